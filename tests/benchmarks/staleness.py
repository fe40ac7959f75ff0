"""How much staleness does each off-policy correction bear? The toy, trained on data of a forced lag.

One process: the real learner (`Trainer`), the embedded engine and the generators' episode loop take turns. The
batch of step s is sampled, whole, with the weights of version max(0, s - 1 - lag), and its tokens say so; lag 0
is on-policy training. A batch is 16 groups of 8, drawn until 16 groups pass DAPO's filter (from at most four
times as many tasks). Then the model is evaluated as `asyncrl eval` does it, at temperature 1 on held-out tasks.
Another seed is other tasks and other draws from the same warm-started model.

All methods are the preset `dapo` but for what `METHODS` says; mu is the policy that sampled. `default` is the
preset itself: PPO's clip of pi / mu, asymmetric, at most 10 |A| for a token of negative advantage. `none`
ignores the lag: the gradient is that of -A log pi. `token_tis`, `icepop` and `m2po` weight it by pi / mu: capped
at 2; dropped outside 0.5 to 5; capped at 10, without the tokens that the second moment rules out. `decoupled` is
PPO's clip of pi / prox times prox / mu, capped at 2, where log prox is interpolated between mu and pi by lag
(`proximal = loglinear`). `cispo` clips pi / mu at 1.2 and weights by it.

Every finished cell is added to the JSON file at once, under a lock: an interrupted grid goes on where it was,
and several processes may fill one file, a seed each. A run whose cells are all there prints the table and draws
the chart.

    python tests/benchmarks/staleness.py --json FILE [--steps 120] [--method M ...] [--lag L ...] [--seed S ...]
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from actor import Actor, Ends
from chart import Axes, line_chart, nice_range

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.envs.rewards import Rewards
from asyncrl.evaluate import evaluate
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import World
from asyncrl.learner import dist
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.export import export
from asyncrl.learner.update import Trainer
from asyncrl.toy import default_model

METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"proximal": "current", "correction": "none"},
    "token_tis": {"proximal": "current", "correction": "token_tis"},
    "icepop": {"proximal": "current", "correction": "icepop"},
    "decoupled": {"proximal": "loglinear", "correction": "token_tis"},
    "m2po": {
        "proximal": "current",
        "rejection": "m2po",
        "correction": "token_tis",
        "correction_args": {"cap": 10.0},
    },
    "cispo": {"loss": "cispo"},
}
LAGS = (0, 4, 16, 64)
SEEDS = (0, 1, 2)
GROUPS, GROUP_SIZE = 16, 8
REPORTED = ("ess", "kl", "ratio_max", "weight_mean", "masked", "clipped", "lag_mean")
"""Metrics of the learner that a cell keeps: means over the last half of the steps."""


@dataclass(frozen=True)
class Grid:
    """What is the same in all cells of a file."""

    steps: int
    tasks: int
    lr: float

    def config(self, method: str, lag: int, seed: int) -> Config:
        """A cell's configuration: the defaults but for method, batch and slots."""
        return Config.model_validate(
            {
                "run": {"seed": seed},
                "algo": {"name": "dapo"} | METHODS[method],
                "train": {"steps": self.steps, "groups_per_step": GROUPS, "group_size": GROUP_SIZE},
                "staleness": {"max_lag": lag, "max_token_age": max(64, lag)},
                "generator": {"count": 1, "slots": GROUPS * GROUP_SIZE},
                "learner": {"lr": self.lr},
            }
        )


# ---- one cell ------------------------------------------------------------------------------------


