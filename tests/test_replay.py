"""What a replay refuses before anything is loaded, and the algorithm that it makes of what is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import records, settings
from asyncrl.algo_launch import fitted
from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.replay import plan, with_algo
from asyncrl.resume import changed, store
from asyncrl.settings import UsageError
from asyncrl.trainers.presets import resolve


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten recorded steps, checkpoints of the fourth and the eighth, tokens of the first five removed."""
    config = config_of({"algo.name": "dapo"}).model_dump_json()
    journal = Journal.create(tmp_path / "run.db", "run", config)
    journal.write([records.step(step, step, 1.0, {"loss": 0.5}) for step in range(1, 11)])
    journal.close()
    for step in (4, 8):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000009.tmp").mkdir()
    return tmp_path


def config_of(typed: dict[str, str | None]) -> Config:
    config = settings.read([], typed)
    return fitted(config.model_copy(update={"algo": resolve(config.algo)}))


def algo(stored: dict[str, str | None], typed: dict[str, str | None]) -> Config | None:
    return with_algo(config_of(stored), settings.read([], typed).algo)


@pytest.mark.parametrize("steps", ["0..3", "3..2", "1..11", "11", "a..b", "1-3", ""])
def test_steps_that_were_not_recorded_are_refused(run: Path, steps: str, capsys) -> None:
    assert main(["replay", str(run), "--steps", steps]) == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        ["--learner.lr", "0.1"],
        ["--algo.filter", "none"],
        ["--algo.lost", "x"],
        ["--algo.loss", "x"],
        ["@file.toml"],
    ],
)
def test_settings_that_make_no_sense_are_refused(run: Path, typed: list[str], capsys) -> None:
    try:
        status = main(["replay", str(run), "--steps", "1..2", *typed])
    except SystemExit as left:
        status = int(str(left.code))
    assert status == 2
    assert typed[-1].removeprefix("--") in capsys.readouterr().err or "--" in typed[0]


def test_what_needs_removed_tokens_is_refused_and_what_can_be_replayed_is_said(run: Path) -> None:
    asked = settings.read([], {})
    assert plan(run, "2..3", asked).first == 2
    journal = Journal.open(run / "run.db")
    journal.write([records.run_key("reclaimed", "5")])
    journal.close()
    for steps in ("1", "2..3", "5..10", "8"):
        with pytest.raises(
            UsageError, match=r"tokens of steps 1 to 5 were removed .* steps from 9 on can be replayed"
        ):
            plan(run, steps, asked)
    assert plan(run, "9..10", asked).last == 10


def test_the_number_of_ranks_decides_whether_bits_must_be_equal(run: Path) -> None:
    assert plan(run, "1..2", settings.read([], {})).exact
    two = plan(run, "1..2", settings.read([], {"learner.ranks": "2"}))
    assert not two.exact
    assert two.config.learner.ranks == 2
    assert two.other is None


def test_a_step_is_replayed_with_the_settings_that_it_was_recorded_with(run: Path) -> None:
    journal = Journal.open(run / "run.db")
    journal.write([records.step(step, step, 3.0, {}) for step in (8, 9, 10)])
    stored = settings.from_json(journal.get("config_json"))
    journal.close()
    now, changes = changed(stored, [], {"learner.ranks": "2", "train.steps": "400"})
    store(run, stored, now, changes)
    journal = Journal.open(run / "run.db")  # It was written after step 7.
    journal.rows("UPDATE event SET time = 2.0 WHERE what = 'settings'")
    journal.close()
    before, after, both = (plan(run, steps, settings.read([], {})) for steps in ("5..7", "9..10", "5..10"))
    assert (before.exact, before.config.learner.ranks, before.config.train.steps) == (True, 1, 300)
    assert (after.exact, after.config) == (True, now)
    assert (both.exact, both.note) == (False, "learner.ranks was changed from 1 to 2 after step 7")


def test_a_journal_that_is_being_written_is_read(run: Path) -> None:
    writer = Journal.open(run / "run.db")
    writer.write([records.step(11, 11, 1.0, {})])
    assert plan(run, "11", settings.read([], {})).last == 11
    writer.close()


def test_the_runs_own_algorithm_is_no_other_one() -> None:
    stored = {"algo.name": "dapo", "algo.filter": "none", "algo.loss_args.clip_high": "0.3"}
    assert algo(stored, {}) is None
    assert algo(stored, {"algo.loss_args.clip_high": "0.3"}) is None


def test_one_key_changes_and_what_follows_from_it() -> None:
    stored = {"algo.name": "dapo", "algo.filter": "none", "algo.loss_args.clip_high": "0.3", "algo.kl": "k3"}
    changed = algo(stored, {"algo.loss": "reinforce"})
    assert changed is not None
    assert (changed.algo.loss, changed.algo.proximal, changed.algo.correction) == (
        "reinforce",
        "current",
        "token_tis",
    )
    assert (changed.algo.kl, changed.algo.filter, changed.algo.loss_args) == ("k3", "none", {})
    sharper = algo(stored, {"algo.loss_args.clip_low": "0.1"})
    assert sharper is not None
    assert sharper.algo.loss_args == {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": 10.0}


def test_a_preset_replaces_the_algorithm_but_not_what_was_sampled() -> None:
    stored = {"algo.name": "dapo", "algo.loss": "cispo", "algo.kl": "k3"}
    changed = algo(stored, {"algo.name": "rloo", "algo.aggregation": "token_mean"})
    assert changed is not None
    expected = config_of({"algo.name": "rloo", "algo.aggregation": "token_mean", "algo.filter": "equal_rewards"})
    assert changed.algo == expected.algo


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"algo.name": "remax"}, "greedy episode of each group"),
        ({"algo.loss": "reinforce", "algo.proximal": "behaviour"}, "no ratio"),
        ({"algo.greedy_baseline": "true"}, "sealed"),
        ({"algo.loss_args.clip_hihg": "0.3"}, "clip_high"),
    ],
)
def test_algorithms_that_cannot_be_replayed_are_refused(typed: dict[str, str | None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        algo({"algo.name": "dapo"}, typed)
