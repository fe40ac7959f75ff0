"""The RL head against float64 autograd through the whole [tokens, vocabulary] logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head_loss

torch.set_num_threads(1)


def problem(n=37, d=24, v=101, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator) * spread
    weight = torch.randn(v, d, generator=generator)
    labels = torch.randint(0, v, (n,), generator=generator)
    advantage = torch.randn(n, generator=generator)
    behaviour = -torch.rand(n, generator=generator) * 5
    return hidden, weight, labels, advantage, behaviour


def clipped_loss(advantage, behaviour, bonus):
    """PPO with a clipped ratio to the behaviour policy, and an entropy bonus, for any slice of tokens."""

    def token_loss(logp, entropy, part):
        a, old = advantage[part].to(logp.dtype), behaviour[part].to(logp.dtype)
        ratio = (logp - old).exp()
        surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        return surrogate - bonus * entropy, {"ratio": ratio.detach()}

    return token_loss


def reference(hidden, weight, labels, token_loss, temperature):
    """The same loss in float64 by plain autograd."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    scale = temperature[:, None].double() if isinstance(temperature, torch.Tensor) else temperature
    log_q = (hidden @ weight.t() / scale).log_softmax(-1)
    logp = log_q.gather(1, labels[:, None])[:, 0]
    entropy = -(log_q.exp() * log_q).sum(-1)
    loss = token_loss(logp, entropy, slice(None))[0].sum()
    loss.backward()
    return loss.detach(), logp.detach(), entropy.detach(), hidden.grad, weight.grad


def run(hidden, weight, labels, token_loss, temperature=1.0, chunk=16):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = rl_head_loss(hidden, weight, labels, token_loss, temperature=temperature, chunk=chunk)
    out.loss.backward()
    return out, hidden.grad, weight.grad


def assert_close(actual, expected, tolerance=1e-5):
    """Relative to the largest entry of the expected tensor."""
    scale = expected.abs().max().clamp(min=1e-30)
    assert ((actual.double() - expected).abs().max() / scale).item() < tolerance


@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("vocabulary", [2, 31, 128, 1009])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_values_and_gradients_equal_float64_autograd(bonus, vocabulary, temperature):
    hidden, weight, labels, advantage, behaviour = problem(v=vocabulary)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, len(labels))
    token_loss = clipped_loss(advantage, behaviour, bonus)
    out, d_hidden, d_weight = run(hidden, weight, labels, token_loss, temperature)
    loss, logp, entropy, ref_hidden, ref_weight = reference(hidden, weight, labels, token_loss, temperature)
    assert_close(out.loss, loss)
    assert_close(out.logp, logp)
    assert_close(out.entropy, entropy)
    assert_close(d_hidden, ref_hidden)
    assert_close(d_weight, ref_weight)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40), v=st.integers(2, 70), seed=st.integers(0, 10_000), chunk=st.integers(1, 50),
    bonus=st.sampled_from([0.0, 0.01, 1.0]),
)  # fmt: skip
def test_any_shape_and_chunk_size_equals_the_reference(n, v, seed, chunk, bonus):
    hidden, weight, labels, advantage, behaviour = problem(n=n, v=v, seed=seed)
    token_loss = clipped_loss(advantage, behaviour, bonus)
    out, d_hidden, d_weight = run(hidden, weight, labels, token_loss, chunk=chunk)
    loss, logp, _, ref_hidden, ref_weight = reference(hidden, weight, labels, token_loss, 1.0)
    assert abs(out.loss.item() - loss.item()) <= 1e-5 * max(1.0, abs(loss.item()))
    # A log-prob next to 0 and a gradient that cancels have absolute accuracy only: float32 holds 1 + 4e-6 to 1e-7.
    assert (out.logp.double() - logp).abs().max() <= 1e-5 * max(1.0, logp.abs().max())
    assert (d_hidden.double() - ref_hidden).abs().max() <= 1e-5 * max(1.0, ref_hidden.abs().max())
    assert (d_weight.double() - ref_weight).abs().max() <= 1e-5 * max(1.0, ref_weight.abs().max())


