"""The rows that are written to a run's journal: one function per statement, and nothing that runs them.

A `Record` is one SQL statement and its values. `asyncrl.scheduler` makes the records of its own changes,
the hub makes the others (chunks, steps, versions, metrics, events), and `asyncrl.journal` writes both, in
one transaction. Every statement may be run twice with the same values and leave the same rows, except
`metric` and `event`, which have no natural key: a failed transaction is rolled back whole, so they are
written once as well. (`INSERT OR IGNORE` would also swallow a broken row; `ON CONFLICT DO NOTHING` does
not.) There is no foreign key and no trigger, so only the order within one table matters.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.messages import Checkpointed, CheckpointFault, Chunk, Task, Turn


class Statement(NamedTuple):
    """One parametrised SQL statement."""

    table: str
    """The only table that it changes."""
    sql: str


class Record(NamedTuple):
    """One execution of a statement."""

    statement: Statement
    values: tuple[Any, ...]


_TASK = Statement(
    "task", "INSERT INTO task (task_index, drawn, task_id, task_json) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_GROUP = Statement(
    "grp",
    "INSERT INTO grp (group_id, task_index, state, needs_version, admitted)"
    " VALUES (?, ?, 'running', ?, ?) ON CONFLICT DO NOTHING",
)
_GROUP_STATE = Statement("grp", "UPDATE grp SET state = ?, reason = ? WHERE group_id = ?")
_GROUP_USES = Statement("grp", "UPDATE grp SET uses = ? WHERE group_id = ?")
_EPISODE = Statement(
    "episode",
    "INSERT INTO episode (episode_id, group_id, seed, greedy, state)"
    " VALUES (?, ?, ?, ?, 'queued') ON CONFLICT DO NOTHING",
)
_EPISODE_STATE = Statement("episode", "UPDATE episode SET state = ? WHERE episode_id = ?")
_EPISODE_ENDED = Statement(
    "episode",
    "UPDATE episode SET state = ?, reason = ?, status = ?, reward = ?, rewards_json = ?, turns = ?,"
    " info_json = ?, next_seq = ?, length = ?, sampled = ?, min_version = ?, max_version = ?, ended = ?"
    " WHERE episode_id = ?",
)
_EPISODES_CLOSED = Statement(
    "episode",
    "UPDATE episode SET state = ?, reason = ? WHERE group_id = ? AND state IN ('queued', 'leased', 'done')",
)
_LEASE = Statement(
    "lease",
    "INSERT INTO lease (lease_id, episode_id, generator, granted, state)"
    " VALUES (?, ?, ?, ?, 'active') ON CONFLICT DO NOTHING",
)
_LEASE_STATE = Statement("lease", "UPDATE lease SET state = ? WHERE lease_id = ?")
_BATCH = Statement(
    "batch",
    "INSERT INTO batch (batch_id, group_ids_json, episode_ids_json, plan_json, seed, sealed)"
    " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
)
_CHUNK = Statement(
    "chunk",
    "INSERT INTO chunk (episode_id, seq, n, version, sampled, fork, tokens, logprobs, crc)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
)
_TURN = Statement(
    "turn", "INSERT OR REPLACE INTO turn (episode_id, turn, turn_json, snapshot) VALUES (?, ?, ?, ?)"
)
_OLD_SNAPSHOT = Statement("turn", "UPDATE turn SET snapshot = NULL WHERE episode_id = ? AND turn < ?")
_CHUNKS_REMOVED = Statement("chunk", "DELETE FROM chunk WHERE episode_id = ?")
_TURNS_REMOVED = Statement("turn", "DELETE FROM turn WHERE episode_id = ?")
_STEP = Statement(
    "step", "INSERT OR REPLACE INTO step (step, batch_id, ended, metrics_json, digest) VALUES (?, ?, ?, ?, ?)"
)
_VERSION = Statement(
    "version", "INSERT OR REPLACE INTO version (version, published, seconds, nbytes) VALUES (?, ?, ?, ?)"
)
_METRIC = Statement("metric", "INSERT INTO metric (time, step, source, metrics_json) VALUES (?, ?, ?, ?)")
_EVENT = Statement("event", "INSERT INTO event (time, source, what, detail) VALUES (?, ?, ?, ?)")
_RUN = Statement("run", "INSERT OR REPLACE INTO run (key, value) VALUES (?, ?)")


# ---- the scheduler's rows ------------------------------------------------------------------------


def task(task_index: int, drawn: int, task: Task) -> Record:
    """A task, before the group that attempts it; `drawn` is its index in the training split."""
    return Record(_TASK, (task_index, drawn, task.id, msgspec.json.encode(task).decode()))


def group(group_id: int, task_index: int, needs_version: int, admitted: float) -> Record:
    """An admitted group, running."""
    return Record(_GROUP, (group_id, task_index, needs_version, admitted))


def group_state(group_id: int, state: str, reason: str = "") -> Record:
    """A group is now `complete`, `filtered` for a reason, or `retired`."""
    return Record(_GROUP_STATE, (state, reason, group_id))


def group_uses(group_id: int, uses: int) -> Record:
    """A group has been sealed into `uses` batches."""
    return Record(_GROUP_USES, (uses, group_id))


def episode(episode_id: int, group_id: int, seed: int, greedy: bool = False) -> Record:
    """An admitted episode, queued."""
    return Record(_EPISODE, (episode_id, group_id, seed, greedy))


def episode_state(episode_id: int, state: str) -> Record:
    """An episode is now `queued` (again) or `leased`."""
    return Record(_EPISODE_STATE, (state, episode_id))


def episode_ended(
    episode_id: int,
    *,
    state: str,
    reason: str,
    status: str,
    reward: float | None,
    rewards: Mapping[str, float],
    turns: int,
    info: Mapping[str, float],
    next_seq: int,
    length: int,
    sampled: int,
    min_version: int,
    max_version: int,
    ended: float,
) -> Record:
    """An episode is `done` or `failed`; the rest of its row is final with it."""
    how = (state, reason, status, reward, json.dumps(rewards), turns, json.dumps(info))
    held = (next_seq, length, sampled, min_version, max_version)
    return Record(_EPISODE_ENDED, (*how, *held, ended, episode_id))


def episodes_closed(group_id: int, state: str, reason: str = "") -> Record:
    """All episodes of a group that have no final state yet are now `trained` or `filtered`."""
    return Record(_EPISODES_CLOSED, (state, reason, group_id))


def lease(lease_id: int, episode_id: int, generator: str, granted: float) -> Record:
    """A granted lease, active."""
    return Record(_LEASE, (lease_id, episode_id, generator, granted))


def lease_state(lease_id: int, state: str) -> Record:
    """A lease is now `done` or `lapsed`."""
    return Record(_LEASE_STATE, (state, lease_id))


def batch(
    batch_id: int,
    group_ids: Sequence[int],
    episode_ids: Sequence[int],
    plan: Sequence[Sequence[Sequence[int]]],
    seed: int,
    sealed: float,
) -> Record:
    """A sealed batch; `plan` is [rank][row][index into episode_ids], without the greedy episodes."""
    lists = (json.dumps(part, separators=(",", ":")) for part in (group_ids, episode_ids, plan))
    return Record(_BATCH, (batch_id, *lists, seed, sealed))


# ---- the hub's rows ------------------------------------------------------------------------------


def chunk(header: Chunk, tokens: bytes | memoryview, logprobs: bytes | memoryview = b"") -> Record:
    """An accepted chunk: `tokens` int32 [n], `logprobs` float32 [n] or, if observed, empty. No copy is made."""
    h = header
    held = (tokens, logprobs if h.sampled else b"")
    return Record(_CHUNK, (h.episode_id, h.seq, h.n, h.version, h.sampled, h.fork, *held, checksum(*held)))


def checksum(tokens: bytes | memoryview, logprobs: bytes | memoryview) -> int:
    """CRC-32 of a chunk's tokens and log-probs, as the journal holds them."""
    return zlib.crc32(logprobs, zlib.crc32(tokens))


