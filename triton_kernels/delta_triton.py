"""The passes over whole tensors of a weight delta as Triton kernels. Same contract as in `delta`.

One program per block of 4096 elements. Counting and writing read both versions once each; between them a running
sum of the counts says where each block writes, so there are no atomics and the order is that of memory. Called by
`asyncrl.triton_kernels.delta`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.triton_kernels.delta import BLOCK, MIX
from asyncrl.triton_kernels.segments_triton import pad_to_16
from asyncrl.triton_kernels.variant import Variant

WARPS = 16


@triton.jit
def count_changes(new, old, counts, padded, SIZE: tl.constexpr):
    """How many elements of one block differ."""
    block = tl.program_id(0).to(tl.int64)
    k = block * SIZE + tl.arange(0, SIZE)
    inside = k < padded
    changed = tl.load(new + k, mask=inside, other=0) != tl.load(old + k, mask=inside, other=0)
    tl.store(counts + block, tl.reduce(changed.to(tl.int32), 0, tl.standard._sum_combine))


@triton.jit
def write_changes(new, old, starts, offsets, values, padded, SIZE: tl.constexpr):
    """Places and new bits of the elements of one block that differ, from `starts` on."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    k = block * SIZE + lane
    inside = k < padded
    value = tl.load(new + k, mask=inside, other=0)
    changed = value != tl.load(old + k, mask=inside, other=0)
    rank = tl.associative_scan(changed.to(tl.int32), 0, tl.standard._sum_combine) - 1
    start = tl.load(starts + block)
    tl.store(offsets + start + rank, lane.to(tl.int16), mask=changed)
    tl.store(values + start + rank, value, mask=changed)


@triton.jit
def weighted_sums(bits, sums, padded, SIZE: tl.constexpr, MIX_0: tl.constexpr, MIX_1: tl.constexpr):
    """Sum of bits times weight of one block, modulo 2^64; the weights are those of `delta`."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    k = block * SIZE + lane
    x = (lane.to(tl.int64) + 1) * MIX_0
    weight = ((x ^ (x >> 32)) * MIX_1) | 1
    value = tl.load(bits + k, mask=k < padded, other=0).to(tl.int64)
    tl.store(sums + block, tl.reduce(value * weight, 0, tl.standard._sum_combine))


def changes(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, offsets and new bits of the elements that differ, as in `delta.Delta`, from bits [E]."""
    blocks = -(-len(new) // BLOCK)
    new, old = pad_to_16(new), pad_to_16(old)
    counts = torch.empty(blocks, dtype=torch.int32, device=new.device)
    with torch.cuda.device_of(new):
        count_changes[(blocks,)](new, old, counts, len(new), SIZE=BLOCK, num_warps=WARPS)
    stops = counts.cumsum(0, dtype=torch.int64)
    n = int(stops[-1]) if blocks else 0
    offsets = torch.empty(n, dtype=torch.int16, device=new.device)
    values = torch.empty(n, dtype=new.dtype, device=new.device)
    with torch.cuda.device_of(new):
        write_changes[(blocks,)](new, old, stops - counts, offsets, values, len(new), SIZE=BLOCK, num_warps=WARPS)
    return counts, offsets, values


def block_sums(bits: Tensor) -> Tensor:
    """[blocks] int64: sum of bits times weight of each block, from bits [E]."""
    sums = torch.empty(-(-len(bits) // BLOCK), dtype=torch.int64, device=bits.device)
    whole = pad_to_16(bits)
    with torch.cuda.device_of(bits):
        weighted_sums[(len(sums),)](
            whole, sums, len(whole), SIZE=BLOCK, MIX_0=MIX[0], MIX_1=MIX[1], num_warps=WARPS
        )
    return sums


def _variants() -> list[Variant]:
    """Both sizes of weights, with tensors of more than 2^31 elements, whose length is an int64."""
    found = []
    for bits in ("i16", "i32"):
        pair = {"new": f"*{bits}", "old": f"*{bits}", "padded": "i64"}
        out = {"starts": "*i64", "offsets": "*i16", "values": f"*{bits}"}
        mix = {"MIX_0": MIX[0], "MIX_1": MIX[1]}
        for kernel, types, constants in (
            (count_changes, pair | {"counts": "*i32"}, {}),
            (write_changes, pair | out, {}),
            (weighted_sums, {"bits": f"*{bits}", "sums": "*i64", "padded": "i64"}, mix),
        ):
            name = f"{kernel.__name__} {bits}"
            found.append(Variant(name, kernel, types, {"SIZE": BLOCK} | constants, frozenset(types), WARPS))
    return found


VARIANTS = _variants()
