"""How one version gets from the publisher's buffers into a receiver's: over a group, or through shared memory.

Over a group (`gloo`, `nccl`) the buckets are broadcast in order, and then the trailer that proves them: the
version and a checksum of each bucket. Gloo broadcasts from and to the host buffers themselves. NCCL needs device
memory: there a `Ring` of two device buffers is used in turn, so the weights never lie on a GPU a second time.

    publisher   copy 0 ▸ copy 1 ▸        copy 2 ▸                 copy k: host buffer to ring slot k % 2
                       ▸ broadcast 0 ──▸ broadcast 1 ──▸ broadcast 2
    receiver             receive 0 ────▸ receive 1 ────▸ receive 2
                                       ▸ survey 0 ────▸ survey 1 ────▸ …   copy k: ring slot k % 2 to host buffer

With `shm`, for a learner and engines on one machine (which may share one GPU, where NCCL cannot be used), nothing
is broadcast: each receiver copies from the publisher's buffers and then proves its copy by the trailer, so a
publisher that has moved on meanwhile is found out. Why not CUDA IPC: it would hold a second copy of the weights
in GPU memory, which must live until every receiver has let go. Host memory costs neither, and the same code runs,
and is tested, without a GPU.

Blocking; `send` runs in the publisher's thread, `Inbox.receive` in a receiver's transfer thread.
"""

from __future__ import annotations

import torch

from asyncrl.generator.engines.base import Segment, StagedWeights
from asyncrl.messages import Prepare
from asyncrl.weights.buckets import Buckets, Snapshot, allocate, views
from asyncrl.weights.checks import check_finite, check_trailer, survey
from asyncrl.weights.groups import Group, GroupSpec
from asyncrl.weights.shared import Mappings, SharedBuffer


def send(group: Group, snapshot: Snapshot) -> None:
    """Broadcasts a sealed snapshot; bucket k + 1 is copied to its slot under the broadcast of bucket k.

    Raises:
        GroupError: a member is gone or too slow.
    """
    trailer = snapshot.trailer.clone().view(torch.uint8)
    wait = None
    for index, host in enumerate([*snapshot.buffers, trailer]):
        slot = group.ring.slot(index, host)
        if slot is not host:
            slot.copy_(host, non_blocking=True)
        if wait is not None:
            wait()
        wait = group.begin(slot)
    if wait is not None:
        wait()


class Inbox:
    """A member's group and its staging buffers, both kept from one transfer to the next.

    One thread at a time. If that thread is stuck, the whole inbox is abandoned with it, because the stuck
    collective may still write to the buffers; it frees them when it gives up.
    """

    def __init__(self) -> None:
        self._group: Group | None = None
        self._buckets: Buckets = []
        self._shared: list[SharedBuffer] = []
        self._mappings = Mappings()

    def receive(self, prepare: Prepare, members: tuple[str, ...], timeout_s: float) -> StagedWeights:
        """Receives a whole version and checks it. It lies in the staging buffers: the next call overwrites it.

        Raises:
            GroupError: the publisher or another member is gone or too slow.
            OSError: the publisher's shared memory is gone.
            DamagedWeights: the trailer does not fit, or a value is not finite.
        """
        try:
            if prepare.backend != "shm":
                self._join(prepare, members, timeout_s)
            if self._buckets != prepare.buckets:
                self._buckets, self._shared = prepare.buckets, []
                self._shared = allocate(prepare.buckets)
            trailer, found = self._copy(prepare) if prepare.backend == "shm" else self._listen()
            check_trailer(trailer, [prepare.version, *(total for total, _ in found)])
            buffers = [shared.tensor for shared in self._shared]
            suspect = [index for index, (_, finite) in enumerate(found) if not finite]
            check_finite(prepare.version, [buffers[i] for i in suspect], [self._buckets[i] for i in suspect])
        except Exception:  # Nothing is handled: a group that failed once must not be used again.
            self.close()
            raise
        segments = [Segment(s.address, bucket) for s, bucket in zip(self._shared, self._buckets, strict=True)]
        tensors = views(buffers, self._buckets)
        return StagedWeights(prepare.version, tensors, segments if all(s.address for s in self._shared) else ())

    def abort(self) -> None:
        """Called from another thread: wakes the one in `receive` if the backend can."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Closes the group and lets go of the publisher's memory; the staging buffers stay. Idempotent."""
        self._mappings.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self, prepare: Prepare, members: tuple[str, ...], timeout_s: float) -> None:
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

    def _listen(self) -> tuple[list[int], list[tuple[int, bool]]]:
        """Takes part in the broadcasts; bucket k is copied and surveyed under the receipt of bucket k + 1."""
        assert self._group is not None
        group, ring = self._group, self._group.ring
        trailer = torch.empty(1 + len(self._shared), dtype=torch.int64)
        hosts = [*(shared.tensor for shared in self._shared), trailer.view(torch.uint8)]
        found = []
        slot = ring.slot(0, hosts[0])
        wait = group.begin(slot)
        for index, (host, bucket) in enumerate(zip(hosts, [*self._buckets, []], strict=True)):
            wait()
            landed = slot
            if index + 1 < len(hosts):
                slot = ring.slot(index + 1, hosts[index + 1])
                wait = group.begin(slot)
            found.append(survey(host, bucket, landed))
        return trailer.tolist(), found[:-1]

    def _copy(self, prepare: Prepare) -> tuple[list[int], list[tuple[int, bool]]]:
        """Copies the publisher's buffers, then takes its trailer: the sums are those of the copy."""
        *addresses, proof = prepare.addresses
        found = []
        for address, shared, bucket in zip(addresses, self._shared, self._buckets, strict=True):
            found.append(survey(shared.tensor, bucket, self._mappings.attach(address, shared.tensor.numel())))
        return self._mappings.attach(proof, 8 * (1 + len(found))).view(torch.int64).tolist(), found
