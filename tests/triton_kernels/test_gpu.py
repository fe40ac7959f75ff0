"""The compiled kernels on a GPU, against float64 and against their torch versions.

The other tests of this folder interpret the kernels, which shows neither races nor what the compiler does. Both
cannot be had in one process: ASYNCRL_TEST_COMPILED=1 pytest tests/triton_kernels/test_gpu.py
"""

import dataclasses
import os
from dataclasses import replace

import pytest
import torch
from head_problems import Result, assert_equal, distance, losses, problem, reference, rows_workspace

from asyncrl.triton_kernels import delta, rows_torch
from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head
from asyncrl.triton_kernels.scan import discounted_returns, gae, reverse_scan, td_lambda, vtrace
from asyncrl.triton_kernels.segments import segment_mean, segment_sum, spread

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        os.environ.get("ASYNCRL_TEST_COMPILED") != "1",
        reason="needs compiled kernels: ASYNCRL_TEST_COMPILED=1 pytest tests/triton_kernels/test_gpu.py",
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LENGTHS = [3, 0, 1, 1024, 1023, 0, 1025, 17, 5000, 2048, 0]
"""Around the blocks of the scan and the segment sum."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def rows_triton():
    from asyncrl.triton_kernels import rows_triton

    return rows_triton


def moved(p, dtype=torch.float32):
    """A problem on the GPU."""
    tensors = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    found = {name: t.to(DEVICE) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return replace(p, **found).to(dtype)


def ppo_with_entropy(p):
    def loss(logp, entropy, part):
        clipped, metrics = losses(p)["ppo_clip"](logp, entropy, part)
        return clipped - 0.1 * p.scale[part].to(logp) * entropy, metrics

    return loss


def run(p, token_loss, backend="triton", rows=128, **arguments):
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    bias = None if p.bias is None else p.bias.clone().requires_grad_()
    out = rl_head(
        hidden, weight, p.labels, token_loss=token_loss, temperature=p.temperature, bias=bias, softcap=p.softcap,
        workspace_bytes=rows_workspace(p, rows, backend), backend=backend, **arguments,
    )  # fmt: skip
    out.loss.backward()
    d_bias = None if bias is None else bias.grad
    return Result(
        out.loss.detach(), out.loss.detach().abs(), out.logp, out.entropy, hidden.grad, weight.grad, d_bias,
        out.squares, out,
    )  # fmt: skip


# ---- the RL head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [257, 5003, 151_936])
def test_ppo_with_an_entropy_bonus_equals_float64_autograd(vocabulary, dtype):
    p = moved(problem(n=300, d=64, v=vocabulary), dtype)
    actual, expected = run(p, ppo_with_entropy(p)), reference(p, ppo_with_entropy(p))
    assert distance(actual.logp, expected.logp) < 1e-5
    assert_equal(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["ppo_clip", "dapo", "cispo", "reinforce", "k3", "gspo", "entropy_only"])
def test_every_loss_equals_the_torch_row_steps(loss, dtype):
    p = moved(problem(n=300, d=64, v=5003), dtype)
    sequences = p.lengths if loss == "gspo" else None
    compiled, plain = (
        run(p, losses(p)[loss], backend=backend, sequences=sequences) for backend in ("triton", "torch")
    )
    for name in ("logp", "entropy"):
        assert distance(getattr(compiled, name), getattr(plain, name)) < 1e-5, name
    for name in ("d_hidden", "d_weight"):
        assert distance(getattr(compiled, name), getattr(plain, name)) < TOLERANCE[dtype], name


def test_a_capped_and_biased_head_with_a_temperature_per_token_equals_float64_autograd():
    scale, bias = torch.linspace(0.5, 2, 300), torch.linspace(-2, 2, 5003)
    p = moved(replace(problem(n=300, d=64, v=5003), temperature=scale, bias=bias, softcap=30.0))
    actual, expected = run(p, ppo_with_entropy(p), squares=True), reference(p, ppo_with_entropy(p))
    assert_equal(actual, expected)
    assert distance(actual.squares, expected.squares) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_without_a_loss_equal_those_with_one(dtype):
    p = moved(problem(n=300, d=64, v=5003), dtype)
    out = run(p, ppo_with_entropy(p))
    logp, entropy = logprob_and_entropy(
        p.hidden, p.weight, p.labels, workspace_bytes=rows_workspace(p, 128, "triton"), backend="triton"
    )
    assert torch.equal(logp, out.logp)
    assert torch.equal(entropy, out.entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twice_the_same_input_gives_the_same_bits(dtype):
    p = moved(problem(n=2000, d=256, v=151_936), dtype)
    first, second = (run(p, ppo_with_entropy(p), rows=512) for _ in range(2))
    for name in ("loss", "logp", "entropy", "d_hidden", "d_weight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("beyond", [-17, -16, -1, 0, 1, 15, 16, 17])
def test_narrow_gradients_never_overwrite_logits_that_are_still_to_be_read(rows_triton, blocks, beyond):
    """Only the first block overlaps itself, and only a GPU runs its warps at different times."""
    n, width = 4000, blocks * rows_triton.BLOCK + beyond
    g = torch.Generator(DEVICE).manual_seed(0)
    wide = torch.randn(n, width, generator=g, device=DEVICE) * 2.5
    labels = torch.randint(0, width, (n,), generator=g, device=DEVICE)
    dlogp, dentropy, inverse = (torch.rand(n, generator=g, device=DEVICE) + 0.5 for _ in range(3))
    log_q = (wide * inverse[:, None]).log_softmax(-1)
    norm, entropy = (wide * inverse[:, None]).logsumexp(-1), -(log_q.exp() * log_q).sum(-1)

    def gradients(implementation, dtype):
        logits = implementation.buffer(n, width, DEVICE)
        logits.copy_(wide)
        made = implementation.gradients(logits, labels, inverse, norm, entropy, dlogp, dentropy, None, 0, dtype)
        return made.clone()

    expected = gradients(rows_torch, torch.float32)
    first = gradients(rows_triton, torch.bfloat16)
    assert ((first - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    for _ in range(10):
        assert torch.equal(gradients(rows_triton, torch.bfloat16), first)


def test_a_row_that_begins_beyond_2_31_elements_is_read_and_written(rows_triton):
    n, width = 14_200, 151_936
    logits = rows_triton.buffer(n, width, DEVICE)
    logits.zero_()
    logits[-1, 5] = 10.0
    labels, ones = torch.full((n,), 5, device=DEVICE), torch.ones(n, device=DEVICE)
    top, s, _, label, _ = rows_triton.statistics(logits, labels, ones, None, 0, False)[-1].tolist()
    assert top == label == 10.0
    assert s == pytest.approx(1 + (width - 1) * torch.tensor(-10.0).exp().item(), rel=1e-5)
    norm = torch.full((n,), 10.0 + torch.tensor(s).log().item(), device=DEVICE)
    out = rows_triton.gradients(logits, labels, ones, norm, ones, ones, None, None, 0, torch.bfloat16)
    assert out[-1, 5].item() == pytest.approx(1 - 1 / s, rel=1e-2)
    assert out[-2, 5].item() == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beyond_inputs_and_gradients_the_memory_is_the_workspace_for_any_number_of_tokens(dtype):
    weight = torch.randn(151_936, 64, device=DEVICE, dtype=dtype).requires_grad_()
    labels = torch.zeros(16_000, dtype=torch.int64, device=DEVICE)
    beyond = []
    for n in (1000, 1000, 4000, 16_000):  # The first call allocates the library's own workspace.
        weight.grad = None
        hidden = torch.randn(n, 64, device=DEVICE, dtype=dtype).requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rl_head(
            hidden, weight, labels[:n], token_loss=lambda logp, entropy, part: (logp - entropy, {}),
            workspace_bytes=256 * MIB, backend="triton",
        ).loss.backward()  # fmt: skip
        peak = torch.cuda.max_memory_allocated() - before
        beyond.append(peak - hidden.nbytes - 4 * weight.numel() - 100 * n)
    assert max(beyond[1:]) <= 256 * MIB + MIB


# ---- scans, segments, deltas ---------------------------------------------------------------------


def packed(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(LENGTHS), generator=g).to(DEVICE) for _ in range(count)]


def edges():
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE)


def assert_close(actual, expected, tolerance=5e-6):
    assert actual.dtype == torch.float32
    assert distance(actual, expected) < tolerance


def test_the_scan_equals_float64():
    a, b = packed(2)
    found = reverse_scan(a.sigmoid(), b, edges(), backend="triton")
    assert_close(found, reverse_scan(a.sigmoid().double(), b.double(), edges(), backend="torch"))
    assert torch.equal(found, reverse_scan(a.sigmoid(), b, edges(), backend="triton"))


def test_returns_advantages_and_targets_equal_float64():
    rewards, values, log_ratio = packed(3)
    bootstrap = torch.linspace(-1, 1, len(LENGTHS), device=DEVICE)

    def all_of(backend, dtype):
        r, v, x, last = (t.to(dtype) for t in (rewards, values, log_ratio, bootstrap))
        return [
            discounted_returns(r, edges(), 0.99, backend=backend),
            *gae(r, v, edges(), 0.99, 0.95, last, backend=backend),
            td_lambda(r, v, edges(), 0.99, 0.9, backend=backend),
            *vtrace(r, v, x, edges(), 0.99, bootstrap=last, backend=backend),
        ]

    for found, expected in zip(all_of("triton", torch.float32), all_of("torch", torch.float64), strict=True):
        assert_close(found, expected)


def test_segment_sums_and_their_gradients_equal_float64():
    values, other = packed(2)
    per_segment = torch.linspace(-1, 1, len(LENGTHS), device=DEVICE)

    def all_of(backend, dtype):
        x, z = (t.detach().to(dtype, copy=True).requires_grad_() for t in (values, per_segment))
        outputs = [
            segment_sum(x, edges(), backend=backend),
            segment_mean(x, edges(), backend=backend),
        ]
        everywhere = spread(z, edges(), backend=backend)
        ((outputs[0] * outputs[1]).sum() + (everywhere * x * other.to(dtype)).sum()).backward()
        return [t.detach() for t in (*outputs, everywhere)] + [x.grad, z.grad]

    for found, expected in zip(all_of("triton", torch.float32), all_of("torch", torch.float64), strict=True):
        assert_close(found, expected, 1e-5)


def versions(n, dtype, density=0.01):
    """Random bits, of which a share changes."""
    g = torch.Generator(DEVICE).manual_seed(n)
    kind = delta.BITS[dtype]
    limits = torch.iinfo(kind)
    old, other = (
        torch.randint(limits.min, limits.max, (n,), generator=g, device=DEVICE).to(kind) for _ in range(2)
    )
    new = torch.where(torch.rand(n, generator=g, device=DEVICE) < density, other, old)
    return new.view(dtype), old.view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("code", ["absolute", "ulp"])
@pytest.mark.parametrize("n", [1, 15, 4095, 4096, 4097, 5_000_011])
def test_a_delta_equals_the_torch_path_and_restores_every_bit(n, code, dtype):
    new, old = versions(n, dtype)
    one, other = (delta.encode(new, old, code=code, backend=backend) for backend in ("triton", "torch"))
    for field in dataclasses.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        same = torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
        assert same, field.name
    base = old.clone()
    delta.apply(one, base, backend="triton")
    bits = delta.BITS[dtype]
    assert torch.equal(base.view(bits), new.view(bits))


def test_a_tensor_of_more_than_2_31_elements_has_its_last_change_found():
    n = 2**31 + 17
    if torch.cuda.mem_get_info()[0] < 8 * 2 * n:
        pytest.skip("needs 34 GB of free GPU memory")
    old = torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    new = old.clone()
    new[[0, n - 1]] = 1.0
    found = delta.encode(new, old, backend="triton")
    assert found.counts.nonzero()[:, 0].tolist() == [0, (n - 1) // delta.BLOCK]
    assert found.offsets.tolist() == [0, (n - 1) % delta.BLOCK]
