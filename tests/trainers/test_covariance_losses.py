"""Losses that mark tokens by covariance: which are marked, and what the marks change."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.covariance_losses import (
    MARKERS,
    clip_cov,
    clip_cov_mark,
    covariance,
    kl_cov,
    kl_cov_mark,
    lots,
)
from asyncrl.trainers.parts import LOSSES
from asyncrl.trainers.tokens import Tokens

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
LENGTHS = [5, 1, 0, 9, 40, 12, 33]


def batch(seed, lengths=LENGTHS):
    """Log-probs before the update and the data of a whole batch; advantages are a sequence's."""
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    behaviour = (-4 * torch.rand(n, generator=rng)).double()
    logp = behaviour + 0.1 * torch.randn(n, generator=rng, dtype=torch.float64)
    advantage = (2 * torch.randn(len(lengths), generator=rng, dtype=torch.float64)).repeat_interleave(
        torch.tensor(lengths)
    )
    return logp, Tokens(behaviour, advantage, torch.ones(n, dtype=torch.float64), lengths, old=logp)


def slow_covariance(logp, advantage):
    x, a = logp.tolist(), advantage.tolist()
    mean_x, mean_a = sum(x) / len(x), sum(a) / len(a)
    return [(u - mean_a) * (v - mean_x) for u, v in zip(a, x, strict=True)]


def shuffled(logp, tokens, order):
    """The same batch with its sequences in another order, and where each of its tokens was before."""
    starts = np.cumsum([0, *tokens.lengths])
    place = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    columns = {key: getattr(tokens, key)[place] for key in ("behaviour", "advantage", "weight", "old")}
    return logp[place], replace(tokens, lengths=[tokens.lengths[i] for i in order], **columns), place


def test_the_covariance_is_that_of_the_definition():
    logp, tokens = batch(1)
    np.testing.assert_allclose(
        covariance(logp, tokens.advantage).numpy(), slow_covariance(logp, tokens.advantage), rtol=1e-9, atol=1e-12
    )
    mean = np.cov(logp.numpy(), tokens.advantage.numpy(), ddof=0)[0, 1]
    assert covariance(logp, tokens.advantage).mean().item() == pytest.approx(mean)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1e-9, 1), (0.1, 10), (1.0, 100)])
