"""Estimators of one number for each token, and the critic's targets, against loops over tokens in Python.

What holds for every estimator (invalid episodes, groups of one, order) is in `test_advantages`.
"""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Episode, batches, estimate, members, outcomes_of, slow_whitened

from asyncrl.trainers.parts import ADVANTAGES
from asyncrl.trainers.token_advantages import TARGETS

factors = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def zeros(batch):
    return [[0.0] * e.n for e in batch]


def whitened_tokens(batch, values):
    """[episode][token]: whitened over the valid episodes' tokens, 0 elsewhere."""
    flat = iter(slow_whitened([x for e, xs in zip(batch, values, strict=True) for x in xs if e.valid]))
    return [[next(flat) if e.valid else 0.0 for _ in xs] for e, xs in zip(batch, values, strict=True)]


def assert_close(found, expected, tolerance=1e-7):
    for xs, ys in zip(found, expected, strict=True):
        np.testing.assert_allclose(xs, ys, rtol=tolerance, atol=tolerance)


def returns(rewards, gamma=1.0):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def slow_gae(e, gamma, lam):
    """Equation 16, term by term."""
    rewards, values = e.token_rewards(), [*e.tokens["value"], 0.0]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(e.n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, e.n)) for t in range(e.n)]


def slow_vtrace(e, gamma, lam, rho_max, c_max):
    """Targets by their recursion from the end, and the advantages."""
    rewards, values = e.token_rewards(), [*e.tokens["value"], 0.0]
    ratio = [math.exp(x - y) for x, y in zip(e.tokens["logp"], e.tokens["behaviour"], strict=True)]
    targets = [0.0] * (e.n + 1)
    advantages = [0.0] * e.n
    for t in reversed(range(e.n)):
        rho, c = min(rho_max, ratio[t]), lam * min(c_max, ratio[t])
        delta = rho * (rewards[t] + gamma * values[t + 1] - values[t])
        targets[t] = values[t] + delta + gamma * c * (targets[t + 1] - values[t + 1])
        advantages[t] = rho * (rewards[t] + gamma * targets[t + 1] - values[t])
    return targets[:-1], advantages


# ---- without a critic -------------------------------------------------------------------------------


@given(batch=batches(), gamma=factors)
@settings(max_examples=30, deadline=None)
def test_reinforce_plus_plus_whitens_discounted_returns(batch, gamma):
    expected = whitened_tokens(batch, [returns(e.token_rewards(), gamma) for e in batch])
    assert_close(estimate("reinforce_pp", batch, gamma=gamma), expected)


def slow_otb(batch):
    expected = zeros(batch)
    for e, xs in zip(batch, expected, strict=True):
        group = members(batch, e.group)
        for t in range(e.n if e.valid else 0):
            compared = [s for s in range(t + 1) if sum(o.n > s for o in group) > 1]
            if compared:
                s = compared[-1]
                alive = [o for o in group if o.n > s]
                weights = [energy(o, s) for o in alive]
                gains = [returns(o.token_rewards())[s] for o in alive]
                baseline = sum(g * w for g, w in zip(gains, weights, strict=True)) / sum(weights)
                xs[t] = returns(e.token_rewards())[t] - baseline
    return expected


def energy(e, t):
    pi = [math.exp(x) for x in e.tokens["logp"]]
    return sum(1 - 2 * pi[j] + e.tokens["squares"][j] for j in range(t + 1))


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_the_optimal_baseline_weighs_returns_by_the_energy_up_to_each_position(batch):
    assert_close(estimate("otb", batch), slow_otb(batch), 1e-6)


def certain(group, reward, n):
    """An episode whose tokens all had probability 1."""
    return Episode(group, reward, n, tokens={"logp": [0.0] * n, "squares": [1.0] * n})


def test_where_all_were_certain_the_optimal_baseline_is_the_mean():
    found = estimate("otb", [certain(0, 1.0, 2), certain(0, 0.0, 2)])
    assert_close(found, [[0.5, 0.5], [-0.5, -0.5]])


def test_the_tail_of_the_longest_episode_keeps_the_last_baseline_of_two():
    found = estimate("otb", [certain(0, 1.0, 2), certain(0, 0.0, 5), certain(0, 1.0, 1)])
    assert_close(found, [[1 / 3, 1 / 2], [-2 / 3, -1 / 2, -1 / 2, -1 / 2, -1 / 2], [1 / 3]])


