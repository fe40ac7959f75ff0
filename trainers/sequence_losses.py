"""Losses of whole sequences: the ratio, or the distance, is one number for all tokens of a sequence.

Same signature as in `losses`. A loss returns its sequence's value at every one of the sequence's tokens, so that
with the aggregation `sequence_mean`, which weighs each by 1 / length, a sequence adds its value once. Nothing
depends on how a batch is cut into rows: every sum is over one sequence's trained tokens, whole in every call. A
mask that drops some tokens of a sequence drops their share of its value; the sequence's ratio still counts them.

Called by `asyncrl.trainers.algorithm` with `tokens.edges()` around whole sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainers.losses import bounded_exp, clipped_surrogate, proximal, unclipped
from asyncrl.trainers.tokens import Tokens
from asyncrl.triton_kernels.segments import segment_mean, segment_sum, sequence_log_ratio, spread


def gspo(logp: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """max(-sA, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of log pi - log pi_old).

    Zheng et al. 2025 (arXiv:2507.18071), section 4.1. The gradient flows through s to every token alike.
    """
    ratio = bounded_exp(sequence_log_ratio(logp, proximal(tokens), tokens.edges()))
    return clipped_surrogate(ratio, tokens.advantage, clip_low, clip_high)


def gmpo(logp: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-gA, g = exp(mean of c), c = log pi - log pi_old, at most clip_high for A > 0, else at least -clip_low.

    The geometric mean of the sequence's token ratios, each clipped on its pessimistic side. A clipped token has no
    gradient. Zhao et al. 2025 (arXiv:2507.20673).
    """
    change, edges = logp - proximal(tokens), tokens.edges()
    bounded = torch.where(tokens.advantage > 0, change.clamp(max=clip_high), change.clamp(min=-clip_low))
    mean = spread(segment_mean(bounded, edges), edges, length=len(logp))
    return -bounded_exp(mean) * tokens.advantage, bounded != change


def sppo(logp: Tensor, tokens: Tokens, *, eta: float) -> tuple[Tensor, Tensor]:
    """(sum over the sequence of log pi - log pi_old, minus eta A)^2.

    Wu et al. 2024 (arXiv:2405.00675), where A is the probability to win against the policy's own samples, minus
    1/2. Here it is the advantage: the reward, centred by the estimator (`rloo`, `dr_grpo`).
    """
    edges = tokens.edges()
    moved = spread(segment_sum(logp - proximal(tokens), edges), edges, length=len(logp))
    return (moved - eta * tokens.advantage).square(), unclipped(logp)
