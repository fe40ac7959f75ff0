"""Numbers and bars as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.metrics.format import bar, count, duration, histogram, reasons, sparkline


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (9999, "9999"), (12_345, "12.3k"), (4_560_000, "4.56M"), (2e9, "2G")],
)
def test_counts_are_short_at_any_size(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_use_the_units_that_fit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█", "each block is the mean of its share"
    assert sparkline([5, 5, 5], 3) == "▁▁▁"
    assert sparkline([0.5], 9, 0, 1) == "▅"
    assert sparkline([], 9) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 80))
def test_a_sparkline_fits_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_bar_is_as_long_as_its_share() -> None:
    assert bar(0.5, 4) == "██░░"
    assert bar(-1, 2) + bar(7, 2) == "░░██"


def test_a_histogram_shows_shares_in_the_order_of_keys() -> None:
    assert histogram({2: 10, 0: 30, 1: 60}) == "0: 30 %  1: 60 %  2: 10 %"
    assert histogram({}) == histogram({0: 0}) == "none yet"


def test_reasons_come_most_frequent_first() -> None:
    assert reasons({"b": 2, "a": 2, "c": 9, "": 1}) == "9 c, 2 a, 2 b, 1 without a reason"
    assert reasons({}) == "none"