def slow_prime(batch, process_coef, outcome_coef):
    expected = zeros(batch)
    for e, xs in zip(batch, expected, strict=True):
        others = [o for o in members(batch, e.group) if o is not e]
        if e.valid and others:
            process = sum(sum(o.tokens["process"]) / o.n for o in others) / len(others)
            outcome = sum(e.token_rewards()) - sum(sum(o.token_rewards()) for o in others) / len(others)
            for t in range(e.n):
                xs[t] = outcome_coef * outcome + process_coef * sum(p - process for p in e.tokens["process"][t:])
    return expected


@given(batch=batches(), process_coef=st.floats(0, 5), outcome_coef=st.floats(0, 5))
@settings(max_examples=30, deadline=None)
def test_prime_leaves_one_out_of_process_rewards_and_of_outcomes(batch, process_coef, outcome_coef):
    found = estimate("prime", batch, process_coef=process_coef, outcome_coef=outcome_coef)
    assert_close(found, slow_prime(batch, process_coef, outcome_coef))


# ---- with a critic ----------------------------------------------------------------------------------


@given(batch=batches(), gamma=factors, lam=factors, whiten=st.booleans())
@settings(max_examples=30, deadline=None)
def test_gae_equals_its_sum_of_errors(batch, gamma, lam, whiten):
    plain = [slow_gae(e, gamma, lam) if e.valid else [0.0] * e.n for e in batch]
    expected = whitened_tokens(batch, plain) if whiten else plain
    assert_close(estimate("gae", batch, gamma=gamma, lam=lam, whiten=whiten), expected)
    assert_targets(
        "gae", batch, lambda e: np.add(slow_gae(e, gamma, lam), e.tokens["value"]), gamma=gamma, lam=lam
    )


@given(batch=batches(), gamma=factors, lam=factors, caps=st.tuples(*[st.sampled_from([0.7, 1.0, 3.0])] * 2),
       scale=st.booleans())  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_vtrace_equals_its_recursion(batch, gamma, lam, caps, scale):
    given = {"gamma": gamma, "lam": lam, "rho_max": caps[0], "c_max": caps[1]}
    plain = [slow_vtrace(e, **given)[1] if e.valid else [0.0] * e.n for e in batch]
    known = [x for e, part in zip(batch, plain, strict=True) if e.valid for x in part]
    std = float(np.std(known, ddof=1)) if len(known) > 1 else 1.0
    factor = 1 / std if scale and std > 1e-8 else 1.0
    expected = [[factor * x for x in part] for part in plain]
    assert_close(estimate("vtrace", batch, **given, scale=scale), expected)
    assert_targets("vtrace", batch, lambda e: slow_vtrace(e, **given)[0], **given)


def assert_targets(name, batch, expected, **arguments):
    """The critic's targets; an episode that is not valid pulls its values nowhere."""
    found = TARGETS[name](outcomes_of(batch), **arguments).split([e.n for e in batch])
    wanted = [expected(e) if e.valid else e.tokens["value"] for e in batch]
    assert_close([part.tolist() for part in found], wanted)


@given(batch=batches(), gamma=factors)
@settings(max_examples=20, deadline=None)
def test_on_policy_vtrace_is_gae_with_lambda_one(batch, gamma):
    for e in batch:
        e.tokens["behaviour"] = e.tokens["logp"]
    assert_close(
        estimate("vtrace", batch, gamma=gamma, scale=False),
        estimate("gae", batch, gamma=gamma, lam=1.0, whiten=False),
    )


def test_a_token_that_the_policy_has_left_keeps_no_advantage_when_vtrace_scales():
    near, far = {"value": [0.0], "logp": [-1.0], "behaviour": [-1.0]}, {"value": [0.0], "logp": [-16.0]}
    batch = [Episode(0, 1.0 + i % 2, 1, tokens=dict(near)) for i in range(6)]
    batch.append(Episode(0, 1.0, 1, tokens=far | {"behaviour": [-1.0]}))
    *others, left = estimate("vtrace", batch)
    assert min(part[0] for part in others) > 0.5
    assert abs(left[0]) < 1e-5


def test_nothing_is_expected_after_a_truncated_episode():
    e = Episode(0, 1.0, 2, truncated=True, tokens={"value": [0.5, 2.0]})
    assert estimate("gae", [e], whiten=False) == [[0.5, -1.0]]


@pytest.mark.parametrize("name", TARGETS)
def test_targets_take_the_parameters_of_their_estimator_but_whitening(name):
    taken = set(inspect.signature(TARGETS[name]).parameters) - {"outcomes"}
    assert taken == ADVANTAGES[name].parameters.keys() - {"whiten", "scale"}
    assert {name for name, part in ADVANTAGES.items() if "value" in part.needs} == set(TARGETS)
