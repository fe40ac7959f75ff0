"""The journal: what is written is read back, twice is once, all or nothing, and errors say what to do."""

import json
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl import records
from asyncrl.journal import Journal, JournalError
from asyncrl.messages import Checkpointed, Chunk, EpisodeMeta, Prefix, Span, Task, Turn
from asyncrl.records import Record
from asyncrl.schema import SCHEMA_VERSION


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "run.db", "a-run", '{"hub": {"sync": "normal"}}')


def chunk(episode_id: int, seq: int, tokens: list[int], version: int, sampled: bool = True) -> Record:
    logprobs = np.array([-token / 8 for token in tokens], "<f4").tobytes() if sampled else b""
    header = Chunk(7, episode_id, seq, len(tokens), version, sampled)
    return records.chunk(header, memoryview(np.array(tokens, "<i4").tobytes()), logprobs)


def test_an_episode_is_read_back_in_order_with_its_spans(journal: Journal) -> None:
    journal.write(
        [
            chunk(3, 2, [30, 31], 1),
            chunk(3, 0, [1, 2, 3], -1, sampled=False),
            chunk(3, 1, [20], 1),
            chunk(4, 0, [9], 0),
            chunk(3, 3, [40], 2),
        ]
    )
    held = journal.episode_tokens([4, 3, 5])
    assert held[3].spans == [Span(3, -1, False), Span(3, 1, True), Span(1, 2, True)]
    assert held[3].next_seq == 4
    assert held[3].tokens.tolist() == [1, 2, 3, 20, 30, 31, 40]
    assert held[3].logprobs.tolist() == [0, 0, 0, -2.5, -3.75, -3.875, -5]
    assert held[4].tokens.tolist() == [9]
    assert held[5].tokens.tolist() == []


def test_a_prefix_is_ready_to_be_sent(journal: Journal) -> None:
    journal.write([chunk(3, 0, [5, 6], -1, sampled=False), chunk(3, 1, [8], 0)])
    prefix, tokens, logprobs = journal.prefix(3)
    assert prefix == Prefix([Span(2, -1, False), Span(1, 0, True)], 2)
    assert np.frombuffer(tokens, "<i4").tolist() == [5, 6, 8]
    assert np.frombuffer(logprobs, "<f4").tolist() == [0, 0, -1]
    assert journal.prefix(99) == (Prefix([], 0), b"", b"")


def test_a_prefix_has_its_forks_and_its_turns_and_only_the_last_snapshot(journal: Journal) -> None:
    start = Turn(1, 3, 0, 1, [{"role": "user", "content": "é"}], [{"name": "f"}], snapshot=b"0")
    turns = [start] + [Turn(1, 3, n, 2 * n, [{"n": n}], [], {"right": 0.5}, {"calls": 1.0}, b"1") for n in (1, 2)]
    observed = [Chunk(1, 3, seq, 1, -1, False, fork) for seq, fork in ((0, False), (2, True))]
    journal.write([record for turn in turns for record in records.turn(turn)])
    journal.write([records.chunk(each, bytes(4)) for each in observed] + [chunk(3, 1, [8], 0)])
    # Answered anew by another generator, whose answer is the one that its tokens follow.
    anew = Turn(2, 3, 2, 4, [{"n": "anew"}], snapshot=b"2")
    journal.write(records.turn(anew))
    snapshots = journal.rows("SELECT snapshot FROM turn WHERE episode_id = 3 ORDER BY turn")
    assert snapshots == [(None,), (None,), (b"2",)]
    prefix = journal.prefix(3)[0]
    assert prefix.spans == [Span(1, -1, False), Span(1, 0, True), Span(1, -1, False, True)]
    assert prefix.turns == [*(msgspec.structs.replace(turn, snapshot=None) for turn in turns[:2]), anew]


def test_rows_that_are_written_twice_are_there_once(journal: Journal) -> None:
    rows = [
        records.run_key("status", "running"),
        records.task(0, 0, Task("t", [{"role": "user", "content": "1+1"}], answer="2")),
        records.group(0, 0, 0, 1.0),
        records.episode(0, 0, 11),
        records.lease(0, 0, "generator-0", 2.0),
        records.episode_state(0, "leased"),
        chunk(0, 0, [1, 2], 0),
        records.lease_state(0, "done"),
        records.group_uses(0, 1),
        records.batch(1, [0], [0], [[[0]]], 5, 3.0),
        records.step(1, 1, 4.0, {"loss": 0.5}),
        records.version(1, 5.0, 0.1, 100),
        records.episodes_closed(0, "trained"),
    ]
    tables = ["run", "task", "grp", "episode", "lease", "chunk", "batch", "step", "version"]

    def content() -> list[list[tuple[object, ...]]]:
        return [journal.rows(f"SELECT * FROM {table}") for table in tables]

    journal.write(rows)
    once = content()
    journal.write(rows)
    assert content() == once
    assert [len(table) for table in once[1:]] == [1] * 8


