"""The reverse scan as a Triton kernel: one program per segment. Same contract as in `scan`.

A program goes through the aligned blocks that its segment touches, from the right, scans each and carries the
leftmost x into the next. It loads whole blocks, so that loads are wide wherever the segment begins, and turns the
neighbours' tokens into the identity in registers. Called by `asyncrl.triton_kernels.scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.triton_kernels.segments_triton import pad_to_16
from asyncrl.triton_kernels.variant import Variant

BLOCK = 1024
WARPS = 4


@triton.jit
def _then(a1, b1, a2, b2):
    """x -> a1 x + b1, and after it x -> a2 x + b2, as one map."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def reverse_scan_segments(a, b, out, edges, padded, SIZE: tl.constexpr):
    """x_t = a_t x_(t+1) + b_t over one segment."""
    segment = tl.program_id(0).to(tl.int64)
    start = tl.load(edges + segment)
    stop = tl.load(edges + segment + 1)
    first = start // SIZE * SIZE
    last = (stop - 1) // SIZE * SIZE
    lane = tl.arange(0, SIZE)
    carry = tl.full((), 0.0, tl.float32)
    for left in range(0, stop - first, SIZE):
        k = last - left + lane
        inside = (k >= start) & (k < stop)
        factor = tl.where(inside, tl.load(a + k, mask=k < padded, other=1.0), 1.0)
        term = tl.where(inside, tl.load(b + k, mask=k < padded, other=0.0), 0.0)
        factor, term = tl.associative_scan((factor, term), 0, _then, reverse=True)
        x = factor * carry + term
        tl.store(out + k, x, mask=inside)
        carry = tl.reduce(tl.where(lane == 0, x, 0.0), 0, tl.standard._sum_combine)


def reverse_scan(a: Tensor, b: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See `scan.reverse_scan`."""
    a, b, n = pad_to_16(a), pad_to_16(b), len(b)
    out = torch.empty_like(b)
    with torch.cuda.device_of(b):
        reverse_scan_segments[(len(cu_seqlens) - 1,)](
            a, b, out, cu_seqlens.contiguous(), len(b), SIZE=BLOCK, num_warps=WARPS
        )
    return out[:n]


VARIANTS = [
    Variant(
        "reverse_scan_segments",
        reverse_scan_segments,
        {"a": "*fp32", "b": "*fp32", "out": "*fp32", "edges": "*i64", "padded": "i32"},
        {"SIZE": BLOCK},
        frozenset({"a", "b", "out", "edges", "padded"}),
        WARPS,
    )
]
