"""The list of runs in a folder, for `asyncrl runs`. It only reads. Called by the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from asyncrl.metrics.format import as_text
from asyncrl.metrics.reader import RunNotFound, RunReader


@dataclass(frozen=True, slots=True)
class RunLine:
    """What the list says of one run; a run that cannot be read has `problem` and nothing else."""

    path: Path
    status: str = ""
    reason: str = ""
    algo: str = ""
    env: str = ""
    step: int = 0
    steps: int = 0
    reward: float | None = None
    created: float = 0.0
    problem: str = ""


def list_runs(folder: str | Path) -> str:
    """The runs in a folder as a table, or what to do if there is none."""
    lines = find_runs(folder)
    if not lines:
        return f"no runs in {str(folder)!r}; `asyncrl train` makes one"
    table = as_text(_table(line for line in lines if not line.problem))
    return "\n".join([table, *(f"unreadable: {line.problem}" for line in lines if line.problem)])


def find_runs(folder: str | Path) -> list[RunLine]:
    """Every run in a folder, newest first; an empty list if there is no such folder."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        return []
    found = [_line(path) for path in folder.iterdir() if (path / "run.db").is_file()]
    return sorted(found, key=lambda line: line.created, reverse=True)


def _table(lines: Iterable[RunLine]) -> Table:
    table = Table("run", "state", "algo", "env", "step", "reward", "started", box=None, header_style="bold")
    for line in lines:
        reward = "" if line.reward is None else f"{line.reward:.3f}"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.created))
        state = f"{line.status} ({line.reason})" if line.reason else line.status
        progress = f"{line.step}/{line.steps}"
        table.add_row(str(line.path), state, line.algo, line.env, progress, reward, started)
    return table


def _line(path: Path) -> RunLine:
    """One unreadable journal is reported in its own line and does not hide the others."""
    try:
        with RunReader(path) as reader:
            config, rewards = reader.config(), reader.rewards(last=10)
            return RunLine(
                path=path,
                status=reader.status,
                reason=reader.reason,
                algo=config.get("algo", {}).get("name", ""),
                env=config.get("env", {}).get("name", ""),
                step=reader.last_step(),
                steps=config.get("train", {}).get("steps", 0),
                reward=sum(reward for _, reward in rewards) / len(rewards) if rewards else None,
                created=reader.created,
            )
    except RunNotFound as error:
        return RunLine(path=path, created=os.stat(path).st_mtime, problem=str(error))
