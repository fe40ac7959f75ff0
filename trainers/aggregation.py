"""Aggregations: how token losses become one number, as a weight for every token of a sequence.

Counts are global, over ranks and micro-batches, and are taken before any masking by ratios; so the loss depends
neither on how a batch is packed nor on how many tokens a rejection drops. A weight that only depends on counts
lets the loss be a plain sum. Names, parameters and defaults are in `asyncrl.trainers.parts`. Called by the
learner, which counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """What the whole batch holds, over all ranks; at least 1 each."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with at least one trained token."""
    max_tokens: float = 1.0
    """Most tokens of a turn (`sampling.max_tokens`)."""


Aggregation = Callable[[Tensor, Totals], Tensor]
"""`trained` [S], the number of trained tokens of each sequence, to the weight of each of its tokens [S]."""


def token_mean(trained: Tensor, totals: Totals) -> Tensor:
    """1 / tokens: every token of the batch counts the same.

    Yu et al. 2025 (arXiv:2503.14476), section 3.3.
    """
    return trained.new_full(trained.shape, 1 / totals.tokens)


def sequence_mean(trained: Tensor, totals: Totals) -> Tensor:
    """1 / (tokens of the sequence x sequences): every sequence counts the same.

    Shao et al. 2024 (arXiv:2402.03300), equation 3.
    """
    return 1 / (trained.clamp(min=1) * totals.sequences)


def sequence_sum(trained: Tensor, totals: Totals) -> Tensor:
    """1 / sequences: the mean over sequences of their tokens' sum, which is the policy gradient's own estimate.

    Williams 1992, section 5.
    """
    return trained.new_full(trained.shape, 1 / totals.sequences)


def constant(trained: Tensor, totals: Totals, *, length: float) -> Tensor:
    """1 / (length x sequences): as `sequence_sum`, at the scale of `sequence_mean` for sequences of that length.

    Liu et al. 2025 (arXiv:2503.20783), section 3: to divide by an answer's own length favours long wrong ones.

    Args:
        trained: [S].
        totals: of the batch.
        length: the divisor; 0: `totals.max_tokens`.
    """
    return trained.new_full(trained.shape, 1 / ((length or totals.max_tokens) * totals.sequences))
