"""The exact change of a weight tensor between two versions: which elements, and their new bits.

An optimizer step in float32 leaves most bfloat16 weights as they were, bit for bit. `encode` finds the others,
`apply` writes them into the old version, which then equals the new one bit for bit, NaN payloads and -0.0
included. Tensors are compared as integers; nothing here computes with weights. A building block
for sending weights: it opens no connection and compresses nothing further.

Per changed element a delta takes 2 bytes for the place (within a block of 4096) and the value: 2 or 4 bytes in
code "absolute", mostly 1 in code "ulp". Above a density of about 12 % send the tensor dense: a bfloat16 delta then
saves less than a factor of about four ("absolute"), and costs several passes over the tensor.

The checksum is a sum of bits times odd position-dependent weights, modulo 2^64. It never misses one wrong element,
and misses several with a probability of at most about 2^-32. `torch.hash_tensor` does not serve: it is the XOR of
the elements, so it misses elements that changed places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.triton_kernels.backend import Backend, use_triton

Code = Literal["absolute", "ulp"]
"""`absolute`: the new bits; applying twice does no harm. `ulp`: the step between the bits as integers that are
ordered like the numbers, one byte where it fits (after an optimizer step most are +-1); needs the exact base."""

BLOCK = 4096
"""Elements of a block. Places within it are kept in 16 bits; the format depends on it."""
ESCAPE = -128
"""Stands in `Delta.values` for a step that does not fit; the new bits are in `Delta.escapes`."""
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""The dtypes of weights, and the integers of the same size."""
MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)
"""Odd multipliers of the checksum's weights; below 2^63, so that they are int64 constants everywhere."""


@dataclass(frozen=True, eq=False)
class Delta:
    """What `encode` leaves. n changed elements of E, in ceil(E / 4096) blocks; the last one may be shorter."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without "torch."."""
    code: Code
    counts: Tensor
    """[blocks] int32: changed elements of each block."""
    offsets: Tensor
    """[n] int16: place of each within its block, 0 ... 4095, ascending within a block."""
    values: Tensor
    """[n] new bits (int16 or int32), or int8 steps with code "ulp"."""
    escapes: Tensor
    """New bits of the elements whose step is `ESCAPE`, in order; empty with code "absolute"."""
    checksum: int
    """Of the new tensor."""
    base_checksum: int | None
    """Of the old tensor; None with code "absolute"."""

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return sum(part.nbytes for part in (self.counts, self.offsets, self.values, self.escapes))

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return len(self.offsets) / max(torch.Size(self.shape).numel(), 1)


@torch.no_grad()
def encode(new: Tensor, old: Tensor, *, code: Code = "absolute", backend: Backend = "auto") -> Delta:
    """The change from `old` to `new`, as tensors on their device. Waits for the device.

    Args:
        new: bfloat16, float16 or float32, contiguous.
        old: the version that the receiver has; same shape, dtype and device.
        code: see `Code`.
        backend: see `backend.use_triton`.

    Raises:
        ValueError: the tensors do not fit together, or are not contiguous, or the code is unknown.
    """
    if code not in ("absolute", "ulp"):
        raise ValueError(f"code = {code!r} is unknown; allowed: absolute, ulp")
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise ValueError(
            f"new is {new.dtype} {list(new.shape)} on {new.device}, old is {old.dtype} {list(old.shape)} on "
            f"{old.device}; a delta is between two versions of one tensor"
        )
    after, before = _bits(new), _bits(old)
    if use_triton(new.device, backend):
        from asyncrl.triton_kernels import delta_triton

        counts, offsets, values = delta_triton.changes(after, before)
    else:
        counts, offsets, values = _changes(after, before)
    escapes, base = values[:0], None
    if code == "ulp":
        step = _ordered(values).long() - _ordered(before[_positions(counts, offsets)]).long()
        fits = step.abs() < -ESCAPE
        escapes, base = values[~fits], checksum(old, backend=backend)
        values = torch.where(fits, step, ESCAPE).to(torch.int8)
    name = str(new.dtype).removeprefix("torch.")
    total = checksum(new, backend=backend)
    return Delta(tuple(new.shape), name, code, counts, offsets, values, escapes, total, base)


