"""The reverse scan and what is built on it, against Python loops over tokens in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.triton_kernels import scan_triton
from asyncrl.triton_kernels.scan import discounted_returns, gae, reverse_scan, td_lambda, vtrace

BACKENDS = ("torch", "triton")
LENGTHS = [3, 0, 1, 17, 16, 0, 40, 15, 1, 0]
"""With the blocks of these tests: empty, single, one block and its neighbours, several blocks."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """The interpreter scans element by element: blocks of 16 reach every boundary in little time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_triton, "BLOCK", 16)
        yield


def edges(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def vectors(lengths, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(lengths), generator=generator, dtype=dtype) for _ in range(count)]


def segments(lengths, *packed):
    """The segments of packed vectors as lists of Python floats, which are float64."""
    start = 0
    for length in lengths:
        yield [vector[start : start + length].tolist() for vector in packed]
        start += length


def loop_scan(a, b, lengths):
    out = []
    for factors, terms in segments(lengths, a, b):
        x, found = 0.0, []
        for factor, term in zip(reversed(factors), reversed(terms), strict=True):
            x = factor * x + term
            found.append(x)
        out += reversed(found)
    return torch.tensor(out, dtype=torch.float64)


def assert_close(actual, expected, tolerance=2e-6):
    scale = expected.abs().max().clamp(min=1.0) if len(expected) else 1.0
    assert actual.shape == expected.shape
    assert torch.all((actual.double() - expected).abs() <= tolerance * scale)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([15, 16, 17])), max_size=6), seed=st.integers()
)
def test_the_scan_equals_a_loop_over_tokens_for_ragged_segments(backend, lengths, seed):
    a, b = vectors(lengths, 2, seed % 2**32)
    found = reverse_scan(a.sigmoid(), b, edges(lengths), backend=backend)
    assert found.dtype == torch.float32
    assert_close(found, loop_scan(a.sigmoid(), b, lengths))


def test_one_block_of_the_real_size_is_scanned():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_triton, "BLOCK", 1024)
        a, b = vectors([1000, 100], 2)
        found = reverse_scan(a.sigmoid(), b, edges([1000, 100]), backend="triton")
    assert_close(found, loop_scan(a.sigmoid(), b, [1000, 100]))


