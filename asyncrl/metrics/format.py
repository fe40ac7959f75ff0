"""Numbers, bars and tables as text: the small pure functions that the view and the summaries share."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType

_BLOCKS = "▁▂▃▄▅▆▇█"


def count(number: float) -> str:
    """A count that is readable at any size: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as 12 s, 3 min 05 s or 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """Values as a row of at most `width` blocks, each the mean of its share of the values.

    Without `low` and `high` the range is that of the values.
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[left:right]) / (right - left) for left, right in itertools.pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    # Divided before it is scaled: the inverse of a range near the smallest number is infinite.
    shares = [min(max(mean - low, 0.0), high - low) / (high - low) if high > low else 0.0 for mean in means]
    return "".join(_BLOCKS[round(share * (len(_BLOCKS) - 1))] for share in shares)


def bar(share: float, width: int) -> str:
    """A share (0 to 1) as a bar of `width` characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def histogram(counts: Mapping[int, float]) -> str:
    """Shares by key: `0: 62 %  1: 30 %  2: 8 %`."""
    total = sum(counts.values())
    if total <= 0:
        return "none yet"
    return "  ".join(f"{key}: {100 * value / total:.0f} %" for key, value in sorted(counts.items()))


def reasons(counts: Mapping[str, int]) -> str:
    """Counts by reason, most frequent first; `none` if there is nothing."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {reason or 'without a reason'}" for reason, number in ordered) or "none"


def as_text(renderable: RenderableType, width: int = 160) -> str:
    """A rich renderable as plain text without colours and trailing blanks."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, markup=False, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())
