"""A run goes on as something else: longer, on other ranks, with its newest checkpoint damaged."""

from __future__ import annotations

import json
import os

import pytest

pytestmark = pytest.mark.slow

FULL_ONCE = """
import errno, os

if os.environ.get("RANK") == "0":
    real, calls = os.fsync, []

    def full_once(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    os.fsync = full_once
"""
"""The first file that the learner wants to have on disk does not fit."""


def test_a_finished_run_goes_on_longer_with_other_ranks_from_the_checkpoint_before_the_damaged_one(
    start, account
) -> None:
    run = start("--steps", "6", "--checkpoint.every", "2", fault=FULL_ONCE)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        [failed] = [event.detail for event in reader.events() if event.what == "checkpoint_failed"]
    assert "step_000002 could not be written" in failed
    assert "No space left" in failed
    newest = run.dir / "checkpoints" / "step_000006"
    os.truncate(next(newest.glob("*.distcp")), 1000)
    refused = start("--learner.lr", "0.1", resume=run.dir)
    assert refused.wait() == 2
    assert "learner.lr = 0.1 (the run has 0.001) cannot change" in refused.output()

    again = start("--learner.ranks", "2", "--train.steps", "10", "--checkpoint.keep", "3", resume=run.dir)
    assert again.wait() == 0, again.output()
    with run.reader() as reader:
        account(reader, 10, 16)
        assert reader.config()["learner"]["ranks"] == 2
        told = {event.what: event.detail for event in reader.events()}
        kept = json.loads(reader._value("checkpoints"))
    assert json.loads(told["settings"]) == {
        "train.steps": [6, 10],
        "learner.ranks": [1, 2],
        "checkpoint.keep": [2, 3],
    }
    assert "step_000006 was passed over" in told["checkpoint_passed_over"]
    assert "has 1000 bytes" in told["checkpoint_passed_over"]
    assert "going on from step 4" in told["checkpoint_passed_over"]
    found = sorted(path.name for path in (run.dir / "checkpoints").iterdir())
    assert found == ["step_000006", "step_000006.passed_over", "step_000008", "step_000010"]
    assert kept == [6, 8, 10]
