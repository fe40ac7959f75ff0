"""The curriculum by pass rate: what is wanted follows from the last rate, and nothing is given up for ever."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.curriculum import Curriculum

rewards = st.lists(st.none() | st.floats(-10, 10), max_size=8)
records = st.lists(st.tuples(st.sampled_from("abc"), rewards), max_size=12)
bounds = st.tuples(st.floats(-5, 5), st.floats(-5, 5)).map(sorted)
BARELY = 2.0**-64
"""A share so small that only a hash of 0 is below it."""


def _last_rate(made: list[tuple[str, list[float | None]]], task: str) -> float | None:
    rate = None
    for name, group in made:
        there = [reward for reward in group if reward is not None]
        if name == task and there:
            rate = sum(there) / len(there)
    return rate


@given(records, bounds, st.sampled_from("abcd"), st.integers(0, 10**9))
def test_a_task_is_wanted_if_it_is_new_or_its_last_rate_is_within_the_bounds(
    made: Any, limits: list[float], task: str, index: int
) -> None:
    low, high = limits
    curriculum = Curriculum(low, high, BARELY)
    for name, group in made:
        curriculum.record(name, group)
    rate = _last_rate(made, task)
    assert curriculum.wants(task, index) == (rate is None or low <= rate <= high)


@given(records, bounds, st.floats(BARELY, 1), st.text(max_size=5), st.integers(0, 10**9))
def test_the_same_records_give_the_same_answers_and_asking_changes_nothing(
    made: Any, limits: list[float], revisit: float, task: str, index: int
) -> None:
    one, other = Curriculum(*limits, revisit), Curriculum(*limits, revisit)
    for name, group in made:
        one.record(name, group)
        one.wants(task, index)
        other.record(name, group)
    assert one.wants(task, index) == other.wants(task, index)


@given(st.floats(BARELY, 1), st.floats(BARELY, 1), st.text(max_size=5), st.integers(0, 10**9))
def test_a_larger_share_revisits_all_that_a_smaller_one_does(a: float, b: float, task: str, index: int) -> None:
    wanted = []
    for revisit in sorted((a, b)):
        curriculum = Curriculum(0.2, 0.8, revisit)
        curriculum.record(task, [1.0, 1.0])
        wanted.append(curriculum.wants(task, index))
    assert wanted[0] <= wanted[1]


def test_the_share_of_the_other_tasks_that_is_revisited_is_the_one_that_was_set() -> None:
    curriculum = Curriculum(0.2, 0.8, 0.1)
    for task in range(100):
        curriculum.record(f"task/{task}", [1.0] * 4 if task % 2 else [0.0] * 4)
    seen = [curriculum.wants(f"task/{task}", 100 * epoch + task) for epoch in range(100) for task in range(100)]
    # Binomial(10000, 0.1) has a standard deviation of 30; 6 of them never happen by chance.
    assert abs(sum(seen) - 1000) < 6 * math.sqrt(900)
    assert all(any(seen[task::100]) for task in range(100))


def test_a_group_without_rewards_changes_nothing() -> None:
    curriculum = Curriculum(0.2, 0.8, BARELY)
    curriculum.record("t", [1.0, None, 1.0])
    assert not curriculum.wants("t", 0)
    curriculum.record("t", [None, None])
    curriculum.record("t", [])
    assert not curriculum.wants("t", 0)
    curriculum.record("t", [1.0, None, 0.0])
    assert curriculum.wants("t", 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0.8, 0.2, 0.1), "low must be at most high"),
        ((math.nan, 1.0, 0.1), "low must be at most high"),
        ((0.2, 0.8, 0.0), "revisit = 0.0: must be above 0 and at most 1"),
        ((0.2, 0.8, 1.5), "revisit = 1.5"),
    ],
)
def test_bounds_that_are_none_are_refused(arguments: tuple[float, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Curriculum(*arguments)