def test_rows_of_one_table_keep_their_order(journal: Journal) -> None:
    journal.write([records.episode(n, 0, n) for n in range(3)])
    journal.write(
        [
            records.episode_state(0, "leased"),
            chunk(0, 0, [1], 0),
            records.episodes_closed(0, "filtered", "equal rewards"),
            records.episode_state(1, "queued"),
        ]
    )
    assert journal.rows("SELECT state FROM episode ORDER BY episode_id") == [
        ("filtered",), ("queued",), ("filtered",),
    ]  # fmt: skip


def test_a_write_that_fails_leaves_nothing(journal: Journal) -> None:
    good = chunk(1, 0, [1], 0)
    bad = Record(good.statement, (1, 1, None, *good.values[3:]))
    with pytest.raises(JournalError, match="NOT NULL"):
        journal.write([records.run_key("status", "finished"), bad])
    assert journal.get("status") == "running"
    journal.write([records.run_key("status", "finished")])
    assert journal.get("status") == "finished"


def test_a_full_disk_is_explained_and_loses_nothing(journal: Journal) -> None:
    journal.write([chunk(0, 0, [1], 0)])
    pages = journal.rows("PRAGMA page_count")[0][0]
    journal.rows(f"PRAGMA max_page_count = {pages + 3}")
    big = [chunk(1, seq, list(range(4096)), 0) for seq in range(16)]
    with pytest.raises(JournalError, match=r"run\.db.*free some space"):
        journal.write([records.run_key("status", "stopped"), *big])
    assert journal.get("status") == "running"
    journal.rows("PRAGMA max_page_count = 100000")
    journal.write(big)  # Space was made: the same rows go in.
    assert len(journal.episode_tokens([1])[1].tokens) == 16 * 4096
    assert journal.rows("PRAGMA integrity_check") == [("ok",)]


