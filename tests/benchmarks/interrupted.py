"""Interrupted runs against one that was not: are weights and trained tokens the same, bit for bit?

One deterministic run goes through. Then each further run, with the same settings, is interrupted once with kill -9
at a random moment: a random step, and a random part of a step later. The victim is in turn everything at once,
after which `asyncrl train --resume` goes on, the hub, a random learner rank, a random generator. At the end the
SHA-256 of `model.safetensors`, and of all trained tokens and behaviour log-probs, are compared with those of the
first run. The random choices are seeded, so a run can be repeated.

    python tests/benchmarks/interrupted.py [--runs 20] [--steps 12] [--ranks 1] [--seed 0] [--json FILE]

Exits with 1 if any run differs. Allow a minute for each run on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrl.journal import Journal
from asyncrl.metrics.reader import RunReader
from asyncrl.toy import init_model

LIMIT_S = 300
VICTIMS = ("everything", "hub", "learner", "generator")
REWARDS = "def parity(completion):\n    return float(sum(map(ord, completion)) % 2)\n"
"""Yes or no at random, so that the filter drops groups, and others take their place."""


def command(folder: Path, name: str, steps: int, ranks: int) -> list[str]:
    """The run's command line: the tiny random model, two generators, a checkpoint every four steps."""
    return [
        *("train", "--plain", "--deterministic", "--model", str(folder / "tiny"), "--run.dir", str(folder)),
        *("--name", name, "--steps", str(steps), "--learner.ranks", str(ranks), "--checkpoint.every", "4"),
        *("--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"),
        *("--generator.slots", "16", "--generator.ahead", "8", "--generator.max_model_len", "64"),
        *("--generator.chunk_tokens", "4", "--reward.functions", json.dumps([f"{folder / 'rewards.py'}:parity"])),
    ]


def start(folder: Path, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Starts an `asyncrl` command that writes to `NAME.out`."""
    with (folder / f"{name}.out").open("a") as out:
        return subprocess.Popen([sys.executable, "-P", "-m", "asyncrl", *arguments], stdout=out, stderr=out)


def pids(run_dir: Path) -> dict[str, int]:
    """The process that was last started under each name."""
    with RunReader(run_dir) as reader:
        started = [event for event in reader.events() if "pid" in event.detail]
    return {event.source: int(event.detail.split()[-1]) for event in started}


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    """Waits until a step is done (0: until the learner is there).

    Raises:
        RuntimeError: the run ended before.
        TimeoutError: it took longer than `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{run_dir} ended before step {step}; see {run_dir}.out")
        if (run_dir / "run.db").exists():
            with RunReader(run_dir) as reader:
                there = any(event.source == "generator-1" for event in reader.events())
                if there and reader.last_step() >= step:
                    return
        time.sleep(0.02)  # Another process writes the journal; there is no event to wait for.
    raise TimeoutError(f"{run_dir}: no step {step} within {LIMIT_S} s")


def interrupt(process: subprocess.Popen[bytes], folder: Path, name: str, victim: str) -> subprocess.Popen[bytes]:
    """Kills the victim; returns the process to wait for."""
    running = pids(folder / name)
    if victim != "everything":
        os.kill(running[victim], signal.SIGKILL)
        return process
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in running.values()) and time.monotonic() < deadline:
        time.sleep(0.02)  # They end with their parent, and are not our children: nobody tells us.
    return start(folder, name, ["train", "--plain", "--resume", str(folder / name)])


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of the exported weights, and of all batches: episodes, tokens and log-probs in order."""
    journal = Journal.open(run_dir / "run.db")
    episodes = [
        row[0]
        for row in journal.rows(
            "SELECT value FROM batch, json_each(episode_ids_json) ORDER BY batch_id, json_each.key"
        )
    ]
    held = journal.episode_tokens(episodes)
    journal.close()
    trained = hashlib.sha256()
    for episode in episodes:
        trained.update(b"%d:" % episode + held[episode].tokens.tobytes() + held[episode].logprobs.tobytes())
    weights = hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes())
    return {"weights": weights.hexdigest(), "trained": trained.hexdigest()}


def finish(process: subprocess.Popen[bytes], folder: Path, name: str) -> dict[str, str]:
    """Waits for a run's end; its digests.

    Raises:
        RuntimeError: it failed.
    """
    if process.wait(LIMIT_S) != 0:
        raise RuntimeError(f"{name} failed:\n{(folder / f'{name}.out').read_text()[-2000:]}")
    return digests(folder / name)


def interrupted(folder: Path, index: int, options: argparse.Namespace, step_s: float) -> dict[str, Any]:
    """One run that is interrupted once; its row."""
    draw = random.Random(f"{options.seed}/{index}")
    victim, step, later = VICTIMS[index % 4], draw.randrange(options.steps - 1), draw.random() * step_s
    if victim in ("learner", "generator"):
        victim += f"-{draw.randrange(options.ranks if victim == 'learner' else 2)}"
    name, started = f"run-{index}", time.monotonic()
    process = start(folder, name, command(folder, name, options.steps, options.ranks))
    wait_for_step(process, folder / name, step)
    time.sleep(later)  # The moment is the very subject.
    found = finish(interrupt(process, folder, name, victim), folder, name)
    seconds = round(time.monotonic() - started, 1)
    return {
        "run": index,
        "victim": victim,
        "after_step": step,
        "later_s": round(later, 3),
        "seconds": seconds,
        **found,
    }


def main() -> int:
    """Runs, prints a table, writes the result; the exit code says whether all were equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "interrupted.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interrupted-") as name:
        folder = Path(name)
        init_model(folder / "tiny", hidden=64, layers=2)
        (folder / "rewards.py").write_text(REWARDS)
        whole = finish(
            start(folder, "whole", command(folder, "whole", options.steps, options.ranks)), folder, "whole"
        )
        with RunReader(folder / "whole") as reader:
            times = [row.ended for row in reader.steps()]
        step_s = (times[-1] - times[0]) / (len(times) - 1)
        print("| run | victim | after step | + s | weights equal | tokens and log-probs equal |")
        print("|---|---|---|---|---|---|")
        rows = []
        for index in range(options.runs):
            row = interrupted(folder, index, options, step_s)
            row |= {f"{key}_equal": row.pop(key) == digest for key, digest in whole.items()}
            rows.append(row)
            cells = ("run", "victim", "after_step", "later_s", "weights_equal", "trained_equal")
            print(f"| {' | '.join(str(row[key]) for key in cells)} |", flush=True)
    equal = sum(row["weights_equal"] and row["trained_equal"] for row in rows)
    print(f"{equal} of {options.runs} interrupted runs are bitwise equal to the uninterrupted one")
    about = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    settings = {"steps": options.steps, "ranks": options.ranks, "seed": options.seed, "step_s": round(step_s, 3)}
    result = {**about, **settings, "equal": equal, "runs": options.runs, "uninterrupted": whole, "rows": rows}
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if equal == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