def turn(turn: Turn) -> list[Record]:
    """What an environment answered. A turn that is answered anew, elsewhere, takes the place of the first.

    Only an episode's last snapshot is kept.
    """
    plain = msgspec.json.encode(msgspec.structs.replace(turn, snapshot=None)).decode()
    written = [Record(_TURN, (turn.episode_id, turn.turn, plain, turn.snapshot))]
    if turn.snapshot is not None and turn.turn:
        written.append(Record(_OLD_SNAPSHOT, (turn.episode_id, turn.turn)))
    return written


def tokens_removed(episode_id: int) -> list[Record]:
    """An episode's tokens and turns are gone; its row stays. Which ones may go: `asyncrl.reclaim`."""
    return [Record(_CHUNKS_REMOVED, (episode_id,)), Record(_TURNS_REMOVED, (episode_id,))]


def step(step: int, batch_id: int, ended: float, metrics: Mapping[str, float], digest: str = "") -> Record:
    """A learner step was applied. Belongs into one write with the records of `Scheduler.step_done`."""
    return Record(_STEP, (step, batch_id, ended, json.dumps(metrics), digest))


def version(version: int, published: float, seconds: float = 0.0, nbytes: int = 0) -> Record:
    """Weights were published. Belongs into the write that follows `Scheduler.published`."""
    return Record(_VERSION, (version, published, seconds, nbytes))


def metric(time: float, step: int, source: str, metrics: Mapping[str, float]) -> Record:
    """Metrics of one process at one time."""
    return Record(_METRIC, (time, step, source, json.dumps(metrics)))


def event(time: float, source: str, what: str, detail: str = "") -> Record:
    """Something that a reader of the run wants to know."""
    return Record(_EVENT, (time, source, what, detail))


def checkpoints(time: float, news: Checkpointed | CheckpointFault) -> list[Record]:
    """An event of the learner's checkpoints, and the steps of those that are there after it. One write."""
    if isinstance(news, Checkpointed):
        what, detail = "checkpoint", json.dumps({"step": news.step, "path": news.path})
    else:
        what, detail = news.what, news.detail
    return [event(time, "learner", what, detail), run_key("checkpoints", json.dumps(news.kept))]


def repeated(time: float, step: int, recorded: str, digest: str) -> Record:
    """The event of a step that was trained again: its digest is the recorded one (`repeated`) or it `differs`."""
    detail = json.dumps({"step": step, "recorded": recorded, "digest": digest})
    return event(time, "learner", "repeated" if digest == recorded else "differs", detail)


def run_key(key: str, value: str) -> Record:
    """One property of the run, for example `status`."""
    return Record(_RUN, (key, value))
