"""A run's journal, `run.db`: the one SQLite file that holds everything a run must not forget.

    hub's loop ── records ──► one thread: write (one transaction) ──► durable ──► acks, leases, batches
                                          prefix, batch, episode_tokens (reads, in the same thread)

The hub is the only writer. It calls `write` and the reads from one thread of its own: while one commit runs,
the records of later events gather and become the next one (group commit). Viewers in other processes read
the file through `asyncrl.metrics.reader`; in WAL mode they neither block the writer nor are blocked by it.

It decides nothing and knows no states: `asyncrl.records` says which rows are written and `asyncrl.schema`
what they mean. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl import records
from asyncrl.messages import EpisodeMeta, Prefix, Span, Task, Turn
from asyncrl.records import Record
from asyncrl.schema import SCHEMA_VERSION, TABLES

PAGE_BYTES = 16384
"""Chunk rows of 32 to 512 tokens are 0.3 to 4 kB; with SQLite's 4 kB pages most of them would spill into
overflow pages. Measured on interleaved episodes: 1.3 to 1.7 times the rows per second of 4 kB pages."""

WAL_PAGES = 1024
"""Pages (16 MiB) in the write-ahead log at which a commit copies them into the file: that one commit is
longer, by 20 to 70 ms on the disk that it was tuned on, so it should be rare but not large."""

BUSY_S = 5.0
"""Longest wait for a lock that another process holds."""


class JournalError(Exception):
    """The journal cannot be used; the text names the file, the cause and what to do."""


class EpisodeTokens(NamedTuple):
    """Everything that is durable of one episode."""

    spans: list[Span]
    next_seq: int
    tokens: NDArray[np.int32]
    """[length] token ids."""
    logprobs: NDArray[np.float32]
    """[length] behaviour log-probs; 0.0 for observed tokens."""


class StoredBatch(NamedTuple):
    """A sealed batch, with what every rank must know of its episodes."""

    batch_id: int
    group_ids: list[int]
    episodes: list[EpisodeMeta]
    """In the order that `plan` indexes."""
    plan: list[list[list[int]]]
    """[rank][row][index into episodes]; greedy episodes are in no row."""
    seed: int


class Journal:
    """An open journal. `create` and `open` make one; at most one thread may be in its methods at a time."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self._db = db

    @classmethod
    def create(cls, path: Path, name: str, config_json: str) -> Journal:
        """Makes the journal of a new run.

        Args:
            path: the file, which must not exist; its folder must.
            name: the run's name.
            config_json: the resolved configuration; its `hub.sync` decides on durability.

        Raises:
            JournalError: the file exists or cannot be made.
        """
        if path.exists():
            raise JournalError(f"{path} exists already; resume that run, or choose another run.name")
        with _explained(path):
            db = _connect(path, "rwc")
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN;{TABLES}COMMIT;")
        journal = cls(path, db)
        created = {
            "schema": str(SCHEMA_VERSION),
            "name": name,
            "config_json": config_json,
            "created": repr(time.time()),
            "status": "running",
        }
        journal.write([records.run_key(key, value) for key, value in created.items()])
        journal._tune()
        return journal

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """Opens the journal of a run that was started before; with `read_only` one that a hub may be writing.

        Raises:
            JournalError: there is no such file, it is no journal, it has another schema version, or it is
                not writable.
        """
        if not path.is_file():
            raise JournalError(f"{path} does not exist; give the folder of a run (`asyncrl runs` lists them)")
        with _explained(path):
            db = _connect(path, "ro" if read_only else "rw")
            tables = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'run'").fetchone()[0]
        journal = cls(path, db)
        schema = journal.get("schema") if tables else "none"
        if schema != str(SCHEMA_VERSION):
            db.close()
            raise JournalError(
                f"{path} has journal schema {schema}, this version of asyncrl reads schema {SCHEMA_VERSION}; "
                "continue the run with the version that started it, or start a new run"
            )
        if not read_only:
            journal._tune()
        return journal

    def _tune(self) -> None:
        """Sets what SQLite does not keep in the file, and checks that the file can be written."""
        with _explained(self.path):
            row = self._db.execute(
                "SELECT json_extract(value, '$.hub.sync') FROM run WHERE key = 'config_json' AND json_valid(value)"
            ).fetchone()
            full = row is not None and row[0] == "full"
            self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            self._db.execute("PRAGMA cache_size = -65536")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._db.close()

    def check(self, *tables: str) -> None:
        """Looks for damaged pages in the given tables, or in the whole file.

        The whole file takes 0.7 s per GiB on one core, or what the disk needs to read it. It does not see a
        changed number or text: tokens have checksums of their own, other columns none.

        Raises:
            JournalError: what SQLite found first.
        """
        for each in [f"('{table}')" for table in tables] or [""]:
            found = self.rows(f"PRAGMA quick_check{each}")
            if found != [("ok",)]:
                raise damaged(self.path, str(found[0][0]).replace("\n", ": "))

    # ---- writing ----

    def write(self, rows: Sequence[Record]) -> None:
        """Writes all rows in one transaction; when it returns they are durable (as far as `hub.sync` says).

        Rows of different tables may be reordered among each other, rows of one table keep their order.

        Raises:
            JournalError: nothing of `rows` was written; the same rows may be written again.
        """
        tables: dict[str, list[Record]] = {}
        for row in rows:
            tables.setdefault(row.statement.table, []).append(row)
        with _explained(self.path), self._transaction():
            for of_table in tables.values():
                for statement, run in groupby(of_table, key=itemgetter(0)):
                    self._db.executemany(statement.sql, [row.values for row in run])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    # ---- reading ----

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a query."""
        with _explained(self.path):
            return self._db.execute(sql, values).fetchall()

    def get(self, key: str) -> str:
        """A property of the run, for example `status`.

        Raises:
            KeyError: it was never set.
        """
        found = self.rows("SELECT value FROM run WHERE key = ?", key)
        if not found:
            raise KeyError(f"{self.path} has no run property {key!r}")
        return str(found[0][0])

    def digest(self, step: int) -> str:
        """The fingerprint of the learner's state after a step; empty if the step or its fingerprint is unknown."""
        found = self.rows("SELECT digest FROM step WHERE step = ?", step)
        return str(found[0][0]) if found else ""

    def used_bytes(self) -> int:
        """Size of the pages that hold something; the file is larger by those that were emptied."""
        pages, empty = (self.rows(f"PRAGMA {what}")[0][0] for what in ("page_count", "freelist_count"))
        return int(pages - empty) * PAGE_BYTES

    def task(self, task_index: int) -> Task:
        """The task that was admitted as the `task_index`-th.

        Raises:
            KeyError: none was.
        """
        found = self.rows("SELECT task_json FROM task WHERE task_index = ?", task_index)
        if not found:
            raise KeyError(f"{self.path} has no task {task_index}")
        return msgspec.json.decode(found[0][0], type=Task)

    def episode_tokens(self, episode_ids: Sequence[int]) -> dict[int, EpisodeTokens]:
        """What is durable of each episode, by id; an episode without chunks has no tokens."""
        return {episode_id: self._tokens(episode_id) for episode_id in episode_ids}

    def prefix(self, episode_id: int) -> tuple[Prefix, bytes, bytes]:
        """What a lease must carry of its episode: the prefix, its tokens (int32), its log-probs (float32)."""
        held = self._tokens(episode_id)
        prefix = Prefix(held.spans, held.next_seq, self._turns(episode_id))
        return prefix, held.tokens.tobytes(), held.logprobs.tobytes()

    def _turns(self, episode_id: int) -> list[Turn]:
        rows = self.rows("SELECT turn_json, snapshot FROM turn WHERE episode_id = ? ORDER BY turn", episode_id)
        turns = [msgspec.json.decode(plain, type=Turn) for plain, _ in rows]
        if turns:
            turns[-1] = msgspec.structs.replace(turns[-1], snapshot=rows[-1][1])
        return turns

    def _tokens(self, episode_id: int) -> EpisodeTokens:
        chunks = self.rows(
            "SELECT n, version, sampled, fork, tokens, logprobs, crc, seq FROM chunk WHERE episode_id = ?"
            " ORDER BY seq",
            episode_id,
        )
        spans: list[Span] = []
        for number, (n, version, sampled, fork, tokens, logprobs, crc, seq) in enumerate(chunks):
            if seq != number:
                raise damaged(self.path, f"chunk {number} of episode {episode_id} is missing (the next is {seq})")
            if records.checksum(tokens, logprobs) != crc:
                raise damaged(self.path, f"chunk {seq} of episode {episode_id} does not fit its checksum")
            if spans and not fork and (spans[-1].version, spans[-1].sampled) == (version, bool(sampled)):
                spans[-1] = msgspec.structs.replace(spans[-1], n=spans[-1].n + n)
            else:
                spans.append(Span(n, version, bool(sampled), bool(fork)))
        all_tokens = b"".join(chunk[4] for chunk in chunks)
        # Observed chunks are stored without log-probs; their zeros are made here.
        all_logprobs = b"".join(chunk[5] or bytes(4 * chunk[0]) for chunk in chunks)
        length = sum(chunk[0] for chunk in chunks)
        if not len(all_tokens) == len(all_logprobs) == 4 * length:
            held = f"{len(all_tokens)} bytes of tokens and {len(all_logprobs)} of log-probs"
            raise damaged(self.path, f"episode {episode_id} should have {length} tokens but holds {held}")
        ids, floats = np.frombuffer(all_tokens, np.dtype("<i4")), np.frombuffer(all_logprobs, np.dtype("<f4"))
        return EpisodeTokens(spans, len(chunks), ids, floats)

    def batch(self, batch_id: int) -> StoredBatch:
        """A sealed batch.

        Raises:
            KeyError: no such batch was sealed.
        """
        found = self.rows(
            "SELECT group_ids_json, episode_ids_json, plan_json, seed FROM batch WHERE batch_id = ?", batch_id
        )
        if not found:
            raise KeyError(f"{self.path} has no batch {batch_id}")
        group_ids, episode_ids, plan, seed = found[0]
        metas = self.rows(
            "SELECT episode_id, group_id, reward, status, length, sampled, rewards_json, greedy FROM json_each(?)"
            " JOIN episode ON episode_id = value ORDER BY json_each.key",
            episode_ids,
        )
        episodes = [EpisodeMeta(*[*plain, json.loads(rewards), bool(greedy)]) for *plain, rewards, greedy in metas]
        return StoredBatch(batch_id, json.loads(group_ids), episodes, json.loads(plan), seed)


