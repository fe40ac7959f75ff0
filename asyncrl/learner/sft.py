"""Supervised training with the same learner: the same rows, head, FSDP units and optimiser, another token loss.

In the caller's own process (a group of one): a warm start on an environment's demonstrations, or training on a
file of conversations. Called by the command line (`asyncrl sft`, and the toy model's first start);
`asyncrl.learner.dpo` uses its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import Algo, Config
from asyncrl.datasets import conversations
from asyncrl.learner import dist, rows
from asyncrl.learner.examples import Example, Loss, batches, chat_format, encode, fitting, progress, steps_of
from asyncrl.learner.export import export
from asyncrl.learner.rows import Row, Share
from asyncrl.learner.update import Trainer
from asyncrl.packing import plan
from asyncrl.triton_kernels.rl_head import TokenLoss

OnStep = Callable[[int, float], bool | None]


def train_sft(
    config: Config,
    model_path: str | Path,
    out_path: str | Path,
    examples: Iterable[Example],
    steps: int,
    rows_per_step: int,
    lr: float,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Minimises the negative log-likelihood of the trained tokens and writes the model to `out_path`.

    Args:
        config: `learner` (token budget, device, AdamW, threads) and `model.dtype` are used.
        model_path: Hugging Face folder to start from.
        out_path: Hugging Face folder to write.
        examples: at least one; started again from its beginning when it ends, if it can be.
        steps: optimiser steps.
        rows_per_step: examples in a step.
        lr: peak learning rate; a twentieth of the steps warms up to it, a cosine leads to 0.
        on_step: called after each step with its number and loss (mean nats per trained token); returning True
            ends the training there.

    Returns:
        The last step's metrics.

    Raises:
        ValueError: there are no examples, or one is longer than the token budget.
        NotFinite: see `asyncrl.learner.update`.
    """
    learner = config.learner.model_copy(update={"lr": lr, "schedule": "cosine", "warmup_steps": steps // 20})
    config = supervised(config.model_copy(update={"learner": learner}), steps)
    stream = _endless(examples)
    taken = (list(islice(stream, rows_per_step)) for _ in range(steps))
    return _train(config, Path(model_path), Path(out_path), taken, on_step)


def train_file(
    config: Config,
    model: Path,
    out: Path,
    data: Path,
    loss: Loss,
    epochs: int,
    size: int,
    say: Callable[[str], object],
) -> dict[str, float]:
    """The same on the conversations of a file, with the learning rate and schedule of `[learner]`.

    Args:
        config: as in `train_sft`; `run.seed` fixes the order.
        model: Hugging Face folder to start from.
        out: Hugging Face folder to write.
        data: JSON lines, see `asyncrl.datasets`.
        loss: which tokens are trained.
        epochs: how often each conversation is trained on.
        size: conversations in a step.
        say: called with a line of text, now and then.

    Returns:
        The last step's metrics.

    Raises:
        UsageError: the file or one of its lines cannot be used; nothing was trained.
        NotFinite: see `asyncrl.learner.update`.
    """
    chat, budget = chat_format(model), config.learner.token_budget
    examples = [encode(chat, talk, loss) for talk in conversations(data)]
    examples = fitting(data, examples, [len(ids) for ids, _ in examples], budget, say)
    steps = steps_of(len(examples), size, epochs)
    say(f"{len(examples)} conversations, {_trained(examples)} trained tokens, {steps} steps")
    taken = ([examples[i] for i in chosen] for chosen in batches(len(examples), size, epochs, config.run.seed))
    told = progress(steps, say)
    return _train(supervised(config, steps), model, out, taken, lambda step, loss: told(step, {"loss": loss}))


def supervised(config: Config, steps: int) -> Config:
    """The settings of a training without sampling: no companion models, log-probs at temperature 1."""
    train = config.train.model_copy(update={"steps": steps})
    sampling = config.sampling.model_copy(update={"temperature": 1.0})
    return config.model_copy(update={"train": train, "sampling": sampling, "algo": Algo()})


def _train(
    config: Config, model: Path, out: Path, taken: Iterable[Sequence[Example]], on_step: OnStep | None
) -> dict[str, float]:
    """One optimiser step for each list of examples; then the folder."""
    metrics = {"loss": float("nan")}
    with dist.alone(config.learner.device, config.learner.threads) as ranks:
        trainer = Trainer(config, model)
        trainer.self_test()
        for step, examples in enumerate(taken, 1):
            weights = np.full(len(examples), 1 / max(1, _trained(examples)))
            packed, _ = pack(examples, weights, config.learner.token_budget, ranks.device)
            _, metrics = trainer.fit(packed, weighted_nll, step, batch_id=step)
            if on_step is not None and on_step(step, metrics["loss"]):
                break
        export(trainer, model, out)
    return metrics


def _trained(examples: Sequence[Example]) -> int:
    """How many tokens are trained: never a sequence's first, which nothing comes before."""
    return sum(sum(mask[1:]) for _, mask in examples)


def pack(
    examples: Sequence[Example], weights: np.ndarray, token_budget: int, device: torch.device
) -> tuple[list[Row], list[int]]:
    """Packed rows of examples, and the order in which the rows hold them.

    `weights`: [S], what each trained token of a sequence weighs in the loss.
    """
    (planned,) = plan([len(ids) for ids, _ in examples], 1, token_budget)
    order = [index for row in planned for index in row]
    ids = np.concatenate([np.asarray(examples[i][0], dtype=np.int32) for i in order])
    trained = np.concatenate([np.asarray(examples[i][1], dtype=bool) for i in order])
    lengths = np.array([len(examples[i][0]) for i in order], dtype=np.int64)
    trained[np.cumsum(lengths) - lengths] = False
    share = Share(
        ids=ids,
        behaviour=np.zeros(len(ids), dtype=np.float32),
        lag=np.zeros(len(ids), dtype=np.int64),
        candidate=trained,
        trained=trained,
        lengths=lengths,
        branches=[[n] for n in lengths.tolist()],
        prompts=[[0]] * len(order),
        episode=np.arange(len(order)),
        row_sizes=[len(row) for row in planned],
    )
    return rows.build(share, trained, np.asarray(weights)[order], {}, device), order


def weighted_nll(row: Row) -> TokenLoss:
    """The negative log-likelihood of each token times its weight."""
    return lambda logp, entropy, part: (-row.tokens.weight[part] * logp, {})


def _endless(examples: Iterable[Example]) -> Iterator[Example]:
    """The examples over and over.

    Raises:
        ValueError: there are none (left).
    """
    while True:
        found = False
        for example in examples:
            found = True
            yield example
        if not found:
            raise ValueError("supervised training ran out of examples; give a list, or an endless iterator")
