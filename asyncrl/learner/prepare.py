"""From a batch and its tokens' columns to what the update needs: advantages, weights, marks, and what is trained.

    outcomes of all episodes ─▶ shaping ─▶ (corrections that see the whole batch: the sequences they empty leave
    the baseline) ─▶ advantages ─▶ (marks of the loss) ─▶ each token's data

Pure but for `Whole.gather`: the same on every rank. Called by `asyncrl.learner.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.rows import Share
from asyncrl.learner.whole import Whole
from asyncrl.messages import Batch
from asyncrl.packing import minibatch_of
from asyncrl.trainers.aggregation import Totals
from asyncrl.trainers.algorithm import Algorithm
from asyncrl.trainers.outcomes import Outcomes
from asyncrl.trainers.tokens import Tokens


@dataclass(frozen=True)
class Prepared:
    """A batch, ready for the update. E episodes, C candidate tokens of this rank."""

    outcomes: Outcomes
    """After shaping and rejection."""
    parts: list[int]
    """[E] minibatch of each episode."""
    totals: list[Totals]
    """Of each minibatch."""
    columns: dict[str, Tensor]
    """[C] each: fields of `Tokens`."""
    trained: np.ndarray
    """[F] bool: of the share's tokens, those that are trained."""
    tokens_trained: float
    """Of all ranks."""
    targets: Tensor | None
    """[C] what the critic is fitted to."""
    metrics: dict[str, float]


def prepare(
    batch: Batch,
    share: Share,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    max_tokens: int,
    kl_coef: float,
    minibatches: int,
    device: torch.device,
) -> Prepared:
    """Prepares a batch. Collective.

    Args:
        batch: as the hub sent it.
        share: this rank's tokens.
        columns: [C] each, what `Algorithm.needs` asks for; see `companions`.
        algorithm: the run's.
        max_tokens: most tokens of a turn.
        kl_coef: coefficient of the divergence from the reference now.
        minibatches: optimiser steps that the batch is for.
        device: of the collectives.
    """
    whole = Whole(share, len(batch.episodes), device)
    metrics: dict[str, float] = {}
    outcomes = algorithm.shape(_outcomes(batch, whole, max_tokens))
    trained = whole.trained * outcomes.valid
    found = {name: whole.gather(column) for name, column in columns.items()}
    if found or algorithm.per_token:
        found["behaviour"] = whole.gather(torch.from_numpy(share.behaviour[share.candidate]))
    if algorithm.settings.kl != "none":
        metrics["kl_coef"] = kl_coef
    if algorithm.settings.kl not in ("none", "full"):
        divergence = algorithm.divergence(found["behaviour"], found["reference"])
        metrics["reference_kl"] = float(divergence.mean()) if len(divergence) else 0.0
        if algorithm.settings.kl_in == "reward":
            found["penalty"] = kl_coef * divergence
    outcomes = replace(outcomes, columns=found)
    given: dict[str, Tensor] = {}
    if algorithm.ahead or algorithm.marker:
        lag = whole.gather(torch.from_numpy(share.lag[share.candidate]))
        in_time = whole.gather(torch.from_numpy(share.trained[share.candidate])) > 0
        outcomes, given = _whole_batch(algorithm, outcomes, lag, in_time & outcomes.spread(outcomes.valid))
        metrics["rejected_sequences"] = float(((trained > 0) & ~outcomes.valid).sum())
    else:
        given["advantage"] = algorithm.estimate(outcomes)
    if algorithm.kl_in_loss:
        given["reference"] = found["reference"]
    metrics["advantage_abs"] = float(given["advantage"].abs().mean()) if whole.total else 0.0
    if algorithm.settings.proximal == "recomputed":
        given["old"] = found["logp"]
    targets = None if algorithm.targets is None else whole.mine(algorithm.targets(outcomes))
    alive = (trained > 0).numpy()
    parts = minibatch_of([e.group_id for e in batch.episodes], minibatches)
    return Prepared(
        outcomes=outcomes,
        parts=parts,
        totals=[_totals(trained, torch.tensor(parts) == part, max_tokens) for part in range(minibatches)],
        columns={name: whole.mine(column) for name, column in given.items()},
        trained=share.trained & np.repeat(alive[share.episode], share.lengths),
        tokens_trained=float(trained.sum()),
        targets=targets,
        metrics=metrics | {"tokens_sampled": float(whole.total)},
    )


def _totals(trained: Tensor, chosen: Tensor, max_tokens: int) -> Totals:
    """What the chosen episodes hold. Counted before any masking by ratios, which must not raise the others'
    weight."""
    counted = trained[chosen]
    return Totals(max(float(counted.sum()), 1.0), max(float((counted > 0).sum()), 1.0), float(max_tokens))


def _outcomes(batch: Batch, whole: Whole, max_tokens: int) -> Outcomes:
    episodes = batch.episodes
    _, group = np.unique([e.group_id for e in episodes], return_inverse=True)
    names = sorted({name for e in episodes for name in e.rewards})
    return Outcomes(
        reward=torch.tensor([0.0 if e.reward is None else e.reward for e in episodes], dtype=torch.float64),
        valid=torch.tensor([e.reward is not None and not e.greedy for e in episodes], dtype=torch.bool),
        group=torch.from_numpy(np.asarray(group, dtype=np.int64)),
        lengths=whole.lengths,
        rewards={
            name: torch.tensor([e.rewards.get(name, torch.nan) for e in episodes], dtype=torch.float64)
            for name in names
        },
        greedy=torch.tensor([e.greedy and e.reward is not None for e in episodes], dtype=torch.bool),
        truncated=torch.tensor([e.status.startswith("truncated") for e in episodes], dtype=torch.bool),
        max_tokens=max_tokens,
    )


def _whole_batch(
    algorithm: Algorithm, outcomes: Outcomes, lag: Tensor, trained: Tensor
) -> tuple[Outcomes, dict[str, Tensor]]:
    """Corrections, baseline, advantages and marks of an algorithm that looks at the whole batch first.

    It looks at the trained tokens only ([N] bool): the others are in no moment, share or product.
    """
    logp, behaviour = outcomes.columns["logp"][trained], outcomes.columns["behaviour"][trained]
    lengths = outcomes.token_sum(trained.double()).long()
    zeros = torch.zeros_like(logp)
    tokens = Tokens(behaviour, zeros, zeros, lengths.tolist(), lag[trained].long())
    factor = _filled(trained, algorithm.factor(logp, tokens), 1.0)
    if algorithm.ahead:
        emptied = (lengths > 0) & (outcomes.token_sum(factor * trained) == 0)
        outcomes = replace(outcomes, valid=outcomes.valid & ~emptied)
    advantage = algorithm.estimate(outcomes)
    given = {"advantage": advantage, "factor": factor}
    if algorithm.marker is not None:
        given["mark"] = _filled(trained, algorithm.mark(logp, replace(tokens, advantage=advantage[trained])), 0.0)
    return outcomes, given


def _filled(chosen: Tensor, values: Tensor, otherwise: float) -> Tensor:
    """[N]: the values of the chosen tokens, and a number for the others."""
    return torch.full(chosen.shape, otherwise, dtype=values.dtype).masked_scatter(chosen, values)
