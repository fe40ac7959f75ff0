"""The RL head against float64 autograd through all logits, in torch and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from head_problems import assert_equal, distance, losses, problem, reference, rows_workspace, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asyncrl.triton_kernels import rows_torch, rows_triton
from asyncrl.triton_kernels.backend import use_triton
from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head
from asyncrl.triton_kernels.sweep import Sweep

BACKENDS = ["torch", "triton"]
LOSSES = ["ppo_clip", "dapo", "cispo", "reinforce", "k3", "gspo", "entropy_only"]


def sequences_of(p, loss):
    return p.lengths if loss == "gspo" else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_every_loss_equals_float64_autograd(backend, loss, temperature):
    p = problem()
    scale = torch.linspace(0.5, 2.0, len(p.labels)) if temperature == "per token" else temperature
    p = replace(p, temperature=scale)
    actual = run(p, losses(p)[loss], rows=16, backend=backend, sequences=sequences_of(p, loss))
    assert_equal(actual, reference(p, losses(p)[loss]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("vocabulary", [2, 15, 2047, 2048, 2049, 5003, 129_920, 151_936])
def test_any_vocabulary_equals_float64_autograd(backend, loss, vocabulary):
    """A peer let columns beyond the vocabulary into the sum when it was not a multiple of the block."""
    p = problem(n=3, d=16, v=vocabulary)
    actual = run(p, losses(p)[loss], rows=2, backend=backend)
    assert_equal(actual, reference(p, losses(p)[loss]))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40), d=st.integers(1, 20), v=st.integers(2, 70), seed=st.integers(0, 10_000),
    rows=st.integers(1, 50), loss=st.sampled_from(LOSSES), backend=st.sampled_from(BACKENDS),
)  # fmt: skip
def test_any_shape_equals_float64_autograd(n, d, v, seed, rows, loss, backend):
    p = problem(n, d, v, seed)
    token_loss = losses(p)[loss]
    actual = run(p, token_loss, rows=rows, backend=backend, sequences=sequences_of(p, loss))
    expected = reference(p, token_loss)
    # A gradient that cancels has absolute accuracy only.
    for name in ("loss", "logp", "entropy", "d_hidden", "d_weight"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a.double() - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_inputs_keep_float32_logits(backend, loss):
    p = problem().to(torch.bfloat16)
    actual = run(p, losses(p)[loss], rows=16, backend=backend, sequences=sequences_of(p, loss))
    expected = reference(p, losses(p)[loss])
    assert actual.d_hidden.dtype == actual.d_weight.dtype == torch.bfloat16
    assert distance(actual.logp, expected.logp) < 1e-5
    assert_equal(actual, expected, 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_very_negative_logits_keep_their_probabilities(backend):
    """A running maximum that starts at 0 turns such rows into log 0."""
    p = replace(problem(), bias=torch.full((257,), -1000.0) + torch.linspace(-3, 3, 257))
    actual = run(p, losses(p)["reinforce"], rows=16, backend=backend)
    expected = reference(p, losses(p)["reinforce"])
    # At 1000, float32 logits are 6e-5 apart.
    for name in ("logp", "entropy", "d_hidden", "d_weight", "d_bias"):
        assert distance(getattr(actual, name), getattr(expected, name)) < 1e-4, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_a_bias_rules_out_have_no_weight(backend):
    p = problem()
    bias = torch.zeros(257)
    bias[200:] = -torch.inf
    p = replace(p, bias=bias, labels=p.labels % 200)
    actual = run(p, losses(p)["reinforce"], rows=16, backend=backend)
    cut = replace(p, weight=p.weight[:200], bias=None)
    expected = reference(cut, losses(p)["reinforce"])
    assert distance(actual.logp, expected.logp) < 1e-5
    assert distance(actual.entropy, expected.entropy) < 1e-5
    assert distance(actual.d_hidden, expected.d_hidden) < 1e-5
    assert distance(actual.d_weight[:200], expected.d_weight) < 1e-5
    assert torch.equal(actual.d_weight[200:], torch.zeros(57, 24))
    assert torch.equal(actual.d_bias[200:], torch.zeros(57))
    ruled_out = logprob_and_entropy(p.hidden, p.weight, p.labels + 200 - p.labels, bias=bias, backend=backend)[0]
    assert torch.equal(ruled_out, torch.full((37,), -torch.inf))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vanishing_probability_gives_finite_gradients(backend):
    p = problem(spread=100.0)
    actual = run(p, losses(p)["reinforce"], rows=16, backend=backend)
    expected = reference(p, losses(p)["reinforce"])
    assert actual.logp.min() < -500
    assert distance(actual.logp, expected.logp) < 1e-5
    assert distance(actual.d_hidden, expected.d_hidden) < 1e-4
    assert distance(actual.d_weight, expected.d_weight) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_a_capped_and_biased_head_equals_float64_autograd(backend, softcap):
    p = replace(problem(), softcap=softcap, bias=torch.linspace(-2, 2, 257), temperature=0.8)
    actual = run(p, losses(p)["reinforce"], rows=16, backend=backend, squares=True)
    expected = reference(p, losses(p)["reinforce"])
    assert_equal(actual, expected)
    assert distance(actual.squares, expected.squares) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "gspo"])
def test_the_chunk_size_changes_nothing(backend, loss):
    p = problem()
    sequences = sequences_of(p, loss)
    one = run(p, losses(p)[loss], rows=64, backend=backend, sequences=sequences)
    # Of a single row the library computes the logits by another routine, which rounds differently.
    for rows, tolerance in ((16, 1e-6), (5, 1e-6), (1, 3e-6)):
        other = run(p, losses(p)[loss], rows=rows, backend=backend, sequences=sequences)
        assert_equal(other, one, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_the_same_input_gives_the_same_bits(backend):
    p = problem()
    first, second = (run(p, losses(p)["reinforce"], rows=16, backend=backend) for _ in range(2))
    for name in ("loss", "logp", "entropy", "d_hidden", "d_weight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("loss", LOSSES)
def test_both_row_steps_give_the_same_numbers(loss):
    p = problem(v=300)
    sequences = sequences_of(p, loss)
    assert_equal(
        run(p, losses(p)[loss], rows=16, backend="triton", sequences=sequences),
        run(p, losses(p)[loss], rows=16, backend="torch", sequences=sequences),
        2e-6,
    )


def test_a_sequence_loss_sees_every_sequence_whole_and_once():
    p = problem()
    seen = []

    def token_loss(logp, entropy, part):
        seen.append(part)
        return losses(p)["gspo"](logp, entropy, part)

    for rows in (64, 20, 4):
        seen.clear()
        run(p, token_loss, rows=rows, sequences=p.lengths)
        edges = {0, p.lengths[0], p.lengths[0] + p.lengths[1], 37}
        assert {edge for part in seen for edge in (part.start, part.stop)} <= edges
        assert [part.stop for part in seen[:-1]] == [part.start for part in seen[1:]]
        assert seen[0].start == 0
        assert seen[-1].stop == 37


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_tokens_neither_count_nor_get_gradient(backend):
    p = problem()
    dropped = torch.arange(37) % 3 == 0
    labels = torch.where(dropped, -100, p.labels)
    broken = replace(p, labels=labels, behaviour=torch.where(dropped, -torch.inf, p.behaviour))
    actual = run(broken, losses(broken)["ppo_clip"], rows=16, backend=backend, ignore_index=-100)
    silent = replace(p, scale=torch.where(dropped, 0.0, p.scale))
    expected = reference(silent, losses(silent)["ppo_clip"])
    assert distance(actual.loss, expected.loss) < 1e-5
    assert distance(actual.d_hidden, expected.d_hidden) < 1e-5
    assert distance(actual.d_weight, expected.d_weight) < 1e-5
    assert not actual.d_hidden[dropped].any()
    assert not actual.logp[dropped].any()
    assert not actual.entropy[dropped].any()


def test_a_loss_of_nothing_leaves_zero_gradients_of_the_right_shape():
    p = problem(n=0)
    actual = run(p, losses(p)["reinforce"])
    assert actual.loss.item() == 0
    assert actual.d_hidden.shape == p.hidden.shape
    assert torch.equal(actual.d_weight, torch.zeros_like(p.weight))


def test_an_upstream_factor_scales_all_gradients():
    p = replace(problem(), bias=torch.linspace(-2, 2, 257))
    once = run(p, losses(p)["reinforce"])
    h, w, b = (t.clone().requires_grad_() for t in (p.hidden, p.weight, p.bias))
    (rl_head(h, w, p.labels, token_loss=losses(p)["reinforce"], bias=b).loss * 4).backward()
    assert torch.equal(h.grad, once.d_hidden * 4)
    assert torch.equal(w.grad, once.d_weight * 4)
    assert torch.equal(b.grad, once.d_bias * 4)


def test_a_second_backward_is_refused():
    p = problem()
    h, w = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    loss = rl_head(h, w, p.labels, token_loss=losses(p)["reinforce"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once per forward"):
        loss.backward()


def test_a_tied_head_adds_its_gradient_to_the_embeddings():
    p = problem()
    grads = []
    for dtype in (torch.float32, torch.float64):
        embedding = nn.Embedding.from_pretrained(p.weight.to(dtype), freeze=False)
        states = torch.tanh(embedding(p.labels.roll(1)))
        if dtype == torch.float32:
            rl_head(states, embedding.weight, p.labels, token_loss=losses(p)["reinforce"]).loss.backward()
        else:
            log_q = (states @ embedding.weight.t()).log_softmax(-1)
            logp = log_q.gather(1, p.labels[:, None])[:, 0]
            losses(p)["reinforce"](logp, -(log_q.exp() * log_q).sum(-1), slice(0, 37))[0].sum().backward()
        grads.append(embedding.weight.grad)
    assert distance(*grads) < 1e-5


@pytest.fixture
def products(monkeypatch):
    """The gradients that every chunk's products were added to: (hidden, weight, bias) as truth values."""
    seen = []
    add = Sweep._add_products

    def spy(self, d_logits, chunk, into):
        seen.append(tuple(x is not None for x in (into.hidden, into.weight, into.bias)))
        add(self, d_logits, chunk, into)

    monkeypatch.setattr(Sweep, "_add_products", spy)
    return seen


