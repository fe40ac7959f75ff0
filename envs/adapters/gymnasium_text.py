"""Gymnasium's spaces and values as text, and actions from text.

Pure functions of spaces; called by `asyncrl.envs.adapters.gymnasium`. Spaces are told apart by the names of their
classes, so that this module imports without the library; arrays are numpy's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

SHOWN = 256
"""Arrays of more numbers are printed with their middle left out."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")


class ActionError(ValueError):
    """The text holds no action; what it says is for the model."""


def readable(space: Any) -> bool:
    """Whether an action of this space can be read from text."""
    return _kind(space) in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text")


def describe(space: Any) -> str:
    """A space in words, for the first message."""
    kind = _kind(space)
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "MultiDiscrete":
        low, high = space.start, space.start + space.nvec - 1
        return f"a list of {_shape(space)} whole numbers, from {compact(low)} to {compact(high)}"
    if kind == "MultiBinary":
        return f"a list of {_shape(space)} numbers, each 0 or 1"
    if kind == "Box":
        numbers = "whole numbers" if np.issubdtype(space.dtype, np.integer) else "numbers"
        return f"a list of {_shape(space)} {numbers}{_bounds(space)}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Dict":
        return "; ".join(f"{name}: {describe(part)}" for name, part in space.spaces.items())
    if kind == "Tuple":
        return " and ".join(describe(part) for part in space.spaces)
    return str(space)


def compact(value: Any, digits: int = 4) -> str:
    """An observation on as few lines as it has parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {compact(part, digits)}" for name, part in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(compact(part, digits) for part in value)})"
    if isinstance(value, np.ndarray):
        return _numbers(value, digits)
    if isinstance(value, float | np.floating):
        return str(round(float(value), digits))
    return str(value)


def read_action(space: Any, text: str) -> Any:
    """The action in the last line of a text that is not empty.

    Discrete: the line's only whole number. Lists: from the line's first `[` to its last `]`, as JSON. Text: the
    line.

    Raises:
        ActionError: there is none, or it is not in the space.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ActionError(f"Your answer is empty. End it with a line that holds your action: {describe(space)}.")
    action = _READERS[_kind(space)](space, lines[-1])
    if action is None or not space.contains(action):
        raise ActionError(
            f"Your last line, {lines[-1][:80]!r}, is no action. End your answer with a line that holds your "
            f"action alone: {describe(space)}."
        )
    return action


def _numbers(array: Any, digits: int) -> str:
    if np.issubdtype(array.dtype, np.floating):
        array = np.round(array.astype(np.float64), digits) + 0.0  # Adding nothing turns -0.0 into 0.0.
    if array.size <= SHOWN:
        return str(array.tolist())
    return np.array2string(array, max_line_width=10**9, separator=", ", threshold=SHOWN)


def _kind(space: Any) -> str:
    return type(space).__name__


def _shape(space: Any) -> str:
    return " x ".join(map(str, space.shape)) or "one"


def _bounds(space: Any) -> str:
    """In words, if all are finite; otherwise nothing, for `from -inf` helps nobody."""
    low, high = np.asarray(space.low), np.asarray(space.high)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return ""
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return f", each from {compact(low.flat[0])} to {compact(high.flat[0])}"
    return f", from {compact(low)} to {compact(high)}"


def _whole_number(space: Any, line: str) -> Any:
    found = _NUMBER.findall(line)
    # numpy would wrap what does not fit into 64 bits, and such a number is in no space.
    return space.dtype.type(int(found[0])) if len(found) == 1 and len(found[0]) <= 18 else None


def _array(space: Any, line: str) -> Any:
    start, end = line.find("["), line.rfind("]")
    text = line[start : end + 1] if 0 <= start < end else line
    try:
        read = np.asarray(json.loads(text), dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    if read.shape == () and math.prod(space.shape) == 1:
        read = read.reshape(space.shape)  # A list of one number may be written without its brackets.
    if read.shape != space.shape or not np.isfinite(read).all():
        return None
    if np.issubdtype(space.dtype, np.integer) and not (read == np.round(read)).all():
        return None
    return read.astype(space.dtype)


def _line(space: Any, line: str) -> str:
    return line


_READERS = {
    "Discrete": _whole_number,
    "MultiDiscrete": _array,
    "MultiBinary": _array,
    "Box": _array,
    "Text": _line,
}
