"""The segment sum as a Triton kernel: one program per segment, no atomics. Same contract as in `segments`.

A segment begins anywhere, but loads are wide only from aligned addresses. So a program goes through the aligned
blocks that its segment touches, loads them whole, and drops in registers what belongs to its neighbours. Called by
`asyncrl.triton_kernels.segments`.

Sums are `tl.reduce`, because the interpreter cannot call `tl.sum` if Triton was imported before it was switched
on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.triton_kernels.variant import Variant

BLOCK = 1024
WARPS = 4


@triton.jit
def segment_sums(values, out, edges, padded, SIZE: tl.constexpr):
    """One segment's sum. Every lane keeps its own; they are joined at the end."""
    segment = tl.program_id(0).to(tl.int64)
    start = tl.load(edges + segment)
    stop = tl.load(edges + segment + 1)
    first = start // SIZE * SIZE
    lane = tl.arange(0, SIZE)
    total = tl.full((SIZE,), 0.0, tl.float32)
    for left in range(0, stop - first, SIZE):
        k = first + left + lane
        value = tl.load(values + k, mask=k < padded, other=0.0)
        total += tl.where((k >= start) & (k < stop), value, 0.0)
    tl.store(out + segment, tl.reduce(total, 0, tl.standard._sum_combine))


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See `segments.segment_sum`; without gradient."""
    out = torch.empty(len(cu_seqlens) - 1, dtype=torch.float32, device=values.device)
    whole = pad_to_16(values)
    with torch.cuda.device_of(whole):
        segment_sums[(len(out),)](whole, out, cu_seqlens.contiguous(), len(whole), SIZE=BLOCK, num_warps=WARPS)
    return out


def pad_to_16(vector: Tensor) -> Tensor:
    """The vector, contiguous, with zeros up to a multiple of 16 elements; itself where that is nothing to do.

    A load is wide only if its mask ends at a multiple of its width.
    """
    missing = -len(vector) % 16
    return torch.nn.functional.pad(vector, (0, missing)) if missing else vector.contiguous()


VARIANTS = [
    Variant(
        "segment_sums",
        segment_sums,
        {"values": "*fp32", "out": "*fp32", "edges": "*i64", "padded": "i32"},
        {"SIZE": BLOCK},
        frozenset({"values", "out", "edges", "padded"}),
        WARPS,
    )
]
