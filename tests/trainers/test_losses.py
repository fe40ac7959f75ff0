"""Token-level losses against their formulas, token by token in Python floats; gradients by central differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Algo
from asyncrl.trainers import losses
from asyncrl.trainers.algorithm import build
from asyncrl.trainers.parts import LOSSES
from asyncrl.trainers.tokens import Tokens

STEP = 1e-6


def clip(x, low, high):
    return min(max(x, low), high)


# Each formula as `(x, fixed, old, A, parameters) -> (loss, clipped)`: x carries gradient, `fixed` is sg(x).


def ppo_clip(x, fixed, old, a, p):
    r = math.exp(x - old)
    plain, bounded = -r * a, -clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * a
    if p["clip_dual"] and a < 0 and max(plain, bounded) > -p["clip_dual"] * a:
        return -p["clip_dual"] * a, True
    return max(plain, bounded), bounded > plain


def reinforce(x, fixed, old, a, p):
    return -a * x, False


def cispo(x, fixed, old, a, p):
    r = math.exp(fixed - old)
    bounded = clip(r, 1 - p["clip_low"], 1 + p["clip_high"])
    return -bounded * a * x, bounded != r


def aipo(x, fixed, old, a, p):
    r = math.exp(fixed - old)
    return -min(r, p["cap"]) * a * x, r > p["cap"]


def sapo(x, fixed, old, a, p):
    tau = p["tau_pos"] if a > 0 else p["tau_neg"]
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x - old) - 1))) * a, False


def dppo_tv(x, fixed, old, a, p):
    moved, r = math.exp(fixed) - math.exp(old), math.exp(fixed - old)
    if (a > 0 and moved > p["delta_high"]) or (a <= 0 and moved < -p["delta_low"]):
        return 0.0, True
    return -min(r, p["cap"]) * a * x, r > p["cap"]


def dppo_kl(x, fixed, old, a, p):
    now, was, r = math.exp(fixed), math.exp(old), math.exp(fixed - old)
    divergence = was * (old - fixed) + (1 - was) * math.log((1 - was) / (1 - now))
    if divergence > p["delta"] and (now > was if a > 0 else now < was):
        return 0.0, True
    return -min(r, p["cap"]) * a * x, r > p["cap"]


def dro(x, fixed, old, a, p):
    return -(x * a - p["beta"] / 2 * (x - old) ** 2), False


REFERENCES = {f.__name__: f for f in (ppo_clip, reinforce, cispo, aipo, sapo, dppo_tv, dppo_kl, dro)}
VARIANTS = [
    *((name, {}) for name in REFERENCES),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.5, "clip_dual": 1.5}),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.1}),
    ("aipo", {"cap": 1.1}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("dppo_tv", {"delta_low": 0.02, "delta_high": 0.05, "cap": 1.3}),
    ("dppo_kl", {"delta": 0.001, "cap": 1.3}),
    ("dro", {"beta": 0.3}),
]


def defaults(name):
    return {key: parameter.default for key, parameter in LOSSES[name].parameters.items()}


def tokens_of(old, advantage, lengths=None):
    ones = torch.ones_like(old)
    return Tokens(behaviour=old, advantage=advantage, weight=ones, lengths=lengths or [len(old)], old=old)


def value_and_gradient(name, parameters, logp, old, advantage):
    x = logp.clone().requires_grad_()
    loss, clipped = getattr(losses, name)(x, tokens_of(old, advantage), **parameters)
    loss.sum().backward()
    return loss.detach(), x.grad, clipped


def random_tokens(seed, n=200, spread=0.5):
    rng = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(n, generator=rng, dtype=torch.float64) - 0.01
    old = (logp + spread * torch.randn(n, generator=rng, dtype=torch.float64)).clamp(max=-0.005)
    return logp, old, torch.randn(n, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize(("name", "changed"), VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_value_gradient_and_clipped_tokens_are_those_of_the_formula(name, changed, seed):
    parameters = defaults(name) | changed
    columns = random_tokens(seed)
    loss, gradient, clipped = value_and_gradient(name, parameters, *columns)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [REFERENCES[name](x, x, old, a, parameters) for x, old, a in rows]
    slopes = [
        (
            REFERENCES[name](x + STEP, x, old, a, parameters)[0]
            - REFERENCES[name](x - STEP, x, old, a, parameters)[0]
        )
        / (2 * STEP)
        for x, old, a in rows
    ]
    np.testing.assert_allclose(loss.numpy(), [e[0] for e in expected], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-6, atol=1e-6)
    assert clipped.tolist() == [bool(e[1]) for e in expected]


@pytest.mark.parametrize("name", REFERENCES)
def test_at_a_ratio_of_one_every_token_loss_has_the_gradient_of_reinforce(name):
    logp, _, advantage = random_tokens(3)
    _, gradient, clipped = value_and_gradient(name, defaults(name), logp, logp, advantage)
    torch.testing.assert_close(gradient, -advantage)
    assert not clipped.any()


@given(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3)), min_size=1, max_size=30),
    st.sampled_from([(0.2, 0.28, 10.0), (0.2, 0.2, 0.0), (0.1, 0.5, 1.5)]),
)
@settings(max_examples=30, deadline=None)
def test_the_gradient_of_ppo_is_that_of_the_case_that_holds(tokens, ranges):
    low, high, dual = ranges
    tokens = [(x, old, a) for x, old, a in tokens if not at_a_corner(math.exp(x - old), low, high, dual)]
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    if not columns:
        return
    parameters = {"clip_low": low, "clip_high": high, "clip_dual": dual}
    loss, gradient, _ = value_and_gradient("ppo_clip", parameters, *columns)
    expected = [ppo_clip(x, x, old, a, parameters) for x, old, a in tokens]
    # Where nothing is cut the loss is -rA, whose derivative is itself.
    np.testing.assert_allclose(loss.numpy(), [e[0] for e in expected], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), [0 if cut else e for e, cut in expected], rtol=1e-9, atol=1e-12)


def at_a_corner(ratio, low, high, dual):
    """Exactly at a corner of the clip the gradient is a matter of convention."""
    return min(abs(ratio - 1 + low), abs(ratio - 1 - high), abs(ratio - dual)) < 1e-3


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("distance", [-200.0, 200.0])
def test_log_ratios_far_outside_any_range_give_finite_numbers(name, distance):
    old = torch.tensor([-210.0, -210.0, -0.0]) if distance > 0 else torch.tensor([-0.0, -1e-9, -1.0])
    logp = (old + distance).clamp(max=0.0)
    for a in (-1.0, 1.0):
        loss, gradient, _ = value_and_gradient(name, defaults(name), logp, old, torch.full_like(old, a))
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_the_binary_kl_of_near_certain_tokens_is_finite_and_does_not_drop_them():
    logp = torch.tensor([0.0, -1e-8, -1e-4, -1e-4, 0.0], dtype=torch.float32)
    old = torch.tensor([0.0, -1e-8, -1e-4, 0.0, -1e-4], dtype=torch.float32)
    for a in (-1.0, 1.0):
        loss, gradient, clipped = value_and_gradient(
            "dppo_kl", defaults("dppo_kl"), logp, old, torch.full((5,), a)
        )
        assert loss.isfinite().all()
        assert not clipped.any()
        torch.testing.assert_close(gradient, torch.full((5,), -a), rtol=2e-4, atol=0)


def test_cispo_keeps_the_gradient_of_a_clipped_token_where_ppo_drops_it():
    logp, old, advantage = torch.tensor([-1.0]), torch.tensor([-3.0]), torch.ones(1)
    for name, expected in (("ppo_clip", 0.0), ("cispo", -1.2)):
        _, gradient, clipped = value_and_gradient(name, defaults(name), logp, old, advantage)
        assert clipped.item()
        assert gradient.item() == pytest.approx(expected)


def test_a_token_that_moved_against_its_advantage_is_kept_by_dppo_however_far():
    logp, old = torch.tensor([-3.0, -0.1]), torch.tensor([-0.1, -3.0])
    for name in ("dppo_tv", "dppo_kl"):
        back = value_and_gradient(name, defaults(name), logp, old, torch.tensor([1.0, -1.0]))
        away = value_and_gradient(name, defaults(name), logp, old, torch.tensor([-1.0, 1.0]))
        assert (back[1] != 0).all()
        assert (away[1] == 0).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_token_of_weight_zero_has_no_gradient(name):
    logp, old, advantage = random_tokens(4, n=12)
    weight = torch.ones_like(logp)
    weight[3:7] = 0
    proximal = "current" if name == "reinforce" else "behaviour"
    algorithm = build(Algo(name="grpo", loss=name, proximal=proximal, correction="none"))
    x = logp.clone().requires_grad_()
    loss, _ = algorithm.token_loss(x, torch.zeros_like(x), Tokens(old, advantage, weight, [12]))
    loss.sum().backward()
    assert (x.grad[3:7] == 0).all()
    assert (x.grad[7:] != 0).any()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_token_loss_does_not_depend_on_the_chunks(name):
    logp, old, advantage = random_tokens(5, n=30)
    whole = value_and_gradient(name, defaults(name), logp, old, advantage)
    cut = [
        value_and_gradient(name, defaults(name), *(column[part] for column in (logp, old, advantage)))
        for part in (slice(0, 7), slice(7, 8), slice(8, 30))
    ]
    for all_at_once, pieces in zip(whole, zip(*cut, strict=True), strict=True):
        assert torch.equal(all_at_once, torch.cat(pieces))
