"""Faults for ten minutes: every few seconds something of a real run is killed, held or stopped; what is lost?

A real `asyncrl train` of the toy model on the default task. A seeded random fault follows another after 5 to 15
seconds, whatever the run is doing: `kill -9` of a generator, the hub, a learner rank, the supervisor, two of them
at once or everything at once; SIGSTOP of one of them for less and for more than the deadlines; SIGTERM of a
generator; Ctrl-C of the whole run. Where the supervisor is gone, or the run has been stopped, it is resumed at
once, while the old processes may still be ending. After the time is up the run must end by itself.

Checked afterwards, from the journal alone: the run is finished, each step is there once, every admitted episode
was trained exactly once or dropped for a recorded reason, the tokens of every trained episode are one gapless row
of chunks, no process is left. The mean reward of the last steps is compared with that of a run without faults.

    python tests/benchmarks/storm.py [--json tests/benchmarks/results/storm.json] [--seconds 600] [--steps 500]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import Config
from asyncrl.metrics.reader import RunReader
from asyncrl.metrics.summary import find_problems
from asyncrl.metrics.view import fold_states
from asyncrl.toy import default_model

LEASE_S, HANG_S = 4.0, 8.0
SETTINGS = {
    "algo": "dapo", "checkpoint.every": "2", "hub.lease_s": f"{LEASE_S}", "supervise.hang_s": f"{HANG_S}",
    "weights.timeout_s": "10", "supervise.max_restarts": "100000", "supervise.backoff_s": "0.05",
    "generator.chunk_tokens": "4",
}  # fmt: skip
ENDS = 20
"""Steps over which the last reward is averaged."""
APART = 0.05
"""Most difference between the last rewards with and without faults."""
END_S = 900.0
"""Longest wait for the end once no more faults come."""
ODD = """
SELECT count(*) FROM (
    SELECT length, sum(n) AS n, count(*) AS chunks, max(seq) AS last FROM chunk JOIN episode USING (episode_id)
    WHERE state = 'trained' GROUP BY episode_id
) WHERE length != n OR chunks != last + 1
"""
GENERATORS = ("generator-0", "generator-1")


class Run:
    """One run of `asyncrl train` through all its supervisors."""

    def __init__(self, folder: Path, name: str, flags: list[str]) -> None:
        self.dir, self._out = folder / name, (folder / f"{name}.out").open("a")
        self._flags = ["--run.dir", str(folder), "--name", name, *flags]
        self.supervisors = 0
        self._start(*self._flags)

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "asyncrl", "train", "--plain", *arguments]
        self.process = subprocess.Popen(command, stdout=self._out, stderr=self._out)
        self.supervisors += 1

    def resume(self) -> None:
        """Waits for the supervisor's end, and for nothing else, and goes on with the run unless it is over."""
        status = self.process.wait(END_S)
        if not (self.dir / "run.db").exists():
            self._start(*self._flags)  # It had not even begun.
        elif status != 0 and not self.over():
            self._start("--resume", str(self.dir))

    def over(self) -> bool:
        """Whether the fault came after the last thing that the run had to do; resuming is refused then."""
        with RunReader(self.dir) as reader:
            return reader.status == "finished" and (self.dir / "model").is_dir()

    def children(self) -> dict[str, psutil.Process]:
        """The processes of the run that live now, by the names that the supervisor gives them."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "generator" in words:
                found[words[words.index("--name") + 1]] = child
            elif "learner" in words:
                found[f"learner-{child.environ()['RANK']}"] = child
            elif "hub" in words:
                found["hub"] = child
        return found


class Storm:
    """Draws faults and does them."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run, self._draw = run, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.log: list[tuple[float, str]] = []
        self._began = time.monotonic()

    def rage(self, seconds: float, shortest: float, longest: float) -> None:
        """Does faults until the time is up or the run has ended by itself."""
        faults = [self.kill] * 4 + [self.kill_two, self.kill_supervisor, self.kill_everything]
        faults += [self.hold] * 3 + [self.terminate_generator, self.interrupt]
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._run.process.poll() is None:
            time.sleep(self._draw.uniform(shortest, longest))  # Faults come whatever the run is doing.
            if self._run.process.poll() is None:
                try:
                    self._draw.choice(faults)()
                except psutil.NoSuchProcess:
                    continue  # It ended between the look and the signal.

    def kill(self) -> None:
        """Kill -9 of one process."""
        self._signal(self._draw.choice(self._victims()), signal.SIGKILL, "kill")

    def kill_two(self) -> None:
        """Kill -9 of two at once."""
        for name in self._draw.sample(self._victims(), 2):
            self._signal(name, signal.SIGKILL, "kill of two")

    def kill_supervisor(self) -> None:
        """Kill -9 of the parent, with which the kernel kills its children; resumed at once."""
        self._run.process.kill()
        self._note("kill", "supervisor")
        self._run.resume()

    def kill_everything(self) -> None:
        """The machine is gone: every process at once, children first, so that nobody can tell of it."""
        children = self._run.children().values()
        for process in (*children, self._run.process):
            process.kill()
        self._note("kill", "all")
        self._run.resume()

    def hold(self) -> None:
        """SIGSTOP for less than any deadline, longer than a lease, or longer than a hang may last."""
        name = self._draw.choice(self._victims())
        seconds = self._draw.choice([0.5 * LEASE_S, LEASE_S + 2.0, HANG_S + 4.0])
        process = self._signal(name, signal.SIGSTOP, f"hold {seconds:g} s")
        if process is not None:
            threading.Timer(seconds, _wake, [process]).start()

    def terminate_generator(self) -> None:
        """A clean stop of a generator."""
        self._signal(self._draw.choice(GENERATORS), signal.SIGTERM, "terminate")

    def interrupt(self) -> None:
        """Ctrl-C, and resume."""
        self._run.process.send_signal(signal.SIGINT)
        self._note("interrupt", "all")
        self._run.resume()

    def _victims(self) -> list[str]:
        """Generators, hub and learner ranks; at least two of them, for one that is not running is no victim."""
        return sorted({*GENERATORS, *self._run.children()})

    def _signal(self, name: str, number: signal.Signals, what: str) -> psutil.Process | None:
        process = self._run.children().get(name)
        if process is not None:
            process.send_signal(number)
            self._note(what, name)
        return process

    def _note(self, what: str, name: str) -> None:
        self.done[f"{what} {name}"] += 1
        self.log.append((round(time.monotonic() - self._began, 1), f"{what} {name}"))
        print(f"{self.log[-1][0]:7.1f} s  {what} {name}", flush=True)


