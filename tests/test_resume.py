"""A run that goes on: which settings may change, what is written of it, and a finished run with more steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl import cli, keys, launch, records, settings
from asyncrl.config import Config
from asyncrl.groups import Rules
from asyncrl.journal import Journal
from asyncrl.messages import Chunk, EpisodeEnd, Task
from asyncrl.process import hold_run
from asyncrl.recovery import restore
from asyncrl.resume import changed, store
from asyncrl.scheduler import Scheduler
from asyncrl.settings import UsageError


@pytest.fixture
def stored() -> Config:
    return settings.read([], {"learner.ranks": "2", "hub.lease_s": "5", "algo.loss_args.clip_high": "0.3"})


@pytest.fixture
def run_dir(tmp_path: Path, stored: Config) -> Path:
    launch.create(stored, tmp_path / "run")
    journal = Journal.open(tmp_path / "run" / "run.db")
    journal.write([records.batch(step, [], [], [], 0, 0.0) for step in range(1, 9)])
    journal.close()
    return tmp_path / "run"


def test_settings_of_where_and_how_long_change_and_all_others_stay(stored: Config, tmp_path: Path) -> None:
    (tmp_path / "again.toml").write_text("[hub]\nlease_s = 5.0\n[algo.loss_args]\nclip_high = 0.3\n")
    flags: dict[str, str | None] = {"learner.ranks": "1", "generator.gpus": "[]", "train.steps": "400"}
    config, changes = changed(stored, [str(tmp_path / "again.toml")], flags)
    assert changes == {"train.steps": (300, 400), "learner.ranks": (2, 1)}
    assert (config.learner.ranks, config.train.steps, config.hub.lease_s) == (1, 400, 5.0)
    assert changed(stored, [], {}) == (stored, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [("learner.lr", "0.1"), ("algo.loss_args.clip_high", "0.2"), ("model.path", "/other"), ("run.seed", "7")],
)
def test_what_is_trained_cannot_change_and_the_error_lists_what_can(stored: Config, key: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(stored, [], {key: value, "learner.ranks": "1"})
    text = str(caught.value)
    assert text.startswith(".".join(key.split(".")[:2]))
    assert "learner.ranks" not in text
    assert "[train] steps" in text
    assert "[hub] all" in text


def test_settings_are_checked_against_those_that_the_run_has_not_against_the_defaults(stored: Config) -> None:
    changed(stored, [], {"hub.heartbeat_s": "1.5"})
    with pytest.raises(UsageError, match=r"hub.lease_s = 5.0 must be at least three heartbeats"):
        changed(stored, [], {"hub.heartbeat_s": "2"})


def test_a_change_is_one_event_and_the_runs_configuration(run_dir: Path, stored: Config) -> None:
    config, changes = changed(stored, [], {"train.steps": "9", "hub.curve": "on"})
    store(run_dir, stored, config, changes)
    assert launch.stored(run_dir) == config
    journal = Journal.open(run_dir / "run.db")
    [(what, detail)] = journal.rows("SELECT what, detail FROM event")
    journal.close()
    assert what == "settings"
    assert json.loads(detail) == {"train.steps": [300, 9], "hub.curve": ["auto", "on"]}
    assert keys.read(run_dir / keys.NAME).server_secret  # Made, for its hub needs them only now.


def test_a_run_cannot_end_before_where_it_is(run_dir: Path, stored: Config) -> None:
    config, changes = changed(stored, [], {"train.steps": "8"})
    with pytest.raises(UsageError, match="come to step 8 already"):
        store(run_dir, stored, config, changes)
    assert launch.stored(run_dir) == stored


def test_a_run_that_is_being_run_does_not_change(run_dir: Path, stored: Config) -> None:
    lock = hold_run(run_dir)
    with pytest.raises(UsageError, match="being run by another hub"):
        store(run_dir, stored, *changed(stored, [], {"learner.ranks": "1"}))
    assert cli.main(["train", "--resume", str(run_dir), "--plain"]) == 2
    lock.close()
    assert launch.stored(run_dir) == stored
    assert not (run_dir / "logs").exists()  # Nothing was started.


def test_a_dry_run_says_what_would_change_and_changes_nothing(
    run_dir: Path, stored: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--learner.ranks", "1", "--hub.curve", "on"]
    assert cli.main(["train", "--resume", str(run_dir), "--dry-run", *changes]) == 0
    told = capsys.readouterr().out
    assert told.startswith('learner.ranks: 2 -> 1\nhub.curve: "auto" -> "on"\n')
    assert "1 rank(s) on cpu" in told
    assert launch.stored(run_dir) == stored


def go_on(scheduler: Scheduler, journal: Journal) -> None:
    """Plays one generator and the learner until all steps are done; every episode has one token."""
    scheduler.generator_joined("g", "1", 100, scheduler.version, [], 0.0)
    while not scheduler.done:
        scheduler.generator_version("g", scheduler.version)
        while scheduler.may_admit():
            scheduler.admit(Task("task", [], None), 0.0)
        for grant in scheduler.grant(0.0):
            chunk = Chunk(grant.lease_id, grant.episode_id, 0, 1, scheduler.version, True)
            scheduler.chunk(chunk)
            scheduler.records.append(records.chunk(chunk, np.zeros(1, "<i4").tobytes(), bytes(4)))
            scheduler.end(EpisodeEnd(grant.lease_id, grant.episode_id, 1, "completed", 1.0, 1), 0.0)
        sealed = scheduler.seal(0.0)
        assert sealed is not None, f"stuck after step {scheduler.step}"
        scheduler.step_done(sealed.step)
        scheduler.records.append(records.step(sealed.step, sealed.batch_id, 0.0, {}))
        scheduler.published(sealed.step)
        scheduler.records.append(records.version(sealed.step, 0.0))
        journal.write(scheduler.take_records())
        scheduler.check()
    scheduler.finish("run ended")
    journal.write(scheduler.take_records())


@pytest.mark.parametrize("reuse", [1, 2, 3])
@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("steps", [3, 4])
def test_a_finished_run_that_gets_more_steps_takes_them_with_new_episodes(
    run_dir: Path, stored: Config, tmp_path: Path, reuse: int, max_lag: int, steps: int
) -> None:
    rules = Rules(
        groups_per_step=2, group_size=2, max_lag=max_lag, over_age="train", reuse=reuse, order="fifo", steps=steps,
        lease_s=10.0, heartbeat_s=1.0, seed=3, ranks=1, token_budget=100, minibatches=1, greedy=False,
    )  # fmt: skip
    journal = Journal.create(tmp_path / "run.db", "run", stored.model_dump_json())
    go_on(restore(rules, lambda rewards: None, journal, 0.0), journal)
    closed = dict(journal.rows("SELECT episode_id, state FROM episode"))
    assert not restore(rules, lambda rewards: None, journal, 0.0).may_admit()  # Only its export may be left.
    go_on(restore(replace(rules, steps=steps + 5), lambda rewards: None, journal, 0.0), journal)
    after = dict(journal.rows("SELECT episode_id, state FROM episode"))
    journal.close()
    assert {episode: after[episode] for episode in closed} == closed
    assert set(after.values()) <= {"trained", "filtered"}
    assert len(after) > len(closed)
