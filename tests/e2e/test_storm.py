"""Faults that meet other faults: what single kills in the middle of a sound run do not show.

`tests/benchmarks/storm.py` does the same at random for ten minutes.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

NAMES = ("hub", "learner-0", "generator-0", "generator-1")


def _started(name: str, times: int):
    return lambda reader: reader.event_counts().get((name, "started"), 0) >= times


def test_faults_that_meet_other_faults_lose_no_episode(start, account) -> None:
    run = start("--supervise.max_restarts", "20", "--supervise.backoff_s", "0.05", "--checkpoint.every", "2")
    # The hub, while the others have said hello and wait for its welcome or are just joining.
    run.wait_for("all are started", _started("generator-1", 1))
    run.kill("hub")
    run.wait_for_step(2)
    # Two at once, of which one has to tell the other what it lost; then one again while it starts.
    run.kill("hub")
    run.kill("learner-0")
    run.wait_for("the learner is started again", _started("learner-0", 2))
    run.kill("learner-0")
    run.wait_for_step(4)
    # The supervisor, while it restarts a generator; resumed while the old processes may still be ending.
    run.kill("generator-0")
    run.process.kill()
    run.process.wait()
    again = start(resume=run.dir)
    again.wait_for_step(6)
    # The machine is gone: all at once, nobody can tell of it.
    for name in NAMES:
        again.kill(name)
    again.process.kill()
    again.process.wait()
    last = start(resume=run.dir)
    assert last.wait() == 0, last.output()
    with run.reader() as reader:
        account(reader, 12, 16)
