"""Real runs: every process, socket, engine and database as in production, on a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.metrics.reader import RunReader
from asyncrl.toy import init_model

ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]
LIMIT_S = 240
FINAL = {"trained", "filtered", "failed"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model; with the filter off, random rewards are enough to train on."""
    return init_model(tmp_path_factory.mktemp("model") / "tiny", hidden=64, layers=2)


class Run:
    """A started `asyncrl train`, and what its journal says."""

    def __init__(self, folder: Path, name: str, process: subprocess.Popen[str]) -> None:
        self.dir = folder / name
        self.process = process

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return self.process.wait(LIMIT_S)

    def reader(self) -> RunReader:
        """Opens the journal for reading."""
        return RunReader(self.dir)

    def wait_for(self, what: str, happened: Callable[[RunReader], bool]) -> None:
        """Waits until the journal shows something."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if (self.dir / "run.db").exists():
                with self.reader() as reader:
                    if happened(reader):
                        return
            assert self.process.poll() is None, f"the run ended before {what}: {self.output()}"
            time.sleep(0.1)  # Another process writes the journal; there is no event to wait for.
        raise AssertionError(f"{what} did not happen within {LIMIT_S} s: {self.output()}")

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is done."""
        self.wait_for(f"step {step}", lambda reader: reader.last_step() >= step)

    def pid(self, name: str) -> int:
        """The process that was last started under a name."""
        with self.reader() as reader:
            started = [event for event in reader.events() if event.source == name and "pid" in event.detail]
        return int(started[-1].detail.split()[-1])

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one process of the run."""
        os.kill(self.pid(name), number)

    def output(self) -> str:
        """What the command printed, and the ends of the logs."""
        logs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.dir.glob("logs/*.log"))]
        return (self.dir.parent / f"{self.dir.name}.out").read_text() + "\n".join(logs)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Start]:
    """Starts `asyncrl train` with small settings; extra arguments override them.

    `fault` is Python code that every process of the run executes before anything else: it is how a test breaks
    what is sound, so that the product needs no hooks.
    """
    runs: list[Run] = []

    def go(*arguments: str, name: str = "run", resume: Path | None = None, fault: str = "") -> Run:
        command = [*ASYNCRL, "train", "--plain"]
        if resume is not None:
            command += ["--resume", str(resume)]
        else:
            command += ["--model", str(tiny_model), "--run.dir", str(tmp_path), "--name", name]
            command += ["--algo.filter", "none", "--steps", "12", "--checkpoint.every", "4"]
            command += ["--engine", "transformers"]  # whatever is installed
            command += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"]
            command += ["--generator.slots", "16", "--generator.ahead", "8", "--generator.max_model_len", "64"]
            command += ["--staleness.max_lag", "2", "--generator.chunk_tokens", "8", "--weights.timeout_s", "10"]
        environment = dict(os.environ)
        if fault:
            (tmp_path / "fault").mkdir()
            (tmp_path / "fault" / "sitecustomize.py").write_text(fault)
            paths = [str(tmp_path / "fault"), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        with (tmp_path / f"{name}.out").open("a") as out:
            process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out, text=True, env=environment)
        runs.append(Run(tmp_path, name, process))
        return runs[-1]

    yield go
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.fixture
def account() -> Callable[[RunReader, int, int], None]:
    """Checks that a run finished, each step once, each trained episode once, nothing live, nothing unexplained."""

    def check(reader: RunReader, steps: int, episodes_per_step: int) -> None:
        assert reader.status == "finished"
        assert [row.step for row in reader.steps()] == list(range(1, steps + 1))
        states = reader.episode_states()
        assert {state for state, _ in states} <= FINAL
        assert all(reason for (state, reason) in states if state != "trained")
        uses = reader.uses()
        assert set(uses.values()) == {1}
        assert set(uses) == reader.episode_ids("trained")
        failed = sum(count for (state, _), count in states.items() if state == "failed")
        assert len(uses) + failed >= steps * episodes_per_step

    return check


@pytest.fixture
def applied() -> Callable[[RunReader], dict[str, list[int]]]:
    """Versions that each generator has applied, in order."""

    def find(reader: RunReader) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for event in reader.events():
            if event.what == "weights_applied":
                found.setdefault(event.source, []).append(json.loads(event.detail)["version"])
        return found

    return find
