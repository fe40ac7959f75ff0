"""The learner's end of weight transfers: rank 0 keeps a snapshot of the newest weights and hands it out.

It decides nothing (the hub's roster does) and gathers nothing: the learner's ranks walk `trainer.weights()`
together, and rank 0 walks it through `Publisher.offer`. All that blocks happens in the publisher's thread, and a
broadcast, which may never end, in a daemon thread of its own, which that one watches.

    learner's main thread            ┊ publisher thread
    offer(version, weights)          ┊
      copies into the spare snapshot ┊  poller: ◀─ wake-up (inproc PAIR)  ◀─ hub (Client)  ◀─ a broadcast has ended
      spare becomes *pending* ─wake──▶  pending becomes *serving* ──Offer──▶ hub
                                     ┊  ◀──Go([]) nobody needs it │ Go(members) ──▶ a broadcast begins
                                     ┊  ──Sent, TransferFailed──▶ hub; then the pending one, if there is one
                                     ┊  ◀──Resync: a broadcast at work is given up; Offer once more

With `weights.backend = shm` there is no group and nothing to broadcast: the Offer says where the snapshot lies,
the members copy it themselves, and Sent follows Go at once.

There are two snapshots, in shared host memory, reused for ever. The serving one stays until a newer one replaces
it, so that a joiner can be served at any time. At most one waits: a newer `offer` overwrites a pending one that
was not offered yet, so a slow network skips versions instead of holding up the learner. (With `shm` a member may
still copy a snapshot that is needed for a newer version: the checksums tell it, and it gets the newer one.)

| waits for                | who              | limit                                                        |
|--------------------------|------------------|--------------------------------------------------------------|
| Go after an Offer        | publisher thread | `weights.timeout_s`, then Hello and Offer again (idempotent) |
| a group, a broadcast     | a thread of its  | `weights.timeout_s` each; where the backend does not keep it |
|                          | own, a daemon    | (NCCL's first broadcast) `roster.transfer_limit_s` for all;  |
|                          |                  | the hub's Resync, when a member's link is away               |
| the last offer's answer  | close()          | its argument                                                 |
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq
from torch.distributed import TCPStore

from asyncrl import keys
from asyncrl.config import Config
from asyncrl.messages import Go, Hello, Message, Offer, Refused, Rehello, Resync, Sent, TransferFailed
from asyncrl.roster import PUBLISHER, transfer_limit_s
from asyncrl.transport import Client
from asyncrl.weights.buckets import Snapshot
from asyncrl.weights.groups import Group, GroupError, GroupSpec, local_address, open_store
from asyncrl.weights.transfer import send

_WAKE, _CLOSE = b"wake", b"close"


class Publisher:
    """What the learner's rank 0 holds. Every method belongs to one thread, the learner's main thread."""

    def __init__(self, config: Config, hub: str) -> None:
        """Connects to `hub` ("tcp://host:port") and starts the thread."""
        limit_bytes = int(config.weights.bucket_mb * 2**20)
        self._shelf = _Shelf(Snapshot(limit_bytes), Snapshot(limit_bytes))
        address = f"inproc://publisher-{secrets.token_hex(8)}"
        self._sender = _Sender(config, hub, address, self._shelf)
        self._wake: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._wake.connect(address)
        self._thread = threading.Thread(target=self._sender.run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the weights and returns; they are sent in the background.

        `weights` yields Hugging Face names and whole tensors, always the same names, dtypes and shapes. A
        tensor may be freed as soon as the iterator moves on.

        Raises:
            RuntimeError: the publisher's thread has failed (the cause is chained).
            ValueError: the set of tensors changed.
        """
        self.check()
        snapshot = self._shelf.take_spare()
        snapshot.fill(version, weights)
        self._shelf.put_pending(snapshot)
        self._tell(_WAKE)

    def check(self) -> None:
        """Raises RuntimeError if the publisher's thread has failed."""
        if self._sender.error is not None:
            raise RuntimeError("the weight publisher failed; no version can be published") from self._sender.error

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits until the last offer is answered and sent, at most `timeout_s`, and stops. Idempotent.

        Raises:
            RuntimeError: the publisher's thread has failed.
        """
        if not self._wake.closed:
            self._tell(_CLOSE)
            self._thread.join(timeout_s)
            # The thread is a daemon: one that is stuck in a broadcast does not hold up the exit.
            self._wake.close(linger=0)
        self.check()

    def _tell(self, what: bytes) -> None:
        # A thread that has ended takes nothing, and a send would wait for it for ever; `check` says why it ended.
        with suppress(zmq.Again):
            self._wake.send(what, zmq.DONTWAIT)


class _Shelf:
    """The two snapshots and whose turn it is. The one that is not serving belongs to `offer`."""

    def __init__(self, first: Snapshot, second: Snapshot) -> None:
        self._lock = threading.Lock()
        self._snapshots = (first, second)
        self._pending: Snapshot | None = None
        self._serving: Snapshot | None = None

    def take_spare(self) -> Snapshot:
        """The snapshot that may be overwritten; a pending one is withdrawn."""
        with self._lock:
            self._pending = None
            first, second = self._snapshots
            return second if self._serving is first else first

    def put_pending(self, snapshot: Snapshot) -> None:
        """Hands a filled snapshot over."""
        with self._lock:
            self._pending = snapshot

    def has_pending(self) -> bool:
        """Whether a snapshot waits to be served."""
        with self._lock:
            return self._pending is not None

    def serve(self) -> Snapshot | None:
        """The newest snapshot, which is the serving one from now on; None before the first."""
        with self._lock:
            if self._pending is not None:
                self._serving, self._pending = self._pending, None
            return self._serving


class _Broadcast:
    """One broadcast in a daemon thread, which is left behind with its group when nothing else ends it."""

    def __init__(
        self,
        spec: GroupSpec,
        held: Group | None,
        store: TCPStore,
        serving: Snapshot,
        device: int | None,
        ended: Callable[[], object],
    ) -> None:
        """Begins. `held`: the last group, used again if it fits. `ended` is called in the thread, at its end."""
        self.spec, self.version = spec, serving.version
        self.nbytes = serving.nbytes
        self.started = time.monotonic()
        self._limit_s = transfer_limit_s(spec.timeout_s, len(serving.buckets))
        self._done: Future[tuple[Group, float]] = Future()
        self._done.add_done_callback(lambda _: ended())
        self._arguments = (held, store, serving, device)
        name = f"broadcast-{spec.epoch}-{self.version}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def deadline(self) -> float:
        """Monotonic time at which it is left behind."""
        return self.started + self._limit_s

    def is_over(self) -> bool:
        """Whether `result` does not wait."""
        return self._done.done() or time.monotonic() >= self.deadline

    def result(self) -> tuple[Group, float]:
        """The group, for the next broadcast, and the seconds that this one took.

        Raises:
            GroupError: a member is gone or too slow.
        """
        try:
            return self._done.result(0)
        except TimeoutError as error:
            members = ", ".join(self.spec.members)
            raise GroupError(
                f"{self.spec.backend} broadcast of version {self.version} to {members} did not end within "
                f"{self._limit_s:g} s and was given up; lower weights.timeout_s if that is too long"
            ) from error

    def _run(self) -> None:
        group, store, serving, device = self._arguments
        try:
            if device is not None:
                torch.cuda.set_device(device)  # A thread starts with the first one.
            if group is None or group.spec != self.spec:
                if group is not None:
                    group.close()
                group = None
                # A store serves one thread at a time, and one that was left behind may still wait for a member.
                own: Any = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it.
                group = Group(self.spec, own)
            send(group, serving)
            self._done.set_result((group, time.monotonic() - self.started))
        except BaseException as error:  # The end of the thread: who waits for it gets the error.
            self._done.set_exception(error)


class _Sender:
    """The publisher's thread: one loop over the sockets that wake it."""

    def __init__(self, config: Config, hub: str, wake: str, shelf: _Shelf) -> None:
        self.error: BaseException | None = None
        self._hub = hub
        self._shelf = shelf
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._backend = config.weights_backend
        self._timeout_s = config.weights.timeout_s
        self._incarnation = secrets.token_hex(4)
        hub_url = urlsplit(hub)
        self._host = local_address(hub_url.hostname or "127.0.0.1", hub_url.port or 1)
        self._store = open_store(self._host, self._timeout_s) if self._backend != "shm" else None
        self._group: Group | None = None
        self._broadcast: _Broadcast | None = None
        self._bell, self._rope = socket.socketpair()
        self._serving: Snapshot | None = None
        self._asked_at: float | None = None
        """When the offer was sent that waits for its Go; None: no offer waits."""
        self._unheard = False
        """The hub has been greeted, and whatever it was offered before may be lost."""
        self._closing = False
        # Bound before the thread starts, so that no wake-up is lost; last, so that no failure leaves it open.
        self._wake: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._wake.bind(wake)

    def run(self) -> None:
        """The thread's body; its failure is kept for the main thread."""
        try:
            name = f"{PUBLISHER}/{self._incarnation}"
            with (
                closing(self._wake),
                closing(self._bell),
                closing(self._rope),
                closing(Client(self._hub, name, self._greet, keys.for_hub(self._hub))) as self._client,
            ):
                self._loop()
        except BaseException as error:  # The end of the thread: `check` raises it in the main one.
            self.error = error
        finally:
            if self._group is not None:
                self._group.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake, self._bell, *self._client.sources):
            poller.register(source, zmq.POLLIN)
        while not self._closing or self._asked_at is not None or self._broadcast or self._shelf.has_pending():
            ready = dict(poller.poll(self._wait_ms()))
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            if self._wake in ready:
                self._closing |= self._wake.recv() == _CLOSE
                self._offer_pending()
            if any(source in ready for source in self._client.sources) and (received := self._client.receive(0)):
                self._on_message(received[0])
            if self._broadcast is not None and self._broadcast.is_over():
                self._report(self._broadcast)
            if self._asked_at is not None and time.monotonic() - self._asked_at >= self._timeout_s:
                self._greet()

    def _wait_ms(self) -> int:
        """Until the offer has to be repeated, or a broadcast given up; without either any time limit does."""
        now = time.monotonic()
        if self._broadcast is not None:
            due = self._broadcast.deadline
        else:
            due = (now if self._asked_at is None else self._asked_at) + self._timeout_s
        return max(0, int(1000 * (due - now)) + 1)

    def _on_message(self, message: Message) -> None:
        match message:
            case Rehello():
                self._greet()
            case Go():
                self._on_go(message)
                self._offer_pending()  # It may be that nothing is sent.
            case Resync():
                self._broadcast = None  # The hub has given up on it.
                # An offer that waits for its Go will be answered with whoever is behind by then.
                if self._asked_at is None:
                    self._offer()
            case Refused(reason):
                raise RuntimeError(f"the hub refused the publisher: {reason}")

    def _greet(self) -> None:
        """With every connection, so a hub that was restarted knows this process at once."""
        self._client.send(Hello("publisher", PUBLISHER, self._incarnation, os.getpid()))
        self._unheard = True
        self._offer_pending()

    def _offer_pending(self) -> None:
        """Offers what the hub may not have heard of, unless it would overwrite what is being sent."""
        if self._broadcast is None and (self._unheard or (self._asked_at is None and self._shelf.has_pending())):
            self._offer()

    def _offer(self) -> None:
        self._unheard = False
        self._serving = serving = self._shelf.serve()
        if serving is None:
            return
        serving.seal()
        self._asked_at = time.monotonic()
        port, addresses = (0, serving.addresses) if self._store is None else (self._store.port, [])
        self._client.send(Offer(serving.version, self._host, port, serving.buckets, addresses))

    def _on_go(self, go: Go) -> None:
        serving = self._serving
        if serving is None or go.version != serving.version:
            if go.members:
                self._client.send(TransferFailed(go.epoch, go.version, "this version is no longer held"))
            return
        self._asked_at = None
        if not go.members:
            return
        if self._store is None:
            self._client.send(Sent(go.epoch, go.version, 0.0, serving.nbytes))
            return
        spec = GroupSpec(
            self._backend, self._host, self._store.port, go.epoch, 0, tuple(go.members), self._timeout_s
        )
        held, self._group = self._group, None
        self._broadcast = _Broadcast(spec, held, self._store, serving, self._device, self._ring)

    def _ring(self) -> None:
        with suppress(OSError):  # The publisher may have been closed.
            self._rope.send(b"!")

    def _report(self, broadcast: _Broadcast) -> None:
        """A broadcast is over: tells the hub how it went, and offers what has come meanwhile."""
        self._broadcast = None
        epoch, version = broadcast.spec.epoch, broadcast.version
        try:
            self._group, seconds = broadcast.result()
        except GroupError as error:
            self._client.send(TransferFailed(epoch, version, str(error)))
        else:
            self._client.send(Sent(epoch, version, seconds, broadcast.nbytes))
        self._offer_pending()
