"""The watchdog in processes of its own: what it ends, what it leaves alone, and what the files say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import lifesigns
from asyncrl.lifesigns import LifeSigns
from asyncrl.overdue import StepWatch
from asyncrl.process import EXIT_STALLED, EXIT_USAGE

START = """
import asyncio, os, sys, threading, time
from pathlib import Path
import asyncrl.watchdog as module
from asyncrl.watchdog import watchdog
module.TICK_S, module.BEAT_S = 0.05, 0.1
watchdog.start("learner-0", folder=Path(sys.argv[1]))
"""
A_WAIT_THAT_NEVER_ENDS = """
def collective():
    time.sleep(60)  # The fault.
with watchdog.waiting("the export", 60):
    with watchdog.waiting("its step 7, collectives included", 0.2, "learner.stall_s"):
        collective()
"""
A_DEADLOCK = """
first, second = threading.Lock(), threading.Lock()
def crossed(one, other):
    with one, watchdog.waiting("the other lock", 0.4):
        time.sleep(0.1)  # By then the other thread holds the other lock.
        with other:
            pass
threading.Thread(target=crossed, args=(first, second), name="forwards").start()
threading.Thread(target=crossed, args=(second, first), name="backwards").start()
"""
A_BLOCKED_LOOP = """
async def inner():
    await asyncio.Event().wait()
async def outer():
    await inner()
def reads_a_file_without_await():
    time.sleep(60)  # The fault.
async def main():
    waiting = asyncio.create_task(outer(), name="lease-3")
    with watchdog.serving(0.4, loop=asyncio.get_running_loop()):
        await asyncio.sleep(0.1)  # The loop has shown that it turns.
        reads_a_file_without_await()
asyncio.run(main())
"""
WAITS_THAT_END = """
async def main():
    with watchdog.serving(0.5, loop=asyncio.get_running_loop()):
        for _ in range(3):
            with watchdog.waiting("a sleep", 0.5):
                await asyncio.sleep(0.2)  # A wait that ends in time.
        with watchdog.waiting("a task of a slow environment", 60, blocks_loop=True):
            time.sleep(0.8)  # Longer than the loop may be blocked otherwise.
        await asyncio.sleep(0.2)  # The watchdog looks once more.
asyncio.run(main())
"""
A_STOP_FROM_OUTSIDE = """
import signal, subprocess
with watchdog.waiting("an answer", 0.5):
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    return tmp_path / "stacks"


def _command(code: str, stacks: Path) -> list[str]:
    return [sys.executable, "-P", "-c", START + code, str(stacks)]


def _run(code: str, stacks: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(code, stacks), capture_output=True, text=True, timeout=60)


def _dumped(stacks: Path) -> str:
    (path,) = stacks.iterdir()
    assert path.name.startswith("learner-0-")
    return path.read_text()


def test_a_wait_that_does_not_end_ends_the_process_which_says_where_it_was(stacks: Path) -> None:
    done = _run(A_WAIT_THAT_NEVER_ENDS, stacks)
    assert done.returncode == EXIT_STALLED
    said = "learner-0 waited 0.2 s for its step 7, collectives included (limit learner.stall_s); it is ended"
    assert done.stdout.splitlines()[-1].startswith(f"{said}; stacks: {stacks}/learner-0-")
    dumped = _dumped(stacks)
    assert dumped.splitlines()[0] == said
    assert "in collective" in dumped
    assert "waits: the export" in dumped, "the outer wait is told too"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this disk without room")
def test_a_log_on_a_full_disk_does_not_keep_a_hung_process_alive(stacks: Path) -> None:
    command = _command(A_WAIT_THAT_NEVER_ENDS, stacks)
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == EXIT_STALLED, done.stderr


FAILS_BESIDE_A_THREAD_THAT_HANGS = """
import time
from concurrent.futures import ThreadPoolExecutor
from asyncrl.commands.options import at_once
from asyncrl.settings import UsageError
ThreadPoolExecutor(1).submit(time.sleep, 60)
def work():
    raise {error}("the reason")
at_once(work)
"""


