"""Sandboxes on this machine: a process of its own for each call, alone, in namespaces, or in bubblewrap.

Every kind runs `python -I -S` with an empty environment, its own session, a working directory of its own that is
removed, the limits of `Limits` set by the kernel, no privileges and none to be had (PR_SET_NO_NEW_PRIVS). Output
is read up to its limit. Whatever ends a call, all its processes are killed and awaited by `launcher.py`, which
also ends them when the trainer dies. As root, each call runs as a user of its own.

`process` does NOT stop the network, nor reading and writing files that everybody may read and write (`/tmp`), nor
filling a disk with many files. Not as root, it is the trainer's own user that runs the code, which can then kill
the trainer, read its environment and its files, and outlive the call: use it for code that you would run yourself.
`namespaces` and `bwrap` stop all of that, and share the kernel with the code: a fault of the kernel is a way out.
The limit of memory is for each process; `processes` times as much can be used.

Called by `asyncrl.envs.sandbox.base.open_sandbox`. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.envs.base import ToolFault
from asyncrl.envs.sandbox.base import How, Kind, Limits, Result
from asyncrl.envs.sandbox.inside import CPU_TIME, ERROR, FAULT, KILLED, OK

LAUNCHER = Path(__file__).with_name("launcher.py")
USERS = range(60578, 61184)
"""User ids that no convention gives to anybody (systemd's list of them, https://systemd.io/UIDS-GIDS)."""
GRACE = 5.0
"""Seconds that the supervisor has for killing and cleaning up."""
HINTS = {
    "process": "as root it needs a Python that every user may run, for example `apt-get install python3`",
    "namespaces": "it needs root with CAP_SYS_ADMIN, or unprivileged user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)",
    "bwrap": "install bubblewrap (`apt-get install bubblewrap`, 0.8 or newer), and allow user namespaces "
    "or run as root with CAP_SYS_ADMIN",
}
TRIAL = b"import json, random, decimal; print(json.dumps(6 * 7), end='')"


def open_local(kind: Kind, limits: Limits) -> Local:
    """A sandbox of a local kind; ToolFault if it does not work here."""
    python, reason = tried(kind)
    if reason:
        raise ToolFault(f"the sandbox {kind!r} does not work here: {reason}. {HINTS[kind]}")
    return Local(kind, python, limits)


def strongest(kinds: Sequence[Kind]) -> Kind:
    """The first kind that works here; ToolFault if none does."""
    for kind in kinds:
        if not tried(kind)[1]:
            return kind
    reasons = "; ".join(f"{kind!r}: {tried(kind)[1]} ({HINTS[kind]})" for kind in kinds)
    raise ToolFault(f"no sandbox works here. {reasons}. Or install 'asyncrl[monty]' and set the sandbox 'monty'")


@functools.cache
def tried(kind: Kind) -> tuple[str, str]:
    """A Python that the kind works with here and "", or "" and why it does not; by a real run, once."""
    if sys.platform != "linux":
        return "", f"it is for Linux, and this is {sys.platform}"
    if kind == "bwrap" and not shutil.which("bwrap"):
        return "", "there is no program `bwrap` on the PATH"
    reasons = []
    candidates = [os.path.realpath(sys.executable), "/usr/local/bin/python3", "/usr/bin/python3"]
    for python in dict.fromkeys(path for path in candidates if os.access(path, os.X_OK)):
        with spare_user() as uid:
            command = command_line(kind, python, Limits(), uid, len(TRIAL))
            try:
                answer = subprocess.run(command, input=TRIAL, capture_output=True, env={}, timeout=30)
            except (OSError, subprocess.TimeoutExpired) as error:
                reasons.append(f"{python}: {error}")
                continue
        if answer.returncode == OK and answer.stdout == b"42":
            return python, ""
        reasons.append(f"{python}: {answer.stderr.decode(errors='replace').strip()[-300:]}")
    return "", "; ".join(reasons)


@contextlib.contextmanager
def spare_user() -> Iterator[int]:
    """A user id that no other call on this machine has, for as long as the context lasts; 0 if this is not root.

    An abstract Unix socket stands for each id: the kernel gives it to one process, and takes it from a dead one.
    """
    if os.geteuid() != 0:
        yield 0
        return
    start = os.getpid() * 31 % len(USERS)
    for uid in [*USERS[start:], *USERS[:start]]:
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0asyncrl-sandbox-user-{uid}")
            except OSError:
                continue
            yield uid
            return
    raise ToolFault(
        f"all {len(USERS)} user ids for sandboxes are in use; set a smaller number of sandboxes at a time"
    )


def command_line(kind: Kind, python: str, limits: Limits, uid: int, code: int) -> list[str]:
    """The launcher's."""
    spec = {
        "kind": kind, "parent": os.getpid(), "uid": uid, "code": code, "temporary": tempfile.gettempdir(),
        "bwrap": shutil.which("bwrap") or "", "seconds": limits.seconds, "memory_mb": limits.memory_mb,
        "processes": limits.processes, "file_mb": limits.file_mb,
    }  # fmt: skip
    options = ["-I", "-S", "-X", "utf8"]
    return [python, *options, str(LAUNCHER), *(f"{name}={value}" for name, value in spec.items())]


class Local:
    """A `Sandbox` of one of the local kinds."""

    def __init__(self, kind: Kind, python: str, limits: Limits) -> None:
        self.kind = kind
        self.limits = limits
        self._python = python
        self._calls: set[_Call] = set()

    async def run(self, code: str, stdin: str = "") -> Result:
        """See `Sandbox.run`. When the wait is cancelled, the call is ended first."""
        source = code.encode(errors="replace")
        with spare_user() as uid:
            command = command_line(self.kind, self._python, self.limits, uid, len(source))
            started = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={}, start_new_session=True
                )
            except OSError as error:
                raise ToolFault(f"the sandbox {self.kind!r} cannot start a process: {error}") from error
            call = _Call(process, self.limits)
            self._calls.add(call)
            try:
                await call.watch(source + stdin.encode(errors="replace"))
            finally:
                try:
                    await _to_its_end(call.end())
                finally:
                    self._calls.discard(call)
        return call.result(time.monotonic() - started)

    async def close(self) -> None:
        """Ends the calls that still run."""
        await asyncio.gather(*(call.end() for call in self._calls))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits it also when cancelled meanwhile: the call's user id is not free before, for all that have it die."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class _Call:
    """A call that runs: its process, what it wrote so far, and why it was stopped, if it was."""

    def __init__(self, process: Process, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._stopped: How | None = None

    async def watch(self, given: bytes) -> None:
        """Feeds the process and reads from it, until it has ended or, after a limit and some grace, anyway."""
        process = self._process
        assert process.stdout is not None  # All three were asked for.
        assert process.stderr is not None
        alarm = asyncio.get_running_loop().call_later(self._limits.seconds, self._stop, "timeout")
        try:
            async with asyncio.timeout(self._limits.seconds + GRACE):
                await asyncio.gather(
                    self._feed(given),
                    self._read(process.stdout, "stdout"),
                    self._read(process.stderr, "stderr"),
                    process.wait(),
                )
        except TimeoutError:
            self._stopped = self._stopped or "timeout"
        finally:
            alarm.cancel()

    async def end(self) -> None:
        """Ends the process, if it has not, and awaits it: by its supervisor, or else with its supervisor."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(GRACE):
                    await self._process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()

    def result(self, seconds: float) -> Result:
        """What came of it; ToolFault if the sandbox could not be set up."""
        stdout, stderr = (bytes(part).decode(errors="replace") for part in self._output.values())
        code = self._process.returncode
        if code == FAULT and self._stopped is None:
            raise ToolFault(f"the sandbox could not be set up: {stderr.strip()[-500:]}")
        outcomes: dict[int | None, How] = {OK: "ok", ERROR: "error", KILLED: "killed", CPU_TIME: "timeout"}
        how = self._stopped or outcomes.get(code, "killed")
        if how == "error" and stderr.rpartition("\n")[0].rpartition("\n")[2].startswith("MemoryError"):
            how = "memory"
        return Result(stdout, stderr, how, seconds)

    def _stop(self, how: How) -> None:
        if self._stopped is None and self._process.returncode is None:
            self._stopped = how
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # It has just ended.
            self._process.send_signal(number)

    async def _feed(self, given: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The code need not read its stdin.
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    async def _read(self, stream: asyncio.StreamReader, name: str) -> None:
        kept = self._output[name]
        while part := await stream.read(1 << 16):
            room = self._limits.output_bytes - len(kept)
            kept += part[:room]
            if len(part) > room:
                self._stop("output")
