"""Kill, stop or hold any process in the middle of a run: it goes on, and every admitted episode is accounted for.

    |             | kill -9 | SIGSTOP beyond the deadline | clean stop                                      |
    |-------------|---------|-----------------------------|-------------------------------------------------|
    | generator   | first   | second: its leases lapse    | third: SIGTERM, hands in what it has sampled    |
    | hub         | first   | test_watchdog               | third: SIGTERM, as a kill: all it says is durable |
    | learner     | first   | test_watchdog               | third: SIGTERM, as a kill: from its checkpoint  |
    | supervisor  | third   | its processes run on        | third: SIGINT                                   |
    | all at once | test_storm | nothing runs             | third: SIGINT                                   |

The tests are named in the order of this file. Each run meets several faults, one after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

GRANTED = "SELECT count(*) FROM lease WHERE generator = 'generator-1'"
HOLDS = "SELECT count(*) FROM lease WHERE state = 'active' AND generator = 'generator-1'"
RESUMED = "SELECT count(*) FROM (SELECT episode_id FROM lease GROUP BY episode_id HAVING count(*) > 1)"
ODD = """
SELECT count(*) FROM (
    SELECT length, sum(n) AS n, count(*) AS chunks, max(seq) AS last FROM chunk JOIN episode USING (episode_id)
    WHERE state = 'trained' GROUP BY episode_id
) WHERE length != n OR chunks != last + 1
"""
"""Trained episodes whose tokens are not one gapless row of chunks, each there once."""
STEPS = 40
LONG = ("--sampling.max_tokens", "48", "--generator.chunk_tokens", "2", "--steps", str(STEPS))
"""Episodes that are likely to be in their middle at any moment, and enough of them for the slower generator."""


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def _pids(run) -> set[int]:
    return {run.pid(name) for name in ("hub", "learner-0", "generator-0", "generator-1")}


def _hold_in_the_middle(run) -> None:
    """Stops generator-1 while it holds leases that are not at their end."""
    run.wait_for("generator-1 at work", lambda reader: reader._one(GRANTED) > 0)
    for _ in range(40):
        run.kill("generator-1", signal.SIGSTOP)
        time.sleep(0.2)  # What it had sent before reaches the journal.
        with run.reader() as reader:
            if reader._one(HOLDS):
                return
        run.kill("generator-1", signal.SIGCONT)
        time.sleep(0.02)  # It runs on for a moment, into another part of its episodes.
    raise AssertionError("generator-1 never held a lease when it was looked at")


def _summary(run) -> str:
    command = [sys.executable, "-P", "-m", "asyncrl", "episodes", str(run.dir), "--summary"]
    summary = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert summary.returncode == 0, summary.stdout + summary.stderr
    return summary.stdout


def _starts(reader) -> dict[str, int]:
    counts = reader.event_counts()
    return {name: n for (name, what), n in counts.items() if what == "started" and name != "hub"}


def test_killed_processes_lose_no_episode_and_their_episodes_continue_from_their_prefixes(start, account) -> None:
    # ReMax: its greedy baselines are leased and accounted for like all episodes.
    run = start("--algo", "remax", *LONG)
    run.wait_for_step(2)
    _hold_in_the_middle(run)
    run.kill("generator-1")
    run.wait_for_step(5)
    run.kill("hub")
    run.wait_for_step(7)
    run.kill("learner-0")
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, STEPS, 20)
        assert reader._one("SELECT count(*) FROM episode WHERE greedy AND state = 'trained'") == STEPS * 4
        assert reader._one(RESUMED) == reader._one("SELECT count(*) FROM lease WHERE state = 'lapsed'") > 0
        assert reader._one(ODD) == 0
        assert _starts(reader) == {"generator-0": 1, "generator-1": 2, "learner-0": 2}


def test_what_a_held_generator_sends_after_its_leases_lapsed_is_refused_and_counted(start, account) -> None:
    # Longer than the lease, but no hang yet for the supervisor.
    run = start("--hub.lease_s", "3", "--weights.timeout_s", "3", "--supervise.hang_s", "120", *LONG)
    run.wait_for_step(3)
    pids = _pids(run)
    _hold_in_the_middle(run)
    run.wait_for(
        "its episodes were done elsewhere", lambda reader: reader.last_step() >= 8 and not reader._one(HOLDS)
    )
    run.kill("generator-1", signal.SIGCONT)
    run.wait_for("late messages", lambda reader: reader.refused() > 0)
    assert run.wait() == 0, run.output()
    assert all(_gone(pid) for pid in pids)
    with run.reader() as reader:
        account(reader, STEPS, 16)
        assert reader._one(ODD) == 0
        lags = reader.lag_histogram()
        assert sum(count for lag, count in lags.items() if lag > 0) > 0
        assert max(lags) <= 2 + 1 + STEPS
        late = f"{reader.refused()} messages of lapsed leases, refused"
    assert late in _summary(run)
    assert late in run.output()
    assert (run.dir / "model" / "config.json").is_file()


def test_stopped_processes_and_a_stopped_or_killed_run_go_on_where_they_were(start, account) -> None:
    run = start(*LONG)
    run.wait_for_step(2)
    run.kill("generator-0", signal.SIGTERM)
    run.wait_for("the generator left", lambda reader: ("generator-0", "left") in reader.event_counts())
    run.kill("hub", signal.SIGTERM)
    run.wait_for_step(4)
    run.kill("learner-0", signal.SIGTERM)
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output()
    with run.reader() as reader:
        assert reader.status == "stopped"
        stopped_at = reader.last_step()
    assert 5 <= stopped_at < STEPS

    again = start(resume=run.dir)
    again.wait_for_step(min(STEPS - 1, stopped_at + 2))
    pids = _pids(again)
    again.process.kill()
    again.process.wait()
    deadline = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)  # They are not our children, so nobody tells us when they end.
    assert all(_gone(pid) for pid in pids)

    last = start(resume=run.dir)
    assert last.wait() == 0, last.output()
    with run.reader() as reader:
        account(reader, STEPS, 16)
        assert reader._one(ODD) == 0


def test_a_process_that_cannot_be_kept_alive_fails_the_run_with_its_reason(start) -> None:
    run = start("--supervise.max_restarts", "0", "--steps", "400")
    run.wait_for_step(2)
    run.kill("generator-0")
    assert run.wait() == 1, run.output()
    assert "generator-0 died 1 times" in run.output()
    assert "asyncrl train --resume" in run.output()
    assert "adds up" in _summary(run)
