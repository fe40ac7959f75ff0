"""What goes over a group: the buckets of one version in order, then a trailer that proves them.

The trailer is an int64 tensor: the version, and one checksum per bucket. A receiver that finds another version
or another sum refuses the whole set. Blocking; `send` runs in the publisher's thread, `Inbox.receive` in a
receiver's transfer thread.
"""

from __future__ import annotations

import torch

from asyncrl.messages import Prepare
from asyncrl.weights.buckets import Buckets, Snapshot, allocate, checksum, views
from asyncrl.weights.groups import Group, GroupSpec

NamedTensors = list[tuple[str, torch.Tensor]]


class DamagedWeights(RuntimeError):
    """What arrived is not what was sent; nothing of it may be used."""


def send(group: Group, snapshot: Snapshot) -> None:
    """Broadcasts a snapshot.

    Raises:
        GroupError: a member is gone or too slow.
    """
    device = snapshot.buffers[0].device
    trailer = torch.tensor([snapshot.version, *(0 for _ in snapshot.buffers)], device=device)
    for index, buffer in enumerate(snapshot.buffers, start=1):
        # Summed before it is sent: a buffer that is overwritten during the broadcast is found out too.
        trailer[index] = checksum(buffer)
        group.broadcast(buffer)
    group.broadcast(trailer)


class Inbox:
    """A member's group and its staging buffers, both kept from one transfer to the next.

    One thread at a time. If that thread is stuck, the whole inbox is abandoned with it, because the stuck
    collective may still write to the buffers; it frees them when it gives up.
    """

    def __init__(self) -> None:
        self._group: Group | None = None
        self._buckets: Buckets = []
        self._buffers: list[torch.Tensor] = []

    def receive(self, prepare: Prepare, members: tuple[str, ...], timeout_s: float) -> NamedTensors:
        """Receives a whole version. The tensors are views of the staging buffers: the next call overwrites them.

        Raises:
            GroupError: the publisher or another member is gone or too slow.
            DamagedWeights: the trailer does not fit.
        """
        try:
            return self._receive(prepare, members, timeout_s)
        except Exception:
            self.close()
            raise

    def abort(self) -> None:
        """Called from another thread: wakes the one in `receive` if the backend can."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Closes the group; the buffers stay. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _receive(self, prepare: Prepare, members: tuple[str, ...], timeout_s: float) -> NamedTensors:
        spec = GroupSpec(
            prepare.backend,
            prepare.store_host,
            prepare.store_port,
            prepare.epoch,
            prepare.rank,
            members,
            timeout_s,
        )
        if self._group is None or self._group.spec != spec:
            self.close()
            self._group = Group(spec)
        device = torch.device("cuda" if prepare.backend == "nccl" else "cpu")
        if self._buckets != prepare.buckets:
            self._buckets, self._buffers = prepare.buckets, []
            self._buffers = allocate(prepare.buckets, device)
        trailer = torch.empty(len(self._buffers) + 1, dtype=torch.int64, device=device)
        sums = [prepare.version]
        for buffer in self._buffers:
            self._group.broadcast(buffer)
            sums.append(int(checksum(buffer)))
        self._group.broadcast(trailer)
        _verify(trailer.tolist(), sums)
        return views(self._buffers, self._buckets)


def _verify(sent: list[int], received: list[int]) -> None:
    if sent[0] != received[0]:
        raise DamagedWeights(
            f"announced was version {received[0]}, received version {sent[0]}; nothing was applied"
        )
    wrong = [index for index, pair in enumerate(zip(sent[1:], received[1:], strict=True)) if pair[0] != pair[1]]
    if wrong:
        raise DamagedWeights(
            f"version {received[0]}: wrong checksum of bucket {', '.join(map(str, wrong))} of "
            f"{len(received) - 1}; nothing was applied"
        )
