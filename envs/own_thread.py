"""A thread of an episode's own, for objects that block and want to be called from one thread only.

Unlike a pool it is given up when a call hangs, and never waited for when the process ends. Called by the adapters
of synchronous environments and by `asyncrl.envs.methods`; `asyncrl.envs.threads` is for calls that do not belong
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class OwnThread:
    """Runs calls one after the other in one daemon thread. `end` it once nothing more is to be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.lost = False
        """A call was given up and may still be running: nothing more can be called."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in the thread and waits for its result; the caller sets the time limit.

        When the wait is cancelled the thread is told to exit, which ends a loop in Python; a call into C goes on
        to its own end first.

        Raises:
            RuntimeError: an earlier call was given up, or the function raised something that is no `Exception`.
            Exception: whatever the function raises.
        """
        if self.lost:
            raise RuntimeError(f"the thread of {self._name} is lost: an earlier call did not return in time")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()
        self._jobs.put(lambda: _answer(loop, outcome, lambda: function(*args, **kwargs)))
        try:
            result, error = await outcome
        except asyncio.CancelledError:
            self._give_up()
            raise
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Lets the thread end, and does not wait for it."""
        self._jobs.put(None)

    def _give_up(self) -> None:
        self.lost = True
        assert self._thread is not None  # Only `call` gives up, and it starts the thread first.
        if self._thread.is_alive():
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        self.end()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _answer(loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], call: Callable[[], Any]) -> None:
    """Runs in the thread: calls, and hands over the outcome as a value, for a future takes no StopIteration."""
    result: tuple[Any, Exception | None]
    try:
        result = call(), None
    except Exception as error:  # Whatever it is, it is raised where it was called for.
        result = None, error
    except BaseException as error:
        result = None, RuntimeError(f"it raised {type(error).__name__}: {error}")

    def settle() -> None:
        if not outcome.done():
            outcome.set_result(result)

    with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile: nobody waits any more.
        loop.call_soon_threadsafe(settle)
