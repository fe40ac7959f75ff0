"""Calls of functions in processes of their own, which are killed and replaced when they do not answer in time.

For libraries that may hang or eat all memory (a computer algebra system, a generator of puzzles), that only
work in a main thread, that print, or that share one global random generator. A call names a function of a
module (`package.module:function`); arguments and results travel as JSON over a socket pair. It is no sandbox:
what runs in the processes is trusted, only its time and its memory are limited.

    call ──▶ an idle process, or a new one ──▶ JSON ──▶ function ──▶ JSON ──▶ the process is idle again
                 └─ past its limit: killed, waited for, replaced by the next call

Each call is looked after by a daemon thread of the pool's own, which goes on to the call's end also when the
caller's thread is told to exit (`asyncrl.envs.threads`): that can happen between any two steps, and would lose a
process's place for ever. Called by `asyncrl.envs.math_answers` and by the adapters of reasoning-gym and TextArena,
from any thread. Started as `python -m asyncrl.envs.process_pool` it is one of the processes. Free of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import msgspec

START_S = 120.0
"""Time limit of starting a process, its imports included; they take seconds, and more on a busy machine."""
ROOM_S = 60.0
"""How long a call waits for one of the processes."""
MEMORY = 4 * 2**30
"""Address space of a process in bytes; who needs more gets a MemoryError."""
_HEADER = struct.Struct("<I")


class CallRaised(Exception):
    """The function raised; the text is `TypeOfError: its text`."""


class CallLost(Exception):
    """There is no answer: it took longer than its limit, the process died, or none was free."""


class ProcessPool:
    """At most `workers` processes, started when a call needs one.

    Args:
        prepare: `package.module:function`, called without arguments in each new process to import what it needs.
        workers: most processes, which is also the number of calls at a time.
    """

    def __init__(self, prepare: str, workers: int) -> None:
        self._prepare = prepare
        self._room = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        # At the end of the interpreter too. A process that is in a call then ends when its socket closes.
        self.close = weakref.finalize(self, _kill_all, self._idle)

    def call(self, function: str, *arguments: Any, limit_s: float) -> Any:
        """Calls `package.module:function` in a process and returns what it returned.

        Raises:
            CallRaised: the function raised, or `prepare` did in a new process.
            CallLost: no answer within `limit_s`, or no process free within a minute.
        """
        return _value(self._begin(function, arguments, limit_s).result())

    async def acall(self, function: str, *arguments: Any, limit_s: float) -> Any:
        """The same from a coroutine. When it is cancelled, a call that runs goes on to its limit."""
        return _value(await asyncio.wrap_future(self._begin(function, arguments, limit_s)))

    def _begin(self, function: str, arguments: tuple[Any, ...], limit_s: float) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        looking = threading.Thread(
            target=self._look_after, args=(answer, function, arguments, limit_s), name="process pool", daemon=True
        )
        try:
            looking.start()
        except RuntimeError as error:
            raise CallLost(f"{function} needs a thread, and none can be started: {error}") from error
        return answer

    def _look_after(
        self, answer: Future[dict[str, Any]], function: str, arguments: tuple[Any, ...], limit_s: float
    ) -> None:
        has_room = self._room.acquire(timeout=ROOM_S)
        try:
            if not answer.set_running_or_notify_cancel():
                return
            if not has_room:
                raise CallLost(f"all processes were busy for {ROOM_S:g} s")
            answer.set_result(self._ask(function, arguments, limit_s))
        except BaseException as error:  # Raised where it was called for.
            answer.set_exception(error)
        finally:
            if has_room:
                self._room.release()

    def _ask(self, function: str, arguments: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self._prepare)
        try:
            answer = worker.ask(function, arguments, limit_s)
        except BaseException:  # Half an answer must not be left in the socket.
            worker.kill()
            raise
        self._idle.append(worker)
        return answer


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


def _value(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise CallRaised(answer["error"])
    return answer["value"]


class _Worker:
    """One process, seen from the pool."""

    def __init__(self, prepare: str) -> None:
        self._socket, theirs = socket.socketpair()
        # Iteration over a set of texts depends on the hash seed; with one for all, a game is the same in each.
        # Numeric libraries would start a thread per core and reserve address space for each.
        settings = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "asyncrl.envs.process_pool", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | settings,
            )
        try:
            _value(self.ask(prepare, (), START_S))
        except BaseException:
            self.kill()
            raise

    def ask(self, function: str, arguments: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        try:
            _send(self._socket, {"function": function, "arguments": arguments, "limit_s": limit_s}, deadline)
            answer = _receive(self._socket, deadline)
        except TimeoutError:
            raise CallLost(f"{function} did not answer within {limit_s:g} s; its process was killed") from None
        except ConnectionError:
            answer = None
        if answer is None:
            raise CallLost(f"the process of {function} died in the call (exit code {self._exit_code()})")
        return answer

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=1.0)
        return None


# ---- frames --------------------------------------------------------------------------------------


def _send(to: socket.socket, message: dict[str, Any], deadline: float | None = None) -> None:
    body = msgspec.json.encode(message)
    _limit(to, deadline)
    to.sendall(_HEADER.pack(len(body)) + body)


def _receive(source: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream."""
    header = _exactly(source, _HEADER.size, deadline)
    body = _exactly(source, _HEADER.unpack(header)[0], deadline) if header else b""
    return msgspec.json.decode(body) if body else None


def _exactly(source: socket.socket, n: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < n:
        _limit(source, deadline)
        part = source.recv(n - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        connection.settimeout(max(0.001, deadline - time.monotonic()))


# ---- in the process ------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    """Answers calls until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too, but its parent decides when it ends.
    with contextlib.suppress(ValueError, OSError):  # Some systems (macOS) do not let it be lowered.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while (request := _receive(connection)) is not None:
        # If the parent is gone nobody kills a call that hangs, so the kernel does, whatever Python is busy with.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + 1.0)
        answer = _run(request["function"], request["arguments"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(connection, answer)


def _run(function: str, arguments: list[Any]) -> dict[str, Any]:
    module, _, name = function.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
        msgspec.json.encode(value)
    except (Exception, SystemExit) as error:  # Whatever the library raises belongs to the caller.
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": value}


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
