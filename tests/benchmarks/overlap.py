"""Does overlap pay? The same run at max_lag = 4 and at max_lag = 0, generation and training on a core each.

One generator is pinned to core 0, one learner rank to core 1; the model is random, so episodes are as long as
`sampling.max_tokens` allows, and the batch is chosen so that both sides take about equally long. Steps per minute
are counted between the first third of the run and its end. The theoretical limit of the ratio is 2.

    python tests/benchmarks/overlap.py [--json FILE] [--steps 30] [--repeats 1]
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

from asyncrl.metrics.reader import RunReader

SIZE = ["--hidden", "128", "--layers", "4"]


def run(folder: Path, model: Path, max_lag: int, steps: int, repeat: int) -> dict[str, float]:
    """One real run; its speed and how its time was spent."""
    name = f"lag-{max_lag}-{repeat}"
    command = [sys.executable, "-P", "-m", "asyncrl", "train", "--plain", "--model", str(model), "--name", name]
    command += ["--run.dir", str(folder), "--steps", str(steps), "--staleness.max_lag", str(max_lag)]
    command += ["--algo.filter", "none", "--train.groups_per_step", "8", "--train.group_size", "8"]
    command += ["--generator.count", "1", "--generator.cores", "[0]", "--learner.cores", "[1]"]
    command += ["--sampling.max_tokens", "96", "--generator.max_model_len", "128", "--learner.lr", "1e-6"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    with RunReader(folder / name) as reader:
        rows = reader.steps()[steps // 3 :]
    minutes = (rows[-1].ended - rows[0].ended) / 60
    train_s = statistics.fmean(row.metrics["train_s"] for row in rows)
    wait_s = statistics.fmean(row.metrics["wait_s"] for row in rows)
    return {
        "max_lag": max_lag,
        "steps_per_min": round((len(rows) - 1) / minutes, 1),
        "train_s": round(train_s, 3),
        "wait_s": round(wait_s, 3),
        "lag_mean": round(statistics.fmean(row.metrics["lag_mean"] for row in rows), 2),
    }


def main() -> None:
    """Prints a table and the ratio; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-P", "-m", "asyncrl", "init-model", str(model), *SIZE], check=True)
        for repeat in range(options.repeats):
            for max_lag in (0, 4):
                rows.append(run(Path(folder), model, max_lag, options.steps, repeat))
                print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    of = {lag: [row["steps_per_min"] for row in rows if row["max_lag"] == lag] for lag in (0, 4)}
    ratio = round(statistics.fmean(of[4]) / statistics.fmean(of[0]), 2)
    print(f"steps per minute, max_lag 4 over 0: {ratio}")
    if options.json:
        import torch

        about = {"date": str(date.today()), "python": platform.python_version(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"about": about, "ratio": ratio, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
