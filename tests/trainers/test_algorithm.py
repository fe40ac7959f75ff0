"""Advantages, losses, corrections and their sum against slow references in numpy and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Algo
from asyncrl.trainers.advantages import ADVANTAGES, Outcomes
from asyncrl.trainers.aggregation import AGGREGATIONS, Totals
from asyncrl.trainers.algorithm import Tokens, build
from asyncrl.trainers.corrections import CORRECTIONS
from asyncrl.trainers.presets import resolve

rewards_strategy = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.none(), st.floats(-2, 2, width=32))), min_size=1, max_size=24
)


def outcomes_of(rows):
    """(group, reward) pairs."""
    return Outcomes(
        reward=torch.tensor([r or 0.0 for _, r in rows], dtype=torch.float64),
        valid=torch.tensor([r is not None for _, r in rows]),
        group=torch.tensor([g for g, _ in rows]),
        sampled=torch.ones(len(rows), dtype=torch.float64),
    )


def slow_advantage(name, rows):
    result = []
    for group, reward in rows:
        others = [r for g, r in rows if g == group and r is not None]
        if reward is None:
            result.append(0.0)
        elif name == "reinforce":
            result.append(reward)
        elif name == "dr_grpo":
            result.append(reward - sum(others) / len(others))
        elif len(others) == 1:
            result.append(0.0)
        elif name == "rloo":
            result.append(reward - (sum(others) - reward) / (len(others) - 1))
        else:
            result.append((reward - np.mean(others)) / (np.std(others, ddof=1) + 1e-6))
    return np.array(result)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rows=rewards_strategy)
@settings(max_examples=40)
def test_an_advantage_equals_its_definition_group_by_group(name, rows):
    actual = ADVANTAGES[name](outcomes_of(rows)).numpy()
    np.testing.assert_allclose(actual, slow_advantage(name, rows), atol=1e-9)


def test_failed_episodes_move_no_baseline():
    with_failure = ADVANTAGES["grpo"](outcomes_of([(0, 1.0), (0, None), (0, 0.0)]))
    without = ADVANTAGES["grpo"](outcomes_of([(0, 1.0), (0, 0.0)]))
    assert with_failure[[0, 2]].tolist() == without.tolist()
    assert with_failure[1] == 0


def tokens_of(behaviour, advantage, weight):
    """Tokens of one sequence."""
    return Tokens(behaviour, advantage, weight, [len(weight)])


def slow_ppo(logp, old, advantage, low, high, dual):
    """Loss and d loss / d logp of one token, by cases."""
    ratio = math.exp(logp - old)
    plain = -ratio * advantage
    bounded = -min(max(ratio, 1 - low), 1 + high) * advantage
    if dual and advantage < 0 and max(plain, bounded) > -dual * advantage:
        return -dual * advantage, 0.0
    if bounded > plain:
        return bounded, 0.0
    return plain, plain


@given(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3)), min_size=1, max_size=30),
    st.sampled_from([(0.2, 0.28, 10.0), (0.2, 0.2, 0.0), (0.1, 0.5, 1.5)]),
)
@settings(max_examples=60)
def test_ppo_and_its_gradient_equal_the_reference_by_cases(tokens, ranges):
    low, high, dual = ranges
    algo = Algo(clip_low=low, clip_high=high, clip_dual=dual, proximal="behaviour", correction="none")
    # Exactly at a corner of the clip the gradient is a matter of convention.
    for logp, old, _ in tokens:
        ratio = math.exp(logp - old)
        if min(abs(ratio - 1 + low), abs(ratio - 1 - high), abs(ratio - dual)) < 1e-3:
            return
    logp, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    logp.requires_grad_()
    data = tokens_of(old, advantage, torch.ones_like(old))
    loss, _ = build(algo).token_loss(logp, torch.zeros_like(old), data)
    loss.sum().backward()
    expected = [slow_ppo(*token, low, high, dual) for token in tokens]
    np.testing.assert_allclose(loss.detach().numpy(), [e[0] for e in expected], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), [e[1] for e in expected], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "reinforce"])
@pytest.mark.parametrize("correction", ["none", "token_tis", "icepop"])
def test_at_a_ratio_of_one_every_loss_has_the_gradient_of_reinforce(loss, correction):
    logp = torch.linspace(-3, -0.1, 7, dtype=torch.float64, requires_grad=True)
    advantage = torch.linspace(-2, 2, 7, dtype=torch.float64)
    data = tokens_of(logp.detach().clone(), advantage, torch.full((7,), 0.25, dtype=torch.float64))
    values, metrics = build(Algo(loss=loss, correction=correction)).token_loss(logp, torch.zeros(7), data)
    values.sum().backward()
    torch.testing.assert_close(logp.grad, -advantage * 0.25)
    assert metrics["clipped"].sum() == 0
    torch.testing.assert_close(metrics["weight"], torch.ones(7, dtype=torch.float64))


def test_with_the_current_policy_as_proximal_the_gradient_is_reinforce_times_the_capped_weight():
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - math.log(5.0), -1.0, -1.0 + math.log(4.0)])
    data = tokens_of(behaviour, torch.ones(3), torch.ones(3))
    loss, _ = build(Algo(name="dapo")).token_loss(logp, torch.zeros(3), data)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -torch.tensor([2.0, 1.0, 0.25]))


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000),
    clip=st.sampled_from([(3e-4, 4e-4), (0.2, 0.3)]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_clipped_loss_of_sequence_ratios_is_gspo(lengths, seed, clip):
    """J = mean over sequences of min(s A, clip(s) A), s = exp(mean of log-ratios): value, and gradient by hand."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    logp, old = -3 * rng.random(n), None
    old = logp + 0.3 * rng.standard_normal(n)
    advantages = rng.standard_normal(len(lengths))
    expected, gradient, start = 0.0, np.zeros(n), 0
    for length, advantage in zip(lengths, advantages, strict=True):
        own = slice(start, start + length)
        start += length
        s = math.exp((logp[own] - old[own]).mean())
        bounded = min(max(s, 1 - clip[0]), 1 + clip[1]) * advantage
        expected -= min(s * advantage, bounded) / len(lengths)
        if s * advantage <= bounded:
            gradient[own] = -s * advantage / length / len(lengths)
    algo = Algo(
        name="grpo", ratio="sequence", clip_low=clip[0], clip_high=clip[1], proximal="behaviour", correction="none"
    )
    x = torch.tensor(logp, requires_grad=True)
    sizes = torch.tensor(lengths)
    weight = AGGREGATIONS["sequence_mean"](sizes.double(), Totals(n, len(lengths))).repeat_interleave(sizes)
    data = Tokens(
        torch.tensor(old), torch.tensor(advantages).repeat_interleave(sizes), weight,
        lengths,
    )  # fmt: skip
    loss, _ = build(algo).token_loss(x, torch.zeros(n), data)
    loss.sum().backward()
    assert loss.sum().item() == pytest.approx(expected, abs=1e-9)
    np.testing.assert_allclose(x.grad.numpy(), gradient, atol=1e-9)


