"""Trackers: each row goes out once, and a tracker that fails never reaches training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.metrics.reader import RunReader
from asyncrl.metrics.trackers import SafeTracker, Tail, open_trackers
from asyncrl.metrics.watch import Watcher


class Notebook:
    """A tracker that writes down what it is told."""

    def __init__(self, fails_at: str = "") -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self._fails_at = fails_at

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        self._maybe_fail("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._maybe_fail("log")
        self.rows.append((step, dict(metrics)))

    def finish(self) -> None:
        self._maybe_fail("finish")
        self.finished += 1

    def _maybe_fail(self, where: str) -> None:
        if where == self._fails_at:
            raise ConnectionError(f"no network at {where}")


def test_every_row_is_logged_once_and_old_ones_never(new_run) -> None:
    run, notebook = new_run(), Notebook()
    run.step(1, [], reward=0.1)
    run.metric("hub", step=1, queued=1)
    with RunReader(run.run_dir) as reader:
        tail = Tail(reader, [notebook])
        run.step(2, [], reward=0.2)
        run.metric("generator-0", step=2, busy_s=0.5)
        tail.pull()
        tail.pull()
        run.step(3, [], reward=0.3)
        tail.finish()
    assert notebook.rows == [(2, {"reward": 0.2}), (2, {"generator-0/busy_s": 0.5}), (3, {"reward": 0.3})]
    assert notebook.finished == 1


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_failing_tracker_is_reported_once_and_left_alone(where: str, capsys) -> None:
    notebook = Notebook(fails_at=where)
    tracker = SafeTracker("wandb", notebook)
    tracker.start({}, Path())
    for step in range(3):
        tracker.log(step, {"reward": 1.0})
    tracker.finish()
    text = capsys.readouterr().err
    assert text.count("switched off") == 1
    assert f"ConnectionError: no network at {where}" in text
    assert tracker.failed


def test_a_tracker_that_is_not_installed_is_answered_with_the_extra(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = Config.model_validate({"track": {"wandb": "offline"}})
    (tracker,) = open_trackers(config, tmp_path)
    assert tracker.failed
    assert "pip install 'asyncrl[wandb]'" in capsys.readouterr().err


def test_no_tracker_is_opened_unless_asked_for(tmp_path: Path) -> None:
    assert open_trackers(Config(), tmp_path) == []


PLUGIN = """
import json

class Lines:
    def start(self, config, run_dir):
        self.file = open(run_dir / "lines.txt", "w")
        self.file.write(config["env"]["name"] + "\\n")

    def log(self, step, metrics):
        self.file.write(json.dumps([step, metrics]) + "\\n")

    def finish(self):
        self.file.close()

def half(): return Notes()

class Notes:
    def start(self, config, run_dir): pass

def away():
    import a_service_that_is_not_there

number = 3
"""


def _with_plugins(config: Config, *plugins: str) -> Config:
    return config.model_copy(update={"track": config.track.model_copy(update={"plugins": list(plugins)})})


def test_a_tracker_of_ones_own_gets_every_row(new_run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    run = new_run()
    with RunReader(run.run_dir) as reader:
        tail = Tail(reader, open_trackers(_with_plugins(run.config, f"{tmp_path}/mine.py:Lines"), run.run_dir))
        run.step(1, [], reward=0.5)
        tail.finish()
    assert (run.run_dir / "lines.txt").read_text() == 'arithmetic\n[1, {"reward": 0.5}]\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nobody", "no tracker named 'nobody'"),
        ("mine.py:half", "it made a Notes, which lacks log, finish"),
        ("mine.py:number", "it is a int, not a class"),
        ("mine.py:away", "No module named 'a_service_that_is_not_there'. Training goes on"),
    ],
)
def test_a_plug_in_that_is_no_tracker_is_reported_and_left_alone(
    capsys, monkeypatch, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    (tracker,) = open_trackers(_with_plugins(Config(), name), tmp_path)
    assert tracker.failed
    said = capsys.readouterr().err
    assert f"tracker {name} is switched off" in said
    assert text in said


def test_tensorboard_files_hold_the_rewards(new_run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(track={"tensorboard": True})
    with RunReader(run.run_dir) as reader:
        tail = Tail(reader, open_trackers(run.config, run.run_dir))
        for step in (1, 2):
            run.step(step, [], reward=step / 2)
        tail.finish()
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    tensors = events.Tensors("reward")
    assert [(event.step, event.tensor_proto.float_val[0]) for event in tensors] == [(1, 0.5), (2, 1.0)]


def test_wandb_works_without_a_network(new_run, capsys) -> None:
    pytest.importorskip("wandb")
    run = new_run(track={"wandb": "offline"})
    with RunReader(run.run_dir) as reader:
        (tracker,) = trackers = open_trackers(run.config, run.run_dir)
        tail = Tail(reader, trackers)
        run.step(1, [], reward=0.5)
        tail.finish()
    assert not tracker.failed, capsys.readouterr().err
    assert list((run.run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_the_watcher_follows_a_run_and_draws_its_last_state(new_run, capsys) -> None:
    run = new_run()
    with Watcher(run.config, run.run_dir, plain=True):
        run.step(1, [], reward=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "shares are busy/waiting/paused"
    assert lines[-1].startswith("step 1/5")


def test_the_live_view_draws_the_last_state_too(new_run, capsys) -> None:
    run = new_run()
    with Watcher(run.config, run.run_dir, plain=False):
        run.step(1, [], reward=0.5)
    assert "1/5" in capsys.readouterr().out
