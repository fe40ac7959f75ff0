"""Segment sums, means, ratios and their spread, against Python loops and numerical gradients in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from asyncrl.triton_kernels.segments import segment_mean, segment_sum, sequence_log_ratio, spread

BACKENDS = ("torch", "triton")
LENGTHS = [3, 0, 1, 1024, 1023, 0, 1025, 17, 0]
"""Empty and single segments, and lengths around the kernel's block."""


def edges(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def vector(n, seed=0, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loop_sum(values, lengths):
    numbers = iter(values.tolist())
    return torch.tensor([math.fsum(next(numbers) for _ in range(n)) for n in lengths], dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 1023, 1024, 1025])), max_size=6),
    seed=st.integers(0, 1000),
)
def test_sums_and_means_equal_a_loop_for_ragged_segments(backend, lengths, seed):
    values = vector(sum(lengths), seed)
    total, mean = (f(values, edges(lengths), backend=backend) for f in (segment_sum, segment_mean))
    expected = loop_sum(values, lengths)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mean.double(), expected / edges(lengths).diff().clamp(min=1), rtol=1e-5, atol=1e-6)
    assert total.dtype == mean.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_segments_have_sum_and_mean_0(backend):
    for lengths in ([], [0], [0, 2, 0]):
        values, cu = vector(sum(lengths)), edges(lengths)
        empty = torch.tensor(lengths, dtype=torch.int64) == 0
        assert torch.all(segment_sum(values, cu, backend=backend)[empty] == 0)
        assert torch.all(segment_mean(values, cu, backend=backend)[empty] == 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_gets_its_segments_value(backend):
    per_segment = vector(len(LENGTHS))
    expected = [x for x, n in zip(per_segment.tolist(), LENGTHS, strict=True) for _ in range(n)]
    assert spread(per_segment, edges(LENGTHS), backend=backend).tolist() == expected
    assert spread(per_segment, edges(LENGTHS), length=sum(LENGTHS), backend=backend).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sequence_ratio_is_the_geometric_mean_of_the_token_ratios_at_every_token(backend):
    logp, old = vector(sum(LENGTHS)) * 0.1 - 1, vector(sum(LENGTHS), 1) * 0.1 - 1
    found = sequence_log_ratio(logp, old, edges(LENGTHS), backend=backend).exp()
    mean = loop_sum(logp - old, LENGTHS) / edges(LENGTHS).diff().clamp(min=1)
    expected = mean.exp().repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_gradients_of_sum_and_mean_are_exact_twice(function):
    lengths = [3, 0, 1, 5]
    values = vector(9, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x: function(x, edges(lengths)).square(), values)
    assert gradgradcheck(lambda x: function(x, edges(lengths)).square(), values)


def test_gradients_of_ratio_and_spread_are_exact():
    lengths, old = [3, 0, 1, 5], vector(9, 1, torch.float64)
    logp = vector(9, dtype=torch.float64).requires_grad_()
    per_segment = vector(4, 2, torch.float64).requires_grad_()
    assert gradcheck(lambda x: sequence_log_ratio(x, old, edges(lengths)), logp)
    assert gradcheck(lambda x: sequence_log_ratio(old, x, edges(lengths)), logp)
    assert gradcheck(lambda x: spread(x, edges(lengths)).square(), per_segment)
    assert gradgradcheck(lambda x: spread(x, edges(lengths)).square(), per_segment)


def gradients(backend, dtype=torch.float32):
    """Gradients of a loss that uses everything, to the log-probs and to one value per segment."""
    cu, weight = edges(LENGTHS), vector(sum(LENGTHS), 3, dtype)
    logp = (vector(sum(LENGTHS), dtype=dtype) * 0.1).requires_grad_()
    per_segment = vector(len(LENGTHS), 1, dtype).requires_grad_()
    ratio = sequence_log_ratio(logp, weight * 0.1, cu, backend=backend).exp()
    tokens = ratio * spread(per_segment, cu, backend=backend) * weight * logp
    (segment_mean(tokens, cu, backend=backend).square().sum() + tokens.sum()).backward()
    return logp.grad, per_segment.grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_float64_and_repeat_bit_for_bit(backend):
    found, again, expected = gradients(backend), gradients(backend), gradients("torch", torch.float64)
    for one, other, exact in zip(found, again, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.double() - exact).abs().max() < 3e-6 * exact.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_segment_and_strides_do_not_matter(backend):
    values = vector(20)
    values[10] = math.nan
    found = segment_sum(values[::2], edges([5, 2, 3]), backend=backend)
    assert found.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(found[0], values[0:10:2].sum())


def test_long_segments_lose_no_digits():
    values = torch.full((1_000_000,), 0.1)
    total = segment_sum(values, edges([len(values)]), backend="torch").item()
    assert total == pytest.approx(1_000_000 * values[0].item(), rel=1e-7)


def test_wrong_arguments_are_explained():
    with pytest.raises(ValueError, match="from 0 to 3; with 4 tokens"):
        segment_sum(torch.zeros(4), edges([3]))
    with pytest.raises(ValueError, match="packed vector"):
        segment_mean(torch.zeros(2, 2), edges([4]))
    with pytest.raises(ValueError, match="one value for each segment"):
        spread(torch.zeros(3), edges([4]))
    with pytest.raises(ValueError, match=r"allowed: float32.*\.float\(\)"):
        segment_sum(torch.zeros(4, dtype=torch.bfloat16), edges([4]))
    with pytest.raises(ValueError, match="must be int64"):
        segment_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