async def train(config: Config, model: Path, lag: int, out: Path) -> dict[str, Any]:
    """Trains a cell and writes its model to `out`; what the steps reported."""
    ends = Ends()
    engine = await asyncio.to_thread(open_engine, config, str(model), asyncio.get_running_loop())
    environment, rewards = load(config.env.name, config.env.args), Rewards(config.reward)
    world = World(config, environment, ChatFormat(model), engine, ends, rewards)
    actor, trainer = Actor(config, world, ends), Trainer(config, model)
    history: deque[dict[str, torch.Tensor]] = deque(maxlen=lag + 1)
    rows: list[dict[str, float]] = []
    stopped = 0
    try:
        for step in range(1, config.train.steps + 1):
            history.append({name: tensor.detach().clone() for name, tensor in trainer.weights()})
            batch = await actor.batch(step, history[0], max(0, step - 1 - lag))
            rows.append(trainer.train(*batch, step) | {"sampled_reward": statistics.fmean(actor.rewards)})
    except NotFinite as error:
        stopped = error.step
    finally:
        await engine.close()
    export(trainer, model, out)
    last = rows[len(rows) // 2 :]
    report: dict[str, Any] = {name: round(statistics.fmean(row[name] for row in last), 4) for name in REPORTED}
    curve = [
        round(statistics.fmean(r["sampled_reward"] for r in rows[i : i + 10]), 3) for i in range(0, len(rows), 10)
    ]
    return report | {"stopped_at": stopped, "sampled_reward": curve}


def cell(grid: Grid, model: Path, method: str, lag: int, seed: int) -> dict[str, Any]:
    """Trains and evaluates one cell."""
    config = grid.config(method, lag, seed)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, dist.alone():
        out = Path(folder) / "model"
        report = asyncio.run(train(config, model, lag, out))
        held_out = asyncio.run(evaluate(config, str(out), grid.tasks))
    about = {"method": method, "lag": lag, "seed": seed, "reward": round(held_out.reward, 4)}
    return about | report | {"seconds": round(time.perf_counter() - started, 1)}


# ---- the file of cells ---------------------------------------------------------------------------


@contextmanager
def opened(path: Path, grid: Grid) -> Iterator[dict[str, Any]]:
    """The report, for this process alone while the `with` block lasts; what was changed in it is then written.

    Raises:
        SystemExit: the file is of a grid with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"groups": GROUPS, "group_size": GROUP_SIZE, **vars(grid)}
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # The folder is locked, not the file, which every writer replaces.
        fcntl.flock(folder, fcntl.LOCK_EX)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"transformers": transformers.__version__}
        report: dict[str, Any] = {"benchmark": "staleness", "date": date.today().isoformat(), "versions": versions}
        report |= {"settings": settings, "methods": METHODS, "start": None, "cells": []}
        if path.exists():
            report = json.loads(path.read_text())
        if report["settings"] != settings:
            raise SystemExit(f"{path} is of {report['settings']}, not {settings}; give another --json")
        yield report
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(fresh, path)
    finally:
        os.close(folder)


def summary(cells: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float, int]]:
    """Mean, standard error over seeds, and number of seeds, by method and lag."""
    found = {}
    for method, lag in itertools.product(METHODS, LAGS):
        rewards = [c["reward"] for c in cells if (c["method"], c["lag"]) == (method, lag)]
        if rewards:
            error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
            found[method, lag] = (statistics.fmean(rewards), error, len(rewards))
    return found


def table(found: dict[tuple[str, int], tuple[float, float, int]]) -> str:
    """Methods by lags, as Markdown."""
    lines = ["| method | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |", "|---|" + "---:|" * len(LAGS)]
    for method in METHODS:
        row = [found.get((method, lag)) for lag in LAGS]
        if any(row):
            cells = ["" if value is None else f"{value[0]:.3f} ± {value[1]:.3f}" for value in row]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(found: dict[tuple[str, int], tuple[float, float, int]], grid: Grid, start: float) -> str:
    """Reward against lag, as SVG."""
    place = {lag: math.log2(1 + lag) for lag in LAGS}
    series = {
        method: [(place[lag], *found[method, lag][:2]) for lag in LAGS if (method, lag) in found]
        for method in METHODS
        if any((method, lag) in found for lag in LAGS)
    }
    ends = [y + sign * error for points in series.values() for _, y, error in points for sign in (-1, 1)]
    axes = Axes(
        f"Held-out reward after {grid.steps} steps on stale data, learning rate {grid.lr:g}",
        "lag of all training data in steps, on a scale of log2(1 + lag)",
        "mean reward ± standard error over seeds",
        [(place[lag], str(lag)) for lag in LAGS],
        nice_range([*ends, start]),
    )
    return line_chart(axes, series, ("before training", start))


def main() -> None:
    """Fills the chosen cells, prints the table, draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the cells; the chart goes beside it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tasks", type=int, default=512, help="held-out tasks")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learner's default")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--lag", type=int, choices=LAGS, action="append")
    parser.add_argument("--seed", type=int, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(options.steps, options.tasks, options.lr)
    model = default_model(Config(), print)
    with opened(options.json, grid) as report:
        if report["start"] is None:
            report["start"] = round(
                asyncio.run(evaluate(grid.config("none", 0, 0), str(model), grid.tasks)).reward, 4
            )
    wanted = itertools.product(options.seed or SEEDS, options.lag or LAGS, options.method or METHODS)
    for seed, lag, method in wanted:
        with opened(options.json, grid) as report:
            done = {(c["method"], c["lag"], c["seed"]) for c in report["cells"]}
        if (method, lag, seed) not in done:
            filled = cell(grid, model, method, lag, seed)
            print("  ".join(f"{key}={value}" for key, value in filled.items()), flush=True)
            with opened(options.json, grid) as report:
                report["cells"].append(filled)
    with opened(options.json, grid) as report:
        found = summary(report["cells"])
        print(f"before training: {report['start']:.3f}\n{table(found)}")
        options.json.with_suffix(".svg").write_text(chart(found, grid, report["start"]))


if __name__ == "__main__":
    main()
