"""Buckets: how a set of named tensors lies in flat byte buffers, and the snapshot that fills them.

Whole tensors go into a bucket, in order, each at a multiple of 16 bytes, zeros between; a tensor larger than the
limit has a bucket of its own. Both sides derive every offset from the `TensorMeta` lists alone. No sockets, no
process groups: called by the publisher (snapshot) and by the receiver (staging).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from asyncrl.messages import TensorMeta

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


def allocate(buckets: Buckets, device: torch.device) -> list[torch.Tensor]:
    """A zeroed uint8 buffer for each bucket."""
    return [torch.zeros(sum(map(_padded, bucket)), dtype=torch.uint8, device=device) for bucket in buckets]


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

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.version = -1
        self.buckets: list[list[TensorMeta]] = []
        self.buffers: list[torch.Tensor] = []
        self._limit_bytes = limit_bytes
        self._device = device
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
            weights = [(name, tensor.detach().clone()) for name, tensor in weights]
            self.buckets = plan((meta_of(*pair) for pair in weights), self._limit_bytes)
            self.buffers = allocate(self.buckets, self._device)
            self._views = views(self.buffers, self.buckets)
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
        if self._device.type == "cuda":
            # The thread that sends has a stream of its own.
            torch.cuda.synchronize(self._device)
        self.version = version


def _nbytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * dtype_of(meta).itemsize


def _padded(meta: TensorMeta) -> int:
    return -(-_nbytes(meta) // ALIGN) * ALIGN
