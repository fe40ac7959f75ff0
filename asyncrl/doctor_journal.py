"""Checks one run's journal: pages, tokens, and whether its tables agree with each other.

A rule is a query for rows that must not be there. All of it reads one snapshot, so a run that goes on is no
different; the journal's log cannot be shortened meanwhile. No torch. Called by `asyncrl.doctor_run`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.doctor import Finding
from asyncrl.metrics.reader import read_only
from asyncrl.metrics.summary import find_problems
from asyncrl.records import checksum
from asyncrl.schema import SCHEMA_VERSION

TOLD = 3
"""Problems of one kind that are named; the others are counted."""
RESTORE = "restore run.db from a copy"

RULES: dict[str, list[tuple[str, str]]] = {
    "episodes": [
        ("episode {} has a state that does not fit its group's", """
            SELECT episode_id FROM episode LEFT JOIN grp USING (group_id) WHERE coalesce(NOT CASE grp.state
            WHEN 'running' THEN episode.state IN ('queued', 'leased', 'done', 'failed')
            WHEN 'complete' THEN episode.state IN ('done', 'failed')
            WHEN 'filtered' THEN episode.state IN ('filtered', 'failed')
            WHEN 'retired' THEN episode.state IN ('trained', 'failed') END, 1)"""),
        ("episode {} was dropped without a reason", """
            SELECT episode_id FROM episode WHERE state IN ('filtered', 'failed') AND reason = ''"""),
        ("episode {} has ended and has no reward", """
            SELECT episode_id FROM episode WHERE state IN ('done', 'trained') AND reward IS NULL"""),
    ],
    "groups": [
        ("group {} has no task", """
            SELECT group_id FROM grp LEFT JOIN task USING (task_index) WHERE task_id IS NULL"""),
        ("group {} was filtered without a reason", """
            SELECT group_id FROM grp WHERE state = 'filtered' AND reason = ''"""),
        ("group {} is not in as many batches as it says", """
            SELECT group_id FROM grp LEFT JOIN (SELECT value, count(*) AS n FROM batch, json_each(group_ids_json)
            GROUP BY value) ON group_id = value WHERE uses != coalesce(n, 0)"""),
    ],
    "steps": [
        ("step {} is missing", """
            SELECT step - 1 FROM step WHERE step > 1 AND step - 1 NOT IN (SELECT step FROM step)"""),
        ("batch {} is missing", """
            SELECT batch_id - 1 FROM batch WHERE batch_id > 1
            AND batch_id - 1 NOT IN (SELECT batch_id FROM batch)"""),
        ("step {} was done without its batch", """
            SELECT step FROM step LEFT JOIN batch USING (batch_id) WHERE step != batch_id OR seed IS NULL"""),
    ],
    "leases": [
        ("episode {} has several active leases", """
            SELECT episode_id FROM lease WHERE state = 'active' GROUP BY episode_id HAVING count(*) > 1"""),
        ("lease {} is active, and its episode is not leased", """
            SELECT lease_id FROM lease LEFT JOIN episode USING (episode_id)
            WHERE lease.state = 'active' AND coalesce(episode.state, '') != 'leased'"""),
        ("episode {} is leased and has no active lease", """
            SELECT episode_id FROM episode WHERE state = 'leased'
            AND episode_id NOT IN (SELECT episode_id FROM lease WHERE state = 'active')"""),
    ],
}  # fmt: skip

# May its tokens be gone? Only as a whole, and only those that `asyncrl.reclaim` takes.
_TOKENS = """
SELECT episode_id, ended IS NOT NULL, next_seq, length, chunks, first, last, n,
       grp.state = 'filtered' OR (grp.state = 'retired' AND last_batch <= :gone)
FROM episode LEFT JOIN grp USING (group_id)
LEFT JOIN (SELECT episode_id, count(*) AS chunks, min(seq) AS first, max(seq) AS last, sum(n) AS n
           FROM chunk GROUP BY episode_id) USING (episode_id)
LEFT JOIN (SELECT value AS group_id, max(batch_id) AS last_batch FROM batch, json_each(group_ids_json)
           GROUP BY value) USING (group_id)
"""
_USES = """
SELECT value, count(*) FROM batch JOIN step USING (batch_id), json_each(episode_ids_json) GROUP BY 1
"""
_MEMBERS = """
SELECT value, greedy, group_id IN (SELECT value FROM json_each(:groups)), episode.state IN ('done', 'trained')
FROM json_each(:episodes) LEFT JOIN episode ON episode_id = value ORDER BY json_each.key
"""


@dataclass
class StoredRun:
    """A run that is being checked."""

    folder: Path
    read_at: float = 0.0
    """When the snapshot was taken; to check it may take minutes."""

    @cached_property
    def db(self) -> sqlite3.Connection:
        """One snapshot of the journal."""
        db = read_only(self.folder / "run.db")
        self.read_at = time.time()
        db.execute("BEGIN")
        return db

    def rows(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        """Runs a query."""
        return self.db.execute(sql, values).fetchall()

    def get(self, key: str) -> str | None:
        """A property of the run."""
        found = self.rows("SELECT value FROM run WHERE key = :key", key=key)
        return str(found[0][0]) if found else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(json.loads(self.get("config_json") or "{}"))

    @property
    def step(self) -> int:
        """The last step that was done."""
        return int(self.rows("SELECT coalesce(max(step), 0) FROM step")[0][0])

    @property
    def gone(self) -> int:
        """Last step whose batch lost tokens; 0: at most filtered groups did; -1: nobody lost any."""
        return int(self.get("reclaimed") or -1)


def check_schema(run: StoredRun) -> Iterator[Finding]:
    """The file can be opened and has this version's tables."""
    schema = run.get("schema")
    if schema != str(SCHEMA_VERSION):
        advice = "use the asyncrl that made the run"
        yield Finding("problem", "schema", f"{schema or 'none'}, this asyncrl reads {SCHEMA_VERSION}; {advice}")
    else:
        yield Finding("ok", "schema", f"{schema}, SQLite {sqlite3.sqlite_version}")


