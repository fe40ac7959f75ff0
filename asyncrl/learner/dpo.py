"""Offline direct preference optimisation (DPO) with the same learner.

    L = mean over pairs of -log sigmoid(m),   m = beta [(log pi(c) - log ref(c)) - (log pi(r) - log ref(r))]

for the chosen answer c and the rejected one r of a prompt. Rafailov et al. 2023 (arXiv:2305.18290), equation 7.

A pair's loss depends on the log-probs of both answers, a token's loss in the RL head on its own only. But the
gradient of L is that of a weighted likelihood: dL/dlog pi(c) = -beta sigmoid(-m) / pairs, and the opposite for
r. So a pass without gradients finds every pair's m, and the training pass has the token losses -w log pi and +w
log pi, whose gradient is exactly L's, however the answers are packed. The reference is the initial model: its
log-probs are taken before the first step, from the policy itself, so there is no second model. Called by
`asyncrl dpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import dist
from asyncrl.learner.examples import batches, chat_format, encode, progress, steps_of
from asyncrl.learner.export import export
from asyncrl.learner.model import logp_of
from asyncrl.learner.preferences import Pair, load
from asyncrl.learner.rows import Row
from asyncrl.learner.sft import pack, supervised, weighted_nll
from asyncrl.learner.update import Trainer


def train_file(
    config: Config,
    model: Path,
    out: Path,
    data: Path,
    beta: float,
    epochs: int,
    size: int,
    say: Callable[[str], object],
) -> dict[str, float]:
    """Trains on the preference pairs of a file; arguments and errors as in `asyncrl.learner.sft.train_file`.

    `beta` is the strength of the pull towards the initial model; `size` pairs make a step.
    """
    found = load(data, chat_format(model), encode, config.learner.token_budget, say)
    steps = steps_of(len(found), size, epochs)
    say(f"{len(found)} pairs, {steps} steps")
    return train_dpo(config, model, out, found, beta, epochs, size, progress(steps, say))


def train_dpo(
    config: Config,
    model: Path,
    out: Path,
    found: Sequence[Pair],
    beta: float,
    epochs: int,
    size: int,
    on_step: Callable[[int, Mapping[str, float]], object],
) -> dict[str, float]:
    """Minimises DPO's loss and writes the model to `out`.

    Args:
        config: `learner`, `model.dtype` and `run.seed` are used.
        model: Hugging Face folder to start from, and the reference.
        out: Hugging Face folder to write.
        found: the pairs, each within the token budget.
        beta: above 0.
        epochs: how often each pair is trained on.
        size: pairs in a step.
        on_step: called after each step with its number and metrics.

    Returns:
        The last step's metrics: `loss`, `accuracy` (share of pairs with m above 0) and `margin` (mean of m), all
        before the step, and `grad_norm` and `lr`.

    Raises:
        NotFinite: see `asyncrl.learner.update`.
    """
    config = supervised(config, steps_of(len(found), size, epochs))
    metrics: dict[str, float] = {}
    with dist.alone(config.learner.device, config.learner.threads):
        trainer = Trainer(config, model)
        trainer.self_test()
        parts = [found[i : i + size] for i in range(0, len(found), size)]
        reference = torch.cat([log_ratios(trainer, part) for part in parts])
        for step, chosen in enumerate(batches(len(found), size, epochs, config.run.seed), 1):
            metrics = dpo_step(trainer, [found[i] for i in chosen], reference[chosen], beta, step)
            on_step(step, metrics)
        export(trainer, model, out)
    return metrics


def dpo_step(
    trainer: Trainer, part: Sequence[Pair], reference: Tensor, beta: float, step: int
) -> dict[str, float]:
    """One optimiser step on some pairs; `reference` [P] holds their `log_ratios` under the reference."""
    margin = beta * (log_ratios(trainer, part) - reference)
    weight = (beta * torch.sigmoid(-margin) / len(part)).numpy()
    packed, _ = _packed(trainer, part, np.concatenate([weight, -weight]))
    _, fitted = trainer.fit(packed, weighted_nll, step, batch_id=step)
    return {
        "loss": float(torch.nn.functional.softplus(-margin).mean()),
        "accuracy": float((margin > 0).double().mean()),
        "margin": float(margin.mean()),
        "grad_norm": fitted["grad_norm"],
        "lr": fitted["lr"],
    }


def log_ratios(trainer: Trainer, part: Sequence[Pair]) -> Tensor:
    """[P] float64 on the CPU: log-prob of each pair's chosen answer minus that of the rejected one, now."""
    packed, order = _packed(trainer, part, np.ones(2 * len(part)))
    limit = trainer.config.learner.head_workspace_mb
    workspace = None if limit is None else limit << 20
    sums = torch.empty(2 * len(part), dtype=torch.float64)
    found = [
        answer.sum()
        for row in packed
        for answer in logp_of(trainer.policy, row, 1.0, workspace)
        .logp.cpu()
        .double()
        .split(list(row.tokens.lengths))
    ]
    sums[order] = torch.stack(found)
    chosen, rejected = sums.chunk(2)
    return chosen - rejected


def _packed(trainer: Trainer, part: Sequence[Pair], weights: np.ndarray) -> tuple[list[Row], list[int]]:
    examples = [pair.chosen for pair in part] + [pair.rejected for pair in part]
    return pack(examples, weights, trainer.config.learner.token_budget, trainer.ranks.device)
