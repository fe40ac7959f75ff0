"""A generator's end of weight transfers: gets ready, receives beside the decoding, applies in one pause.

It decides nothing (the hub's roster does) and does not touch the engine before a whole version has arrived and
passed all checks (`asyncrl.weights.checks`): a version that cannot be used is refused, and nothing else happens.
One receipt for each generator, whatever its engine: the staging buffers are shared memory, which an engine's own
processes can map. `asyncrl.generator.process` calls `handle` in a task of its own for each Prepare and Go.
This module imports torch only in threads of their own, so that the process can pin its cores before.

    event loop                                          ┊ transfer thread (a daemon, one per transfer)
    hub ──Prepare──▶ handle ────────────────────────────▶ (a pool thread) does it fit the engine's model?
                   ├─▶ Ready, or TransferFailed ──▶ hub ┊
    hub ──Go──▶ handle ── starts ───────────────────────▶ builds the group if the epoch is new (or none: shm),
                   │  (episodes go on)                  ┊ receives buckets into staging buffers,
                   │◀────────────────────────────────────  checks them: staged weights, or an error
                   ├─▶ await engine.update (the only pause)
                   └─▶ Applied, or TransferFailed ──▶ hub

    | waits for               | unblocked by                             | limit                       |
    |-------------------------|------------------------------------------|-----------------------------|
    | the transfer thread     | the broadcast; a Prepare of a new epoch  | `roster.transfer_limit_s`   |
    | Ready: an update at work| the engine                               | the hub's, for Ready        |
    | Ready: model's layout   | reading config.json, once                | the hub's, for Ready        |

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
    from asyncrl.messages import TensorMeta
    from asyncrl.weights.transfer import Inbox


class _Superseded(Exception):
    """A newer epoch began, or the receiver was closed."""


class Receiver:
    """Handles Prepare and Go for one engine. All methods belong to the event loop's thread."""

    def __init__(self, config: Config, engine: Engine, send: Callable[[Message], object]) -> None:
        self._timeout_s = config.weights.timeout_s
        self._kv = config.weights.kv
        self._model, self._dtype = config.model.path, config.model.dtype
        self._expected: dict[str, TensorMeta] | None = None
        self._announced: list[list[TensorMeta]] = []
        """What was checked last; it does not change within a run."""
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
            if self._prepared is not prepare:
                return
            try:
                await asyncio.to_thread(self._check, prepare)
            except Exception as error:
                self._fail(prepare, error)
            else:
                self._send(Ready(prepare.epoch, prepare.version))

    def _check(self, prepare: Prepare) -> None:
        """Refuses what does not fit the engine's model. Without a model folder nothing is known of it."""
        if self._model is None or prepare.buckets == self._announced:
            return
        from asyncrl.weights import checks

        if self._expected is None:
            self._expected = checks.expected(self._model, self._dtype)
        checks.check_announced(prepare.version, prepare.buckets, self._expected)
        self._announced = prepare.buckets

    def _fail(self, what: Prepare | Go, error: Exception) -> None:
        from asyncrl.weights.checks import DamagedWeights

        reason = str(error) if isinstance(error, DamagedWeights) else f"{type(error).__name__}: {error}"
        self._send(TransferFailed(what.epoch, what.version, reason, isinstance(error, DamagedWeights)))

    async def _on_go(self, go: Go) -> None:
        prepare = self._prepared
        key = (go.epoch, go.version)
        if prepare is None or key != (prepare.epoch, prepare.version) or key == self._gone:
            return
        self._gone = key
        async with self._lock:
            started = time.perf_counter()
            try:
                staged = await self._receive(prepare, tuple(go.members))
            except _Superseded:
                return
            except Exception as error:
                # The fault boundary of a transfer: whatever went wrong, the engine still has its old weights.
                self._fail(go, error)
                return
            transfer_s = time.perf_counter() - started
            times = await self._engine.update(staged, self._kv)
            self._send(Applied(go.epoch, go.version, times.pause_s, transfer_s))

    async def _receive(self, prepare: Prepare, members: tuple[str, ...]) -> StagedWeights:
        transfer = self._transfer = _Transfer(self._inbox, prepare, members, self._timeout_s)
        self._inbox = None
        limit_s = transfer_limit_s(self._timeout_s, len(prepare.buckets))
        try:
            async with asyncio.timeout(limit_s):
                return await transfer.outcome
        except TimeoutError:
            raise TimeoutError(
                f"waited {limit_s:g} s (from weights.timeout_s = {self._timeout_s:g}) for version "
                f"{prepare.version} from the publisher; the transfer is given up, a new group is made"
            ) from None
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
        self.outcome: asyncio.Future[StagedWeights] = self._loop.create_future()
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
            threading.Thread(target=self.inbox.abort, name="weights-abort", daemon=True).start()  # It may block.

    def _run(self) -> None:
        from asyncrl.weights.transfer import Inbox

        staged, error = None, None
        try:
            self.inbox = self.inbox or Inbox()
            staged = self.inbox.receive(*self._arguments)
        except Exception as failure:
            error = failure
        # When the loop is closed nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, staged, error)

    def _end(self, staged: StagedWeights | None, error: Exception | None) -> None:
        self.ended = True
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        elif staged is not None:
            self.outcome.set_result(staged)
