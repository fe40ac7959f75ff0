"""Group filters: which complete groups are not worth a place in a batch, and the reason that is journalled.

A filter sees the rewards that the environment gave, before any shaping. Free of torch: called by the hub when
a group is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


FILTERS: dict[str, GroupFilter] = {"none": keep_all, "equal_rewards": equal_rewards}


def group_filter(name: str) -> GroupFilter:
    """The filter called `name`; names are checked by `presets.resolve`."""
    return FILTERS[name]
