"""Journal space: tokens that nothing needs go, oldest first; everything else stays readable and adds up for ever.

That this holds whatever happens, crashes included, is played in `test_recovery`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl import commit, records
from asyncrl.batches import BatchDesk
from asyncrl.commit import Committer
from asyncrl.config import Config
from asyncrl.journal import Journal, JournalError
from asyncrl.messages import Chunk, NextBatch, Task, Turn
from asyncrl.metrics.summary import list_episodes
from asyncrl.reclaim import Reclaimer, TokensGone, reclaimed_step
from asyncrl.records import Record
from asyncrl.toy import write_tokenizer

TOKENS, SIZE = 256, 4


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "run.db", "a-run", "{}")


def group(number: int, state: str, uses: int = 1, length: int = TOKENS) -> list[Record]:
    """A group of SIZE episodes, the last one of which failed."""
    rows = [records.task(number, number, Task(f"t{number}", [])), records.group(number, number, 0, 1.0)]
    for episode_id in range(SIZE * number, SIZE * (number + 1)):
        tokens = np.full(length, episode_id, "<i4").tobytes()
        failed = episode_id % SIZE == SIZE - 1
        end = records.episode_ended(
            episode_id, state="failed" if failed else "done", reason="error: no" if failed else "",
            status="completed", reward=None if failed else 1.0, rewards={}, turns=1, info={}, next_seq=1,
            length=length, sampled=length, min_version=0, max_version=0, ended=1.0,
        )  # fmt: skip
        header = Chunk(0, episode_id, 0, length, 0, True)
        rows += [records.episode(episode_id, number, 0), records.chunk(header, tokens, tokens), end]
        rows += records.turn(Turn(0, episode_id, 0, 0, [], snapshot=b"state"))
    closed = {"retired": "trained", "filtered": "filtered"}.get(state)
    if closed:
        rows.append(records.episodes_closed(number, closed, "" if closed == "trained" else "equal rewards"))
    return [*rows, records.group_state(number, state), records.group_uses(number, uses)]


def batch(step: int, groups: Sequence[int], done: bool = True) -> list[Record]:
    episodes = [SIZE * number + i for number in groups for i in range(SIZE - 1)]
    sealed = records.batch(step, groups, episodes, [[list(range(len(episodes)))]], 1, 1.0)
    return [sealed, records.step(step, step, 1.0, {})] if done else [sealed]


def kept(*steps: int) -> Record:
    return records.run_key("checkpoints", json.dumps(steps))


def sweep(journal: Journal, limit_mb: float = 1e-6) -> None:
    reclaimer = Reclaimer(journal, limit_mb)
    for _ in range(40):
        reclaimer.piece(0)


def groups_with_tokens(journal: Journal) -> list[int]:
    sql = f"SELECT DISTINCT episode_id / {SIZE} FROM"
    found = [journal.rows(f"{sql} {table} ORDER BY 1") for table in ("chunk", "turn")]
    assert found[0] == found[1]
    whole = journal.rows(f"SELECT count(*) FROM chunk GROUP BY episode_id / {SIZE}")
    assert set(whole) <= {(SIZE,)}
    return [row[0] for row in found[0]]


def test_only_what_no_kept_checkpoint_and_no_live_group_needs_goes(journal: Journal) -> None:
    states = ["retired", "retired", "filtered", "retired", "complete", "running", "retired"]
    for number, state in enumerate(states):
        journal.write(group(number, state))
    journal.write([*batch(1, [0]), *batch(2, [1]), *batch(3, [3]), *batch(4, [6]), *batch(5, [4], done=False)])
    account = [journal.rows(f"SELECT * FROM {table}") for table in ("episode", "grp", "batch", "step")]
    sweep(journal, 0)
    sweep(journal, 1000)
    assert groups_with_tokens(journal) == [0, 1, 2, 3, 4, 5, 6]
    assert reclaimed_step(journal) is None
    sweep(journal)
    assert groups_with_tokens(journal) == [0, 1, 3, 4, 5, 6]  # No checkpoint: the run may begin anew.
    assert reclaimed_step(journal) == 0
    journal.write([kept(9)])
    sweep(journal)
    assert groups_with_tokens(journal) == [
        0,
        1,
        3,
        4,
        5,
        6,
    ]  # One beyond the journal would not be loaded.
    journal.write([kept(2, 4)])
    sweep(journal)
    assert groups_with_tokens(journal) == [3, 4, 5, 6]
    assert reclaimed_step(journal) == 2
    assert [journal.rows(f"SELECT * FROM {table}") for table in ("episode", "grp", "batch", "step")] == account


def test_a_group_that_is_used_again_goes_with_its_last_batch(journal: Journal) -> None:
    for number, uses in enumerate([2, 1, 2, 1]):
        journal.write(group(number, "retired", uses))
    for step, groups in enumerate([[0, 1], [2], [2], [0], [3]], start=1):
        journal.write(batch(step, groups))
    for oldest, left in ((1, [0, 2, 3]), (3, [0, 3]), (4, [3])):
        journal.write([kept(oldest)])
        sweep(journal)
        assert groups_with_tokens(journal) == left


def test_a_learner_that_needs_what_is_gone_is_told_what_would_do(journal: Journal) -> None:
    for number in range(4):
        journal.write(group(number, "retired") + batch(number + 1, [number]))
    journal.write([kept(2, 4)])
    sweep(journal)
    desk = BatchDesk(journal, Config())
    assert desk.share(NextBatch(3, 0, 1))[0].step == 3
    with pytest.raises(
        TokensGone, match=r"step 1, but the tokens of steps 1 to 2 .*\(hub\.journal_mb\).*: 2, 4\."
    ):
        desk.share(NextBatch(1, 0, 1))
    journal.write([record for record in records.tokens_removed(SIZE * 3) if "chunk" in record.statement.sql])
    with pytest.raises(JournalError, match="is damaged: episode 12 of batch 4 has not the tokens of its row"):
        desk.share(NextBatch(4, 0, 1))


def test_the_list_of_episodes_says_what_was_reclaimed(journal: Journal, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    config = json.dumps({"model": {"path": str(tmp_path / "model")}})
    journal.write([*group(0, "filtered"), *group(1, "complete"), records.run_key("config_json", config)])
    sweep(journal)
    lines = list_episodes(journal.path.parent).splitlines()[1:]
    assert ["(reclaimed)" in line for line in lines] == [False] * SIZE + [True] * SIZE


async def test_the_file_stops_growing_and_pieces_run_between_commits(journal: Journal) -> None:
    limit_mb, length, committed = 4, 2048, 0
    committer = Committer(journal, lambda: [], Reclaimer(journal, limit_mb))
    runs = asyncio.create_task(committer.run_forever())
    for number in range(400):
        done = asyncio.Event()
        step, last = divmod(number, 8)
        committer.record(*group(number, "retired" if number % 4 else "filtered", length=length))
        if last == 7:
            groups = [n for n in range(8 * step, 8 * step + 8) if n % 4]
            committer.record(*batch(step + 1, groups), kept(max(1, step - 1)))
        committer.after(done.set)
        await done.wait()
        committed += SIZE * length * 8
    runs.cancel()
    await asyncio.gather(runs, return_exceptions=True)
    committer.close()
    assert committed > 5 * limit_mb * 2**20
    assert journal.path.stat().st_size < 1.3 * limit_mb * 2**20
    again = Journal.open(journal.path)
    held = groups_with_tokens(again)
    assert {n for n in range(8 * 48, 400) if n % 4} <= set(held)
    assert again.rows("SELECT count(*) FROM episode") == [(400 * SIZE,)]
    assert again.rows("SELECT DISTINCT what FROM event") == [("reclaimed",)]
    assert again.rows("PRAGMA integrity_check") == [("ok",)]


async def test_a_journal_over_its_limit_of_which_nothing_may_go_says_so_once(
    journal: Journal,
) -> None:
    journal.write([row for number in range(40) for row in group(number, "complete")])
    reclaimer = Reclaimer(journal, 0.1)
    for _ in range(10):
        reclaimer.piece(0)
    events = journal.rows("SELECT what, detail FROM event")
    assert [what for what, _ in events] == ["journal_over_limit"]
    assert "hub.journal_mb = 0.1, the rest is live or needed by a kept checkpoint" in events[0][1]


async def test_a_slow_disk_makes_acks_late_and_is_an_event(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "SLOW_COMMIT_S", 0.2)
    committer = Committer(journal, lambda: [], Reclaimer(journal, 0))
    acked = asyncio.Event()
    other = Journal.open(journal.path)
    other._db.execute("BEGIN IMMEDIATE")  # Nobody else can write, as on a disk that does not answer.
    committer.record(records.run_key("status", "finished"))
    committer.after(acked.set)
    runs = asyncio.create_task(committer.run_forever())
    await asyncio.sleep(0.4)  # The commit hangs; how long is the subject.
    assert not acked.is_set()
    other._db.execute("ROLLBACK")
    async with asyncio.timeout(20):
        await acked.wait()
        assert other.get("status") == "finished"
        while not (found := other.rows("SELECT detail FROM event WHERE what = 'slow_disk'")):
            await asyncio.sleep(0.01)  # It is written by the commit after the slow one.
    assert "a commit of 1 rows took" in found[0][0]
    runs.cancel()
    await asyncio.gather(runs, return_exceptions=True)
