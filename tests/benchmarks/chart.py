"""A line chart with error bars as SVG, without a plotting library: the same bytes for the same numbers.

It draws one kind of chart and knows nothing of what it shows. Called by `staleness.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by colour-blind readers too (Okabe and Ito 2008)."""
WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 46, 56
DODGE = 4
"""Pixels between the lines' points of one tick, so that their error bars do not cover each other."""
DASHED = 'stroke-dasharray="6 4"'

Point = tuple[float, float, float]
"""x, y and half the length of the error bar."""


@dataclass(frozen=True)
class Axes:
    """What is written on the chart, and its ranges."""

    title: str
    x_label: str
    y_label: str
    x_ticks: Sequence[tuple[float, str]]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Pixels from the left; the outermost ticks keep some distance from the frame."""
        low, high = self.x_ticks[0][0], self.x_ticks[-1][0]
        return LEFT + 30 + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT - 60)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.y_range
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line_chart(axes: Axes, series: Mapping[str, Sequence[Point]], level: tuple[str, float] | None = None) -> str:
    """The chart.

    Args:
        axes: labels and ranges.
        series: the points of each line, from left to right, by the name in the legend.
        level: name and value of a dashed horizontal line.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_frame(axes),
    ]
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += _series(axes, points, colour, DODGE * (number - (len(series) - 1) / 2))
        parts += _entry(number, name, colour)
    if level is not None:
        y = axes.y(level[1])
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#777", DASHED))
        parts += _entry(len(series), level[0], "#777", DASHED)
    return "\n".join([*parts, "</svg>"]) + "\n"


def nice_range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest range of whole tenths that holds all values."""
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10
    return low, high if high > low else low + 0.1


def _frame(axes: Axes) -> list[str]:
    """Title, axes, ticks and grid."""
    parts = [_text(LEFT, 26, axes.title, "start", "#222", 'font-size="15" font-weight="bold"')]
    low, high = axes.y_range
    steps = round((high - low) * 10)
    for i in range(steps + 1):
        value = low + (high - low) * i / steps
        parts.append(_line(LEFT, axes.y(value), WIDTH - RIGHT, axes.y(value), "#ddd"))
        parts.append(_text(LEFT - 8, axes.y(value) + 4, f"{value:.1f}", "end"))
    for value, label in axes.x_ticks:
        x, bottom = axes.x(value), HEIGHT - BOTTOM
        parts.append(_line(x, bottom, x, bottom + 5, "#222"))
        parts.append(_text(x, bottom + 20, label, "middle"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#222"))
    parts.append(_line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#222"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, axes.x_label, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(18, middle, axes.y_label, "middle", "#222", f'transform="rotate(-90 18 {middle:.1f})"'))
    return parts


def _series(axes: Axes, points: Sequence[Point], colour: str, shift: float) -> list[str]:
    """One line with its points and error bars."""
    placed = [(axes.x(x) + shift, axes.y(y), axes.y(y - error), axes.y(y + error)) for x, y, error in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in placed)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
    for x, y, low, high in placed:
        parts.append(_line(x, low, x, high, colour))
        parts += [_line(x - 3, end, x + 3, end, colour) for end in (low, high)]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')
    return parts


def _entry(number: int, name: str, colour: str, more: str = "") -> list[str]:
    """A line of the legend."""
    x, y = WIDTH - RIGHT + 12, TOP + 12 + 20 * number
    return [_line(x, y, x + 24, y, colour, more), _text(x + 30, y + 4, name, "start")]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.4" {more}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {more}>{escape(text)}</text>'