def test_a_frozen_head_costs_no_product_and_a_frozen_trunk_none_either(products):
    p = problem()
    expected = reference(p, losses(p)["reinforce"])
    h = p.hidden.clone().requires_grad_()
    rl_head(h, p.weight, p.labels, token_loss=losses(p)["reinforce"]).loss.backward()
    assert distance(h.grad, expected.d_hidden) < 1e-5
    w = p.weight.clone().requires_grad_()
    rl_head(p.hidden, w, p.labels, token_loss=losses(p)["reinforce"], bias=torch.zeros(257)).loss.backward()
    assert distance(w.grad, expected.d_weight) < 1e-5
    assert products == [(True, False, False), (False, True, False)]


def test_metrics_come_back_for_every_token_in_order():
    p = problem()
    out = run(p, losses(p)["ppo_clip"], rows=7).output
    torch.testing.assert_close(out.metrics["ratio"], (out.logp - p.behaviour).exp())
    assert not out.metrics["ratio"].requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_without_a_loss_equal_those_with_one(backend):
    p = replace(problem(), temperature=0.7)
    out = run(p, losses(p)["ppo_clip"], rows=16, backend=backend)
    bytes_ = rows_workspace(p, 16, backend)
    logp, entropy = logprob_and_entropy(
        p.hidden, p.weight, p.labels, temperature=0.7, workspace_bytes=bytes_, backend=backend
    )
    assert torch.equal(logp, out.logp)
    assert torch.equal(entropy, out.entropy)


