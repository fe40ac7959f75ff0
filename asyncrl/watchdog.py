"""The watchdog of a process: it names what the process waits for, and ends a process that waits for too long.

One daemon thread in each process of a run. It ends nothing in order, for what hangs cannot be unwound: it writes
the stacks of all threads and tasks to RUN/stacks, prints why, and leaves with `EXIT_STALLED`; the supervisor
starts the process again. It is also the process's sign of life: a byte each second to the supervisor, which kills
a child that gives none (stopped, swapping, or in C with the GIL: `asyncrl.lifesigns`). Only time in which its own
thread ran counts: a process that was stopped for an hour has waited for nobody meanwhile.

    | who                | waits for                            | limit                     | and then          |
    |--------------------|--------------------------------------|---------------------------|-------------------|
    | any event loop     | its own next turn                    | supervise.hang_s          | watchdog          |
    | supervisor         | a sign of life of each child         | supervise.hang_s          | kills, restarts   |
    |                    | the same, while a child starts       | supervise.start_timeout_s | kills, restarts   |
    |                    | a child's orderly end                | supervise.grace_s         | kills             |
    |                    | the end of a child that it killed    | KILLED_S (`supervisor`)   | run fails         |
    | learner            | the hub's first answer               | supervise.start_timeout_s | run fails         |
    | generator          | the hub's, the scorer's first answer | supervise.start_timeout_s | it ends           |
    | both               | their start: model, engine, ranks    | OPEN_S                    | watchdog          |
    | learner rank       | a batch                              | learner.batch_s           | stacks, run fails |
    |                    | a step with its collectives; weights | learner.stall_s           | watchdog          |
    |                    | the copy of a checkpoint, the export | checkpoint.timeout_s      | watchdog          |
    |                    | a checkpoint that is being written   | checkpoint.timeout_s      | run fails         |
    | publisher          | a group, a broadcast                 | weights.timeout_s         | a new group       |
    | generator          | its engine                           | generator.stall_s         | it ends           |
    |                    | an environment, a reward             | env., reward.timeout_s    | the episode fails |
    |                    | the hub, once it is gone             | HUB_GONE_S (its process)  | it ends           |
    | hub                | a task of the environment            | TASK_S (`tasks`)          | watchdog          |
    |                    | a commit                             | SLOW_COMMIT_S (`commit`)  | an event          |
    |                    | its last commit                      | supervise.grace_s         | watchdog          |
    |                    | StepDone, once a batch is handed out | learner.stall_s           | an event          |
    | scorer             | its model, for one batch             | reward.timeout_s          | it ends           |

All learner ranks start again with one of them. `kill -USR1 PID` makes any of these processes write the stacks of
its threads to its standard error, even from the middle of C code. Free of torch. Started by the process commands
and the supervisor; where it is not started, `waiting` keeps a note and nothing more.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from asyncrl.process import EXIT_STALLED

TICK_S = 0.25
"""Interval at which the deadlines are looked at."""
BEAT_S = 1.0
"""Interval of the signs of life, and of the mark that an event loop renews."""
OPEN_S = 3600.0
"""Longest start of a learner rank or a generator: a large model from a slow disk, an engine that compiles."""

STARTING, SERVING, DUMPED = b"s", b"r", b"w"
"""What a process tells its supervisor: two signs of life, and that its stacks are written."""


@dataclass(frozen=True, slots=True)
class _Wait:
    what: str
    limit_s: float
    setting: str
    since: float
    thread: str
    blocks_loop: bool


class Watchdog:
    """What watches over this process. There is one, `watchdog`; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._name = "asyncrl"
        self._folder: Path | None = None
        self._link: socket.socket | None = None
        self._sign = STARTING
        self._told = -BEAT_S
        self._clock = 0.0
        """Seconds during which the thread ran."""
        self._lock = threading.Lock()
        self._numbers = count()
        self._waits: dict[int, _Wait] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hang_s = 0.0
        self._mark = 0.0
        self._thread: threading.Thread | None = None

    def start(self, name: str, link: int | None = None, folder: Path | None = None) -> None:
        """Begins to watch, once in a process and before anything heavy is imported.

        Args:
            name: of the process, for example generator-0.
            link: file descriptor of the socket to the supervisor; None: there is none.
            folder: where stacks are written; None: RUN/stacks once the run's folder is known (`serving`), until
                then a folder of this user's in the system's temporary one.
        """
        self._name, self._folder = name, folder
        if link is not None:
            os.set_inheritable(link, False)
            self._link = socket.socket(fileno=link)
            self._link.setblocking(False)
        faulthandler.register(signal.SIGUSR1, file=2)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    @contextmanager
    def waiting(
        self, what: str, limit_s: float, setting: str = "", *, blocks_loop: bool = False
    ) -> Iterator[None]:
        """Names a wait: if the block is not left within the limit, the process ends with its stacks written.

        Args:
            what: what is waited for, as in "learner-0 waited 600 s for ...".
            limit_s: seconds.
            setting: the setting or constant that the limit is, for the message.
            blocks_loop: the event loop's thread itself waits, and its loop is excused meanwhile.
        """
        thread = threading.current_thread().name
        with self._lock:
            number = next(self._numbers)
            self._waits[number] = _Wait(what, limit_s, setting, self._clock, thread, blocks_loop)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[number]
                self._mark = max(self._mark, self._clock) if blocks_loop else self._mark

    @contextmanager
    def serving(
        self, hang_s: float, run_dir: Path | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> Iterator[None]:
        """The start is over: within the block a silent process is a hung one, and so is one whose loop is blocked.

        Args:
            hang_s: longest time that `loop` may be blocked (`supervise.hang_s`).
            run_dir: the run's folder, if it is on this machine.
            loop: the running event loop, if the process has one.
        """
        if self._folder is None and run_dir is not None and run_dir.is_dir():
            self._folder = run_dir / "stacks"
        self._sign, self._loop, self._hang_s = SERVING, loop, hang_s
        self._tell(self._sign)  # At once: until it is heard, a process that stops has the time of a start.
        if loop is not None:
            self._renew(loop)
        try:
            yield
        finally:
            self._loop = None

    def last_words(self, line: str) -> str:
        """Writes all stacks, and returns the line with where they are; a full disk is no reason to stay."""
        try:
            return f"{line}; stacks: {self.dump(line)}"
        except OSError as error:
            return f"{line}; the stacks cannot be written: {error}"

    def dump(self, line: str) -> Path:
        """Writes the stacks of all threads and tasks under the given first line; returns the file.

        Raises:
            OSError: it cannot be written.
        """
        folder = self._folder or Path(tempfile.gettempdir()) / f"asyncrl-stacks-{os.getuid()}"
        path = dump_path(folder, self._name)
        with self._lock:
            waits = list(self._waits.values())
        with path.open("a") as file:
            print(line, file=file)
            for wait in waits:
                passed = f"for {self._clock - wait.since:.1f} s of {wait.limit_s:g} s"
                print(f"waits: {wait.what}, {passed}, in thread {wait.thread}", file=file)
            for thread in threading.enumerate():
                print(f"thread 0x{thread.ident or 0:016x} is {thread.name}", file=file)
            file.flush()
            faulthandler.dump_traceback(file)
            _dump_tasks(self._loop, file)
        self._tell(DUMPED)
        return path

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)  # The thread is a clock; nothing tells it that something did not happen.
            now = time.monotonic()
            self._clock += min(now - last, BEAT_S)
            last = now
            overdue = self._overdue()
            if overdue is not None:
                # Not print: the lock of sys.stdout may belong to what hangs.
                with suppress(OSError):  # The log may be on a full disk.
                    os.write(1, f"{self.last_words(overdue)}\n".encode(errors="backslashreplace"))
                os._exit(EXIT_STALLED)
            if self._clock - self._told >= BEAT_S:
                self._told = self._clock
                self._tell(self._sign)
            self._answer()

    def _overdue(self) -> str | None:
        """What has taken too long, if anything has."""
        with self._lock:
            waits = list(self._waits.values())
        for wait in waits:
            if self._clock - wait.since > wait.limit_s:
                setting = f" (limit {wait.setting})" if wait.setting else ""
                return f"{self._name} waited {wait.limit_s:g} s for {wait.what}{setting}; it is ended"
        excused = any(wait.blocks_loop for wait in waits)
        if self._loop is not None and not excused and self._clock - self._mark > self._hang_s:
            limit = f"{self._hang_s:g} s (limit supervise.hang_s)"
            return f"{self._name}: its event loop was blocked for {limit} by code that does not await; it is ended"
        return None

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        self._mark = self._clock
        if self._loop is loop:
            loop.call_later(BEAT_S, self._renew, loop)

    # ---- the supervisor --------------------------------------------------------------------------

    def _tell(self, sign: bytes) -> None:
        if self._link is not None:
            # Without room it has plenty of signs to read; without a supervisor nobody reads them.
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                self._link.send(sign)

    def _answer(self) -> None:
        """The supervisor asks for the stacks by sending their first line."""
        if self._link is None:
            return
        try:
            line = self._link.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            line = b""
        if not line:
            self._link = None  # The supervisor is gone, and without the kernel's help this process outlived it.
            return
        with suppress(OSError):  # Without an answer it takes what it can get from outside.
            self.dump(line.decode(errors="replace"))


def dump_path(folder: Path, name: str) -> Path:
    """The file for the stacks of the process `name`, as of now, in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}.txt"


def _dump_tasks(loop: asyncio.AbstractEventLoop | None, file: TextIO) -> None:
    """Where the tasks of a loop wait, outermost coroutine first; the loop may run meanwhile."""
    try:
        tasks = list(asyncio.all_tasks(loop)) if loop is not None else []
    except RuntimeError as error:  # They changed all the time while they were listed.
        print(f"\nthe tasks cannot be listed: {error}", file=file)
        return
    for task in tasks:
        print(f"\nTask {task.get_name()} (outermost call first):", file=file)
        awaited: Any = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            code = frame.f_code
            print(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}', file=file)
            awaited = awaited.cr_await


watchdog = Watchdog()
"""This process's."""