def damaged(path: Path, what: str) -> JournalError:
    """The error for a journal whose content cannot be right."""
    return JournalError(
        f"{path} is damaged: {what}; `asyncrl doctor {path.parent}` finds all that is; "
        "restore run.db from a copy, or start a new run"
    )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # No isolation level: transactions are opened by hand. The hub opens the journal in one thread and uses
    # it in another, one at a time.
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


_ADVICE = {
    "SQLITE_FULL": "the disk (or a quota) is full: free some space, then resume the run; nothing was lost",
    "SQLITE_NOTADB": "it is not an asyncrl journal: give the folder of a run",
    "SQLITE_CORRUPT": "it is damaged: `asyncrl doctor RUN` says where; restore it from a copy, or start a new run",
    "SQLITE_CANTOPEN": "its folder must exist and be writable: check it, or choose another run.dir",
    "SQLITE_READONLY": "it must be writable by this user: check its owner and permissions",
    "SQLITE_BUSY": "another process is writing it: is a second hub running on this run?",
    "SQLITE_IOERR": "the disk failed to read or write: check it and its free space, then resume the run",
}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into a `JournalError` that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
        advice = next((text for code, text in _ADVICE.items() if name.startswith(code)), "nothing was written")
        raise JournalError(f"{path}: {error} ({name}); {advice}") from error
