"""The supervisor's view of one child's life: its signs, its silence, and its stacks while it is still there.

    child's watchdog thread ──a byte each second──▶ socket pair ──▶ supervisor: silent for how long?
                            ◀──"your stacks, for this reason"──

A child that answers writes its stacks itself, tasks and waits included. From one that does not, the supervisor
takes what can be had from outside: what `faulthandler` writes to the child's log on SIGUSR1, even in the middle of
C code, and what the kernel says of it. It kills and restarts nothing. Used by `asyncrl.supervisor`; the other end
is `asyncrl.watchdog`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from asyncrl.watchdog import DUMPED, SERVING, dump_path

ANSWER_S = 2.0
"""Longest wait for a child's own dump, and for what it writes on a signal."""
LOOK_S = 0.1
"""Interval of looking for it."""


class LifeSigns:
    """One child process's signs of life.

    Args:
        name: of the process.
        log: its log, to which it writes its stacks on a signal.
        folder: RUN/stacks.
    """

    def __init__(self, name: str, log: Path, folder: Path) -> None:
        self._name, self._log, self._folder = name, log, folder
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._silent_s = 0.0
        self.serving = False
        """Whether its start is over."""
        self.dumped = False
        """Whether it has written its stacks: asked, or because it stalled."""

    @property
    def fd(self) -> int:
        """File descriptor of the child's end."""
        return self._theirs.fileno()

    def handed_over(self) -> None:
        """The child has its end, or could not be started."""
        self._theirs.close()

    def close(self) -> None:
        """The child has ended."""
        self._listen()
        self._ours.close()

    def silent(self, elapsed: float) -> float:
        """Seconds of silence so far; `elapsed` have passed since the last call."""
        self._silent_s = 0.0 if self._listen() else self._silent_s + elapsed
        return self._silent_s

    async def dump(self, line: str, pid: int) -> None:
        """Has the stacks of the child, process `pid`, written to RUN/stacks, under the given first line."""
        self.dumped = False
        with suppress(OSError):  # It has just ended, or reads nothing any more.
            self._ours.send(line.encode())
        for _ in range(int(ANSWER_S / LOOK_S)):
            self._listen()
            if self.dumped:
                return
            await asyncio.sleep(LOOK_S)  # The answer is a byte among others; in a moment there is one, or never.
        told = await self._told_on_signal(pid)
        with suppress(OSError):  # A full disk must not keep a hung process alive.
            dump_path(self._folder, self._name).write_text(f"{line}\n{told}\n{_kernels_view(pid)}")

    def _listen(self) -> bool:
        """Reads what has come; whether there was anything."""
        try:
            signs = self._ours.recv(65536)
        except OSError:  # Nothing yet, or the child's end is gone: its exit says so.
            return False
        self.serving |= SERVING in signs
        self.dumped |= DUMPED in signs
        return bool(signs)

    async def _told_on_signal(self, pid: int) -> str:
        """What the child writes to its log when it gets SIGUSR1."""
        try:
            before = size = self._log.stat().st_size
            os.kill(pid, signal.SIGUSR1)
            for _ in range(int(ANSWER_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)  # Nobody tells when a signal handler has written all.
                last, size = size, self._log.stat().st_size
                if before < last == size:
                    break
            with self._log.open("rb") as log:
                log.seek(before)
                told = log.read().decode(errors="replace")
        except OSError as error:
            return f"it cannot be asked: {error}"
        return told or "it did not answer SIGUSR1: one that is stopped (State: T) or waits in the kernel cannot"


def _kernels_view(pid: int) -> str:
    """What /proc says of a process, as far as it can be read: its stack in the kernel only by root."""
    parts = []
    for name in ("status", "wchan", "stack"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
        parts.append(f"/proc/{pid}/{name}:\n{text}\n")
    return "\n".join(parts)
