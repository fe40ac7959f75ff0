"""A builder of journals: real run.db files, written through the schema as the hub writes them."""

import json
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.records import checksum
from asyncrl.schema import SCHEMA_VERSION, TABLES

START = 1_000_000.0


class RunWriter:
    """Writes one run; every call commits."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        run_dir.mkdir(parents=True)
        self.run_dir, self.config = run_dir, config
        self.db = sqlite3.connect(run_dir / "run.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.executescript(TABLES)
        self._episodes = 0
        for key, value in {
            "schema": SCHEMA_VERSION,
            "name": run_dir.name,
            "config_json": config.model_dump_json(),
            "created": START,
            "status": "running",
        }.items():
            self.set(key, value)

    def set(self, key: str, value: object) -> None:
        self.db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, str(value)))

    def group(
        self, group_id: int, states: list[tuple[str, str]], reward: float = 1.0, greedy: bool = False
    ) -> list[int]:
        """Admits a group of episodes in the given (state, reason), the last perhaps greedy; returns their ids."""
        task = json.dumps({"id": f"t{group_id}", "prompt": []})
        self.db.execute("INSERT INTO task VALUES (?, ?, ?, ?)", (group_id, group_id, f"t{group_id}", task))
        self.db.execute(
            "INSERT INTO grp (group_id, task_index, state, admitted, needs_version)"
            " VALUES (?, ?, 'running', ?, 0)",
            (group_id, group_id, START),
        )
        ids = []
        for member, (state, reason) in enumerate(states):
            baseline = greedy and member == len(states) - 1
            rewards = json.dumps({"right": reward - 0.25, "polite": 0.25})
            self.db.execute(
                "INSERT INTO episode (episode_id, group_id, seed, greedy, state, reason, status, reward,"
                " rewards_json, length, sampled, min_version, max_version)"
                " VALUES (?, ?, 0, ?, ?, ?, 'completed', ?, ?, 10, 4, 2, 3)",
                (self._episodes, group_id, baseline, state, reason, reward, rewards),
            )
            ids.append(self._episodes)
            self._episodes += 1
        return ids

    def chunk(self, episode_id: int, seq: int, tokens: list[int], sampled: bool) -> None:
        blob = array("i", tokens).tobytes()
        row = (episode_id, seq, len(tokens), 2, int(sampled), 0, blob, b"", checksum(blob, b""))
        self.db.execute("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def step(self, step: int, episodes: list[int], **metrics: float) -> None:
        self.seal(step, episodes)
        values = (step, step, START + 2.0 * step, json.dumps(metrics))
        self.db.execute("INSERT OR REPLACE INTO step VALUES (?, ?, ?, ?, '')", values)

    def seal(self, step: int, episodes: list[int]) -> None:
        values = (step, "[]", json.dumps(episodes), "[]", 0, START)
        self.db.execute("INSERT OR REPLACE INTO batch VALUES (?, ?, ?, ?, ?, ?)", values)

    def metric(self, source: str, time: float = START, step: int = 0, **metrics: float) -> None:
        self.db.execute(
            "INSERT INTO metric (time, step, source, metrics_json) VALUES (?, ?, ?, ?)",
            (time, step, source, json.dumps(metrics)),
        )

    def event(self, source: str, what: str, detail: str = "") -> None:
        self.db.execute(
            "INSERT INTO event (time, source, what, detail) VALUES (?, ?, ?, ?)", (START, source, what, detail)
        )

    def version(self, version: int, seconds: float, nbytes: int) -> None:
        self.db.execute("INSERT INTO version VALUES (?, ?, ?, ?)", (version, START, seconds, nbytes))


@pytest.fixture
def new_run(tmp_path: Path):
    """Makes a run: `new_run(name, train={...})`; keywords are sections of the configuration."""
    writers: list[RunWriter] = []

    def make(name: str = "run", **sections: Any) -> RunWriter:
        sections.setdefault("train", {"groups_per_step": 2, "group_size": 2, "steps": 5})
        writers.append(RunWriter(tmp_path / "runs" / name, Config.model_validate(sections)))
        return writers[-1]

    yield make
    for writer in writers:
        writer.db.close()
