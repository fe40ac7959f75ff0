"""Aggregations: how token losses become one number, as a weight for every token of a sequence.

Counts are global, over ranks and micro-batches, and are taken before any ratio-based masking; so the loss
does not depend on how a batch is packed. A weight that only depends on counts lets the loss be a plain sum.
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


AGGREGATIONS: dict[str, Aggregation] = {"token_mean": token_mean, "sequence_mean": sequence_mean}
