"""Reward shapings against their formulas, and what they do to greedy and to failed episodes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Episode, batches, members, shaped, slow_whitened

from asyncrl.trainers.parts import SHAPINGS
from asyncrl.trainers.shaping import clip, drop_truncated, length, normalise, overlong


def rewards(batch):
    return [e.reward for e in batch]


@pytest.mark.parametrize(
    ("sampled", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (40, -1.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(sampled, penalty):
    [e] = shaped(overlong, [Episode(0, 0.5, sampled)], 16, overlong_buffer=4, overlong_coef=2.0)
    assert e.reward == 0.5 + 2 * penalty


@given(
    batch=batches(), max_tokens=st.integers(1, 10), buffer=st.integers(1, 8), coef=st.sampled_from([0.0, 0.5, 1])
)
@settings(max_examples=30, deadline=None)
def test_the_overlong_penalty_equals_the_papers_three_cases(batch, max_tokens, buffer, coef):
    def punished(e):
        if not e.valid or e.n <= max_tokens - buffer:
            return e.reward
        return e.reward + coef * (-1 if e.n > max_tokens else (max_tokens - buffer - e.n) / buffer)

    found = shaped(overlong, batch, max_tokens, overlong_buffer=buffer, overlong_coef=coef)
    np.testing.assert_allclose(rewards(found), [punished(e) for e in batch], atol=1e-12)


def test_without_a_limit_of_tokens_nothing_is_overlong():
    batch = [Episode(0, 1.0, 100)]
    assert shaped(overlong, batch, 0, overlong_buffer=4, overlong_coef=1.0) == batch


@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_truncated_episodes_leave_the_batch_and_the_baselines(batch):
    greedy = [replace(e, truncated=e.group == 0) if e.greedy else e for e in batch]
    for before, after in zip(greedy, shaped(drop_truncated, greedy), strict=True):
        assert after.valid == (before.valid and not before.truncated)
        assert after.greedy == (before.greedy and not before.truncated)
        assert after.reward == before.reward


def slow_length(e, group, coef):
    shortest, longest = min(o.n for o in group), max(o.n for o in group)
    if shortest == longest:
        return e.reward
    share = 0.5 - (e.n - shortest) / (longest - shortest)
    return e.reward + coef * (share if e.reward > 0 else min(0.0, share))


@given(batch=batches(), coef=st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=30, deadline=None)
def test_the_length_reward_is_that_of_kimi(batch, coef):
    expected = [slow_length(e, members(batch, e.group), coef) if e.valid else e.reward for e in batch]
    np.testing.assert_allclose(rewards(shaped(length, batch, length_coef=coef)), expected, atol=1e-12)


def test_a_short_wrong_answer_gains_nothing_and_a_long_right_one_loses():
    batch = [Episode(0, 0.0, 1), Episode(0, 1.0, 1), Episode(0, 0.0, 5), Episode(0, 1.0, 5)]
    assert rewards(shaped(length, batch, length_coef=1.0)) == [0.0, 1.5, -0.5, 0.5]


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_normalised_rewards_have_mean_zero_and_deviation_one(batch):
    found = shaped(normalise, batch)
    valid = [e.reward for e in found if e.valid]
    np.testing.assert_allclose(valid, slow_whitened([e.reward for e in batch if e.valid]), atol=1e-9)
    for before, after in zip(batch, found, strict=True):
        if not before.valid and not before.greedy:
            assert after.reward == before.reward


def test_equal_rewards_are_centred_and_not_blown_up():
    batch = [Episode(0, 0.1, 1)] * 3 + [Episode(0, 0.6, 0, valid=False, greedy=True)]
    np.testing.assert_allclose(rewards(shaped(normalise, batch)), [0, 0, 0, 0.5], atol=1e-12)


def test_a_greedy_baseline_is_normalised_like_the_rewards_it_is_compared_with():
    batch = [Episode(0, 0.0, 1), Episode(0, 2.0, 1), Episode(0, 2.0, 0, valid=False, greedy=True)]
    a, b, greedy = rewards(shaped(normalise, batch))
    assert greedy == b == -a


@given(batch=batches(), low=st.floats(-2, 0), high=st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_clipped_rewards_stay_in_the_range(batch, low, high):
    found = rewards(shaped(clip, batch, reward_low=low, reward_high=high))
    counts = [e.valid or e.greedy for e in batch]
    assert found == [
        min(max(e.reward, low), high) if here else e.reward for e, here in zip(batch, counts, strict=True)
    ]


@pytest.mark.parametrize("name", SHAPINGS)
@given(batch=batches())
@settings(max_examples=15, deadline=None)
def test_what_failed_or_was_rejected_changes_no_shaped_reward(name, batch):
    part = SHAPINGS[name]
    shape = partial(part.function(), **{key: p.default for key, p in part.parameters.items()})
    there = [i for i, e in enumerate(batch) if e.valid or e.greedy]
    found = shaped(shape, batch, 6)
    if there:
        for i, e in zip(there, shaped(shape, [batch[i] for i in there], 6), strict=True):
            assert e.reward == pytest.approx(found[i].reward, abs=1e-12)
            assert e.valid == found[i].valid