def test_the_torch_path_takes_float64():
    a, b = vectors(LENGTHS, 2, dtype=torch.float64)
    found = reverse_scan(a.sigmoid(), b, edges(LENGTHS))
    assert found.dtype == torch.float64
    assert_close(found, loop_scan(a.sigmoid(), b, LENGTHS), 1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_stays_in_its_segment(backend, bad):
    a, b = vectors([20, 20, 20], 2)
    b[25] = bad
    found = reverse_scan(a.sigmoid(), b, edges([20, 20, 20]), backend=backend)
    assert not found[20:26].isfinite().any()
    assert found[:20].isfinite().all()
    assert found[26:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone_and_runs_are_bitwise_equal(backend):
    a, b = vectors(LENGTHS, 2)
    kept = a.clone(), b.clone()
    first, second = (reverse_scan(a, b, edges(LENGTHS), backend=backend) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_with_strides_are_scanned(backend):
    a, b = vectors([18, 22], 2)
    found = reverse_scan(a[::2].sigmoid(), b[::2], edges([9, 11]), backend=backend)
    assert_close(found, loop_scan(a[::2].sigmoid(), b[::2], [9, 11]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_tokens(backend):
    empty = torch.zeros(0)
    for lengths in ([], [0], [0, 0]):
        assert reverse_scan(empty, empty, edges(lengths), backend=backend).shape == (0,)
        assert gae(empty, empty, edges(lengths), 1.0, 1.0, backend=backend)[0].shape == (0,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_discounted_returns_are_sums_of_later_rewards(backend):
    (rewards,) = vectors(LENGTHS, 1)
    found = discounted_returns(rewards, edges(LENGTHS), 0.9, backend=backend)
    expected = [
        sum(0.9 ** (k - t) * r[k] for k in range(t, len(r)))
        for (r,) in segments(LENGTHS, rewards)
        for t in range(len(r))
    ]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def loop_gae(rewards, values, lengths, gamma, lam, bootstrap):
    """Exponentially weighted sums of the TD errors, each from its definition."""
    out = []
    for i, (r, v) in enumerate(segments(lengths, rewards, values)):
        v = [*v, float(bootstrap[i])]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        out += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("with_bootstrap", [False, True])
def test_gae_is_the_weighted_sum_of_td_errors(backend, gamma, lam, with_bootstrap):
    rewards, values = vectors(LENGTHS, 2)
    bootstrap = torch.linspace(-1, 1, len(LENGTHS)) if with_bootstrap else None
    advantages, returns = gae(rewards, values, edges(LENGTHS), gamma, lam, bootstrap, backend=backend)
    end = torch.zeros(len(LENGTHS)) if bootstrap is None else bootstrap
    expected = loop_gae(rewards, values, LENGTHS, gamma, lam, end)
    assert_close(advantages, expected)
    assert_close(returns, expected + values.double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_lambda_returns_equal_their_recursion(backend):
    rewards, values = vectors(LENGTHS, 2)
    bootstrap, expected = torch.linspace(-1, 1, len(LENGTHS)), []
    for i, (r, v) in enumerate(segments(LENGTHS, rewards, values)):
        g, v = float(bootstrap[i]), [*v, float(bootstrap[i])]
        found = []
        for t in reversed(range(len(r))):
            g = r[t] + 0.97 * ((1 - 0.8) * v[t + 1] + 0.8 * g)
            found.append(g)
        expected += reversed(found)
    assert_close(
        td_lambda(rewards, values, edges(LENGTHS), 0.97, 0.8, bootstrap, backend=backend),
        torch.tensor(expected, dtype=torch.float64),
    )


def loop_vtrace(rewards, values, log_ratio, lengths, gamma, rho_max, c_max, lam, bootstrap):
    """Equation 1 of the paper, each target as its own sum of products."""
    targets, advantages = [], []
    for i, (r, v, ratio) in enumerate(segments(lengths, rewards, values, log_ratio.double().exp())):
        rho, c = [min(rho_max, x) for x in ratio], [lam * min(c_max, x) for x in ratio]
        v = [*v, float(bootstrap[i])]
        delta = [rho[t] * (r[t] + gamma * v[t + 1] - v[t]) for t in range(len(r))]
        vs = [
            v[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, len(r)))
            for s in range(len(r))
        ]
        following = [*vs[1:], v[-1]]
        targets += vs
        advantages += [rho[t] * (r[t] + gamma * following[t] - v[t]) for t in range(len(r))]
    return (torch.tensor(x, dtype=torch.float64) for x in (targets, advantages))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rho_max", "c_max", "lam"), [(1.0, 1.0, 1.0), (2.0, 1.0, 0.9), (math.inf, 1.5, 1.0)])
def test_vtrace_equals_the_definition_in_the_paper(backend, rho_max, c_max, lam):
    rewards, values, log_ratio = vectors(LENGTHS, 3)
    bootstrap = torch.linspace(-1, 1, len(LENGTHS))
    found = vtrace(
        rewards, values, log_ratio, edges(LENGTHS), 0.98, rho_max, c_max, lam, bootstrap, backend=backend
    )  # fmt: skip
    expected = loop_vtrace(rewards, values, log_ratio, LENGTHS, 0.98, rho_max, c_max, lam, bootstrap)
    for actual, reference in zip(found, expected, strict=True):
        assert_close(actual, reference, 1e-5)


def test_vtrace_on_policy_gives_lambda_returns():
    rewards, values = vectors(LENGTHS, 2, dtype=torch.float64)
    targets, advantages = vtrace(rewards, values, torch.zeros_like(values), edges(LENGTHS), 0.95)
    assert_close(targets, td_lambda(rewards, values, edges(LENGTHS), 0.95, 1.0), 1e-12)
    assert_close(advantages, gae(rewards, values, edges(LENGTHS), 0.95, 1.0)[0], 1e-12)


def test_a_ratio_that_overflows_is_truncated():
    rewards, values = vectors([5], 2)
    huge = vtrace(rewards, values, torch.full((5,), 200.0), edges([5]), 0.9)
    one = vtrace(rewards, values, torch.zeros(5), edges([5]), 0.9)
    assert torch.equal(huge[0], one[0])
    assert torch.equal(huge[1], one[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_flows_through_targets(backend):
    rewards, values = vectors(LENGTHS, 2)
    values.requires_grad_()
    for result in (
        *gae(rewards, values, edges(LENGTHS), 0.9, 0.9, backend=backend),
        *vtrace(rewards, values, values, edges(LENGTHS), 0.9, backend=backend),
        td_lambda(rewards, values, edges(LENGTHS), 0.9, 0.9, backend=backend),
    ):
        assert not result.requires_grad


def test_wrong_arguments_are_explained():
    one = torch.zeros(4)
    with pytest.raises(ValueError, match="from 0 to 3; with 4 tokens"):
        reverse_scan(one, one, edges([3]))
    with pytest.raises(ValueError, match="decreases"):
        reverse_scan(one, one, torch.tensor([0, 3, 2, 4]))
    with pytest.raises(ValueError, match="must be int64"):
        reverse_scan(one, one, edges([4]).int())
    with pytest.raises(ValueError, match="packed alike"):
        gae(one, one.double(), edges([4]), 1.0, 1.0)
    with pytest.raises(ValueError, match="packed vector"):
        discounted_returns(one.view(2, 2), edges([4]), 1.0)
    with pytest.raises(ValueError, match="one value for each of 1 segments"):
        gae(one, one, edges([4]), 1.0, 1.0, torch.zeros(2))
    with pytest.raises(ValueError, match="allowed: float32"):
        reverse_scan(one.double(), one.double(), edges([4]), backend="triton")
    with pytest.raises(ValueError, match="allowed: float32"):
        discounted_returns(one.bfloat16(), edges([4]), 1.0)
