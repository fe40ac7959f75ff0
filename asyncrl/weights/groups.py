"""One process group for one epoch of weight transfer: build, broadcast from rank 0, close.

It is outside torch's default group: raw `ProcessGroupGloo` and `ProcessGroupNCCL` objects over a TCPStore that
the publisher hosts, so generators come and go without touching the learner's own groups. It knows neither
versions nor buckets. Called by a publisher's broadcast thread (rank 0) and by a receiver's transfer thread
(rank 1..); everything here blocks, and everything has a time limit but for the first broadcast over NCCL.

What torch 2.13 really does, measured, and what follows from it:

* A killed peer: Gloo's collective fails at once ("Connection closed by peer") for the ranks that talk to it.
  The error names a port, not a member. So a failed rank closes its group, whereupon the others fail at
  once too, and then the ranks hold a *roll call* over the store: whoever does not answer is named.
* A stopped peer: fails after the time limit of the collective, not before.
* `ProcessGroupGloo.abort()` does not wake a thread that waits in a collective; nothing does. Whoever cannot
  wait must abandon the thread and what it writes to (`asyncrl.weights.receiver`).
* Building with a member missing fails after the *store's* time limit, not the group's.
* A TCPStore client takes up to 1.7 times its limit to give up on a closed port, and waits without any limit on
  a server that is stopped. So the port is probed first, and only abandonable threads may be clients.
* A TCPStore master listens on all interfaces unless it is handed a listening socket, and Gloo binds to what the
  host name resolves to unless it is handed a device. Both are handed the address that the run uses.
* Dropping the last reference to a Gloo group closes its connections within milliseconds.

What torch's documentation and sources say of NCCL (no NCCL group has been run, not on one GPU either):

* Building the group object meets nobody. The communicator is built in the *first broadcast*, within the call
  itself, and that is where a missing member or a GPU that is two ranks shows. The members' wait for rank 0's id
  has the store's time limit, but rank 0's wait for the members has none of ours, only NCCL's own. So both sides
  run it in daemon threads, for which they wait at most `roster.transfer_limit_s`, and leave it behind then.
* Its watchdog kills the *process* on a time-out unless blocking wait is on when the group is made.
* `abort()` may itself block until the group's time limit: an event loop calls it at the end of the process only.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights.ring import ring_for

ROLL_CALL_S = 1.0
"""Time that the ranks of a failed group get to show that they are alive."""


class GroupError(RuntimeError):
    """A group could not be built, or a broadcast failed. The text names the member that is likely missing."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What every rank of a group must agree on, and this rank's place in it."""

    backend: str
    """`gloo` or `nccl`."""
    host: str
    """Address of the publisher's store."""
    port: int
    epoch: int
    rank: int
    members: tuple[str, ...]
    """Names of ranks 1, 2, ...; rank 0 is the publisher."""
    timeout_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names by rank."""
        return ("publisher", *self.members)


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Starts a store on a free port of `host`, and of no other interface."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # The store owns it from here on.
    )


def local_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Group:
    """The group of `spec`; building it is collective, or with NCCL its first broadcast. One thread at a time.

    Raises:
        GroupError: a member did not come within `spec.timeout_s`, or the store cannot be reached.
    """

    def __init__(self, spec: GroupSpec, store: dist.TCPStore | None = None) -> None:
        self.spec = spec
        self.ring = ring_for(spec.backend)
        self._limit = timedelta(seconds=spec.timeout_s)
        self._pg: Any = None  # torch's stubs do not know the methods of raw groups.
        self._store: dist.PrefixStore | None = None
        started = time.monotonic()
        try:
            self._store = dist.PrefixStore(f"epoch-{spec.epoch}", store or _connect(spec))
            self._pg = _build(spec, self._store)
        except (RuntimeError, OSError) as error:
            raise self._fail("could not be built", error, started) from error

    def begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins to send a contiguous tensor from rank 0 to all others, in place.

        Returns:
            A function, to be called once, that waits until it is there. It raises GroupError if that failed or
            took longer than `spec.timeout_s`; the group is closed then.

        Raises:
            GroupError: it could not even begin (NCCL: its communicator could not be built); the group is closed.
        """
        if self._pg is None:
            raise GroupError(f"group of epoch {self.spec.epoch} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._limit
        started = time.monotonic()
        try:
            # In a list, so that no variable holds it once it has failed: it would keep the connections open.
            works = [self._pg.broadcast([tensor], options)]
        except RuntimeError as error:
            raise self._fail("failed in a broadcast", error, started) from error

        def wait() -> None:
            try:
                works.pop().wait()
            except RuntimeError as error:
                raise self._fail("failed in a broadcast", error, started) from error

        return wait

    def close(self) -> None:
        """Closes the connections; the peers' pending collectives fail. Idempotent."""
        pg, self._pg = self._pg, None
        if isinstance(pg, dist.ProcessGroupGloo) or pg is None:
            return  # Dropping the reference is what closes it.
        pg.abort()

    def abort(self) -> None:
        """Wakes the thread that waits in a collective, if the backend can (NCCL can, Gloo cannot)."""
        if self._pg is not None and not isinstance(self._pg, dist.ProcessGroupGloo):
            self._pg.abort()

    def _fail(self, what: str, cause: Exception, started: float) -> GroupError:
        spec, seconds = self.spec, time.monotonic() - started
        self.close()
        missing = self._roll_call()
        names = [f"{spec.names[rank]} (rank {rank})" for rank in missing]
        absent = f"no sign of life from {', '.join(names)}" if names else "every member is still alive"
        reason = str(cause).split("\n", 1)[0].split(". This is typically")[0]
        return GroupError(
            f"{spec.backend} group of epoch {spec.epoch} {what} after {seconds:.1f} s of at most "
            f"{spec.timeout_s:g} s (weights.timeout_s): {absent}; this is rank {spec.rank} of "
            f"{', '.join(spec.names)}; cause: {reason}"
        )

    def _roll_call(self) -> list[int]:
        """Ranks that do not show up in the store after a failure."""
        if self._store is None:
            return [0]  # The store is the publisher's, and it was not reached.
        everybody = [rank for rank in range(len(self.spec.names)) if rank != self.spec.rank]
        missing = []
        deadline = time.monotonic() + ROLL_CALL_S
        try:
            self._store.set(f"alive/{self.spec.rank}", "1")
            for rank in everybody:
                left = max(0.001, deadline - time.monotonic())
                try:
                    self._store.wait([f"alive/{rank}"], timedelta(seconds=left))
                except dist.DistStoreError:
                    missing.append(rank)
        except dist.DistNetworkError:
            return [0]
        return missing


def _connect(spec: GroupSpec) -> dist.TCPStore:
    # A plain connect is refused at once, where the store's client would retry until its time limit.
    socket.create_connection((spec.host, spec.port), timeout=spec.timeout_s).close()
    limit = timedelta(seconds=spec.timeout_s)
    return dist.TCPStore(spec.host, spec.port, None, False, timeout=limit, wait_for_workers=False)


def _build(spec: GroupSpec, store: dist.PrefixStore) -> Any:
    limit, size = timedelta(seconds=spec.timeout_s), len(spec.names)
    if spec.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        address = local_address(spec.host, spec.port)
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = limit
        gloo._threads = 1
        return dist.ProcessGroupGloo(store, spec.rank, size, gloo)
    if spec.backend == "nccl" and dist.is_nccl_available():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        with _blocking_wait():
            return dist.ProcessGroupNCCL(store, spec.rank, size, nccl)
    raise RuntimeError(f"this torch has no process-group backend {spec.backend!r}; set weights.backend = 'gloo'")


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Makes the NCCL group that is built meanwhile raise on a time-out instead of ending the process."""
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        else:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