@pytest.mark.parametrize(("error", "status"), [("RuntimeError", 1), ("UsageError", EXIT_USAGE)])
def test_a_process_that_fails_does_not_wait_for_a_thread_that_hangs(error: str, status: int) -> None:
    command = [sys.executable, "-P", "-c", FAILS_BESIDE_A_THREAD_THAT_HANGS.format(error=error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == status
    assert done.stderr.rstrip().endswith(": the reason")


def test_of_a_deadlock_both_threads_are_shown(stacks: Path) -> None:
    assert _run(A_DEADLOCK, stacks).returncode == EXIT_STALLED
    dumped = _dumped(stacks)
    assert dumped.count("in crossed") == 2
    assert "is forwards" in dumped
    assert "is backwards" in dumped


def test_a_blocked_event_loop_is_a_stall_whose_culprit_and_tasks_are_named(stacks: Path) -> None:
    done = _run(A_BLOCKED_LOOP, stacks)
    assert done.returncode == EXIT_STALLED
    assert "its event loop was blocked for 0.4 s (limit supervise.hang_s)" in done.stdout
    dumped = _dumped(stacks)
    assert "in reads_a_file_without_await" in dumped
    assert dumped.index("Task lease-3") < dumped.index("in outer") < dumped.index("in inner")


@pytest.mark.parametrize("code", [WAITS_THAT_END, A_STOP_FROM_OUTSIDE], ids=["in-time", "stopped-meanwhile"])
def test_waits_that_end_in_the_time_in_which_the_process_ran_leave_nothing(stacks: Path, code: str) -> None:
    done = _run(code, stacks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not stacks.exists()


WATCHED = """
import asyncio, ctypes, os, sys
from pathlib import Path
from asyncrl.watchdog import watchdog
watchdog.start("generator-0", int(sys.argv[1]), Path(sys.argv[2]))
async def main():
    with watchdog.serving(30, loop=asyncio.get_running_loop()):
        print("serving", file=sys.stderr, flush=True)
        if sys.argv[3] == "in C":
            ctypes.PyDLL(None).sleep(60)  # With the GIL.
        await asyncio.create_task(asyncio.sleep(60), name="lease-3")  # It is ended from outside.
asyncio.run(main())
"""


class Watched:
    """A child as the supervisor starts it."""

    def __init__(self, tmp_path: Path, how: str) -> None:
        log = tmp_path / "generator-0.log"
        self.stacks = tmp_path / "stacks"
        self.signs = LifeSigns("generator-0", log, self.stacks)
        with log.open("w") as stderr:
            command = [sys.executable, "-P", "-c", WATCHED, str(self.signs.fd), str(self.stacks), how]
            self.process = subprocess.Popen(command, stderr=stderr, pass_fds=[self.signs.fd])
        self.signs.handed_over()

    async def until_serving(self) -> None:
        async with asyncio.timeout(60):
            while not self.signs.serving:
                self.signs.silent(0.0)
                await asyncio.sleep(0.02)  # Signs of another process are read, not awaited.

    async def dumped(self) -> str:
        await self.signs.dump("the run is stopped", self.process.pid)
        return "".join(path.read_text() for path in sorted(self.stacks.iterdir()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.signs.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifesigns, "ANSWER_S", 0.6)


async def test_a_living_child_writes_its_stacks_itself_when_it_is_asked(tmp_path: Path) -> None:
    child = Watched(tmp_path, "waits")
    await child.until_serving()
    assert child.signs.silent(10.0) < 20.0
    dumped = await child.dumped()
    assert dumped.startswith("the run is stopped\n")
    assert "Task lease-3" in dumped
    child.end()


async def test_a_stopped_child_is_silent_and_the_kernel_says_why(tmp_path: Path) -> None:
    child = Watched(tmp_path, "waits")
    await child.until_serving()
    os.kill(child.process.pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)  # What it had written before is read first.
    child.signs.silent(0.0)
    assert [child.signs.silent(1.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    dumped = await child.dumped()
    assert dumped.startswith("the run is stopped\nit did not answer SIGUSR1")
    assert "T (stopped)" in dumped
    child.end()


async def test_a_child_that_hangs_in_c_with_the_gil_still_shows_its_python_stack(tmp_path: Path) -> None:
    child = Watched(tmp_path, "in C")
    async with asyncio.timeout(60):
        while "serving" not in (tmp_path / "generator-0.log").read_text():
            await asyncio.sleep(0.02)  # Another process writes it; there is no event to wait for.
    await asyncio.sleep(0.3)  # The call into C comes right after the text; nothing can be told from within.
    dumped = await child.dumped()
    assert "in main" in dumped
    assert "/proc" in dumped
    child.end()


def test_a_batch_that_is_not_answered_is_told_once() -> None:
    watch = StepWatch(600.0)
    watch.served(7, 1000.0)
    assert not watch.overdue(6, 1600.0)
    (told,) = watch.overdue(6, 1601.0)
    assert "the batch of step 7 was handed out 601 s ago" in str(told)
    assert not watch.overdue(6, 1700.0)
    watch.served(8, 1800.0)
    assert not watch.overdue(8, 9999.0), "it is done"
