"""Calls of other people's functions: async ones awaited, sync ones in threads of their own, within a time limit.

A function that hangs takes no thread from the others, and keeps no process alive. Called for reward functions
(`asyncrl.envs.rewards`), for tools (`asyncrl.envs.tools`), for a user's class or agent (`asyncrl.envs.methods`,
`asyncrl.envs.agent`) and for the batches of the scorer (`asyncrl.scorer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a function returned, or else what it raised: a value, for a future takes no StopIteration."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it must be awaited; of an object, its method `__call__` says so."""
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is asked, not whether there is one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def outcome_of(call: Callable[[], Any], awaits: bool, limit_s: float, room: asyncio.Semaphore) -> Outcome:
    """Calls a function, whatever it does.

    Args:
        call: the function, without arguments.
        awaits: whether it is async (`is_async`).
        limit_s: time limit in seconds, the wait for room included. An async function keeps to it only if it awaits
            something; one that computes holds up everybody.
        room: how many calls of a sync function may run at a time, hung ones included.

    Raises:
        TimeoutError: it did not answer within its limit. One of the function's own is an outcome.
    """
    async with asyncio.timeout(limit_s):
        return await (_awaited(call) if awaits else in_thread(call, room))


async def result_of(call: Callable[[], Any], awaits: bool) -> Any:
    """Calls a function and returns what it returns; the caller sets the time limit.

    Args:
        call: the function, without arguments.
        awaits: whether it is async (`is_async`).

    Raises:
        RuntimeError: the function raised something that is no `Exception`. Raised in an event loop, a `SystemExit`
            of the function would end the process, and a `CancelledError` would look like the caller's own.
        Exception: whatever the function raised.
    """
    returned, error = await (_awaited(call) if awaits else in_thread(call, asyncio.Semaphore(1)))
    if error is None:
        return returned
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


async def in_thread(call: Callable[[], Any], room: asyncio.Semaphore) -> Outcome:
    """Runs a call in a thread of its own, once there is room.

    When the wait is cancelled the thread is told to exit. Its room is given back when it has ended, not before, so
    calls that hang are never more than the room.
    """
    await room.acquire()
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Outcome] = loop.create_future()

    def settle(result: Outcome) -> None:
        room.release()
        if not outcome.done():
            outcome.set_result(result)

    def ended(result: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile: nobody waits any more.
            loop.call_soon_threadsafe(settle, result)

    running = _Call(call, ended)
    try:
        running.start()
    except RuntimeError as error:
        room.release()
        return None, RuntimeError(f"it needs a thread of its own, and none can be started: {error}")
    try:
        return await outcome
    except asyncio.CancelledError:
        running.stop()
        raise


# ---- machinery -----------------------------------------------------------------------------------


class _Call:
    """A call and the thread that it runs in. `ended` is called in that thread, once, after everything else."""

    def __init__(self, call: Callable[[], Any], ended: Callable[[Outcome], None]) -> None:
        self._call = call
        self._ended = ended
        self._lock = threading.Lock()
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="call", daemon=True)
        self.start = self._thread.start

    def stop(self) -> None:
        """Tells the thread to exit, which ends a loop in Python; a call into C goes on to its own end first."""
        with self._lock:
            # A thread that has ended must not be meant: its ident may be another's by now.
            if not self._finished:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def _run(self) -> None:
        outcome: Outcome = None, SystemExit()
        try:
            try:
                outcome = self._call(), None
            except BaseException as error:  # Whatever it is, it is the function's; its caller judges it.
                outcome = None, error
            with self._lock:
                self._finished = True
        except SystemExit:
            pass  # From a `stop` that came late; there is only one, and none from here on.
        self._ended(outcome)


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return await call(), None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # The time limit, or a revoked lease. Otherwise the function itself raised it.
        return None, error
    except (Exception, SystemExit) as error:  # A function that calls exit() must not end the generator.
        return None, error
