"""Kill any process in the middle of a run: it goes on, and every admitted episode is accounted for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_run_trains_every_episode_once_and_leaves_no_process(start, account) -> None:
    run = start()
    run.wait_for_step(2)
    names = ["hub", "learner-0", "generator-0", "generator-1"]
    pids = {run.pid(name) for name in names}
    assert len(pids) == 4
    assert run.wait() == 0, run.output()
    assert all(_gone(pid) for pid in pids)
    with run.reader() as reader:
        account(reader, 12, 16)
        lags = reader.lag_histogram()
        assert sum(count for lag, count in lags.items() if lag > 0) > 0
        assert max(lags) <= 2 + 1 + 12
    assert (run.dir / "model" / "config.json").is_file()


def test_greedy_baselines_are_leased_and_accounted_for_like_all_episodes(start, account) -> None:
    run = start("--algo", "remax", "--steps", "10")
    run.wait_for_step(4)
    run.kill("generator-1")
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 10, 20)
        greedy = reader._one("SELECT count(*) FROM episode WHERE greedy AND state = 'trained'")
        assert greedy == 10 * 4


@pytest.mark.parametrize("victim", ["generator-0", "hub", "learner-0"])
def test_a_killed_process_loses_no_episode(start, account, victim: str) -> None:
    run = start()
    run.wait_for_step(5)
    run.kill(victim)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        started = [event for event in reader.events() if event.source == victim and "pid" in event.detail]
        assert len(started) == 2


def test_episodes_of_a_killed_generator_continue_from_their_prefixes(start, account) -> None:
    run = start("--sampling.max_tokens", "48", "--generator.chunk_tokens", "2")
    run.wait_for_step(3)
    for _ in range(40):
        # Stopped, it holds what it holds: kill it only in the middle of episodes.
        run.kill("generator-1", signal.SIGSTOP)
        time.sleep(0.2)  # What it had sent before reaches the journal.
        with run.reader() as reader:
            held = reader._one("SELECT count(*) FROM lease WHERE state = 'active' AND generator = 'generator-1'")
        if held:
            break
        run.kill("generator-1", signal.SIGCONT)
        time.sleep(0.02)  # It runs on for a moment, into another part of its episodes.
    run.kill("generator-1")
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        resumed = reader._one(
            "SELECT count(*) FROM (SELECT episode_id FROM lease GROUP BY episode_id HAVING count(*) > 1)"
        )
        lapsed = reader._one("SELECT count(*) FROM lease WHERE state = 'lapsed'")
    assert resumed == lapsed > 0


def test_a_stopped_run_resumes_and_finishes(start, account) -> None:
    run = start()
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output()
    with run.reader() as reader:
        assert reader.status == "stopped"
        stopped_at = reader.last_step()
    assert 5 <= stopped_at < 12
    again = start(resume=run.dir)
    assert again.wait() == 0, again.output()
    with run.reader() as reader:
        account(reader, 12, 16)


def test_a_killed_supervisor_leaves_no_orphans_and_the_run_resumes(start, account) -> None:
    run = start()
    run.wait_for_step(4)
    pids = [run.pid(name) for name in ("hub", "learner-0", "generator-0", "generator-1")]
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)  # They are not our children, so nobody tells us when they end.
    assert all(_gone(pid) for pid in pids)
    again = start(resume=run.dir)
    assert again.wait() == 0, again.output()
    with run.reader() as reader:
        account(reader, 12, 16)


def test_a_generator_that_hangs_in_the_middle_does_not_stop_the_others(start, account) -> None:
    run = start("--hub.lease_s", "3", "--weights.timeout_s", "3")
    run.wait_for_step(3)
    run.kill("generator-0", signal.SIGSTOP)
    run.wait_for_step(8)
    run.kill("generator-0", signal.SIGCONT)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)


def test_a_process_that_cannot_be_kept_alive_fails_the_run_with_its_reason(start) -> None:
    run = start("--supervise.max_restarts", "0", "--steps", "400")
    run.wait_for_step(2)
    run.kill("generator-0")
    assert run.wait() == 1, run.output()
    assert "generator-0 died 1 times" in run.output()
    assert "asyncrl train --resume" in run.output()
    command = [sys.executable, "-P", "-m", "asyncrl", "episodes", str(run.dir), "--summary"]
    summary = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert summary.returncode == 0, summary.stderr
