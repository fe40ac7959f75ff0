"""Group filters: which complete groups are not worth a place in a batch, and the reason that is journalled.

A filter sees the rewards that the environment gave, before any shaping. Free of torch: called by the hub when
a group is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from asyncrl.config import Algo
from asyncrl.trainers.catalogue import find

GroupFilter = Callable[[Sequence[float | None]], str | None]
"""Rewards of a group (None: the episode failed) to the reason for dropping it, or None to keep it."""


def keep_all(rewards: Sequence[float | None]) -> str | None:
    """Keeps every group."""
    return None


def equal_rewards(rewards: Sequence[float | None]) -> str | None:
    """DAPO's dynamic sampling: a group whose rewards do not differ has no gradient.

    Yu et al. 2025 (arXiv:2503.14476), section 3.2. Failed episodes do not count.
    """
    given = [reward for reward in rewards if reward is not None]
    if not given:
        return "no rewards"
    return "equal rewards" if min(given) == max(given) else None


def mean_band(rewards: Sequence[float | None], *, low: float, high: float) -> str | None:
    """PRIME's online prompt filter: a group whose mean reward is outside [low, high] is too hard or too easy.

    Cui et al. 2025 (arXiv:2502.01456), section 3.2. Failed episodes do not count.
    """
    given = [reward for reward in rewards if reward is not None]
    if not given:
        return "no rewards"
    mean = sum(given) / len(given)
    if mean < low:
        return "mean reward below the band"
    return "mean reward above the band" if mean > high else None


def group_filter(algo: Algo) -> GroupFilter:
    """The filter of a resolved algorithm, with its parameters."""
    return partial(find("filter", algo.filter or "none").function(), **algo.filter_args)
