"""The pool with real processes: what hangs, dies, raises or prints, and that nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from asyncrl.envs.process_pool import CallLost, CallRaised, ProcessPool
from asyncrl.envs.threads import outcome_of

LIMIT_S = 30.0


@pytest.fixture
def pool():
    made = ProcessPool("os:getpid", workers=1)
    yield made
    made.close()


def _gone(pid: int) -> bool:
    """Whether the process is neither alive nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_call_returns_what_the_function_returned_and_the_process_is_used_again(pool: ProcessPool) -> None:
    assert pool.call("math:gcd", 12, 18, limit_s=LIMIT_S) == 6
    first, second = (pool.call("os:getpid", limit_s=LIMIT_S) for _ in range(2))
    assert first == second != os.getpid()


def test_what_the_function_raises_is_told_by_type_and_text_and_harms_no_later_call(pool: ProcessPool) -> None:
    with pytest.raises(CallRaised, match=r"ZeroDivisionError: .*zero"):
        pool.call("operator:truediv", 1, 0, limit_s=LIMIT_S)
    with pytest.raises(CallRaised, match="SystemExit"):
        pool.call("sys:exit", 3, limit_s=LIMIT_S)
    assert pool.call("math:gcd", 12, 18, limit_s=LIMIT_S) == 6


def test_a_call_that_hangs_is_killed_and_waited_for_and_the_next_has_a_new_process(pool: ProcessPool) -> None:
    pid = pool.call("os:getpid", limit_s=LIMIT_S)
    with pytest.raises(CallLost, match=r"time:sleep did not answer within 0\.2 s"):
        pool.call("time:sleep", 60, limit_s=0.2)
    assert _gone(pid)
    assert pool.call("os:getpid", limit_s=LIMIT_S) != pid


def test_a_computation_that_holds_the_interpreter_is_killed_all_the_same(pool: ProcessPool) -> None:
    pool.call("os:getpid", limit_s=LIMIT_S)
    with pytest.raises(CallLost, match="did not answer"):
        pool.call("builtins:pow", 7, 10**9, limit_s=0.3)


def test_a_process_that_dies_in_a_call_is_told_with_its_exit_code(pool: ProcessPool) -> None:
    with pytest.raises(CallLost, match=r"died in the call .exit code -6"):
        pool.call("os:abort", limit_s=LIMIT_S)
    assert pool.call("math:gcd", 12, 18, limit_s=LIMIT_S) == 6


def test_too_much_memory_is_an_error_of_the_function_not_of_the_machine(pool: ProcessPool) -> None:
    with pytest.raises(CallRaised, match="MemoryError"):
        pool.call("builtins:bytearray", 2**40, limit_s=LIMIT_S)


def test_what_the_function_prints_and_what_json_cannot_say_do_not_disturb_the_answers(pool: ProcessPool) -> None:
    assert pool.call("builtins:print", "noise", limit_s=LIMIT_S) is None
    with pytest.raises(CallRaised, match="complex"):
        pool.call("builtins:complex", 1, 2, limit_s=LIMIT_S)
    assert pool.call("builtins:len", "x" * 200_000, limit_s=LIMIT_S) == 200_000


def test_calls_from_many_threads_share_the_processes() -> None:
    pool, found = ProcessPool("os:getpid", workers=2), []
    threads = [
        threading.Thread(target=lambda: found.append(pool.call("os:getpid", limit_s=LIMIT_S))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 8
    assert len(set(found)) <= 2
    pool.close()
    assert all(_gone(pid) for pid in found)


async def test_callers_that_are_stopped_lose_no_process_place(pool: ProcessPool) -> None:
    def sleep() -> object:
        return pool.call("time:sleep", 0.3, limit_s=LIMIT_S)

    async def stopped() -> None:
        with pytest.raises(TimeoutError):
            await outcome_of(sleep, awaits=False, limit_s=0.1, room=asyncio.Semaphore(1))

    pool.call("os:getpid", limit_s=LIMIT_S)
    await asyncio.gather(*(stopped() for _ in range(2)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pool.acall("time:sleep", 60, limit_s=LIMIT_S)
    assert await pool.acall("math:gcd", 12, 18, limit_s=LIMIT_S) == 6


def test_a_library_that_cannot_be_imported_is_told_at_the_first_call() -> None:
    pool = ProcessPool("no_such_library:load", workers=1)
    with pytest.raises(CallRaised, match="No module named 'no_such_library'"):
        pool.call("os:getpid", limit_s=LIMIT_S)


ORPHAN = """
import os, threading, time
from asyncrl.envs.process_pool import ProcessPool
pool = ProcessPool("os:getpid", workers=1)
print(pool.call("os:getpid", limit_s=30), flush=True)
threading.Thread(target=lambda: pool.call("builtins:pow", 7, 10**9, limit_s=0.5), daemon=True).start()
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""


def test_a_call_that_hangs_ends_by_itself_when_its_parent_was_killed() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pid, until = int(done.stdout), time.monotonic() + 20
    while not _gone(pid) and time.monotonic() < until:
        with open(f"/proc/{pid}/stat") as stat:  # An orphan may stay a zombie of a container's first process.
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.05)
    assert _gone(pid)