@torch.no_grad()
def apply(delta: Delta, base: Tensor, *, backend: Backend = "auto") -> None:
    """Turns `base` into the new version in place. On an error it is left, or put back, as it was.

    Args:
        delta: on any device.
        base: the old version, contiguous.
        backend: of the checksums; see `backend.use_triton`.

    Raises:
        ValueError: another shape or dtype, not contiguous, not the base that the delta was made from (code "ulp"),
            or the result is not the new version: another base, or the delta was damaged on its way.
    """
    if tuple(base.shape) != delta.shape or str(base.dtype) != f"torch.{delta.dtype}":
        raise ValueError(
            f"base is {base.dtype} {list(base.shape)}, but the delta is of torch.{delta.dtype} "
            f"{list(delta.shape)}; apply it to the tensor of the same name"
        )
    bits = _bits(base)
    if delta.base_checksum is not None and checksum(base, backend=backend) != delta.base_checksum:
        raise ValueError(
            "base is not the version that this delta was made from (its checksum differs), and code 'ulp' needs "
            "exactly that one; load the whole tensor, or use code 'absolute'"
        )
    counts, offsets, values, escapes = (
        part.to(base.device) for part in (delta.counts, delta.offsets, delta.values, delta.escapes)
    )
    _check_parts(delta.code, len(bits), counts, offsets, values, escapes)
    positions = _positions(counts, offsets)
    before = bits[positions]
    if delta.code == "ulp":
        escaped = values == ESCAPE
        values = _ordered((_ordered(before).long() + values).to(bits.dtype))
        values[escaped] = escapes
    bits[positions] = values
    if checksum(base, backend=backend) != delta.checksum:
        bits[positions] = before
        raise ValueError(
            "the delta does not give the new version (the checksum differs): the base is another version, or the "
            "delta was damaged on its way. The base is as it was; load the whole tensor"
        )


@torch.no_grad()
def checksum(tensor: Tensor, *, backend: Backend = "auto") -> int:
    """64 bits that tell two tensors of one shape and dtype apart; the same on every device and backend.

    Raises:
        ValueError: the tensor is not contiguous, or not bfloat16, float16 or float32.
    """
    bits = _bits(tensor)
    if use_triton(tensor.device, backend):
        from asyncrl.triton_kernels import delta_triton

        sums = delta_triton.block_sums(bits)
    else:
        sums = torch.cat([bits.new_empty(0, dtype=torch.int64), *_block_sums(bits)])
    # Blocks have other weights than the elements of a block: else element 1 of block 2 would weigh the same as
    # element 2 of block 1.
    blocks = torch.arange(BLOCK, BLOCK + len(sums), device=bits.device)
    return int((sums * _weights(blocks)).sum())


def _bits(tensor: Tensor) -> Tensor:
    """[E] the tensor's memory as integers.

    Raises:
        ValueError: see `checksum`.
    """
    if tensor.dtype not in BITS:
        raise ValueError(f"the tensor is {tensor.dtype}; allowed: bfloat16, float16, float32")
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor {list(tensor.shape)} has strides {tensor.stride()}; give a contiguous one: deltas are "
            "counted and written in memory order"
        )
    return tensor.detach().view(-1).view(BITS[tensor.dtype])


def _changes(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, offsets and new bits of the elements that differ, as in `Delta`."""
    positions = (new != old).nonzero()[:, 0]
    counts = torch.bincount(positions // BLOCK, minlength=-(-len(new) // BLOCK))
    return counts.to(torch.int32), (positions % BLOCK).to(torch.int16), new[positions]


def _positions(counts: Tensor, offsets: Tensor) -> Tensor:
    """[n] int64: where the changed elements are in the whole tensor."""
    return torch.repeat_interleave(counts.long(), output_size=len(offsets)) * BLOCK + offsets


def _check_parts(code: Code, n: int, counts: Tensor, offsets: Tensor, values: Tensor, escapes: Tensor) -> None:
    """Raises ValueError unless the parts belong together and every place is within n elements."""
    escaped = int((values == ESCAPE).sum()) if code == "ulp" else 0
    ok = (
        len(counts) == -(-n // BLOCK)
        and int(counts.sum()) == len(offsets) == len(values)
        and len(escapes) == escaped
    )
    ok = ok and not bool((counts < 0).any()) and not bool((offsets < 0).any())
    if not ok or bool((_positions(counts, offsets) >= n).any()):
        raise ValueError("the parts of the delta do not belong together; it was damaged on its way, send it again")


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats (sign and magnitude) to integers in the order of the numbers, one to one; its own inverse.

    -0.0 comes just below 0.0, and neighbouring floats differ by 1.
    """
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _block_sums(bits: Tensor) -> Iterator[Tensor]:
    """[blocks] int64: sum of bits times weight of each block. A few hundred blocks at a time, to bound memory."""
    weights = _weights(torch.arange(BLOCK, device=bits.device))
    for part in bits.split(BLOCK * 256):
        whole = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        yield (whole.long() * weights).sum(1)


def _weights(index: Tensor) -> Tensor:
    """Odd pseudo-random int64 of each index; products and sums of int64 are modulo 2^64."""
    x = (index + 1) * MIX[0]
    return ((x ^ (x >> 32)) * MIX[1]) | 1
