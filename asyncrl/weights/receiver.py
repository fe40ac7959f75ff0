"""A generator's end of weight transfers: gets ready, receives beside the decoding, applies in one pause.

It decides nothing (the hub's roster does) and does not touch the engine before a whole version has arrived and
its checksums fit. `asyncrl.generator.process` calls `handle` in a task of its own for each Prepare and Go.
This module imports torch only in the transfer thread, so that the process can pin its cores before.

    event loop                                          ┊ transfer thread (a daemon, one per transfer)
    hub ──Prepare──▶ handle ──Ready──▶ hub              ┊
    hub ──Go──▶ handle ── starts ───────────────────────▶ builds the group if the epoch is new,
                   │  (episodes go on)                  ┊ receives buckets into staging buffers,
                   │◀────────────────────────────────────  compares checksums: tensors, or an error
                   ├─▶ await engine.update (the only pause)
                   └─▶ Applied, or TransferFailed ──▶ hub

    | waits for               | unblocked by                             | limit                       |
    |-------------------------|------------------------------------------|-----------------------------|
    | the transfer thread     | the broadcast; a Prepare of a new epoch  | `roster.transfer_limit_s`   |
    | Ready: an update at work| the engine                               | the hub's, for Ready        |

A thread in a Gloo collective cannot be woken. When a newer epoch begins it is abandoned, with the buffers it may
still write to; it ends at the collective's own time limit, and being a daemon it never holds up the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.generator.engines.base import Engine, StagedWeights
from asyncrl.messages import Applied, Go, Message, Prepare, Ready, TransferFailed
from asyncrl.roster import transfer_limit_s

if TYPE_CHECKING:
    from asyncrl.weights.transfer import Inbox, NamedTensors


class _Superseded(Exception):
    """A newer epoch began, or the receiver was closed."""


class Receiver:
    """Handles Prepare and Go for one engine. All methods belong to the event loop's thread."""

    def __init__(self, config: Config, engine: Engine, send: Callable[[Message], object]) -> None:
        self._timeout_s = config.weights.timeout_s
        self._kv = config.weights.kv
        self._engine = engine
        self._send = send
        self._prepared: Prepare | None = None
        self._transfer: _Transfer | None = None
        self._inbox: Inbox | None = None
        self._gone = (-1, -1)
        """Epoch and version of the last Go that was acted on."""
        self._lock = asyncio.Lock()
        """Held from Go until Applied or TransferFailed."""

    async def handle(self, message: Prepare | Go) -> None:
        """Acts on a message; returns when its consequence has been sent. Messages of older epochs are ignored.

        Raises:
            EngineDead: applying failed; the process must end.
        """
        if isinstance(message, Prepare):
            await self._on_prepare(message)
        else:
            await self._on_go(message)

    def close(self) -> None:
        """Gives up what is being received. Idempotent; does not wait for the thread."""
        self._prepared = None
        if self._transfer is not None:
            self._transfer.supersede()
        if self._inbox is not None:
            self._inbox.close()

    async def _on_prepare(self, prepare: Prepare) -> None:
        if self._prepared is not None and prepare.epoch < self._prepared.epoch:
            return
        self._prepared = prepare
        if self._transfer is not None:
            self._transfer.supersede()
        async with self._lock:
            if self._prepared is prepare:
                self._send(Ready(prepare.epoch, prepare.version))

    async def _on_go(self, go: Go) -> None:
        prepare = self._prepared
        key = (go.epoch, go.version)
        if prepare is None or key != (prepare.epoch, prepare.version) or key == self._gone:
            return
        self._gone = key
        async with self._lock:
            started = time.perf_counter()
            try:
                tensors = await self._receive(prepare, tuple(go.members))
            except _Superseded:
                return
            except Exception as error:
                # The fault boundary of a transfer: whatever went wrong, the engine still has its old weights.
                self._send(TransferFailed(go.epoch, go.version, f"{type(error).__name__}: {error}"))
                return
            transfer_s = time.perf_counter() - started
            pause_s = await self._engine.update(StagedWeights(go.version, tensors), self._kv)
            self._send(Applied(go.epoch, go.version, pause_s, transfer_s))

    async def _receive(self, prepare: Prepare, members: tuple[str, ...]) -> NamedTensors:
        transfer = self._transfer = _Transfer(self._inbox, prepare, members, self._timeout_s)
        self._inbox = None
        limit_s = transfer_limit_s(self._timeout_s, len(prepare.buckets))
        try:
            async with asyncio.timeout(limit_s):
                return await transfer.outcome
        except TimeoutError:
            raise TimeoutError(f"the transfer thread did not end within {limit_s:g} s") from None
        finally:
            self._transfer = None
            if transfer.ended:
                self._inbox = transfer.inbox
            else:
                transfer.abandon()


class _Transfer:
    """One receipt in a daemon thread; `outcome` is its result on the event loop."""

    def __init__(self, inbox: Inbox | None, prepare: Prepare, members: tuple[str, ...], timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[NamedTensors] = self._loop.create_future()
        self.inbox = inbox
        self.ended = False
        self._arguments = (prepare, members, timeout_s)
        name = f"weights-{prepare.epoch}-{prepare.version}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def supersede(self) -> None:
        """Ends the wait for the outcome, not the thread."""
        if not self.outcome.done():
            self.outcome.set_exception(_Superseded())

    def abandon(self) -> None:
        """Lets go of the thread; what it holds is freed when it ends."""
        if self.inbox is not None:
            self.inbox.abort()

    def _run(self) -> None:
        from asyncrl.weights.transfer import Inbox

        tensors, error = None, None
        try:
            self.inbox = self.inbox or Inbox()
            tensors = self.inbox.receive(*self._arguments)
        except Exception as failure:
            error = failure
        # When the loop is closed nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, tensors, error)

    def _end(self, tensors: NamedTensors | None, error: Exception | None) -> None:
        self.ended = True
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        elif tensors is not None:
            self.outcome.set_result(tensors)
