"""A reward model from preference pairs, by the model of Bradley and Terry.

    L = mean over pairs of -log sigmoid(r(chosen) - r(rejected))

r is a number at the last token of a conversation. Bradley and Terry 1952 (Biometrika 39); Ouyang et al. 2022
(arXiv:2203.02155), equation 1. The result is a Hugging Face folder that `AutoModelForSequenceClassification` loads
with one label, beside the tokenizer. It is trained by transformers' own forward on padded batches, in one process:
what scores later is the same code. Called by `asyncrl reward-model`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from asyncrl.config import Config
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.examples import batches, chat_format, progress, steps_of, whole
from asyncrl.learner.export import WEIGHT_FILES
from asyncrl.learner.optim import Optimizer, learning_rate
from asyncrl.learner.preferences import Pair, hold_out, load
from asyncrl.settings import UsageError


def train_file(
    config: Config,
    model: Path,
    out: Path,
    data: Path,
    held_out: float,
    epochs: int,
    size: int,
    say: Callable[[str], object],
) -> dict[str, float]:
    """Trains on the preference pairs of a file; arguments and errors as in `asyncrl.learner.sft.train_file`.

    `held_out` is the share of pairs that is tested on, not trained; `size` pairs make a step.

    Returns:
        The last step's metrics, and `held_out_accuracy` if anything was held out.
    """
    found = load(data, chat_format(model), whole, config.learner.token_budget, say)
    train, test = hold_out(found, held_out, config.run.seed)
    steps = steps_of(len(train), size, epochs)
    say(f"{len(train)} pairs, {len(test)} held out, {steps} steps")
    scorer = Scorer(config, model)
    if any(ids[-1] == scorer.pad_id for pair in found for ids, _ in pair):
        raise UsageError(
            f"{model}: its chat template ends with its tokenizer's pad token, so the end of a conversation cannot "
            "be told from padding; set another pad_token in tokenizer_config.json"
        )
    metrics = scorer.train(train, epochs, size, progress(steps, say))
    if test:
        metrics["held_out_accuracy"] = scorer.accuracy(test)
        say(f"held-out accuracy {metrics['held_out_accuracy']:.3f} on {len(test)} pairs")
    scorer.save(model, out)
    return metrics


class Scorer:
    """A causal language model whose head is replaced by one number, with its training."""

    def __init__(self, config: Config, path: Path) -> None:
        """Loads the model at `path`; the head is drawn from `run.seed`.

        Raises:
            UsageError: the architecture has no such head in transformers, or the tokenizer no pad token.
        """
        torch.set_num_threads(config.learner.threads)
        self._config = config
        self._device = torch.device(config.learner.device)
        self.pad_id = AutoTokenizer.from_pretrained(path).pad_token_id
        if self.pad_id is None:
            raise UsageError(
                f"{path}: its tokenizer has no pad token, which batches of conversations need; set pad_token in "
                "tokenizer_config.json to a token that no conversation ends with"
            )
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(config.run.seed)
            try:
                loaded = AutoModelForSequenceClassification.from_pretrained(
                    path, num_labels=1, dtype=torch.float32
                )
            except ValueError as error:
                raise UsageError(f"{path}: transformers makes no reward model of it: {error}") from error
        loaded.config.get_text_config().pad_token_id = self.pad_id
        self.model: Any = loaded.eval().to(self._device)  # eval: no dropout, as in the learner.

    def train(
        self, pairs: Sequence[Pair], epochs: int, size: int, on_step: Callable[[int, Mapping[str, float]], object]
    ) -> dict[str, float]:
        """Minimises the loss of the module's docstring; returns the last step's metrics.

        Raises:
            NotFinite: see `asyncrl.learner.update`.
        """
        settings, steps = self._config.learner, steps_of(len(pairs), size, epochs)
        optimizer = Optimizer(self.model, settings)
        metrics: dict[str, float] = {}
        for step, chosen in enumerate(batches(len(pairs), size, epochs, self._config.run.seed), 1):
            margins = self._backward([pairs[i] for i in chosen])
            squared, loss = float(optimizer.squared_norm()), float(softplus(-margins).mean())
            for what, value in (("the loss", loss), ("the gradient norm", squared)):
                if not math.isfinite(value):
                    raise NotFinite(step, step, what)
            lr, norm = learning_rate(settings, step, steps), math.sqrt(squared)
            optimizer.step(lr, min(1.0, settings.grad_clip / (norm + 1e-6)))
            optimizer.zero()
            accuracy = float((margins > 0).double().mean())
            metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": norm, "lr": lr}
            on_step(step, metrics)
        return metrics

    @torch.no_grad()
    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """The share of pairs whose chosen conversation has the higher score."""
        right = sum(int((self._margins(part) > 0).sum()) for part in self._parts(pairs))
        return right / len(pairs)

    def scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[S] float32: the scores of conversations, each at its last token."""
        longest = max(map(len, sequences))
        padded = [[*ids, *[self.pad_id] * (longest - len(ids))] for ids in sequences]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
        ids, attended = (torch.tensor(values, device=self._device) for values in (padded, mask))
        low = self._config.model.dtype == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=low):
            logits = self.model(input_ids=ids, attention_mask=attended, use_cache=False).logits
        return logits[:, 0].float()

    def save(self, source: Path, out: Path) -> None:
        """Writes the folder in `model.dtype`, which appears when it is complete; `source` gives the tokenizer."""
        fresh = out.with_name(out.name + ".tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(
            source, fresh, ignore=shutil.ignore_patterns(*WEIGHT_FILES, "generation_config.json", ".*")
        )
        self.model.to(getattr(torch, self._config.model.dtype)).save_pretrained(fresh)
        fresh.rename(out)

    def _backward(self, pairs: Sequence[Pair]) -> Tensor:
        """Adds up the gradients of a step's loss; returns the margins [P], without gradient, in any order."""
        found = []
        for part in self._parts(pairs):
            margins = self._margins(part)
            (softplus(-margins).sum() / len(pairs)).backward()
            found.append(margins.detach())
        return torch.cat(found)

    def _margins(self, part: Sequence[Pair]) -> Tensor:
        """[P] score of the chosen conversation minus that of the rejected one."""
        scores = self.scores([ids for ids, _ in [p.chosen for p in part] + [p.rejected for p in part]])
        chosen, rejected = scores.chunk(2)
        return chosen - rejected

    def _parts(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Pairs by length, in batches of at most `learner.token_budget` padded tokens, or of one pair."""
        part: list[Pair] = []
        for pair in sorted(pairs, key=lambda pair: pair.longest, reverse=True):
            if part and 2 * (len(part) + 1) * part[0].longest > self._config.learner.token_budget:
                yield part
                part = []
            part.append(pair)
        yield part


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from reporting that the head is new, which is what is wanted."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
