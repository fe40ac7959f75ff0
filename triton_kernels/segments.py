"""Sums, means and ratios of the segments of a packed vector: one number per sequence, and back to its tokens.

Every gradient is exact and deterministic: the gradient of a segment's sum is spread over its tokens, the gradient
of a spread value is its segment's sum, and neither is a scatter with atomics. No padded batches, no masks: leave
out the tokens that do not count. For the losses and metrics of the learner; `scan` uses the same segments.

Shapes: N tokens, S segments. `cu_seqlens` [S + 1] int64 holds the edges: 0, then where each segment ends, the last
N. Segments may be empty. The edges are checked where reading them is free, on the CPU; on a GPU they are trusted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.triton_kernels.backend import Backend, use_triton


def segment_sum(values: Tensor, cu_seqlens: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[N] to [S]: the sum of each segment; 0 if it is empty. Differentiable with respect to `values`.

    Args:
        values: [N] float32; float64 too on the torch path.
        cu_seqlens: [S + 1] int64, on the same device.
        backend: see `backend.use_triton`.

    Raises:
        ValueError: shapes, types or edges do not fit together.
    """
    check(values, cu_seqlens)
    return _Sum.apply(values, cu_seqlens, use_triton_for(values, backend))


def segment_mean(values: Tensor, cu_seqlens: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[N] to [S]: the mean of each segment; 0 if it is empty. Otherwise as `segment_sum`."""
    return segment_sum(values, cu_seqlens, backend=backend) / cu_seqlens.diff().clamp(min=1)


def sequence_log_ratio(logp: Tensor, old: Tensor, cu_seqlens: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[N], [N] to [N]: at every token, the mean of `logp - old` over its sequence; exp of it is GSPO's ratio.

    Zheng et al. 2025 (arXiv:2507.18071), section 4.1. Otherwise as `segment_sum`.
    """
    mean = segment_mean(logp - old, cu_seqlens, backend=backend)
    return spread(mean, cu_seqlens, length=len(logp), backend=backend)


def spread(
    per_segment: Tensor, cu_seqlens: Tensor, *, length: int | None = None, backend: Backend = "auto"
) -> Tensor:
    """[S] to [N]: every token gets its segment's value. Differentiable; the gradient is the segment's sum.

    Args:
        per_segment: [S] float32; float64 too on the torch path.
        cu_seqlens: [S + 1] int64, on the same device.
        length: N. Without it the last edge is read, for which the host waits on a GPU.
        backend: of the gradient's sum; see `backend.use_triton`.

    Raises:
        ValueError: shapes, types or edges do not fit together.
    """
    n = length if length is not None else int(cu_seqlens[-1])
    check_edges(cu_seqlens, n, per_segment.device)
    if per_segment.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"{len(cu_seqlens) - 1} segments, but the values have shape {list(per_segment.shape)}; "
            "give one value for each segment"
        )
    return _Spread.apply(per_segment, cu_seqlens, n, use_triton_for(per_segment, backend))


def segment_ids(cu_seqlens: Tensor, n: int) -> Tensor:
    """[n] int64: which segment each token is in."""
    return torch.repeat_interleave(cu_seqlens.diff(), output_size=n)


def use_triton_for(values: Tensor, backend: Backend) -> bool:
    """`backend.use_triton`, for a type that the path can take.

    Raises:
        ValueError: the values are not float32, nor float64 on the torch path.
    """
    chosen = use_triton(values.device, backend)
    allowed = (torch.float32,) if chosen else (torch.float32, torch.float64)
    if values.dtype not in allowed:
        raise ValueError(
            f"values are {values.dtype}; allowed: float32, or float64 with backend='torch'; "
            "convert them with .float()"
        )
    return chosen


def check(values: Tensor, cu_seqlens: Tensor) -> None:
    """Raises ValueError unless `values` is one packed vector with these edges."""
    if values.dim() != 1:
        raise ValueError(f"values have shape {list(values.shape)}; give one packed vector [N] with its cu_seqlens")
    check_edges(cu_seqlens, len(values), values.device)


def check_edges(cu_seqlens: Tensor, n: int, device: torch.device) -> None:
    """Raises ValueError unless these are the edges of segments that fill n tokens."""
    if cu_seqlens.dtype != torch.int64 or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; it must be int64 [segments + 1], "
            "where each segment starts and, last, N"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, the values on {device}; move them to one device")
    if device.type != "cpu":
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != n:
        raise ValueError(f"cu_seqlens goes from {first} to {last}; with {n} tokens it must go from 0 to {n}")
    if bool((cu_seqlens.diff() < 0).any()):
        raise ValueError("cu_seqlens decreases somewhere; it is the running sum of the lengths, none below 0")


class _Sum(torch.autograd.Function):
    """Sum of each segment; its gradient is a spread, so it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, triton: bool) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.n, ctx.triton = len(values), triton
        if triton:
            from asyncrl.triton_kernels import segments_triton

            return segments_triton.segment_sum(values, cu_seqlens)
        # One accumulator per segment: in float32 it would lose digits with the length.
        total = torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens, initial=0.0)
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (cu_seqlens,) = ctx.saved_tensors
        return _Spread.apply(upstream, cu_seqlens, ctx.n, ctx.triton), None, None


class _Spread(torch.autograd.Function):
    """Each segment's value at its tokens. Indexing would have a scatter with atomics as its gradient."""

    @staticmethod
    def forward(ctx: Any, per_segment: Tensor, cu_seqlens: Tensor, n: int, triton: bool) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.triton = triton
        return per_segment[segment_ids(cu_seqlens, n)]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (cu_seqlens,) = ctx.saved_tensors
        return _Sum.apply(upstream, cu_seqlens, ctx.triton), None, None, None
