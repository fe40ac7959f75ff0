"""Buckets: how a set of named tensors lies in flat byte buffers, and the snapshot that fills them.

Whole tensors go into a bucket, in order, each at a multiple of 16 bytes, zeros between; a tensor larger than the
limit has a bucket of its own. Both sides derive every offset from the `TensorMeta` lists alone.

Buffers are always shared host memory (`asyncrl.weights.shared`), wherever the weights come from and go to: on a
GPU they would double the weights there, on both sides, and no other process could map them.

No sockets, no process groups: called by the publisher (snapshot) and by the receiver (staging).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from asyncrl.messages import TensorMeta
from asyncrl.weights.shared import SharedBuffer

ALIGN = 16
"""Bytes. A view as another dtype needs an offset that is a multiple of its item size; int64 sums need 8."""

Buckets = Sequence[Sequence[TensorMeta]]


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Describes a tensor."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """The tensor's dtype.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {meta.name} has dtype {meta.dtype!r}, which this torch does not know")
    return dtype


def plan(metas: Iterable[TensorMeta], limit_bytes: int) -> list[list[TensorMeta]]:
    """Cuts a sequence of tensors into buckets of at most `limit_bytes`, or of one tensor."""
    buckets: list[list[TensorMeta]] = []
    room = 0
    for meta in metas:
        nbytes = _padded(meta)
        if not buckets or nbytes > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append(meta)
        room -= nbytes
    return buckets


def size_of(bucket: Iterable[TensorMeta]) -> int:
    """Bytes of the buffer that holds a bucket."""
    return sum(map(_padded, bucket))


def allocate(buckets: Buckets) -> list[SharedBuffer]:
    """A zeroed buffer for each bucket."""
    return [SharedBuffer(size_of(bucket)) for bucket in buckets]


def views(buffers: Sequence[torch.Tensor], buckets: Buckets) -> list[tuple[str, torch.Tensor]]:
    """The tensors as views of the buffers, named, in order."""
    found = []
    for buffer, bucket in zip(buffers, buckets, strict=True):
        offset = 0
        for meta in bucket:
            raw = buffer[offset : offset + _nbytes(meta)]
            found.append((meta.name, raw.view(dtype_of(meta)).view(meta.shape)))
            offset += _padded(meta)
    return found


def checksum(buffer: torch.Tensor) -> torch.Tensor:
    """Sum of a buffer's int64 words, modulo 2**64: any single damaged word changes it. int64, no dimension."""
    return buffer.view(torch.int64).sum()


class Snapshot:
    """A copy of one version of the weights. Its buffers are allocated by the first `fill` and then reused."""

    def __init__(self, limit_bytes: int) -> None:
        self.version = -1
        self.buckets: list[list[TensorMeta]] = []
        self.buffers: list[torch.Tensor] = []
        self.trailer = torch.empty(0, dtype=torch.int64)
        """What proves a copy of the buffers once `seal` was called: the version, and a checksum of each."""
        self.addresses: list[str] = []
        """Of the buffers, and last of the trailer."""
        self._limit_bytes = limit_bytes
        self._shared: list[SharedBuffer] = []
        self._views: list[tuple[str, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes in the buffers, padding included."""
        return sum(buffer.numel() for buffer in self.buffers)

    def fill(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies a set of weights; the tensors may die as soon as the iterator moves on.

        Raises:
            ValueError: the set differs from the first one in a name, dtype, shape or in length.
        """
        if not self.buffers:
            weights = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights]
            self._allocate(plan((meta_of(*pair) for pair in weights), self._limit_bytes))
        self.trailer[0] = -1  # Whoever still copies the version that was here finds out.
        expected = iter(self._views)
        for name, tensor in weights:
            known, view = next(expected, ("the end", tensor))
            if known != name or view.shape != tensor.shape or view.dtype != tensor.dtype:
                raise ValueError(
                    f"weights changed between versions: got {meta_of(name, tensor)} where the first set had "
                    f"{meta_of(known, view)}; a run's parameters must keep names, shapes and dtypes"
                )
            view.copy_(tensor.detach())
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"weights changed between versions: the walk ended before {missing[0]}")
        self.version = version

    def seal(self) -> None:
        """Writes the trailer, unless it has been written since `fill`."""
        if self.trailer[0] != self.version:
            self.trailer[1:] = torch.stack([checksum(buffer) for buffer in self.buffers])
            self.trailer[0] = self.version  # Last: it says that the sums are complete.

    def _allocate(self, buckets: list[list[TensorMeta]]) -> None:
        trailer = SharedBuffer(8 * (1 + len(buckets)))
        self.buckets, self._shared = buckets, [*allocate(buckets), trailer]
        self.buffers = [shared.tensor for shared in self._shared[:-1]]
        self.trailer = trailer.tensor.view(torch.int64)
        self.addresses = [shared.address for shared in self._shared]
        self._views = views(self.buffers, buckets)


def _nbytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * dtype_of(meta).itemsize


def _padded(meta: TensorMeta) -> int:
    return -(-_nbytes(meta) // ALIGN) * ALIGN