def check_pages(run: StoredRun) -> Iterator[Finding]:
    """SQLite's own check of every page, row and index."""
    found = [str(row[0]).replace("\n", ": ") for row in run.rows("PRAGMA integrity_check(20)")]
    size = (run.folder / "run.db").stat().st_size / 2**20
    yield _finding("pages", [] if found == ["ok"] else found, f"{size:.1f} MiB, no page is damaged")


def check_tokens(run: StoredRun) -> Iterator[Finding]:
    """Every chunk fits its checksum, every ended episode has the tokens that its row promises."""
    wrong, chunks = [], 0
    for episode_id, seq, n, sampled, tokens, logprobs, crc in run.db.execute(
        "SELECT episode_id, seq, n, sampled, tokens, logprobs, crc FROM chunk ORDER BY rowid"
    ):
        chunks += 1
        if checksum(tokens, logprobs) != crc:
            wrong.append(f"chunk {seq} of episode {episode_id} does not fit its checksum")
        elif (len(tokens), len(logprobs)) != (4 * n, 4 * n * sampled):
            wrong.append(f"chunk {seq} of episode {episode_id} does not hold the {n} tokens that it says")
    reclaimed = 0
    for episode_id, ended, next_seq, length, held, first, last, n, may_go in run.rows(_TOKENS, gone=run.gone):
        if held is None and next_seq and run.gone >= 0 and may_go:
            reclaimed += 1
        elif held is not None and (first, last) != (0, held - 1):
            wrong.append(f"episode {episode_id} has {held} chunks, numbered from {first} to {last}")
        elif ended and (held or 0, n or 0) != (next_seq, length):
            wrong.append(f"episode {episode_id} has {n or 0} tokens, and its row says {length}")
    stray = "SELECT DISTINCT episode_id FROM chunk WHERE episode_id NOT IN (SELECT episode_id FROM episode)"
    wrong += [f"there are chunks of episode {row[0]}, which does not exist" for row in run.rows(stray)]
    yield _finding("tokens", wrong, f"{chunks} chunks fit their checksums; {reclaimed} episodes were reclaimed")


def check_rules(run: StoredRun) -> Iterator[Finding]:
    """States fit each other, steps and batches are gapless, leases are unique."""
    for what, rules in RULES.items():
        wrong = [text.format(row[0]) for text, sql in rules for row in run.rows(sql)]
        yield _finding(what, wrong, f"{len(rules)} rules hold")


def check_batches(run: StoredRun) -> Iterator[Finding]:
    """Each batch holds episodes of its groups, and its plan has each of them, but the baselines, in one row."""
    wrong, batches = [], run.rows("SELECT batch_id, group_ids_json, episode_ids_json, plan_json FROM batch")
    for batch_id, groups, episodes, plan in batches:
        members = run.rows(_MEMBERS, groups=groups, episodes=episodes)
        if len({row[0] for row in members}) < len(members):
            wrong.append(f"batch {batch_id} has an episode twice")
        if strange := [row[0] for row in members if not (row[2] and row[3])]:
            wrong.append(f"batch {batch_id} has episode {strange[0]}, which is not of its groups or was dropped")
        planned = Counter(index for rank in json.loads(plan) for row in rank for index in row)
        if planned != Counter(index for index, row in enumerate(members) if not row[1]):
            wrong.append(f"the plan of batch {batch_id} does not have each episode exactly once")
    yield _finding("batches", wrong, f"{len(batches)} batches, each plan has its episodes once")


def check_account(run: StoredRun) -> Iterator[Finding]:
    """Every admitted episode is trained as often as it may be, dropped, or live."""
    train, reuse = run.config["train"], int(run.config["replay"]["reuse"])
    greedy = bool(run.rows("SELECT EXISTS (SELECT 1 FROM episode WHERE greedy)")[0][0])
    admitted = run.rows("SELECT count(*) FROM grp")[0][0] * (int(train["group_size"]) + greedy)
    by_state = dict(run.rows("SELECT state, count(*) FROM episode GROUP BY state"))
    uses = dict(run.rows(_USES))
    trained = {row[0] for row in run.rows("SELECT episode_id FROM episode WHERE state = 'trained'")}
    wrong = find_problems(admitted, by_state, uses, trained, reuse)
    parts = ", ".join(f"{number} {state}" for state, number in sorted(by_state.items()))
    yield _finding("account", wrong, f"{admitted} admitted = {parts or 'none'}")


def _finding(what: str, wrong: list[str], sound: str) -> Finding:
    if not wrong:
        return Finding("ok", what, sound)
    more = f" (and {len(wrong) - TOLD} more)" if len(wrong) > TOLD else ""
    return Finding("problem", what, f"{', '.join(wrong[:TOLD])}{more}; {RESTORE}")
