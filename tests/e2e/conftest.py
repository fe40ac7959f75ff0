"""Real runs: every process, socket, engine and database as in production, on a tiny random model."""

from __future__ import annotations

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
            time.sleep(0.1)
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
    """Starts `asyncrl train` with small settings; extra arguments override them."""
    runs: list[Run] = []

    def go(*arguments: str, name: str = "run", resume: Path | None = None) -> Run:
        command = [*ASYNCRL, "train", "--plain"]
        if resume is not None:
            command += ["--resume", str(resume)]
        else:
            command += ["--model", str(tiny_model), "--run.dir", str(tmp_path), "--name", name]
            command += ["--algo.filter", "none", "--steps", "12", "--checkpoint.every", "4"]
            command += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"]
            command += ["--generator.slots", "16", "--generator.ahead", "8", "--generator.max_model_len", "64"]
            command += ["--staleness.max_lag", "2", "--generator.chunk_tokens", "8", "--weights.timeout_s", "10"]
        with (tmp_path / f"{name}.out").open("a") as out:
            process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out, text=True)
        runs.append(Run(tmp_path, name, process))
        return runs[-1]

    yield go
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
