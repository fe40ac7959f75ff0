"""`EngineDriver`: turns any synchronous `StepEngine` into the asynchronous `Engine`, with one thread of its own.

    event loop (episodes, weight receiver)            engine thread (the only one that touches the StepEngine)
    ──────────────────────────────────────            ──────────────────────────────────────────────────────
    generate() ── add ────────┐                       loop:
    abort()    ── abort ──────┤  deque + Condition      wait on the Condition while there is nothing to do
    update()   ── load ───────┼────────────────────►    run the commands, in order
    cancelled consumer, abort ┘                         flush() if flush_s have passed; step()
                                                        │
    one queue for each request  ◄───────────────────────┘ one call_soon_threadsafe for all deltas of a step,
    one future for each command                           one for the results of the commands before it

    thread        consumes          produces           waits for              woken by
    event loop    deltas, results   commands           a queue or a future    the thread's calls
    engine        commands          deltas, results    work, on a Condition   a command

A command runs between two steps, so a weight update needs no pause protocol. The first exception in the thread
(other than a refused request) kills the engine: every consumer, running and later, gets `EngineDead` with that
cause. Queues are not bounded by themselves: a request's queue holds at most its own `max_tokens` tokens.

`asyncrl.generator.engines.select` constructs it, for the generator process and for evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from asyncrl.generator.engines.base import (
    Delta,
    EngineDead,
    EngineStats,
    KvMode,
    SamplingParams,
    StagedWeights,
    StepEngine,
    UpdateTimes,
)

T = TypeVar("T")
_Command = tuple[Callable[[], Any], "asyncio.Future[Any] | None"]
_Result = tuple["asyncio.Future[Any] | None", Any]


class EngineDriver:
    """An `Engine` over a `StepEngine`; see the module docstring. All methods belong to the event loop."""

    def __init__(
        self,
        step_engine: StepEngine,
        flush_s: float = 0.5,
        stall_s: float = 600.0,
        loop: asyncio.AbstractEventLoop | None = None,
        entered: Callable[[], object] | None = None,
    ) -> None:
        """Starts the thread.

        Args:
            step_engine: from now on only the driver's thread calls it; `close` closes it too.
            flush_s: tokens reach their consumers at most about this many seconds after they were sampled.
            stall_s: a consumer gives the engine up when no step or command has ended for so long.
            loop: the event loop that the driver belongs to; default: the running one.
            entered: called first in the driver's thread. OpenMP keeps the number of kernel threads for each thread
                that calls kernels, so what the thread that loaded the engine has set does not hold here.
        """
        self.stats = EngineStats()
        self._engine = step_engine
        self._flush_s, self._stall_s, self._entered = flush_s, stall_s, entered
        self._loop = loop or asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()  # guarded by _wake
        self._closing = False  # guarded by _wake
        # Requests run under a number of their own, so that late deltas of an aborted request can never reach
        # a new one of the same name.
        self._numbers = itertools.count()
        self._running: dict[str, str] = {}
        self._streams: dict[str, asyncio.Queue[Delta | None]] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._dead: EngineDead | None = None
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- the event loop's side ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._engine.version

    async def generate(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas; see `Engine.generate`. Closing or cancelling it aborts the request."""
        if rid in self._running:
            raise ValueError(f"request {rid!r} is already running; every request needs an id of its own")
        number = self._running[rid] = f"{rid}#{next(self._numbers)}"
        stream = self._streams[number] = asyncio.Queue()
        ended = False
        try:
            refusal = await self._call(lambda: self._add(number, prompt_ids, params))
            if refusal is not None:
                raise refusal
            while not ended:
                delta = await self._patiently(stream.get)
                if delta is None:
                    assert self._dead is not None
                    raise self._dead.again()
                ended = delta.finish_reason is not None
                yield delta
        finally:
            del self._running[rid], self._streams[number]
            if not ended and self._dead is None:
                self._post(lambda: self._engine.abort([number]), None)

    async def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all); their consumers get a last delta, `finish_reason="abort"`."""
        names = list(self._running) if rids is None else list(rids)
        numbers = [self._running[rid] for rid in names if rid in self._running]
        await self._call(lambda: self._engine.abort(numbers))

    async def update(self, weights: StagedWeights, kv: KvMode) -> UpdateTimes:
        """Applies weights between two steps. See `Engine.update`."""
        asked = time.perf_counter()

        def load() -> UpdateTimes:
            start = time.perf_counter()
            self._engine.load_weights(weights, kv)
            seconds = time.perf_counter() - start
            self.stats.paused_s += seconds
            # The thread goes on with its next step by itself.
            return UpdateTimes(start - asked, seconds, 0.0)

        return await self._call(load)

    async def close(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after its step and closes the step engine; open requests get `EngineDead`. Idempotent.

        Raises:
            TimeoutError: the thread did not end in time; it is a daemon, and dies with the process.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the engine's thread did not end within {timeout_s:g} s: a step hangs; it is left behind"
            )
        self._die(EngineDead("the engine was closed"))

    def _post(self, work: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        with self._wake:
            self._commands.append((work, future))
            self._wake.notify()

    async def _call(self, work: Callable[[], T]) -> T:
        """Has the thread run `work` between two steps, and awaits its result."""
        if self._dead is not None:
            raise self._dead.again()
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._settle)
        self._post(work, future)
        return await self._patiently(lambda: asyncio.shield(future))

    def _settle(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        # Asking marks the exception as seen: a caller that was cancelled will not come for it.
        if not future.cancelled():
            future.exception()

    async def _patiently(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Awaits `wait()`, anew as long as the thread makes progress."""
        while True:
            beats = self._beats
            try:
                async with asyncio.timeout(self._stall_s):
                    return await wait()
            except TimeoutError:
                if beats == self._beats:
                    limit = f"{self._stall_s:g} s (generator.stall_s)"
                    silent = f"the engine's thread has been silent for {limit} while requests wait; restart it"
                    raise self._die(EngineDead(silent)) from None

    def _answer(self, results: list[_Result]) -> None:
        """Hands out the results of commands."""
        for future, result in results:
            if future is not None and not future.done():
                future.set_result(result)

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        """Hands out the deltas of one step; those of a consumer that has left are dropped."""
        for number, delta in deltas:
            if stream := self._streams.get(number):
                stream.put_nowait(delta)

    def _die(self, cause: EngineDead) -> EngineDead:
        """Ends everything that waits; the first cause stays, and is returned to be raised."""
        self._dead = self._dead or cause
        for future in list(self._pending):
            if not future.done():
                future.set_exception(self._dead.again())
        for stream in self._streams.values():
            stream.put_nowait(None)
        return self._dead.again()

    # ---- the thread's side ----------------------------------------------------------------------

    def _run(self) -> None:
        """The thread. Its boundary turns any exception into the engine's death."""
        try:
            if self._entered is not None:
                self._entered()
            flushed = time.monotonic()
            while (commands := self._next_commands()) is not None:
                if commands:
                    self._to_loop(self._answer, [(future, work()) for work, future in commands])
                if time.monotonic() - flushed >= self._flush_s:
                    self._engine.flush()
                    flushed = time.monotonic()
                deltas = self._step() if self._engine.has_work() else []
                self._beats += 1
                if deltas:
                    self._to_loop(self._deliver, deltas)
            self._engine.close()
        except BaseException as error:
            dead = EngineDead(f"the engine failed and must be restarted: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._to_loop(self._die, dead)

    def _next_commands(self) -> list[_Command] | None:
        """The commands that have come; waits for one if there is nothing else to do. None: close."""
        start = time.perf_counter()
        with self._wake:
            if not self._engine.has_work():
                while not self._commands and not self._closing:
                    self._wake.wait(timeout=self._stall_s)
                self.stats.waiting_s += time.perf_counter() - start
            if self._closing:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _add(self, number: str, prompt_ids: Sequence[int], params: SamplingParams) -> ValueError | None:
        """Adds a request; a refusal is the request's own fault and leaves the engine alive."""
        try:
            self._engine.add(number, prompt_ids, params)
        except ValueError as error:
            return error
        self.stats.prefill_tokens += len(prompt_ids)
        return None

    def _step(self) -> list[tuple[str, Delta]]:
        start = time.perf_counter()
        deltas = self._engine.step()
        stats = self.stats
        stats.busy_s += time.perf_counter() - start
        stats.steps += 1
        stats.sampled_tokens += sum(len(delta.token_ids) for _, delta in deltas)
        stats.live, stats.queued = self._engine.occupancy()
        return deltas

    def _to_loop(self, callback: Callable[..., object], *args: Any) -> None:
        # A loop that has been closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)
