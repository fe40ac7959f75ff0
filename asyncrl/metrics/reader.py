"""Reads a run's journal, `run.db`, from any process while the hub writes it. It never writes.

One method per question, the SQL in plain sight. SQLite's write-ahead log gives every read a consistent
snapshot and never blocks the hub. Called by the live view, the end-of-run summary, the list of runs, the
trackers' tail and the command line.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.schema import SCHEMA_VERSION
from asyncrl.settings import UsageError

BUSY_S = 5.0


class RunNotFound(UsageError, FileNotFoundError):
    """There is no readable run in the folder."""


class StepRow(NamedTuple):
    """One learner step."""

    step: int
    ended: float
    metrics: dict[str, float]


class MetricRow(NamedTuple):
    """What one process reported at one time."""

    id: int
    time: float
    step: int
    source: str
    metrics: dict[str, float]


class EventRow(NamedTuple):
    """Something that happened, outside the ordinary course."""

    id: int
    time: float
    source: str
    what: str
    detail: str


class VersionRow(NamedTuple):
    """One publication of weights: `seconds` of broadcast, `nbytes` sent."""

    version: int
    published: float
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode, without its tokens."""

    episode_id: int
    group_id: int
    task_id: str
    state: str
    reason: str
    status: str
    reward: float | None
    turns: int
    length: int
    sampled: int
    min_version: int
    max_version: int
    greedy: bool
    """A baseline of its group, sampled at temperature 0 and in no row of a batch."""
    rewards: dict[str, float]
    """Parts of `reward` by name, before their weights: the environment's, summed over turns, and those of the
    reward functions and model."""


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of a step's recorded metrics those that follow from batch and weights alone, under the learner's own names.

    Left out are times (`*_s`), and what the hub adds: means over the episodes that happened to end before it.
    """
    hubs = ("reward", "turns", "episodes_ended", "reward_batch")
    kept = {k: v for k, v in metrics.items() if not (k in hubs or k.startswith("env/") or k.endswith("_s"))}
    return kept | ({"reward": metrics["reward_batch"]} if "reward_batch" in metrics else {})


def read_only(path: Path) -> sqlite3.Connection:
    """A connection to a journal that only reads.

    On a disk that cannot be written SQLite cannot make the files by which readers and writer agree; where there is
    no log to be read either, nobody writes, and the file is taken as it is.
    """
    log = path.with_name(path.name + "-wal")
    still = not os.access(path.parent, os.W_OK) and not (log.is_file() and log.stat().st_size)
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if still else ''}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S)


class RunReader:
    """A read-only view of one run. Use it from one thread; close it, or use it as a context manager.

    Raises:
        RunNotFound: the folder holds no `run.db`, or one that is no journal of this schema version.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir).expanduser()
        path = self.run_dir / "run.db"
        if not path.is_file():
            raise RunNotFound(f"no run in {str(run_dir)!r}: {path} does not exist; `asyncrl runs` lists them")
        self._db = read_only(path)
        try:
            schema = self._value("schema")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise RunNotFound(f"{path} is not the journal of a run: {error}") from error
        if schema != str(SCHEMA_VERSION):
            self._db.close()
            raise RunNotFound(
                f"{path} has schema version {schema or 'none'}, this asyncrl reads {SCHEMA_VERSION}; "
                f"use the asyncrl that made the run"
            )

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the journal; idempotent."""
        self._db.close()

    # ---- the run ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The run's name."""
        return self._value("name") or self.run_dir.name

    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(json.loads(self._value("config_json") or "{}"))

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` or `failed`; a run that was killed still says `running`."""
        return self._value("status") or "running"

    @property
    def reason(self) -> str:
        """Why the run is in that state; empty if that needs no reason."""
        return self._value("reason") or ""

    @property
    def created(self) -> float:
        """When the run was made, in seconds since the epoch."""
        return float(self._value("created") or 0.0)

    def last_step(self) -> int:
        """The last step that is done; 0 before the first."""
        return int(self._one("SELECT COALESCE(MAX(step), 0) FROM step"))

    # ---- steps and metrics -----------------------------------------------------------------------

    def steps(self, after: int = 0) -> list[StepRow]:
        """The learner's steps later than `after`, in order."""
        rows = self._db.execute(
            "SELECT step, ended, metrics_json FROM step WHERE step > ? ORDER BY step", (after,)
        )
        return [StepRow(step, ended, json.loads(text)) for step, ended, text in rows]

    def metrics(self, after_id: int = 0, limit: int = 10_000) -> list[MetricRow]:
        """The processes' reports with an id above `after_id`, in order, at most `limit`."""
        rows = self._db.execute(
            "SELECT id, time, step, source, metrics_json FROM metric WHERE id > ? ORDER BY id LIMIT ?",
            (after_id, limit),
        )
        return [MetricRow(id, time, step, source, json.loads(text)) for id, time, step, source, text in rows]

    def last_metric_id(self) -> int:
        """The newest report's id; 0 before the first."""
        return int(self._one("SELECT COALESCE(MAX(id), 0) FROM metric"))

    def rewards(self, last: int | None = None) -> list[tuple[int, float]]:
        """(step, reward), in order; of the `last` steps only, if given.

        A step's reward is the hub's: the mean over all episodes that ended since the step before. The mean over
        the batch (`reward_batch`) hardly moves under dynamic sampling, which drops what is always solved.
        """
        rows = self._db.execute(
            "SELECT step, json_extract(metrics_json, '$.reward') FROM step ORDER BY step DESC LIMIT ?",
            (-1 if last is None else last,),
        )
        return [(step, reward) for step, reward in reversed(rows.fetchall()) if reward is not None]

    def lag_histogram(self) -> dict[int, float]:
        """Trained tokens by lag, over the whole run."""
        rows = self._db.execute(
            """
            SELECT CAST(SUBSTR(entry.key, 10) AS INTEGER) AS lag, SUM(entry.value)
            FROM step, json_each(step.metrics_json) AS entry
            WHERE entry.key LIKE 'lag!_hist/%' ESCAPE '!' GROUP BY lag ORDER BY lag
            """
        )
        return {int(lag): float(tokens) for lag, tokens in rows}

    # ---- episodes --------------------------------------------------------------------------------

    def episode_states(self) -> dict[tuple[str, str], int]:
        """Number of episodes by (state, reason)."""
        rows = self._db.execute("SELECT state, reason, COUNT(*) FROM episode GROUP BY state, reason")
        return {(state, reason): count for state, reason, count in rows}

    def greedy_states(self) -> dict[str, int]:
        """Number of greedy episodes, the baselines of their groups, by state; `episode_states` has them too."""
        rows = self._db.execute("SELECT state, COUNT(*) FROM episode WHERE greedy GROUP BY state")
        return dict(rows.fetchall())

    def statuses(self) -> dict[str, int]:
        """Number of ended episodes by how they ended (`messages.EpisodeStatus`)."""
        rows = self._db.execute("SELECT status, COUNT(*) FROM episode WHERE status != '' GROUP BY status")
        return dict(rows.fetchall())

    def token_counts(self) -> tuple[int, int]:
        """Tokens of all ended episodes, and those of them that the policy sampled."""
        rows = self._db.execute("SELECT COALESCE(SUM(length), 0), COALESCE(SUM(sampled), 0) FROM episode")
        length, sampled = rows.fetchone()
        return int(length), int(sampled)

    def groups(self) -> int:
        """Groups admitted."""
        return int(self._one("SELECT COUNT(*) FROM grp"))

    def refused(self) -> int:
        """Chunks, turns and ends that came too late: their lease had lapsed, and nothing of them was kept."""
        sql = "SELECT COALESCE(SUM(json_extract(metrics_json, '$.refused')), 0) FROM metric WHERE source = 'hub'"
        return int(self._one(sql))

    def uses(self) -> dict[int, int]:
        """For every episode that was part of a trained batch: of how many."""
        rows = self._db.execute(
            """
            SELECT entry.value, COUNT(*) FROM batch JOIN step USING (batch_id),
                   json_each(batch.episode_ids_json) AS entry GROUP BY entry.value
            """
        )
        return dict(rows.fetchall())

    def episode_ids(self, state: str) -> set[int]:
        """Ids of the episodes in a state."""
        return {row[0] for row in self._db.execute("SELECT episode_id FROM episode WHERE state = ?", (state,))}

    def episodes(
        self, *, state: str | None = None, reason: str | None = None, group: int | None = None, limit: int = 50
    ) -> list[EpisodeRow]:
        """Episodes, newest first, that match every filter given."""
        rows = self._db.execute(
            """
            SELECT episode_id, group_id, task_id, episode.state, episode.reason, status, reward, turns,
                   length, sampled, min_version, max_version, greedy, rewards_json
            FROM episode JOIN grp USING (group_id) JOIN task USING (task_index)
            WHERE (:state IS NULL OR episode.state = :state)
              AND (:reason IS NULL OR episode.reason = :reason)
              AND (:group IS NULL OR group_id = :group)
            ORDER BY episode_id DESC LIMIT :limit
            """,
            {"state": state, "reason": reason, "group": group, "limit": limit},
        )
        return [EpisodeRow(*[*plain, bool(greedy), json.loads(rewards)]) for *plain, greedy, rewards in rows]

    def episode_tokens(self, episode_id: int) -> list[tuple[bool, int, bytes]]:
        """The chunks of an episode in order: (sampled, version, little-endian int32 token ids).

        Empty if its tokens were removed to save space (`asyncrl.reclaim`); its row says how many it had.
        """
        rows = self._db.execute(
            "SELECT sampled, version, tokens FROM chunk WHERE episode_id = ? ORDER BY seq", (episode_id,)
        )
        return [(bool(sampled), version, tokens) for sampled, version, tokens in rows]

    # ---- events and versions ---------------------------------------------------------------------

    def events(self, after_id: int = 0, limit: int = 10_000) -> list[EventRow]:
        """Events with an id above `after_id`, in order, at most `limit`."""
        rows = self._db.execute(
            "SELECT id, time, source, what, detail FROM event WHERE id > ? ORDER BY id LIMIT ?",
            (after_id, limit),
        )
        return [EventRow(*row) for row in rows]

    def event_counts(self) -> dict[tuple[str, str], int]:
        """Number of events by (source, what)."""
        rows = self._db.execute("SELECT source, what, COUNT(*) FROM event GROUP BY source, what")
        return {(source, what): count for source, what, count in rows}

    def versions(self, last: int = 20) -> list[VersionRow]:
        """The `last` published versions, in order."""
        rows = self._db.execute(
            "SELECT version, published, seconds, nbytes FROM version ORDER BY version DESC LIMIT ?", (last,)
        )
        return [VersionRow(*row) for row in reversed(rows.fetchall())]

    # ---- machinery -------------------------------------------------------------------------------

    def _one(self, sql: str) -> Any:
        return self._db.execute(sql).fetchone()[0]

    def _value(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])
