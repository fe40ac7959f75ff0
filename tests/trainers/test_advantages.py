"""Estimators of one number for each episode against their formulas in Python, and what holds for all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Episode, batches, estimate, members, outcomes_of, slow_whitened

from asyncrl.trainers.advantages import dpo
from asyncrl.trainers.aggregation import Totals, sequence_sum
from asyncrl.trainers.parts import ADVANTAGES

BY_GROUP = sorted(ADVANTAGES.keys() - {"reinforce", "reinforce_pp", "gae", "vtrace"})
"""Estimators whose baseline is the group."""


# ---- slow references: (episode, valid members of its group, whole batch) -> advantage ---------------


def mean(values):
    return sum(values) / len(values)


def slow_grpo(e, group, batch):
    rewards = [o.reward for o in group]
    return (e.reward - mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)


def slow_rloo(e, group, batch):
    return e.reward - mean([o.reward for o in group if o is not e])


def slow_opo(e, group, batch):
    return e.reward - sum(o.n * o.reward for o in group) / sum(o.n for o in group)


def slow_gpg(e, group, batch):
    valid = [o for o in batch if o.valid]
    useless = [o for o in valid if len({p.reward for p in members(batch, o.group)}) == 1]
    scale = len(valid) / (len(valid) - len(useless)) if len(useless) < len(valid) else 1.0
    return scale * (e.reward - mean([o.reward for o in group]))


def slow_pass_k(e, group, batch):
    best_without = max(o.reward for o in group if o is not e)
    return max(e.reward - best_without, 0.0)


SLOW = {
    "dr_grpo": lambda e, group, batch: e.reward - mean([o.reward for o in group]),
    "grpo": slow_grpo, "rloo": slow_rloo, "opo": slow_opo, "gpg": slow_gpg, "pass_k": slow_pass_k,
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_an_advantage_within_a_group_equals_its_definition(name, batch):
    expected = []
    for e in batch:
        group = members(batch, e.group)
        expected.append([SLOW[name](e, group, batch) if e.valid and len(group) > 1 else 0.0])
    np.testing.assert_allclose(estimate(name, batch), expected, atol=1e-9)


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_without_a_baseline_the_advantage_is_the_reward(batch):
    assert estimate("reinforce", batch) == [[e.reward if e.valid else 0.0] for e in batch]


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_remax_takes_the_greedy_reward_or_the_mean_of_the_group(batch):
    expected = []
    for e in batch:
        greedy = [o.reward for o in batch if o.group == e.group and o.greedy]
        baseline = greedy[0] if greedy else mean([o.reward for o in members(batch, e.group)] or [0.0])
        expected.append([e.reward - baseline if e.valid else 0.0])
    np.testing.assert_allclose(estimate("remax", batch), expected, atol=1e-12)


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_the_whitened_baseline_counts_every_token(batch):
    compared = [e for e in batch if e.valid and len(members(batch, e.group)) > 1]
    centred = [e.reward - mean([o.reward for o in members(batch, e.group)]) for e in compared]
    tokens = slow_whitened([x for e, x in zip(compared, centred, strict=True) for _ in range(e.n)])
    first = np.cumsum([0] + [e.n for e in compared])
    expected = {id(e): tokens[i] for e, i in zip(compared, first, strict=False)}
    np.testing.assert_allclose(
        estimate("reinforce_pp_baseline", batch), [[expected.get(id(e), 0.0)] for e in batch], atol=1e-9
    )


def slow_gdpo(batch, weights):
    compared = [e for e in batch if e.valid and len(members(batch, e.group)) > 1]
    names = {name for e in batch for name in e.rewards}
    sums = []
    for e in compared:
        total = 0.0
        for name in names & e.rewards.keys():
            given = [o.rewards[name] for o in members(batch, e.group) if name in o.rewards]
            if len(given) > 1:
                scaled = (e.rewards[name] - mean(given)) / (np.std(given, ddof=1) + 1e-6)
                total += weights.get(name, 1.0) * scaled
        sums.append(total)
    expected = {id(e): x for e, x in zip(compared, slow_whitened(sums), strict=True)}
    return [[expected.get(id(e), 0.0)] for e in batch]


@given(batch=batches(named=True), weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
@settings(max_examples=40, deadline=None)
def test_gdpo_scales_every_named_reward_by_itself(batch, weight):
    if not any(e.rewards for e in batch):
        return
    weights = {"short": weight}
    np.testing.assert_allclose(
        estimate("gdpo", batch, weights=weights), slow_gdpo(batch, weights), rtol=1e-6, atol=1e-6
    )


@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_gdpo_without_named_rewards_is_the_whitened_grpo_of_the_reward(batch):
    as_named = [replace(e, rewards={"reward": e.reward}) for e in batch]
    np.testing.assert_allclose(estimate("gdpo", batch), slow_gdpo(as_named, {}), rtol=1e-6, atol=1e-6)


def test_a_missing_named_reward_is_not_a_reward_of_zero():
    batch = [Episode(0, 0.0, 1, rewards=rewards) for rewards in ({"right": 1.0}, {}, {"right": 1.0})]
    assert estimate("gdpo", batch) == [[0.0]] * 3
    given_as_zero = [replace(e, rewards={"right": e.rewards.get("right", 0.0)}) for e in batch]
    assert estimate("gdpo", given_as_zero)[1][0] < 0


@given(batch=batches(), beta=st.sampled_from([0.05, 0.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_the_gradient_with_dpo_advantages_is_that_of_the_dpo_loss(batch, beta):
    outcomes = outcomes_of(batch)
    logp = outcomes.columns["logp"].clone().requires_grad_()
    gains = (logp - outcomes.columns["reference"]).split(outcomes.lengths.tolist())
    losses = []
    for g in range(4):
        rows = [i for i, e in enumerate(batch) if e.valid and e.group == g]
        rewards = [batch[i].reward for i in rows]
        if len(set(rewards)) > 1:
            best, worst = rows[rewards.index(max(rewards))], rows[rewards.index(min(rewards))]
            margin = gains[best].sum() - gains[worst].sum()
            losses.append(-torch.nn.functional.logsigmoid(beta * margin))
    loss = torch.stack(losses).mean() if losses else 0.0 * logp.sum()
    [expected] = torch.autograd.grad(loss, logp)

    trained = outcomes.lengths.double() * outcomes.valid
    totals = Totals(max(float(trained.sum()), 1.0), max(float((trained > 0).sum()), 1.0))
    weight = outcomes.spread(sequence_sum(trained, totals))
    found = -outcomes.spread(dpo(outcomes, beta=beta)) * weight
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_gpg_makes_up_for_groups_without_a_difference():
    rewards = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0)]
    found = estimate("gpg", [Episode(g, r, 1) for g, r in rewards])
    assert [x for [x] in found] == pytest.approx([1.5, -1.5, 0, 0, 0, 0])


# ---- what holds for every estimator, per episode and per token --------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches(named=True))
@settings(max_examples=20, deadline=None)
def test_an_episode_that_is_not_valid_moves_nothing_and_gets_nothing(name, batch):
    """Neither what stands in its place matters, nor whether it is there."""
    found = estimate(name, batch)
    assert all(x == 0.0 for e, xs in zip(batch, found, strict=True) for x in xs if not e.valid)
    nothing = float("nan")
    garbage = [
        e if e.valid or e.greedy
        else replace(e, reward=nothing, rewards={}, tokens={c: [nothing] * e.n for c in e.tokens})
        for e in batch
    ]  # fmt: skip
    assert estimate(name, garbage) == found
    there = [i for i, e in enumerate(batch) if e.valid or e.greedy]
    if there:
        without = estimate(name, [batch[i] for i in there])
        for i, xs in zip(there, without, strict=True):
            np.testing.assert_allclose(xs, found[i], atol=1e-9)


@pytest.mark.parametrize("name", BY_GROUP)
@given(batch=batches(named=True))
@settings(max_examples=20, deadline=None)
def test_a_group_of_one_has_advantage_zero(name, batch):
    batch = [e for e in batch if not e.greedy]
    for e, xs in zip(batch, estimate(name, batch) if batch else [], strict=True):
        if len(members(batch, e.group)) == 1:
            assert xs == [0.0] * len(xs)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches(named=True), random=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_order_of_episodes_does_not_matter(name, batch, random):
    batch = [replace(e, reward=e.reward + i / 1024) for i, e in enumerate(batch)]  # DPO takes the first of equals.
    order = list(range(len(batch)))
    random.shuffle(order)
    found, moved = estimate(name, batch), estimate(name, [batch[i] for i in order])
    for i, xs in zip(order, moved, strict=True):
        np.testing.assert_allclose(xs, found[i], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", BY_GROUP)
@given(batch=batches(), constant=st.integers(-4, 4))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name, batch, constant):
    higher = [replace(e, reward=e.reward + constant * (e.group == 1)) for e in batch]
    for xs, ys in zip(estimate(name, batch), estimate(name, higher), strict=True):
        np.testing.assert_allclose(xs, ys, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_without_anything_valid_and_a_valid_episode_without_tokens_are_no_trouble(name):
    failed, silent, spoken = (Episode(0, 0.0, 0, valid=False), Episode(0, 1.0, 0), Episode(0, 0.0, 2))
    for e in (failed, silent, spoken):
        e.tokens = {c: [-1.0] * e.n for c in ("behaviour", "logp", "squares", "reference", "value", "process")}
    assert estimate(name, [failed, failed]) in ([[0.0], [0.0]], [[], []])
    assert np.isfinite(np.concatenate(estimate(name, [silent, spoken, failed]))).all()


def test_ranks_fall_with_the_value_and_the_first_of_equals_is_first():
    outcomes = outcomes_of([Episode(1, 2.0, 1), Episode(0, 1.0, 1), Episode(1, 3.0, 1), Episode(1, 2.0, 1)])
    assert outcomes.rank(outcomes.reward).tolist() == [1, 0, 0, 2]
