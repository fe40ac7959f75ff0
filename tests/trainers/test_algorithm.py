"""The composition: what an algorithm makes of its parts, for a chunk of tokens and for a whole batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Algo
from asyncrl.trainers.aggregation import Totals
from asyncrl.trainers.algorithm import build, loglinear
from asyncrl.trainers.outcomes import Outcomes
from asyncrl.trainers.presets import PRESETS
from asyncrl.trainers.tokens import Tokens

NOT_A_POLICY_GRADIENT = {"sppo"}
"""SPPO fits a log-ratio: on-policy its gradient is 2 eta times that of REINFORCE, over the sequence's length."""


def on_policy(algorithm, lengths, seed=0):
    """Tokens whose behaviour log-probs are the current ones, with one advantage for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    logp = -3 * torch.rand(n, dtype=torch.float64, generator=generator) - 0.05
    advantage = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    sizes = torch.tensor(lengths)
    weight = algorithm.aggregation(sizes.double(), Totals(n, len(lengths), 16.0)).repeat_interleave(sizes)
    zeros = torch.zeros(n, dtype=torch.float64)
    data = Tokens(
        logp.clone(),
        advantage.repeat_interleave(sizes),
        weight,
        lengths,
        torch.ones(n, dtype=torch.int64),
        mark=zeros,
    )
    return logp.requires_grad_(), data


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - NOT_A_POLICY_GRADIENT))
def test_on_policy_every_algorithm_has_the_gradient_of_reinforce(name):
    algorithm = build(Algo(name=name, kl="none"))
    logp, data = on_policy(algorithm, [3, 1, 5])
    loss, metrics = algorithm.token_loss(logp, torch.zeros(9), data)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -data.advantage * data.weight)
    assert metrics["clipped"].sum() == 0
    torch.testing.assert_close(metrics["weight"], torch.ones(9, dtype=torch.float64))


@pytest.mark.parametrize("name", PRESETS)
def test_a_token_of_weight_zero_has_no_gradient(name):
    algorithm = build(Algo(name=name, kl="none", entropy_bonus=0.1))
    logp, data = on_policy(algorithm, [4])
    entropy = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss, _ = algorithm.token_loss(logp, entropy, replace(data, weight=torch.zeros_like(data.weight)))
    loss.sum().backward()
    assert logp.grad.abs().sum() == entropy.grad.abs().sum() == 0


def test_with_the_current_policy_as_proximal_the_gradient_is_reinforce_times_the_capped_weight():
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - math.log(5.0), -1.0, -1.0 + math.log(4.0)])
    data = Tokens(behaviour, torch.ones(3), torch.ones(3), [3])
    loss, metrics = build(Algo(name="dapo", proximal="current")).token_loss(logp, torch.zeros(3), data)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -torch.tensor([2.0, 1.0, 0.25]))
    torch.testing.assert_close(metrics["weight"], torch.tensor([2.0, 1.0, 0.25]))


def test_masks_and_the_factor_of_the_whole_batch_multiply_the_weight():
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - math.log(5.0), -1.0, -1.0 + math.log(4.0)])
    data = Tokens(behaviour, torch.ones(3), torch.ones(3), [3], factor=torch.tensor([1.0, 0.5, 1.0]))
    algo = Algo(
        proximal="current", rejection="token_k1", rejection_args={"token_k1_low": 0.5, "token_k1_high": 10.0}
    )
    loss, _ = build(algo).token_loss(logp, torch.zeros(3), data)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -torch.tensor([2.0, 0.5, 0.0]))


@given(st.integers(0, 100), st.floats(-5, 0), st.floats(-5, 0))
@settings(max_examples=40)
def test_the_loglinear_proximal_goes_from_the_behaviour_policy_to_the_current_one_with_the_lag(lag, logp, mu):
    between = loglinear(torch.tensor([logp]), torch.tensor([mu]), torch.tensor([lag])).item()
    if lag <= 1:
        assert between == pytest.approx(mu, abs=1e-6)
    assert min(mu, logp) - 1e-5 <= between <= max(mu, logp) + 1e-5
    assert abs(between - logp) == pytest.approx(abs(mu - logp) / max(lag, 1), abs=1e-5)


def test_decoupled_ppo_clips_the_ratio_to_the_proximal_policy_and_weighs_the_rest():
    """Lag 2: the proximal policy lies halfway, so w and r are both the square root of the whole ratio."""
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-1.0 - math.log(1.21), -1.0 - math.log(1.96)], dtype=torch.float64)
    data = Tokens(mu, torch.ones(2), torch.ones(2), [2], torch.tensor([2, 2]))
    loss, metrics = build(Algo(proximal="loglinear")).token_loss(logp, torch.zeros(2), data)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-1.1 * 1.1, 0.0], dtype=torch.float64))
    assert metrics["clipped"].tolist() == [0, 1]


def test_the_kl_term_of_the_loss_is_added_with_its_coefficient():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    data = Tokens(logp.detach(), torch.zeros(2), torch.ones(2), [2], reference=reference)
    loss, _ = build(Algo(kl="k2")).token_loss(logp, torch.zeros(2), data, 0.1)
    torch.testing.assert_close(loss, 0.1 * torch.tensor([0.125, 0.5], dtype=torch.float64))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, 0.1 * (logp.detach() - reference))


def test_the_entropy_bonus_rewards_entropy():
    entropy = torch.ones(3, requires_grad=True)
    data = Tokens(torch.zeros(3), torch.zeros(3), torch.full((3,), 0.5), [3])
    loss, _ = build(Algo(entropy_bonus=0.1)).token_loss(torch.zeros(3, requires_grad=True), entropy, data)
    loss.sum().backward()
    torch.testing.assert_close(entropy.grad, torch.full((3,), -0.05))


def outcomes_of(rewards, groups, lengths, **columns):
    return Outcomes(
        reward=torch.tensor(rewards, dtype=torch.float64),
        valid=torch.ones(len(rewards), dtype=torch.bool),
        group=torch.tensor(groups),
        lengths=torch.tensor(lengths),
        max_tokens=16,
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
    )


def test_a_kl_penalty_is_a_part_of_the_reward_of_episode_and_token_estimators():
    penalty = [0.1, 0.2, 0.0, 0.3]
    outcomes = outcomes_of([1.0, 0.0], [0, 0], [2, 2], penalty=penalty)
    centred = build(Algo(name="drgrpo")).estimate(outcomes)
    torch.testing.assert_close(centred, torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64))
    returns = build(Algo(name="reinforce++")).estimate(outcomes)
    plain = np.array([1 - 0.3, 1 - 0.2, -0.3, -0.3])
    spread = (plain - plain.mean()) / np.sqrt(np.square(plain - plain.mean()).mean())
    np.testing.assert_allclose(returns.numpy() / spread, (returns / torch.from_numpy(spread))[0].item(), rtol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_stale_tokens_are_corrected_in_every_preset(name):
    """Either the loss has a ratio to the policy that sampled, or a weight does it, in the sweep or the
    advantages."""
    algo = build(Algo(name=name)).settings
    if algo.proximal == "behaviour":
        assert algo.loss != "reinforce"
        assert algo.correction == "none"
    else:
        assert algo.correction != "none" or algo.advantage in ("vtrace", "dpo")


def test_what_takes_the_place_of_a_part_brings_its_own_correction():
    def chosen(**parts):
        algo = build(Algo(name="dapo", **parts)).settings
        return algo.proximal, algo.correction

    assert chosen() == ("behaviour", "none")
    assert chosen(loss="reinforce") == ("current", "token_tis")
    assert chosen(proximal="loglinear") == ("loglinear", "token_tis")
    assert chosen(proximal="current", correction="none") == ("current", "none")


def test_what_an_algorithm_needs_follows_from_its_parts():
    assert build(Algo(name="dapo")).needs == frozenset()
    assert build(Algo(name="ppo")).needs == {"value"}
    assert build(Algo(name="remax")).needs == {"greedy"}
    assert build(Algo(name="dapo", kl="k3")).needs == {"reference"}
    assert build(Algo(name="dapo", rejection="geometric,veto")).needs == {"logp"}
    assert build(Algo(name="gspo")).sequence_level
    assert not build(Algo(name="dapo")).sequence_level
    assert build(Algo(name="dapo", correction="sequence_tis")).sequence_level


def test_a_chunk_of_tokens_keeps_the_lengths_of_what_it_holds():
    vector = torch.arange(9.0)
    tokens = Tokens(vector, vector, vector, [3, 0, 2, 4], mark=vector)
    assert list(tokens[0:9].lengths) == [3, 0, 2, 4]
    assert list(tokens[3:5].lengths) == [2]
    assert list(tokens[2:6].lengths) == [1, 0, 2, 1]
    assert tokens[3:9].edges().tolist() == [0, 2, 6]
    assert tokens[2:6].mark.tolist() == [2, 3, 4, 5]
    assert tokens[2:6].factor is None