def test_a_batch_lists_its_episodes_in_the_order_of_its_plan(journal: Journal) -> None:
    for episode_id, reward in ((4, 1.0), (5, 0.0), (9, 0.5)):
        journal.write([records.episode(episode_id, episode_id // 4, 0, greedy=episode_id == 5)])
        journal.write(
            [
                records.episode_ended(
                    episode_id, state="done", reason="", status="completed", reward=reward,
                    rewards={"right": reward - 0.5, "naïve": 0.5}, turns=1, info={}, next_seq=2,
                    length=10 + episode_id, sampled=episode_id, min_version=0, max_version=1, ended=1.0,
                )
            ]
        )  # fmt: skip
    journal.write([records.batch(1, [2, 1], [9, 4, 5], [[[0]], [[1]]], 77, 2.0)])
    batch = journal.batch(1)
    assert batch.episodes == [
        EpisodeMeta(9, 2, 0.5, "completed", 19, 9, {"right": 0.0, "naïve": 0.5}),
        EpisodeMeta(4, 1, 1.0, "completed", 14, 4, {"right": 0.5, "naïve": 0.5}),
        EpisodeMeta(5, 1, 0.0, "completed", 15, 5, {"right": -0.5, "naïve": 0.5}, greedy=True),
    ]
    assert (batch.group_ids, batch.plan, batch.seed) == ([2, 1], [[[0]], [[1]]], 77)
    with pytest.raises(KeyError, match="no batch 2"):
        journal.batch(2)


def test_tasks_and_run_properties_survive_reopening(journal: Journal) -> None:
    task = Task("sum-1", [{"role": "user", "content": "1+1"}], answer={"value": 2}, metadata={"digits": 1})
    journal.write([records.task(0, 0, task), *records.checkpoints(1.0, Checkpointed(20, "c/20", [10, 20]))])
    journal.close()
    again = Journal.open(journal.path)
    assert again.task(0) == task
    assert again.get("name") == "a-run"
    assert json.loads(again.rows("SELECT detail FROM event")[0][0]) == {"step": 20, "path": "c/20"}
    assert json.loads(again.get("checkpoints")) == [10, 20]
    with pytest.raises(KeyError, match="no task 1"):
        again.task(1)
    with pytest.raises(KeyError, match="verdict"):
        again.get("verdict")


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
def test_the_configuration_decides_how_durable_a_commit_is(tmp_path: Path, sync: str, level: int) -> None:
    Journal.create(tmp_path / "run.db", "x", json.dumps({"hub": {"sync": sync}})).close()
    journal = Journal.open(tmp_path / "run.db")
    assert journal.rows("PRAGMA synchronous") == [(level,)]
    assert journal.rows("PRAGMA journal_mode") == [("wal",)]


def test_a_reader_elsewhere_sees_a_commit_and_does_not_block_the_next(journal: Journal) -> None:
    reader = sqlite3.connect(f"{journal.path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
    journal.write([chunk(0, 0, [1], 0)])
    assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
    reader.execute("COMMIT")
    assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (1,)
    reader.close()


@pytest.mark.parametrize("column", ["tokens", "logprobs"])
def test_a_flipped_bit_is_noticed_wherever_tokens_are_read(journal: Journal, column: str) -> None:
    journal.write([chunk(6, seq, [1, 2, 3], 0) for seq in range(3)] + [chunk(7, 0, [4], 0)])
    journal.close()
    stored, damaged = {"tokens": ([1, 2, 3], [1, 2, 7]), "logprobs": ([-1 / 8, -2 / 8], [-1 / 8, -3 / 8])}[column]
    kind = {"tokens": "<i4", "logprobs": "<f4"}[column]
    before, after = (np.array(values, kind).tobytes() for values in (stored, damaged))
    content = journal.path.read_bytes()
    second = content.index(before, content.index(before) + 1)
    journal.path.write_bytes(content[:second] + after + content[second + len(after) :])
    again = Journal.open(journal.path)
    assert again.rows("PRAGMA integrity_check") == [("ok",)]  # SQLite itself does not notice.
    assert again.episode_tokens([7])[7].tokens.tolist() == [4]
    for read in (lambda: again.episode_tokens([6]), lambda: again.prefix(6)):
        with pytest.raises(JournalError, match=r"chunk 1 of episode 6 does not fit its checksum; `asyncrl doc"):
            read()


def test_a_chunk_whose_length_is_wrong_is_noticed(journal: Journal) -> None:
    journal.write([chunk(6, 0, [1, 2], 0)])
    journal._db.execute("UPDATE chunk SET n = 3")
    with pytest.raises(JournalError, match="episode 6 should have 3 tokens but holds 8 bytes"):
        journal.episode_tokens([6])


def test_opening_what_is_no_journal_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with pytest.raises(JournalError, match=r"run\.db does not exist; give the folder of a run"):
        Journal.open(path)
    with pytest.raises(JournalError, match="its folder must exist"):
        Journal.create(tmp_path / "nowhere" / "run.db", "x", "{}")
    path.write_text("not a database, but long enough to have a header" * 10)
    with pytest.raises(JournalError, match="not an asyncrl journal"):
        Journal.open(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE other (x)").connection.close()
    with pytest.raises(JournalError, match="schema none"):
        Journal.open(path)


@pytest.mark.parametrize("schema", [3, 999])
def test_an_older_or_newer_schema_version_is_refused(journal: Journal, schema: int) -> None:
    journal.write([records.run_key("schema", str(schema))])
    journal.close()
    text = f"has journal schema {schema}, this version of asyncrl reads schema {SCHEMA_VERSION}; continue the run"
    with pytest.raises(JournalError, match=text):
        Journal.open(journal.path)


def test_an_existing_run_is_not_overwritten(journal: Journal) -> None:
    with pytest.raises(JournalError, match="exists already; resume that run"):
        Journal.create(journal.path, "x", "{}")
    assert journal.get("name") == "a-run"


def test_a_second_writer_is_told_about_the_first(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.journal.BUSY_S", 0.05)
    journal._db.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError, match="is a second hub running"):
        Journal.open(journal.path)
    journal._db.execute("ROLLBACK")


def test_a_journal_that_became_read_only_is_explained(journal: Journal) -> None:
    journal.rows("PRAGMA query_only = ON")
    with pytest.raises(JournalError, match="owner and permissions"):
        journal.write([records.run_key("status", "finished")])
    assert journal.get("status") == "running"
