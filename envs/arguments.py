"""Checks of an environment's arguments that many have in common, with the text that a user needs.

Called by the `make` functions of environments; what only one of them checks is there.
"""

from __future__ import annotations

from math import inf


def check_whole(name: str, value: object, low: int | None = None, high: int | None = None) -> None:
    """Refuses what is no whole number from `low` to `high`.

    Raises:
        ValueError: with the argument's name, the value and the range.
    """
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        bounds = ("" if low is None else f" from {low}") + ("" if high is None else f" to {high}")
        raise ValueError(f"env.args.{name} = {value!r}: must be a whole number{bounds}")


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no time limit.

    Raises:
        ValueError: with the argument's name and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"env.args.{name} = {value!r}: must be a number of seconds above 0")
