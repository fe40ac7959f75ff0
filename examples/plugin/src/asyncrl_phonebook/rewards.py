"""A reward function: the names of its parameters say what it is given (asyncrl's README, section Rewards)."""

from __future__ import annotations


def terse(final: str) -> float:
    """1 for a last message of at most eight characters, falling to 0 at forty."""
    return min(1.0, max(0.0, (40 - len(final)) / 32))