def test_a_chunk_of_tokens_keeps_the_lengths_of_what_it_holds():
    vector = torch.arange(9.0)
    tokens = Tokens(vector, vector, vector, [3, 0, 2, 4])
    assert list(tokens[0:9].lengths) == [3, 0, 2, 4]
    assert list(tokens[3:5].lengths) == [2]
    assert list(tokens[2:6].lengths) == [1, 0, 2, 1]
    assert tokens[3:9].edges().tolist() == [0, 2, 6]
    assert tokens[2:6].weight.tolist() == [2, 3, 4, 5]


def test_cispo_keeps_the_gradient_of_a_clipped_token_where_ppo_drops_it():
    behaviour, data = torch.tensor([-3.0]), None
    data = tokens_of(behaviour, torch.ones(1), torch.ones(1))
    grads = {}
    for loss in ("ppo_clip", "cispo"):
        logp = torch.tensor([-1.0], requires_grad=True)
        values, metrics = build(Algo(loss=loss, proximal="behaviour")).token_loss(logp, torch.zeros(1), data)
        values.sum().backward()
        grads[loss] = logp.grad.item()
        assert metrics["clipped"].item() == 1
    assert grads["ppo_clip"] == 0
    assert grads["cispo"] == pytest.approx(-1.28)


def test_the_entropy_bonus_rewards_entropy():
    entropy = torch.ones(3, requires_grad=True)
    data = tokens_of(torch.zeros(3), torch.zeros(3), torch.full((3,), 0.5))
    loss, _ = build(Algo(entropy_bonus=0.1)).token_loss(torch.zeros(3, requires_grad=True), entropy, data)
    loss.sum().backward()
    torch.testing.assert_close(entropy.grad, torch.full((3,), -0.05))


def test_corrections_of_known_weights():
    log_weight = torch.tensor([0.1, 1.0, 3.0, 50.0]).log()
    algo = resolve(Algo(correction_floor=0.5, correction_cap=5.0))
    torch.testing.assert_close(CORRECTIONS["none"](log_weight, algo), torch.ones(4))
    torch.testing.assert_close(CORRECTIONS["token_tis"](log_weight, algo), torch.tensor([0.1, 1.0, 3.0, 5.0]))
    torch.testing.assert_close(CORRECTIONS["icepop"](log_weight, algo), torch.tensor([0.0, 1.0, 3.0, 0.0]))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_the_weights_of_all_tokens_sum_to_one(trained):
    lengths = torch.tensor(trained, dtype=torch.float64)
    totals = Totals(max(1.0, lengths.sum().item()), max(1.0, (lengths > 0).sum().item()))
    for aggregation in AGGREGATIONS.values():
        total = (aggregation(lengths, totals) * lengths).sum().item()
        assert total == pytest.approx(1.0 if sum(trained) else 0.0)


def test_the_sequence_mean_weighs_sequences_and_the_token_mean_tokens():
    lengths, totals = torch.tensor([1.0, 4.0]), Totals(5.0, 2.0)
    assert AGGREGATIONS["token_mean"](lengths, totals).tolist() == pytest.approx([0.2, 0.2])
    assert AGGREGATIONS["sequence_mean"](lengths, totals).tolist() == pytest.approx([0.5, 0.125])
