"""The sandbox `monty`: a Python interpreter written in Rust that has no files, network or processes to give.

The interpreter (https://github.com/pydantic/monty, the extra `asyncrl[monty]`) runs in a pool of worker processes,
each call in a fresh session. It is by far the fastest sandbox and works wherever its wheels do, not only on Linux,
but it runs a part of Python only: no `yield`, no stdin, few modules of the standard library. So it is chosen by
name and never by `auto`. A fault of the interpreter itself is a way out, to all that the trainer's user may do.

Its blocking interface is used, in threads: a process that exits right after a call of the asynchronous one may
abort (https://github.com/PyO3/pyo3-async-runtimes/issues/40). Called by `asyncrl.envs.sandbox.base.open_sandbox`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from types import ModuleType
from typing import Any

from asyncrl.envs.base import ToolFault
from asyncrl.envs.sandbox.base import How, Limits, Result
from asyncrl.envs.threads import in_thread

START_LIMIT = 60.0
"""Seconds that a call waits for a free worker."""


def open_monty(limits: Limits) -> Monty:
    """A sandbox of this kind; ToolFault if the extra is not installed."""
    try:
        pydantic_monty = importlib.import_module("pydantic_monty")
    except ImportError as error:
        raise ToolFault(
            f"the sandbox 'monty' cannot be used: {error}. Install it: pip install 'asyncrl[monty]'"
        ) from error
    return Monty(pydantic_monty, limits)


class Monty:
    """A `Sandbox` in Monty's pool of workers, which starts with the first call."""

    kind = "monty"

    def __init__(self, monty: ModuleType, limits: Limits) -> None:
        self.limits = limits
        self._monty = monty
        self._workers = os.cpu_count() or 1
        self._room = asyncio.Semaphore(self._workers)
        self._pool: Any = None
        self._starting = threading.Lock()

    async def run(self, code: str, stdin: str = "") -> Result:
        """See `Sandbox.run`; the code has no way to read a stdin. A cancelled call runs on until its limit."""
        result, error = await in_thread(lambda: self._run(code), self._room)
        if error is not None:
            raise ToolFault(f"the sandbox 'monty' cannot run: {type(error).__name__}: {error}") from error
        return result

    async def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await in_thread(lambda: pool.__exit__(None, None, None), asyncio.Semaphore(1))

    def _run(self, code: str) -> Result:
        pool, started = self._started(), time.monotonic()
        printed = _Printed(self.limits.output_bytes)
        limits = {
            "max_feed_duration_secs": self.limits.seconds,
            "max_total_sleep_secs": self.limits.seconds,
            "max_memory": self.limits.memory_mb << 20,
        }
        how: How = "ok"
        with pool.checkout(limits=limits) as session:
            try:
                value = session.feed_run(code, print_callback=printed)
                if value is not None:
                    printed("stdout", f"{value!r}\n")
            except self._monty.MontyError as error:
                printed("stderr", f"{error.display() if hasattr(error, 'display') else error}\n")
                how = self._outcome(error)
        how = "output" if printed.full else how
        return Result("".join(printed.stdout), "".join(printed.stderr), how, time.monotonic() - started)

    def _started(self) -> Any:
        with self._starting:
            if self._pool is None:
                pool = self._monty.Monty(max_processes=self._workers, checkout_timeout=START_LIMIT)
                pool.__enter__()
                self._pool = pool
            return self._pool

    def _outcome(self, error: Any) -> How:
        if isinstance(error, self._monty.MontyCrashedError):
            return "timeout" if error.timed_out else "killed"
        raised = error.exception()
        if isinstance(raised, MemoryError):
            return "memory"
        return "timeout" if isinstance(raised, TimeoutError) else "error"


class _Printed:
    """Takes what the code prints, up to a limit for each stream; code that prints more runs on, unheard."""

    def __init__(self, most: int) -> None:
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self.full = False
        self._room = {"stdout": most, "stderr": most}

    def __call__(self, stream: str, text: str) -> None:
        data, room = text.encode(errors="replace"), self._room[stream]
        self.full = self.full or len(data) > room
        self._room[stream] -= min(room, len(data))
        if room:
            (self.stdout if stream == "stdout" else self.stderr).append(data[:room].decode(errors="replace"))
