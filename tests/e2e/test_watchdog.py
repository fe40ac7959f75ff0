"""Processes that hang are found, shown and started again; a run that hangs for good ends and says where."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from asyncrl.metrics.reader import RunReader

pytestmark = pytest.mark.slow

HANGS_IN_ITS_STEP = """
import sys
if "learner" in sys.orig_argv:
    import time
    from asyncrl.learner.update import Trainer
    train = Trainer.train
    def waits_for_a_rank_that_never_comes(self, batch, tokens, logprobs, step):
        while step == 5:
            time.sleep(60)  # The fault.
        return train(self, batch, tokens, logprobs, step)
    Trainer.train = waits_for_a_rank_that_never_comes
"""


def _told(reader: RunReader, victim: str) -> bool:
    said = f"{victim}: no sign of life for 4 s (supervise.hang_s); killed"
    return any(event.what == "died" and event.detail.startswith(said) for event in reader.events())


def _applies(reader: RunReader) -> bool:
    """Until its start is over a process may be silent for longer."""
    return any(event.what == "weights_applied" and event.source == "generator-0" for event in reader.events())


def test_stopped_processes_are_killed_for_their_silence_and_no_episode_is_lost(start, account) -> None:
    # With one generator the run waits for whoever is stopped, and cannot end meanwhile.
    run = start("--supervise.hang_s", "4", "--generator.count", "1")
    run.wait_for("generator-0 at work", _applies)
    for victim in ("generator-0", "hub", "learner-0"):
        run.kill(victim, signal.SIGSTOP)
        run.wait_for(f"the end of the silent {victim}", partial(_told, victim=victim))
        with run.reader() as reader:
            step = reader.last_step()
        run.wait_for_step(step + 1)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        died = [event.source for event in reader.events() if event.what == "died"]
    assert died == ["generator-0", "hub", "learner-0"]
    for victim in died:
        (path,) = (run.dir / "stacks").glob(f"{victim}-*.txt")
        assert path.read_text().startswith(f"{victim}: no sign of life for 4 s")
        assert "T (stopped)" in path.read_text()


def test_a_learner_that_hangs_in_its_step_fails_the_run_which_shows_what_everybody_did(start) -> None:
    run = start("--learner.stall_s", "5", "--supervise.max_restarts", "0", fault=HANGS_IN_ITS_STEP)
    assert run.wait() == 1, run.output()
    stacks = run.dir / "stacks"
    output = run.output()
    assert "learner-0 died 1 times" in output
    assert (
        "learner-0 waited 5 s for its step 5, collectives included (limit learner.stall_s); it is ended" in output
    )
    assert f"what all processes did then is in {stacks}" in output
    shown = {path.name.rsplit("-", 2)[0]: path.read_text() for path in stacks.iterdir()}
    assert sorted(shown) == ["generator-0", "generator-1", "hub", "learner-0", "supervisor"]
    assert "in waits_for_a_rank_that_never_comes" in shown["learner-0"]
    assert "Task commit" in shown["hub"]
    assert all("Task heartbeat" in shown[name] for name in ("generator-0", "generator-1"))
