"""KL over the whole vocabulary: the sweep against float64 autograd, and as a term of the learner's loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.learner import model
from asyncrl.learner.full_kl import FullKl
from asyncrl.learner.reference import Reference
from asyncrl.triton_kernels.full_kl import LIVE, Head, full_kl
from asyncrl.triton_kernels.rl_head import logprob_and_entropy

V, D, OTHER = 37, 16, 24


def inputs(n, bias=True, softcap=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    hidden, weight, of_head = draw(n, D), draw(V, D) / 4, draw(V) if bias else None
    other = Head(draw(V, OTHER) / 5, draw(V) if bias else None, softcap and 2 * softcap)
    return hidden, Head(weight, of_head, softcap), draw(n, OTHER), other, draw(n)


def slow(hidden, head, other_hidden, other, scale, temperature):
    """Loss, KL and gradients by autograd in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]

    def log_probs(states, weight, bias, cap):
        logits = states.double() @ weight.double().t() + (0 if bias is None else bias.double())
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return (logits / temperature).log_softmax(-1)

    log_p = log_probs(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, head.softcap)
    log_q = log_probs(other_hidden, *other[:2], other.softcap)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (scale.double() * kl).sum()
    return loss, kl, torch.autograd.grad(loss, leaves)


@given(
    st.integers(0, 9), st.booleans(), st.sampled_from([None, 3.0]), st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([1, 3 * 4 * LIVE * V, None]), st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_value_and_gradients_equal_float64_autograd(n, bias, softcap, temperature, workspace, seed):
    hidden, head, other_hidden, other, scale = inputs(n, bias, softcap, seed)
    leaves = [x.requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]
    loss, kl = full_kl(
        hidden, head, other_hidden, other, scale, temperature=temperature, workspace_bytes=workspace
    )
    expected, each, gradients = slow(hidden, head, other_hidden, other, scale, temperature)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kl.double(), each.detach(), atol=1e-5, rtol=1e-5)
    assert not kl.requires_grad
    (2 * loss).backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad.double(), 2 * gradient, atol=1e-5, rtol=1e-5)


def test_equal_models_have_no_divergence_and_no_gradient():
    hidden, head, *_, scale = inputs(5)
    hidden.requires_grad_()
    loss, kl = full_kl(hidden, head, hidden.detach(), head, scale)
    loss.backward()
    assert loss.item() == 0
    assert not kl.any()
    assert not hidden.grad.any()


def test_a_token_that_both_heads_rule_out_counts_for_nothing():
    hidden, head, other_hidden, other, scale = inputs(5)
    ruled = torch.zeros(V).index_fill(0, torch.tensor([3]), -torch.inf)
    kept = torch.arange(V) != 3
    small = [Head(h.weight[kept], h.bias[kept], None) for h in (head, other)]
    large = [Head(h.weight, h.bias + ruled, None) for h in (head, other)]
    hidden.requires_grad_()
    gradients = []
    for mine, theirs in (small, large):
        loss, kl = full_kl(hidden, mine, other_hidden, theirs, scale)
        gradients.append((kl, *torch.autograd.grad(loss, hidden)))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_inputs_give_bfloat16_gradients_of_float32_sums():
    hidden, head, other_hidden, other, scale = inputs(6, bias=False)
    narrow = [x.bfloat16() for x in (hidden, head.weight, other_hidden, other.weight)]
    leaves = [x.requires_grad_() for x in narrow[:2]]
    loss, _ = full_kl(narrow[0], Head(narrow[1]), narrow[2], Head(narrow[3]), scale)
    loss.backward()
    wide = [x.detach().float() for x in narrow]
    expected, _, gradients = slow(wide[0], Head(wide[1]), wide[2], Head(wide[3]), scale, 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.double(), gradient, atol=1e-2, rtol=1e-2)


def test_wrong_shapes_are_named_and_gradients_are_given_once():
    hidden, head, other_hidden, other, scale = inputs(4)
    with pytest.raises(ValueError, match=r"scale is \[3\], not \[4\]"):
        full_kl(hidden, head, other_hidden, other, scale[:3])
    with pytest.raises(ValueError, match="needs two models with the same one"):
        full_kl(hidden, head, other_hidden, Head(other.weight[:30]), scale)
    with pytest.raises(ValueError, match=r"temperature = 0\.0"):
        full_kl(hidden, head, other_hidden, other, scale, temperature=0.0)
    hidden.requires_grad_()
    loss, _ = full_kl(hidden, head, other_hidden, other, scale)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once per forward"):
        loss.backward()


def test_as_a_term_of_the_loss_it_equals_autograd_through_both_models(alone, untied_folder, batches, model_jobs):
    policy = model_jobs.moved(untied_folder, alone)
    whole = model_jobs.whole(dict(policy.named_parameters()), "hf.")
    reference = Reference(untied_folder, "float32", alone)
    rows, _ = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    pi, ref = (AutoModelForCausalLM.from_pretrained(untied_folder, dtype=torch.float64) for _ in range(2))
    pi.load_state_dict(whole, strict=False)
    total = 0.0
    for row in rows:
        scale = 0.1 + torch.rand(len(row.labels))
        term = FullKl(policy, reference, row, scale, 0.7, 4096)
        out = policy(model.head_loss, row, model_jobs.zero_loss, 0.7, None, False, term)
        out.loss.backward()
        log_p, log_q = ((hf.lm_head(model_jobs.slow_states(hf, row)[0]) / 0.7).log_softmax(-1) for hf in (pi, ref))
        kl = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        (scale * kl).sum().backward()
        assert term.kl.double().numpy() == pytest.approx(kl.detach().numpy(), abs=1e-5)
        total += out.loss.item()
    assert total > 0.1
    model.release(policy)
    for name, p in policy.named_parameters():
        expected = pi.get_parameter(name.removeprefix("hf.")).grad
        torch.testing.assert_close(p.grad.full_tensor().double(), expected, atol=1e-4, rtol=1e-3, msg=name)


def test_it_is_minus_entropy_plus_cross_entropy():
    """KL(p || uniform) = log V - H."""
    hidden, head, other_hidden, other, scale = inputs(6)
    uniform = Head(torch.zeros_like(other.weight))
    _, kl = full_kl(hidden, head, other_hidden, uniform, scale, temperature=0.9)
    _, entropy = logprob_and_entropy(
        hidden, head.weight, torch.zeros(6, dtype=torch.int64), temperature=0.9, bias=head.bias
    )
    torch.testing.assert_close(kl, torch.tensor(float(V)).log() - entropy, atol=1e-5, rtol=1e-5)