def test_without_gradients_the_sweep_only_reads(products):
    p = problem()
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    with torch.no_grad():
        out = rl_head(hidden, weight, p.labels, token_loss=losses(p)["reinforce"])
    assert not out.loss.requires_grad
    assert not products
    assert distance(out.loss, reference(p, losses(p)["reinforce"]).loss) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_hands_its_inputs_through_has_its_gradient(backend):
    """Its gradient is a single number with a stride of 0."""
    p = problem()
    for token_loss in (
        lambda logp, entropy, part: (logp, {}),
        lambda logp, entropy, part: (entropy, {}),
        lambda logp, entropy, part: (logp - entropy, {}),
    ):
        assert_equal(run(p, token_loss, rows=16, backend=backend), reference(p, token_loss))


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_as_what_they_show(backend):
    p = problem()
    labels = torch.stack([torch.zeros_like(p.labels), p.labels], 1)[:, 1]
    scale = torch.linspace(0.5, 2, 74)[::2]
    p = replace(p, labels=labels, temperature=scale, hidden=p.hidden.t().contiguous().t())
    actual = run(p, losses(p)["reinforce"], rows=16, backend=backend)
    assert_equal(actual, reference(p, losses(p)["reinforce"]))


def test_autocast_changes_nothing():
    p = problem()
    plain = run(p, losses(p)["reinforce"])
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(run(p, losses(p)["reinforce"]), plain, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_that_no_one_holds_has_no_probability(backend):
    """What is left where labels are not checked, on a GPU and with a divided vocabulary."""
    p = problem(n=3)
    module = rows_triton if backend == "triton" else rows_torch
    logits = module.buffer(3, 257, torch.device("cpu"))
    logits.copy_(p.hidden @ p.weight.t())
    found = module.statistics(logits, torch.tensor([-1, 257, 256]), torch.ones(3), None, 0, False)
    assert found[:, 3].isneginf().tolist() == [True, True, False]


@pytest.mark.parametrize("wrong", [lambda p: -p.mean(), lambda p: torch.stack([p, p], 1), lambda p: p[:1]])
def test_a_loss_or_metric_that_is_not_one_number_per_token_is_refused(wrong):
    p = problem()
    with pytest.raises(ValueError, match=r"gave a loss of shape .* for 37 tokens"):
        run(p, lambda logp, entropy, part: (wrong(logp), {}))
    with pytest.raises(ValueError, match="gave a ratio of shape"):
        run(p, lambda logp, entropy, part: (logp, {"ratio": wrong(logp)}))


def test_narrow_gradients_stand_in_the_memory_of_the_logits():
    p = problem(n=5, v=4099)
    logits = rows_triton.buffer(5, 4099, torch.device("cpu"))
    logits.copy_(p.hidden @ p.weight.t())
    wide, ones = logits.clone(), torch.ones(5)
    norm = wide.logsumexp(-1)
    d_logits = rows_triton.gradients(logits, p.labels, ones, norm, ones, ones, None, None, 0, torch.bfloat16)
    assert d_logits.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    expected = nn.functional.one_hot(p.labels, 4099) - (wide - norm[:, None]).exp()
    assert (d_logits.float() - expected).abs().max() < 2**-7  # The interpreter cuts bits off instead of rounding.


def test_the_device_chooses_the_row_steps_and_a_name_overrides_it():
    assert use_triton(torch.device("cuda"), "auto")
    assert not use_triton(torch.device("cpu"), "auto")
    assert use_triton(torch.device("cpu"), "triton")
    assert not use_triton(torch.device("cuda"), "torch")
    with pytest.raises(ValueError, match="auto, torch, triton"):
        use_triton(torch.device("cpu"), "cuda")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(37, 23)}, r"hidden is \[37, 23\], not \[37, 24\]"),
        ({"temperature": torch.ones(3)}, r"temperature is \[3\], not \[37\]"),
        ({"bias": torch.ones(256)}, r"bias is \[256\], not \[257\]"),
        ({"labels": torch.zeros(37, 1, dtype=torch.int64)}, r"labels are \[37, 1\]"),
        ({"labels": torch.full((37,), 257)}, "label 257 is not in the vocabulary of 257"),
        ({"labels": torch.full((37,), -100)}, "label -100 is not in the vocabulary of 257"),
        ({"hidden": torch.zeros(37, 24, dtype=torch.float16)}, "hidden is torch.float16"),
        ({"softcap": 0.0}, "softcap = 0.0: must be above 0"),
        ({"temperature": 0.0}, "temperature = 0.0: must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    p = replace(problem(), **change)
    with pytest.raises(ValueError, match=said):
        run(p, losses(p)["reinforce"])


def test_sequences_that_do_not_cover_the_tokens_are_refused():
    p = problem()
    with pytest.raises(ValueError, match="add up to 30 tokens, but there are 37"):
        run(p, losses(p)["reinforce"], sequences=(10, 20))
