"""Trackers besides run.db: Weights & Biases, TensorBoard and plug-ins, fed from run.db by a tail.

Processes report to the hub only; the tail reads new rows by id in the supervisor's process and hands them
on, so one writer serves the whole run and no tracker is on training's path. A tracker that fails is
reported once and left alone from then on: run.db has everything anyway. A tracker of your own is a plug-in
(`track.plugins`): a class or function without arguments that makes a `Tracker`. Called by `asyncrl.metrics.watch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.envs.registry import PluginError, load_plugin
from asyncrl.metrics.reader import RunReader

GROUP = "asyncrl.trackers"
"""Entry points of trackers."""
EXTRAS = ("wandb", "tensorboard")
"""Trackers that are part of asyncrl, each with an extra of its name."""


class Tracker(Protocol):
    """Where metrics go."""

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Called once, with the run's resolved configuration."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes metrics of a learner step; the same step may be logged more than once."""

    def finish(self) -> None:
        """Called once, at the end of the run."""


class WandbTracker:
    """Weights & Biases; `offline` needs no network and no account."""

    def __init__(self, mode: str, project: str) -> None:
        self._mode, self._project = mode, project

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Starts a run whose files lie in the run's folder."""
        import wandb

        self._run = wandb.init(
            project=self._project, name=run_dir.name, dir=str(run_dir), config=dict(config), mode=self._mode
        )
        # Several rows belong to one step and arrive late, which wandb's own step counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log({"step": step, **metrics})

    def finish(self) -> None:
        """Flushes and closes the run."""
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard event files in `<run>/tensorboard`; needs neither torch nor TensorFlow."""

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Opens the event file."""
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Flushes and closes the event file."""
        self._writer.flush()
        self._writer.close()


class PluginTracker:
    """A tracker of somebody else's, loaded and made when the run starts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Loads, makes and starts the plug-in.

        Raises:
            PluginError: it cannot be loaded, or what it makes is no tracker.
        """
        make = load_plugin(GROUP, self._name, "tracker")
        if not callable(make):
            raise PluginError(f"it is a {type(make).__name__}, not a class or function that makes a tracker")
        self._tracker: Tracker = make()
        missing = [method for method in ("start", "log", "finish") if not hasattr(self._tracker, method)]
        if missing:
            raise PluginError(
                f"it made a {type(self._tracker).__name__}, which lacks {', '.join(missing)}; see "
                "asyncrl.metrics.trackers.Tracker"
            )
        self._tracker.start(config, run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a row on."""
        self._tracker.log(step, metrics)

    def finish(self) -> None:
        """Ends the plug-in."""
        self._tracker.finish()


class SafeTracker:
    """A fault boundary around a tracker: its first failure is printed, and it is not called again."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self.failed = False

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Starts the tracker."""
        self._guard(lambda: self._tracker.start(config, run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs to the tracker."""
        self._guard(lambda: self._tracker.log(step, metrics))

    def finish(self) -> None:
        """Finishes the tracker."""
        self._guard(self._tracker.finish)

    def _guard(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:
            self.failed = True
            hint = f"; install the extra: pip install 'asyncrl[{self._name}]'" if self._name in EXTRAS else ""
            print(
                f"tracker {self._name} is switched off for this run: {type(error).__name__}: {error}"
                f"{hint if isinstance(error, ImportError) else ''}. Training goes on; run.db has every metric.",
                file=sys.stderr,
                flush=True,
            )


def open_trackers(config: Config, run_dir: Path) -> list[SafeTracker]:
    """Starts the trackers that `[track]` asks for."""
    wanted: dict[str, Tracker] = {}
    if config.track.wandb != "off":
        wanted["wandb"] = WandbTracker(config.track.wandb, config.track.wandb_project)
    if config.track.tensorboard:
        wanted["tensorboard"] = TensorBoardTracker()
    for name in config.track.plugins:
        wanted[name] = PluginTracker(name)
    trackers = [SafeTracker(name, tracker) for name, tracker in wanted.items()]
    for tracker in trackers:
        tracker.start(config.model_dump(mode="json"), run_dir)
    return trackers


class Tail:
    """Hands rows of run.db that are new since the last `pull` to trackers, each row once.

    A step's metrics keep their names (`reward`, `loss`); a process's are prefixed with its name
    (`generator-0/busy_s`).
    """

    def __init__(self, reader: RunReader, trackers: Sequence[Tracker]) -> None:
        self._reader, self._trackers = reader, trackers
        self._step = reader.last_step()
        self._metric_id = reader.last_metric_id()

    def pull(self) -> None:
        """Reads and logs what is new."""
        if not self._trackers:
            return
        for step in self._reader.steps(after=self._step):
            self._step = step.step
            self._log(step.step, step.metrics)
        for row in self._reader.metrics(self._metric_id):
            self._metric_id = row.id
            self._log(row.step, {f"{row.source}/{name}": value for name, value in row.metrics.items()})

    def finish(self) -> None:
        """Logs what is left and ends the trackers."""
        self.pull()
        for tracker in self._trackers:
            tracker.finish()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)
