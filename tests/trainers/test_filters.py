"""Group filters: which complete groups are dropped, and for which recorded reason."""

import pytest

from asyncrl.config import Algo
from asyncrl.trainers.filters import group_filter
from asyncrl.trainers.presets import resolve


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0, 1.0], "equal rewards"),
        ([0.0, 1.0], None),
        ([1.0, None, 1.0], "equal rewards"),
        ([1.0, None, 0.0], None),
        ([0.5], "equal rewards"),
        ([None, None], "no rewards"),
    ],
)
def test_dynamic_sampling_drops_groups_without_a_difference(rewards, reason):
    assert group_filter(resolve(Algo(name="dapo")))(rewards) == reason
    assert group_filter(resolve(Algo(name="dapo", filter="none")))(rewards) is None


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], "mean reward below the band"),
        ([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], "mean reward above the band"),
        ([1.0, 0.0, None], None),
        ([None], "no rewards"),
    ],
)
def test_a_band_of_mean_rewards_drops_what_is_too_hard_and_too_easy(rewards, reason):
    assert group_filter(resolve(Algo(name="prime")))(rewards) == reason


def test_the_band_is_the_users():
    algo = resolve(Algo(name="dapo", filter="mean_band", filter_args={"low": 0.0, "high": 1.0}))
    assert group_filter(algo)([1.0, 1.0]) is None