def _wake(process: psutil.Process) -> None:
    if process.is_running():  # Compares start times too, so a reused pid is not touched.
        process.send_signal(signal.SIGCONT)


def account(run: Run, steps: int) -> tuple[dict[str, Any], list[str]]:
    """What the journal says, and what is wrong with it."""
    with RunReader(run.dir) as reader:
        by_state, drops = fold_states(reader.episode_states())
        group = int(reader.config()["train"]["group_size"])
        uses, trained = reader.uses(), reader.episode_ids("trained")
        admitted = reader.groups() * group
        rows = [row.step for row in reader.steps()]
        wrong = find_problems(admitted, by_state, uses, trained, 1)
        holes = reader._one(ODD)
        checks = {
            f"status {reader.status}: {reader.reason}": reader.status != "finished",
            f"{len(rows)} rows of steps for {steps} steps": rows != list(range(1, steps + 1)),
            f"{holes} trained episodes whose chunks are no gapless row": holes > 0,
            f"{len(uses)} episodes trained, at least {steps} expected": len(uses) < steps,
        }
        wrong += [text for text, bad in checks.items() if bad]
        died = Counter({name: n for (name, what), n in reader.event_counts().items() if what == "died"})
        rewards = [reward for _, reward in reader.rewards()]
        told = {
            "admitted": admitted,
            "trained": by_state.get("trained", 0),
            "dropped": dict(sorted(drops.items())),
            "uses": dict(Counter(uses.values())),
            "leases_lapsed": reader._one("SELECT count(*) FROM lease WHERE state = 'lapsed'"),
            "restarts_noticed": dict(sorted(died.items())),
            "reward_last": round(statistics.fmean(rewards[-ENDS:]), 4) if rewards else None,
            "reward_first": round(statistics.fmean(rewards[:ENDS]), 4) if rewards else None,
        }
    if left := [
        p.pid for p in psutil.process_iter(["cmdline"]) if str(run.dir) in " ".join(p.info["cmdline"] or [])
    ]:
        wrong.append(f"processes {left} are still there")
    return told, wrong


def measure(
    folder: Path, name: str, options: argparse.Namespace, extra: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """One run with faults (`storm`) or without (`calm`), and what is wrong with it."""
    settings = SETTINGS | {"steps": str(options.steps), "model": str(default_model(Config(), print))}
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    began = time.monotonic()
    run = Run(folder, name, [*flags, *extra])
    storm = Storm(run, options.seed)
    if name == "storm":
        storm.rage(options.seconds, options.shortest, options.longest)
    wrong = []
    try:
        if (status := run.process.wait(END_S)) != 0 and not run.over():
            wrong.append(f"exit status {status}: see {folder / name}.out")
    except subprocess.TimeoutExpired:
        run.process.kill()
        wrong.append(f"the run did not end within {END_S:g} s after the last fault")
    told, problems = account(run, options.steps)
    told = {"wall_s": round(time.monotonic() - began, 1), "supervisors": run.supervisors} | told
    if name == "storm":
        told |= {"faults": sum(storm.done.values()), "by_kind": dict(sorted(storm.done.items())), "log": storm.log}
    return told, wrong + problems


def main() -> None:
    """Runs both, prints the figures, and fails if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults come")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--faults", type=int, default=40, help="fewest faults; with fewer the result counts for nothing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shortest", type=float, default=5.0, help="least seconds between two faults")
    parser.add_argument("--longest", type=float, default=15.0)
    parser.add_argument("--no-calm", action="store_true", help="leave out the run without faults")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which are kept there")
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {"benchmark": "storm", "date": date.today().isoformat()}
        report |= {"python": platform.python_version(), "cores": os.cpu_count(), "seed": options.seed}
        report |= {"settings": SETTINGS | {"steps": options.steps}}
        report["storm"], wrong = measure(folder, "storm", options, extra)
        if report["storm"]["faults"] < options.faults:
            wrong.append(f"only {report['storm']['faults']} faults came before the run ended; raise --steps")
        if not options.no_calm:
            report["calm"], problems = measure(folder, "calm", options, extra)
            apart = abs(report["storm"]["reward_last"] - report["calm"]["reward_last"])
            wrong += problems + ([f"the last rewards are {apart:.3f} apart"] if apart > APART else [])
    report["wrong"] = wrong
    print(json.dumps({**report, "storm": {k: v for k, v in report["storm"].items() if k != "log"}}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
