"""Estimates of the divergence from the reference: values, gradients, and expectations over a small vocabulary."""

import math

import numpy as np
import pytest
import torch

from asyncrl.trainers import kl
from asyncrl.trainers.catalogue import find
from asyncrl.trainers.parts import KLS

# Value and derivative with respect to log pi of each, as functions of d = log pi - log ref.
CLOSED = {
    "none": (lambda d: 0.0, lambda d: 0.0),
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
    "k1+": (lambda d: d, lambda d: d),
    "k3+": (lambda d: math.exp(-d) - 1 + d, lambda d: d),
    "abs+": (abs, lambda d: d),
}


@pytest.mark.parametrize("name", CLOSED)
def test_value_and_gradient_are_those_of_the_closed_form(name):
    rng = torch.Generator().manual_seed(1)
    logp = (-3 * torch.rand(100, generator=rng, dtype=torch.float64)).requires_grad_()
    reference = -3 * torch.rand(100, generator=rng, dtype=torch.float64)
    value = find("kl", name).function()(logp, reference)
    (value.sum() + 0 * logp.sum()).backward()
    differences = (logp.detach() - reference).tolist()
    np.testing.assert_allclose(value.detach().numpy(), [CLOSED[name][0](d) for d in differences], atol=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), [CLOSED[name][1](d) for d in differences], atol=1e-12)


def test_every_divergence_of_sampled_tokens_has_a_closed_form_here():
    assert set(CLOSED) == set(KLS) - {"full"}


def exact_kl(logits, reference):
    p = logits.log_softmax(0)
    return (p.exp() * (p - reference)).sum()


def expected_gradient(name, logits, reference):
    """Sum over the vocabulary of pi(v) times the gradient of the estimate for v."""
    probabilities = logits.detach().softmax(0)
    x = logits.detach().clone().requires_grad_()
    estimates = find("kl", name).function()(x.log_softmax(0), reference)
    (probabilities * estimates).sum().backward()
    return x.grad


def test_what_the_estimates_are_on_average():
    rng = torch.Generator().manual_seed(2)
    logits, other = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
    reference = other.log_softmax(0)
    divergence = exact_kl(logits, reference)
    logp = logits.log_softmax(0)
    for name in ("k1", "k3", "k1+", "k3+"):
        mean = (logp.exp() * find("kl", name).function()(logp, reference)).sum()
        torch.testing.assert_close(mean, divergence)
    x = logits.clone().requires_grad_()
    exact_kl(x, reference).backward()
    for name in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(expected_gradient(name, logits, reference), x.grad)
    torch.testing.assert_close(expected_gradient("k1", logits, reference), torch.zeros_like(logits))
    y = logits.clone().requires_grad_()
    (reference.exp() * (reference - y.log_softmax(0))).sum().backward()
    torch.testing.assert_close(expected_gradient("k3", logits, reference), y.grad)


@pytest.mark.parametrize("name", CLOSED)
def test_no_log_ratio_overflows_and_equal_policies_have_no_divergence(name):
    function = find("kl", name).function()
    logp = torch.tensor([-1e4, 0.0, -1.0], requires_grad=True)
    value = function(logp, torch.tensor([0.0, -1e4, -1.0]))
    (value.sum() + 0 * logp.sum()).backward()
    assert value.isfinite().all()
    assert logp.grad.isfinite().all()
    assert value[2] == 0


def test_k3_is_exact_for_the_small_differences_of_float32():
    logp, reference = torch.tensor([-1.0]), torch.tensor([-1.0 - 2**-12])
    assert kl.k3(logp, reference).item() == pytest.approx(2**-24 / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(0.1, 0.5), (0.11, 0.5 * (1 + 0.1 * 64 / 1000)), (0.09, 0.5 * (1 - 0.1 * 64 / 1000)),
     (5.0, 0.5 * (1 + 0.2 * 64 / 1000)), (0.0, 0.5 * (1 - 0.2 * 64 / 1000))],
)  # fmt: skip
def test_the_adaptive_coefficient_follows_the_clipped_relative_error(divergence, expected):
    assert kl.adapt(0.5, divergence, 0.1, 64, 1000.0) == pytest.approx(expected, rel=1e-12)


def test_the_adaptive_coefficient_finds_the_target():
    coef = 1.0
    for _ in range(400):
        coef = kl.adapt(coef, 0.05 / coef, 0.1, 256, 1000.0)
    assert 0.05 / coef == pytest.approx(0.1, rel=1e-3)