def test_kl_cov_marks_the_tokens_of_largest_covariance(share, expected):
    logp, tokens = batch(2)
    mark = kl_cov_mark(logp, tokens, share=share)
    order = sorted(range(100), key=slow_covariance(logp, tokens.advantage).__getitem__, reverse=True)
    assert set(mark.nonzero().flatten().tolist()) == set(order[:expected])
    assert set(mark.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("share", [0.02, 0.05, 1.0])
def test_clip_cov_marks_so_many_tokens_and_only_within_the_band(share):
    logp, tokens = batch(3)
    cov = slow_covariance(logp, tokens.advantage)
    band = [i for i, c in enumerate(cov) if 0.5 < c < 4.0]
    mark = clip_cov_mark(logp, tokens, share=share, cov_low=0.5, cov_high=4.0, **CLIP)
    chosen = mark.nonzero().flatten().tolist()
    assert set(chosen) <= set(band)
    assert len(chosen) == min(len(band), int(share * 100))


def test_clip_cov_marks_no_token_that_the_clip_already_cuts():
    logp, tokens = batch(4)
    tokens = replace(tokens, old=tokens.behaviour - 1.0)
    mark = clip_cov_mark(logp, tokens, share=1.0, cov_low=-100.0, cov_high=100.0, **CLIP)
    # Every ratio is far above 1.2, which cuts the tokens of positive advantage.
    assert torch.equal(mark == 1, tokens.advantage <= 0)


@given(order=st.permutations(range(len(LENGTHS))), seed=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_the_same_tokens_are_marked_whatever_the_order_of_the_sequences(order, seed):
    logp, tokens = batch(seed)
    moved_logp, moved, place = shuffled(logp, tokens, order)
    assert torch.equal(lots(moved), lots(tokens)[place])
    for mark in (
        lambda x, data: kl_cov_mark(x, data, share=0.07),
        lambda x, data: clip_cov_mark(x, data, share=0.05, cov_low=0.2, cov_high=9.0, **CLIP),
    ):
        assert torch.equal(mark(moved_logp, moved), mark(logp, tokens)[place])


def test_lots_do_not_depend_on_the_last_bits_of_a_forward_pass_and_differ_between_batches():
    logp, tokens = batch(5)
    first = clip_cov_mark(logp, tokens, share=0.05, cov_low=0.2, cov_high=9.0, **CLIP)
    again = clip_cov_mark(logp + 1e-9, tokens, share=0.05, cov_low=0.2, cov_high=9.0, **CLIP)
    assert torch.equal(first, again)
    assert not torch.equal(lots(tokens), lots(batch(6)[1]))


def test_only_equal_sequences_draw_equal_lots():
    behaviour = torch.tensor([-1.0, -2.0, -2.0, -1.0, -1.0, -2.0], dtype=torch.float64)
    drawn = lots(Tokens(behaviour, behaviour, behaviour, [2, 2, 2])).tolist()
    assert drawn[:2] == drawn[4:]
    assert len(set(drawn[:4])) == 4


def test_lots_draw_every_token_equally_often():
    drawn = torch.zeros(100)
    for seed in range(2000):
        drawn[lots(batch(seed)[1]).argsort()[:10]] += 1
    # 200 expected of each token, with a standard deviation of 13.4.
    assert (drawn - 200).abs().max() < 5 * 13.4
    assert len(lots(batch(0)[1]).unique()) == 100


def test_tokens_of_equal_covariance_are_told_apart_the_same_way_everywhere():
    behaviour = torch.linspace(-3, -1, 10, dtype=torch.float64)
    tokens = Tokens(behaviour, torch.ones(10, dtype=torch.float64), torch.ones(10), [4, 6], old=behaviour)
    logp = torch.full((10,), -1.0, dtype=torch.float64)
    mark = kl_cov_mark(logp, tokens, share=0.3)
    moved_logp, moved, place = shuffled(logp, replace(tokens, weight=tokens.weight.double()), [1, 0])
    assert mark.sum() == 3
    assert torch.equal(kl_cov_mark(moved_logp, moved, share=0.3), mark[place])


def test_a_batch_without_tokens_has_no_marks():
    nothing = torch.zeros(0, dtype=torch.float64)
    tokens = Tokens(nothing, nothing, nothing, [0, 0], old=nothing)
    assert len(kl_cov_mark(nothing, tokens, share=0.1)) == 0
    assert len(clip_cov_mark(nothing, tokens, share=0.1, cov_low=1.0, cov_high=5.0, **CLIP)) == 0


def value_and_gradient(loss, logp, tokens, **parameters):
    x = logp.clone().requires_grad_()
    value, clipped = loss(x, tokens, **parameters)
    value.sum().backward()
    return value.detach().tolist(), x.grad.tolist(), clipped.tolist()


def test_clip_cov_is_ppo_without_the_gradient_of_the_marked_tokens():
    logp, tokens = batch(7)
    old = logp - 0.3 * torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mark = (torch.arange(100) % 3 == 0).double()
    tokens = replace(tokens, old=old, mark=mark)
    band = {"share": 0.1, "cov_low": 1.0, "cov_high": 5.0}
    value, gradient, clipped = value_and_gradient(clip_cov, logp, tokens, **band, **CLIP)
    for i, (x, o, a) in enumerate(zip(logp.tolist(), old.tolist(), tokens.advantage.tolist(), strict=True)):
        r = math.exp(x - o)
        plain, bounded = -r * a, -min(max(r, 0.8), 1.2) * a
        assert value[i] == pytest.approx(max(plain, bounded), rel=1e-9)
        assert gradient[i] == pytest.approx(0.0 if mark[i] or bounded > plain else plain, rel=1e-9)
        assert clipped[i] == bool(mark[i] or bounded > plain)


def test_kl_cov_adds_the_distance_to_the_policy_that_sampled_to_the_marked_tokens():
    logp, tokens = batch(8)
    mark = (torch.arange(100) % 4 == 0).double()
    value, gradient, _ = value_and_gradient(kl_cov, logp, replace(tokens, mark=mark), share=0.1, coef=0.7)
    columns = (logp.tolist(), tokens.behaviour.tolist(), tokens.advantage.tolist())
    for i, (x, mu, a) in enumerate(zip(*columns, strict=True)):
        # The proximal policy is the current one here, so that the ratio is 1.
        penalty, slope = (0.7 * abs(x - mu), math.copysign(0.7, x - mu)) if mark[i] else (0.0, 0.0)
        assert value[i] == pytest.approx(-a + penalty, rel=1e-9)
        assert gradient[i] == pytest.approx(-a + slope, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [(clip_cov, {"share": 0.1, "cov_low": 1.0, "cov_high": 5.0, **CLIP}), (kl_cov, {"share": 0.1, "coef": 1.0})],
)
def test_without_marks_and_at_a_ratio_of_one_the_gradient_is_that_of_reinforce(loss, parameters):
    logp, tokens = batch(9)
    _, gradient, _ = value_and_gradient(loss, logp, replace(tokens, mark=torch.zeros_like(logp)), **parameters)
    np.testing.assert_allclose(gradient, -tokens.advantage.numpy())


def test_marks_follow_their_tokens_into_every_chunk():
    logp, tokens = batch(10)
    tokens = replace(tokens, mark=(torch.arange(100) % 5 == 0).double())
    whole, _ = kl_cov(logp, tokens, share=0.1, coef=1.0)
    cut = [kl_cov(logp[part], tokens[part], share=0.1, coef=1.0)[0] for part in (slice(0, 33), slice(33, 100))]
    assert torch.equal(torch.cat(cut), whole)


def test_every_loss_that_sees_the_whole_batch_has_a_marker():
    assert set(MARKERS) == {name for name, part in LOSSES.items() if part.level == "batch"}
