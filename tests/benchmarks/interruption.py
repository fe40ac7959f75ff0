"""Episodes of 400 tokens, interrupted at about 200: how many tokens are sampled twice?

A real hub process and two real generator processes with a random model that never ends a turn by itself, each with
eight episodes at a time. When the journal shows about 200 sampled tokens of all that the first holds, it happens:

    kill      SIGKILL of the generator
    terminate SIGTERM: it hands in what it has sampled before it leaves
    lapse     SIGSTOP until its leases have lapsed and another generator has taken over, then SIGCONT
    hub       SIGKILL of the hub, which is started again; the generator goes on meanwhile

The second generator goes on with the episodes when it has room. Every engine writes down each token that it
samples, at once and before anybody hears of it, so that nothing that a dead process did is missed. `again` are
tokens sampled twice for one position of an episode; of a generator that was held still, those sampled before.
What it samples afterwards, until it hears that its leases are gone, is counted as `late`, and refused by the hub.

    python tests/benchmarks/interruption.py [--json tests/benchmarks/results/interruption.json] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrl import launch, settings
from asyncrl.metrics.reader import RunReader
from asyncrl.toy import init_model
from asyncrl.transport import free_port_pair

SLOTS, EPISODES, TOKENS, INTERRUPTED_AT = 8, 48, 400, 200
LEASE_S = 2.0
LIMIT_S = 120.0
RECORDER = """
import os, sys, time
if "generator" in sys.orig_argv:
    from asyncrl.chat import ChatFormat
    from asyncrl.generator.engines.transformers import TransformersEngine
    out = os.open(os.environ["SAMPLED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    init, record = ChatFormat.__init__, TransformersEngine._record

    def without_stops(self, *arguments, **named):
        init(self, *arguments, **named)
        self.stop_token_ids = ()

    def recorded(self, slots, tokens, logprobs):
        rows = [self._rows[slot] for slot in slots]
        rids = [row.rid.split("#")[0] for row in rows]
        lengths = [len(row.ids) + 1 for row in rows]
        now = time.time()
        os.write(out, "".join(f"{now} {rid} {n}\\n" for rid, n in zip(rids, lengths)).encode())
        record(self, slots, tokens, logprobs)

    ChatFormat.__init__, TransformersEngine._record = without_stops, recorded
"""
"""Runs in every process before anything else: no turn ends by itself, what an engine samples is written down."""


class Trial:
    """One hub with two generators, and one interruption."""

    def __init__(self, folder: Path, model: Path, chunk_tokens: int) -> None:
        flags: dict[str, str | None] = {
            "run.dir": str(folder), "run.name": "run", "model.path": str(model), "algo.filter": "none",
            "train.groups_per_step": str(EPISODES // 4), "train.group_size": "4", "staleness.max_lag": "0",
            "generator.engine": "transformers", "generator.slots": str(SLOTS), "generator.ahead": "0",
            "generator.max_model_len": "512", "sampling.max_tokens": str(TOKENS),
            "generator.chunk_tokens": str(chunk_tokens), "hub.lease_s": f"{LEASE_S}", "hub.heartbeat_s": "0.25",
        }  # fmt: skip
        config = launch.resolved(settings.read([], flags))
        self.run_dir, self.log = launch.new_run_dir(config), folder / "sampled"
        launch.create(config, self.run_dir)
        self._folder, self._port = folder, free_port_pair("127.0.0.1")
        self._address = f"tcp://127.0.0.1:{self._port}"
        (folder / "sitecustomize.py").write_text(RECORDER)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SAMPLED": str(self.log)}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.hub = self.start_hub()
        self.first, _ = (
            self._start("generator", "--hub", self._address, "--name", f"generator-{i}") for i in (0, 1)
        )

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{arguments[0]}.out").open("ab") as out:
            command = [sys.executable, "-P", "-m", "asyncrl", *arguments]
            self.processes.append(subprocess.Popen(command, env=self._env, stdout=out, stderr=out))
        return self.processes[-1]

    def start_hub(self) -> subprocess.Popen[bytes]:
        """Starts the hub; again after it was killed."""
        return self._start("hub", "--run", str(self.run_dir), "--port", str(self._port))

    def wait_for(self, sql: str) -> None:
        """Waits until the journal answers with something true."""
        deadline = time.monotonic() + LIMIT_S
        while not self.ask(sql):
            if time.monotonic() > deadline:
                outs = "\n".join(path.read_text()[-800:] for path in self._folder.glob("*.out"))
                raise TimeoutError(f"{sql}: not within {LIMIT_S:g} s\n{outs}")
            time.sleep(0.01)  # Another process writes the journal; there is no event to wait for.

    def ask(self, sql: str) -> Any:
        """The first value of the journal's answer."""
        db = sqlite3.connect(f"file:{self.run_dir / 'run.db'}?mode=ro", uri=True)
        try:
            return db.execute(sql).fetchone()[0]
        finally:
            db.close()

    def close(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def kill(trial: Trial) -> None:
    """SIGKILL of the generator; there is no supervisor, so its leases lapse."""
    trial.first.kill()


def terminate(trial: Trial) -> None:
    """A clean stop."""
    trial.first.terminate()


def lapse(trial: Trial) -> None:
    """Held still until another generator has taken over and is at work."""
    trial.first.send_signal(signal.SIGSTOP)
    again = "SELECT 1 FROM lease GROUP BY episode_id HAVING count(*) > 1 AND max(generator) = 'generator-1'"
    trial.wait_for(f"SELECT count(*) = {SLOTS} FROM ({again})")
    time.sleep(0.3)  # The other one goes on meanwhile.
    trial.first.send_signal(signal.SIGCONT)


def kill_hub(trial: Trial) -> None:
    """The hub dies and comes back; leases and prefixes are what the journal says."""
    trial.hub.kill()
    trial.hub.wait()
    trial.hub = trial.start_hub()


KINDS: dict[str, Callable[[Trial], None]] = {
    "kill": kill, "terminate": terminate, "lapse": lapse, "hub": kill_hub,
}  # fmt: skip
SAMPLED = "(SELECT coalesce(sum(n), 0) FROM chunk WHERE sampled AND chunk.episode_id = lease.episode_id)"
HELD = "FROM lease WHERE state = 'active' AND generator = 'generator-0'"


def run(kind: str, model: Path, chunk_tokens: int, seed: int) -> dict[str, Any]:
    """One interruption; tokens sampled again, for each episode, and what the hub refused."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), model, chunk_tokens)
        try:
            trial.wait_for("SELECT count(*) > 0 FROM lease WHERE generator = 'generator-1'")
            low, high = INTERRUPTED_AT - min(chunk_tokens, 32), TOKENS - 3 * chunk_tokens
            high = max(high, INTERRUPTED_AT)
            trial.wait_for(f"SELECT min({SAMPLED}) >= {low} AND max({SAMPLED}) <= {high} {HELD}")
            time.sleep(random.Random(seed).uniform(0, 0.1))  # At any moment within a chunk.
            at, held = (
                trial.ask(f"SELECT min({SAMPLED}) {HELD}"),
                trial.ask(f"SELECT group_concat(episode_id) {HELD}"),
            )
            stopped = time.time()
            KINDS[kind](trial)
            trial.wait_for(f"SELECT min(ended IS NOT NULL) FROM episode WHERE episode_id IN ({held})")
            time.sleep(1.2 if kind == "lapse" else 0.0)  # The hub reports once a second what it refused.
            about = {"kind": kind, "chunk_tokens": chunk_tokens, "durable_at": at}
            return about | _counts(trial, {int(episode) for episode in held.split(",")}, stopped)
        finally:
            trial.close()


def _counts(trial: Trial, episodes: set[int], stopped: float) -> dict[str, Any]:
    with RunReader(trial.run_dir) as reader:
        leases = dict(reader._db.execute("SELECT lease_id, episode_id FROM lease"))
        last = dict(reader._db.execute("SELECT episode_id, max(lease_id) FROM lease GROUP BY episode_id"))
        kept = dict(reader._db.execute("SELECT episode_id, sum(n) FROM chunk WHERE sampled GROUP BY episode_id"))
        refused = reader.refused()
    sampled: Counter[int] = Counter()
    late = 0
    for line in trial.log.read_text().splitlines():
        moment, lease, _ = line.split()
        episode = leases[int(lease)]
        if last[episode] != int(lease) and float(moment) > stopped + LEASE_S / 2:
            late += 1  # By a process that was held still, or it would not sample for this lease any more.
        else:
            sampled[episode] += 1
    assert {kept[episode] for episode in episodes} == {TOKENS}, kept
    again = [sampled[episode] - TOKENS for episode in sorted(episodes)]
    return {"again": again, "late": late, "refused": refused, "leases": len(leases)}


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as promised."""
    wrong = []
    for row in rows:
        limit = row["chunk_tokens"] if row["kind"] in ("kill", "lapse") else 0
        if max(row["again"]) > limit or min(row["again"]) < 0:
            wrong.append(
                f"{row['kind']}, chunks of {row['chunk_tokens']}: {row['again']} tokens again, not 0..{limit}"
            )
    return wrong


def main() -> None:
    """Runs all kinds with all sizes of chunks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, of four layers")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = init_model(Path(folder) / "model", hidden=options.hidden, layers=4)
        print(
            f"{'kind':<10} {'chunk':>5} {'durable':>7} {'again: mean':>11} {'most':>5} {'late':>5} {'refused':>7}"
        )
        for kind in options.kinds:
            for chunk_tokens in options.chunks:
                for seed in range(options.repeats):
                    rows.append(run(kind, model, chunk_tokens, seed))
                    row = rows[-1]
                    mean, most = statistics.fmean(row["again"]), max(row["again"])
                    figures = (
                        f"{row['durable_at']:>7} {mean:>11.1f} {most:>5} {row['late']:>5} {row['refused']:>7}"
                    )
                    print(f"{kind:<10} {chunk_tokens:>5} {figures}", flush=True)
    wrong = judge(rows)
    print("\n".join(wrong) or "as promised: at most one chunk again after a kill or a lapse, none otherwise")
    if options.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"transformers": transformers.__version__}
        about = {"benchmark": "interruption", "date": date.today().isoformat(), "versions": versions}
        setting = {"episodes": EPISODES, "tokens": TOKENS, "hidden": options.hidden, "layers": 4}
        options.json.write_text(json.dumps(about | setting | {"runs": rows, "wrong": wrong}, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