def test_the_entropy_bonus_alone_has_the_gradient_of_the_entropy():
    hidden, weight, labels, _, _ = problem()

    def token_loss(logp, entropy, part):
        return -entropy, {}

    _, d_hidden, d_weight = run(hidden, weight, labels, token_loss)
    _, _, _, ref_hidden, ref_weight = reference(hidden, weight, labels, token_loss, 1.0)
    assert_close(d_hidden, ref_hidden)
    assert_close(d_weight, ref_weight)


def test_a_vanishing_probability_gives_finite_gradients():
    hidden, weight, labels, advantage, behaviour = problem(spread=200.0)
    token_loss = clipped_loss(advantage * 0 + 1, behaviour, 0.1)
    out, d_hidden, d_weight = run(hidden, weight, labels, token_loss)
    assert out.logp.min() < -500
    assert all(t.isfinite().all() for t in (out.loss, out.logp, out.entropy, d_hidden, d_weight))
    _, logp, _, ref_hidden, ref_weight = reference(hidden, weight, labels, token_loss, 1.0)
    assert_close(out.logp, logp)
    assert_close(d_hidden, ref_hidden, 1e-3)
    assert_close(d_weight, ref_weight, 1e-3)


def test_a_loss_of_nothing_leaves_zero_gradients_of_the_right_shape():
    hidden, weight, labels, advantage, behaviour = problem(n=0)
    out, d_hidden, d_weight = run(hidden, weight, labels, clipped_loss(advantage, behaviour, 0.1))
    assert out.loss.item() == 0
    assert d_hidden.shape == hidden.shape
    assert torch.equal(d_weight, torch.zeros_like(weight))


def test_twice_the_same_input_gives_the_same_bits():
    hidden, weight, labels, advantage, behaviour = problem()
    token_loss = clipped_loss(advantage, behaviour, 0.1)
    first, second = run(hidden, weight, labels, token_loss), run(hidden, weight, labels, token_loss)
    assert torch.equal(first[0].loss, second[0].loss)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_an_upstream_factor_scales_both_gradients():
    hidden, weight, labels, advantage, behaviour = problem()
    token_loss = clipped_loss(advantage, behaviour, 0.1)
    _, d_hidden, d_weight = run(hidden, weight, labels, token_loss)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    (rl_head_loss(h, w, labels, token_loss, chunk=16).loss * 4).backward()
    assert torch.equal(h.grad, d_hidden * 4)
    assert torch.equal(w.grad, d_weight * 4)


def test_metrics_come_back_for_every_token_in_order():
    hidden, weight, labels, advantage, behaviour = problem()
    out, _, _ = run(hidden, weight, labels, clipped_loss(advantage, behaviour, 0.1), chunk=7)
    torch.testing.assert_close(out.metrics["ratio"], (out.logp - behaviour).exp())


def test_bfloat16_inputs_keep_float32_logits():
    hidden, weight, labels, advantage, behaviour = problem()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    token_loss = clipped_loss(advantage, behaviour, 0.1)
    out, d_hidden, d_weight = run(hidden, weight, labels, token_loss)
    _, logp, _, ref_hidden, ref_weight = reference(hidden, weight, labels, token_loss, 1.0)
    assert_close(out.logp, logp)
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    assert_close(d_hidden, ref_hidden, 8e-3)
    assert_close(d_weight, ref_weight, 8e-3)


def test_log_probs_without_a_loss_equal_those_with_one():
    hidden, weight, labels, advantage, behaviour = problem()
    out, _, _ = run(hidden, weight, labels, clipped_loss(advantage, behaviour, 0.1), temperature=0.7)
    logp, entropy = logprob_and_entropy(hidden, weight, labels, temperature=0.7, chunk=16)
    assert torch.equal(logp, out.logp)
    assert torch.equal(entropy, out.entropy)
    assert not logp.requires_grad


def test_without_gradients_the_sweep_only_reads():
    hidden, weight, labels, advantage, behaviour = problem()
    with torch.no_grad():
        out = rl_head_loss(hidden, weight, labels, clipped_loss(advantage, behaviour, 0.1))
    assert not out.loss.requires_grad
    loss, *_ = reference(hidden, weight, labels, clipped_loss(advantage, behaviour, 0.1), 1.0)
    assert_close(out.loss, loss)
