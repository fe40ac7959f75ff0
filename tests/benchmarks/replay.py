"""Is a replay exact, and how fast? A real run, then its last steps once more: with one rank bit for bit, with two.

A random tiny model is trained for a number of steps; rewards come from a function of the text, so that there is
something to learn from the first step on. Each replay is a process of its own. Last, what the digest costs: its
time beside that of a step, on the tiny model and on one of three million parameters.

    python tests/benchmarks/replay.py [--json FILE] [--steps 60] [--replayed 50]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.learner import dist
from asyncrl.learner.digest import digest
from asyncrl.learner.update import Trainer
from asyncrl.metrics.reader import RunReader
from asyncrl.toy import init_model

ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]
REWARD = "def vowels(completion):\n    return sum(letter in 'aeiouAEIOU0123456789' for letter in completion) / 8\n"
SIZES = {"tiny": (64, 2), "3M": (256, 3)}
"""Width and layers."""


def train(folder: Path, steps: int) -> Path:
    """A real run; its folder."""
    (folder / "reward.py").write_text(REWARD)
    model = init_model(folder / "tiny")
    command = [*ASYNCRL, "train", "--plain", "--model", str(model), "--name", "run", "--run.dir", str(folder)]
    command += ["--steps", str(steps), "--checkpoint.every", "5", "--checkpoint.keep", str(steps)]
    command += ["--reward.functions", json.dumps([f"{folder / 'reward.py'}:vowels"]), "--algo.filter", "none"]
    command += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"]
    command += ["--generator.count", "1", "--generator.max_model_len", "64", "--staleness.max_lag", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return folder / "run"


def replay(run: Path, first: int, last: int, ranks: int) -> dict[str, object]:
    """One replay; what it found, and its seconds from start to end."""
    command = [
        *ASYNCRL,
        "replay",
        str(run),
        "--steps",
        f"{first}..{last}",
        "--json",
        "--learner.ranks",
        str(ranks),
    ]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    seconds = time.perf_counter() - started
    found = json.loads(done.stdout)
    gaps = found["differences"]
    return {
        "ranks": ranks,
        "steps": last - first + 1,
        "exit": done.returncode,
        "bitwise_equal": found["equal"],
        "largest_metric_difference": max((abs(gap["recorded"] - gap["replayed"]) for gap in gaps), default=0.0),
        "largest_weight_difference": max((far["largest"] for far in found["checkpoints"].values()), default=0.0),
        "checkpoints": len(found["checkpoints"]),
        "seconds": round(seconds, 1),
        "sentence": found["sentence"],
    }


def cost(run: Path, name: str) -> dict[str, object]:
    """The digest beside a step on one of the run's batches, each the median of some calls."""
    from asyncrl.batches import BatchDesk
    from asyncrl.journal import Journal
    from asyncrl.messages import NextBatch

    hidden, layers = SIZES[name]
    journal = Journal.open(run / "run.db", read_only=True)
    with tempfile.TemporaryDirectory() as folder, dist.alone():
        config = Config.model_validate_json(journal.get("config_json"))
        trainer = Trainer(config, init_model(Path(folder) / "model", hidden=hidden, layers=layers))
        batch, frames = BatchDesk(journal, config).share(NextBatch(1, 0, 1))
        tokens, logprobs = np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.float32)
        step_s = _median(lambda: trainer.train(batch, tokens, logprobs, 1), 7)
        digest_s = _median(lambda: digest(trainer.state()), 30)
        parameters = sum(parameter.numel() for parameter in trainer.policy.parameters())
    journal.close()
    share = round(100 * digest_s / step_s, 2)
    times = {"step_ms": round(1e3 * step_s, 1), "digest_ms": round(1e3 * digest_s, 2), "share_percent": share}
    return {
        "model": name,
        "parameters": parameters,
        "episodes": len(batch.episodes),
        "tokens": len(tokens),
    } | times


def _median(call: Callable[[], object], times: int) -> float:
    call()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--replayed", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder), options.steps)
        with RunReader(run) as reader:
            train_s = sum(row.metrics["train_s"] for row in reader.steps(options.steps - options.replayed))
        first = options.steps - options.replayed + 1
        rows = [replay(run, first, options.steps, ranks) for ranks in (1, 2)]
        costs = [cost(run, name) for name in SIZES]
    for row in (*rows, *costs):
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if options.json:
        about = {"date": str(date.today()), "python": platform.python_version(), "torch": torch.__version__}
        result = {"about": about, "recorded_train_s": round(train_s, 1), "replays": rows, "digest": costs}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
