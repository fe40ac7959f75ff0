"""Every algorithm on the toy: a short run of `asyncrl train` with each preset, and what it learned.

Real runs, one at a time, with the defaults (two generators, one learner rank, asynchronous, the same learning
rate for all), in a temporary folder, from the same warm-started model. `first` and `last` are the mean reward of
all episodes that ended in the first and last ten steps, as the journal has it; `sampled` is that of all rewarded
episodes of the run. `held-out` is `asyncrl eval` at temperature 1 after the run; before it is the same for all.
It shows that each algorithm trains, and what its step costs; which is best is not to be read from a run so
short, at a learning rate that was tuned for none.

Every finished run is written to the JSON file at once; if the program is started again, only what is missing or
failed is run. Flags that are not known here are passed on to `asyncrl train`.

    python tests/benchmarks/presets.py --json FILE [--steps 80] [--preset NAME ...] [--seed S ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.metrics.reader import RunReader
from asyncrl.toy import default_model

PRESETS = (
    "dapo", "grpo", "drgrpo", "rloo", "opo", "reinforce++", "remax", "ppo", "gspo", "gmpo", "cispo", "clip-cov",
    "kl-cov", "prime", "sppo",
)  # fmt: skip
ENDS = 10
"""Steps over which the first and last rewards are averaged."""
LIMIT_S = 1800


class Failed(RuntimeError):
    """A command did not end well; the text is the end of what it said."""


def asyncrl(*arguments: str) -> str:
    """Runs a command; what it printed.

    Raises:
        Failed: it ended with an error, or not in time.
    """
    command = [sys.executable, "-P", "-m", "asyncrl", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{arguments[0]} had not ended after {LIMIT_S} s") from None
    if done.returncode != 0:
        raise Failed((done.stderr or done.stdout).strip()[-600:])
    return done.stdout.strip()


def train(folder: Path, model: Path, preset: str, seed: int, steps: int, extra: list[str]) -> dict[str, Any]:
    """One run, and what its journal says."""
    command = ["train", "--plain", "--algo", preset, "--model", str(model), "--steps", str(steps)]
    asyncrl(*command, "--run.dir", str(folder), "--name", "run", "--run.seed", str(seed), *extra)
    with RunReader(folder / "run") as reader:
        rows = reader.steps()
        rewards = [reward for _, reward in reader.rewards()]
        episodes = [e.reward for e in reader.episodes(limit=sys.maxsize) if e.reward is not None]
        wall = rows[-1].ended - reader.created
    between = rows[-1].ended - rows[0].ended
    return {
        "steps": len(rows),
        "first": round(statistics.fmean(rewards[:ENDS]), 4),
        "last": round(statistics.fmean(rewards[-ENDS:]), 4),
        "sampled": round(statistics.fmean(episodes), 4),
        "episodes": len(episodes),
        "wall_s": round(wall, 1),
        "step_s": round(between / max(1, len(rows) - 1), 3),
        "train_s": round(statistics.fmean(row.metrics["train_s"] for row in rows), 3),
        "lag_mean": round(statistics.fmean(row.metrics["lag_mean"] for row in rows), 2),
    }


def held_out(target: Path, tasks: int) -> dict[str, float]:
    """`asyncrl eval` of a run or a model."""
    found = json.loads(asyncrl("eval", str(target), "--json", "--tasks", str(tasks)).splitlines()[-1])
    return {"held_out": round(found["reward"], 4), "stderr": round(found["stderr"], 4)}


def table(report: dict[str, Any]) -> str:
    """One line for each preset, means over its seeds, as Markdown."""
    columns = ("first", "last", "sampled", "held_out", "wall_s", "step_s", "train_s", "lag_mean")
    lines = ["| preset | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    before = report["before"]
    lines.append(f"| before training | | | | {before['held_out']:.3f} ± {before['stderr']:.3f} | | | | |")
    for preset in dict.fromkeys(run["preset"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["preset"] == preset]
        good = [run for run in runs if "failed" not in run]
        mean = {name: statistics.fmean(run[name] for run in good) for name in columns if good}
        cells = [f"{mean[name]:.3f}" if good else "failed" for name in columns]
        if good:
            error = statistics.fmean(run["stderr"] ** 2 for run in good) ** 0.5 / len(good) ** 0.5
            cells[columns.index("held_out")] += f" ± {error:.3f}"
        note = f" ({len(runs) - len(good)} of {len(runs)} failed)" if len(good) < len(runs) else ""
        lines.append(f"| {preset}{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def begun(path: Path, settings: dict[str, Any], model: Path) -> dict[str, Any]:
    """The report so far, or a new one with the evaluation of the model that all runs start from.

    Raises:
        SystemExit: the file is of runs with other settings.
    """
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        if report["settings"] != settings:
            raise SystemExit(f"{path} is of {report['settings']}, not {settings}; give another --json")
        return report
    import torch
    import transformers

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__}
    report = {"benchmark": "presets", "date": date.today().isoformat(), "versions": versions, "settings": settings}
    return report | {"before": held_out(model, settings["tasks"]), "runs": []}


def main() -> None:
    """Runs what is not there yet and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--tasks", type=int, default=512, help="held-out tasks")
    parser.add_argument("--preset", action="append", help="default: " + " ".join(PRESETS))
    parser.add_argument("--seed", type=int, action="append", help="default: 0")
    options, extra = parser.parse_known_args()
    model = default_model(Config(), print)
    report = begun(options.json, {"steps": options.steps, "tasks": options.tasks, "flags": extra}, model)
    report["runs"] = [run for run in report["runs"] if "failed" not in run]
    done = {(run["preset"], run["seed"]) for run in report["runs"]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seed or [0]:
        for preset in (preset for preset in options.preset or PRESETS if (preset, seed) not in done):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = train(Path(folder), model, preset, seed, options.steps, extra)
                    run |= held_out(Path(folder) / "run", options.tasks)
                except Failed as failure:
                    run = {"failed": str(failure)}
            report["runs"].append({"preset": preset, "seed": seed} | run)
            print("  ".join(f"{key}={value}" for key, value in report["runs"][-1].items()), flush=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
