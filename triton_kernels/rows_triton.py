"""The row steps of the RL head as two Triton kernels, one program per row. Same contract as `rows_torch`.

Both are bound by memory: `row_statistics` reads a float32 logit once, `row_gradients` reads it again and writes
the gradient over it in the type that the products take: 10 bytes per logit in all. A row is read from the right in
the first pass and from the left in the second, which therefore begins with what is still in the cache, and lets
the narrower gradient trail behind the logits it overwrites.

Rows stand at a stride that is a multiple of 16 elements and are loaded whole, padding included, so that every load
is 16 bytes wide for any vocabulary. Reductions are `tl.reduce`, because the interpreter cannot call `tl.sum` if
Triton was imported before it was switched on. Called by `asyncrl.triton_kernels.sweep`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.triton_kernels.variant import Variant

BLOCK = 2048
WARPS = 8
NO_CAP = 0.0


@triton.jit
def _capped(z, cap):
    """cap tanh(z / cap), by way of an exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(z) / cap)
    t = cap * (1.0 - e) / (1.0 + e)
    return tl.where(z < 0, -t, t)


@triton.jit
def row_statistics(
    logits, labels, inverse, out, width, padded, stride, first, cap,
    CAPPED: tl.constexpr, SQUARES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row's m, s, u, z_label and sum of squares. Every lane keeps its own; they are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    scale = tl.load(inverse + row)
    label = tl.load(labels + row) - first
    lane = tl.arange(0, SIZE)
    m = tl.full((SIZE,), -1e30, tl.float32)
    s = tl.full((SIZE,), 0.0, tl.float32)
    u = tl.full((SIZE,), 0.0, tl.float32)
    t = tl.full((SIZE,), 0.0, tl.float32)
    last = (padded - 1) // SIZE * SIZE
    for left in range(0, padded, SIZE):
        k = last - left + lane
        z = tl.load(start + k, mask=k < padded, other=0.0)
        if CAPPED:
            z = _capped(z, cap)
        z = tl.where(k < width, z * scale, float("-inf"))
        gap = z - m
        d = tl.exp(-tl.abs(gap))  # The one exponential: of the new value, or of the old maximum.
        up = gap > 0
        u = tl.where(up, d * (u - gap * s), u + tl.where(d > 0, d * gap, 0.0))
        s = tl.where(up, s * d + 1.0, s + d)
        if SQUARES:
            t = tl.where(up, t * d * d + 1.0, t + d * d)
        m = tl.where(up, z, m)
    top = tl.reduce(m, 0, tl.standard._elementwise_max)
    w = tl.exp(m - top)
    tl.store(out + row * 5, top)
    tl.store(out + row * 5 + 1, tl.reduce(s * w, 0, tl.standard._sum_combine))
    tl.store(out + row * 5 + 2, tl.reduce(w * (u + (m - top) * s), 0, tl.standard._sum_combine))
    own = (label >= 0) & (label < width)
    z = tl.load(start + tl.where(own, label, 0))
    if CAPPED:
        z = _capped(z, cap)
    own = own & (z > -1e20)  # `rows_torch.RULED_OUT`
    tl.store(out + row * 5 + 3, tl.where(own, z * scale, float("-inf")))
    tl.store(out + row * 5 + 4, tl.reduce(t * w * w, 0, tl.standard._sum_combine))


@triton.jit
def row_gradients(
    logits, out, labels, inverse, norm, entropy, dlogp, dentropy, width, padded, stride, out_stride, first, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row of d logits = (1/T) (g at the label - q (g + h (log q + H))), written over the row itself."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    label = tl.load(labels + row) - first
    lse = tl.load(norm + row)
    g = tl.load(dlogp + row)
    if ENTROPY:
        h = tl.load(dentropy + row)
        level = tl.load(entropy + row)
    lane = tl.arange(0, SIZE)
    for left in range(0, padded, SIZE):
        k = left + lane
        z = tl.load(logits + row * stride + k, mask=k < padded, other=0.0)
        if CAPPED:
            z = _capped(z, cap)
            slope = 1.0 - (z / cap) * (z / cap)
        log_q = z * scale - lse
        q = tl.exp(log_q)
        weight = tl.full((SIZE,), 0.0, tl.float32) + g
        if ENTROPY:
            weight += h * tl.where(q > 0, log_q + level, 0.0)
        dz = scale * (tl.where(k == label, g, 0.0) - q * weight)
        if CAPPED:
            dz *= slope
        dz = tl.where(k < width, dz, 0.0)
        # A block of narrow gradients lies within the logits of blocks that were read before; only the first
        # overlaps itself, so all warps must have read it before any of them writes.
        tl.debug_barrier()
        tl.store(out + row * out_stride + k, dz.to(out.dtype.element_ty), mask=k < padded)


def row_bytes(vocabulary: int, narrow: bool) -> int:
    """Workspace of one row: the float32 logits; a narrower gradient stands in the same place."""
    return 4 * _padded(vocabulary)


def fixed_bytes(vocabulary: int, device: torch.device) -> int:
    """Workspace that does not depend on the chunk."""
    return 0


def buffer(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """[rows, V] float32 for the logits of a chunk, at an aligned stride."""
    return torch.empty(rows, _padded(vocabulary), dtype=torch.float32, device=device)[:, :vocabulary]


def statistics(
    logits: Tensor, labels: Tensor, inverse: Tensor, softcap: float | None, first: int, squares: bool
) -> Tensor:
    """See `rows_torch.statistics`. `logits` comes from `buffer`."""
    n, width = logits.shape
    out = logits.new_empty(n, 5)
    with torch.cuda.device_of(logits):
        row_statistics[(n,)](
            logits, labels, inverse, out, width, _padded(width), logits.stride(0), first, softcap or NO_CAP,
            CAPPED=softcap is not None, SQUARES=squares, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def gradients(
    logits: Tensor,
    labels: Tensor,
    inverse: Tensor,
    norm: Tensor,
    entropy: Tensor,
    g: Tensor,
    h: Tensor | None,
    softcap: float | None,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """See `rows_torch.gradients`. `logits` comes from `buffer`; the result is a view of the same memory."""
    n, width = logits.shape
    padded, stride = _padded(width), logits.stride(0)
    whole = logits.as_strided((n, stride), (stride, 1)).view(dtype)
    with torch.cuda.device_of(logits):
        row_gradients[(n,)](
            logits, whole, labels, inverse, norm, entropy, g, g if h is None else h, width, padded, stride,
            whole.stride(0), first, softcap or NO_CAP,
            CAPPED=softcap is not None, ENTROPY=h is not None, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return whole[:, :width]


def _padded(width: int) -> int:
    return -(-width // 16) * 16


def _variants() -> list[Variant]:
    """What the two wrappers launch: every combination of the switches, and the types of the result."""
    shared = {"labels": "*i64", "inverse": "*fp32", "width": "i32", "padded": "i32", "stride": "i32"}
    shared |= {"first": "i32", "cap": "fp32", "logits": "*fp32", "out": "*fp32"}
    vectors = dict.fromkeys(("norm", "entropy", "dlogp", "dentropy"), "*fp32")
    pointers = {name for name, kind in (shared | vectors).items() if kind.startswith("*")}
    aligned = frozenset(pointers | {"padded", "stride", "out_stride"})
    found = []
    for capped in (False, True):
        for extra in (False, True):
            for name, kernel, switch, types in (
                ("row_statistics", row_statistics, "SQUARES", shared),
                ("row_gradients fp32", row_gradients, "ENTROPY", shared | vectors | {"out_stride": "i32"}),
                ("row_gradients bf16", row_gradients, "ENTROPY",
                 shared | vectors | {"out_stride": "i32", "out": "*bf16"}),
            ):  # fmt: skip
                constants = {"CAPPED": capped, switch: extra, "SIZE": BLOCK}
                label = f"{name} capped={capped} {switch.lower()}={extra}"
                found.append(Variant(label, kernel, types, constants, aligned & set(types), WARPS))
    return found


VARIANTS = _variants()
