"""Brings a scheduler back from the journal, as it was at the last commit.

The hub calls `restore` at every start: for a new run the tables are empty and a new scheduler comes out. The
result equals the scheduler that made the records, but for the generators: of those only the leases are
known, which stay valid for `hub.lease_s` from now. A generator that says hello in that time keeps the
leases that it names. What was not committed was told to nobody, so nothing is missed.

First it looks for damage: in the pages of the tables that it reads (30 ms per 100,000 episodes), and in all tokens
of live episodes, which are about to become prefixes and batches (1.4 s per GiB). Other tokens are checked when
they are read; the whole file is by `asyncrl train --resume` and `asyncrl doctor RUN`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from asyncrl.groups import Episode, EpisodeState, Group, GroupState, KeepGroup, Rules, kind_of
from asyncrl.journal import Journal, damaged
from asyncrl.messages import Task
from asyncrl.scheduler import Scheduler

_TABLES = ("run", "task", "grp", "episode", "lease", "batch", "step", "version")
_LIVE = """
SELECT episode_id, episode.state, length, next_seq FROM episode JOIN grp USING (group_id)
WHERE grp.state IN ('running', 'complete')
"""
_GROUPS = """
SELECT group_id, task_index, task_json, needs_version, state, uses
FROM grp JOIN task USING (task_index) WHERE state IN ('running', 'complete') ORDER BY group_id
"""
_EPISODES = """
SELECT group_id, episode_id, seed, greedy, episode.state,
       next_seq, length, sampled, min_version, max_version, reward
FROM episode JOIN grp USING (group_id) WHERE grp.state IN ('running', 'complete') ORDER BY episode_id
"""
# Until an episode ends, its row does not say how far it is; its chunks do.
_PROGRESS = """
SELECT episode_id, count(*), sum(n), sum(n * sampled),
       coalesce(min(version) FILTER (WHERE sampled), -1), coalesce(max(version) FILTER (WHERE sampled), -1)
FROM chunk WHERE episode_id IN (SELECT episode_id FROM episode WHERE state IN ('queued', 'leased'))
GROUP BY episode_id
"""
# SQLite takes the other columns of a group from the row that holds the max.
_LAST_LEASES = """
SELECT max(lease_id), episode_id, lease.state, generator, sum(lease.state = 'lapsed')
FROM lease JOIN episode USING (episode_id) JOIN grp USING (group_id)
WHERE grp.state IN ('running', 'complete') GROUP BY episode_id ORDER BY 1
"""
_ENDED = """
SELECT task_id, json_group_array(reward) FROM episode JOIN grp USING (group_id) JOIN task USING (task_index)
WHERE grp.state != 'running' AND NOT greedy GROUP BY group_id ORDER BY max(ended), group_id
"""
_FINAL = """
SELECT state, reason, count(*) FROM episode WHERE state IN ('trained', 'filtered', 'failed')
GROUP BY state, reason
"""


def restore(rules: Rules, keep_group: KeepGroup, journal: Journal, now: float) -> Scheduler:
    """Builds the scheduler that the journal describes.

    Raises:
        JournalError: the journal cannot be read, is damaged, or its tables contradict each other.
    """
    _check(journal)
    scheduler = Scheduler(rules, keep_group)
    try:
        _restore_counters(scheduler, journal)
        _restore_groups(scheduler, journal)
        _restore_progress(scheduler, journal)
        _restore_leases(scheduler, journal, now)
        _restore_batches(scheduler, journal)
    except KeyError as error:  # The fault boundary of tables that do not fit together.
        raise damaged(journal.path, f"its tables refer to number {error}, which is not there") from error
    return scheduler


def _check(journal: Journal) -> None:
    journal.check(*_TABLES)
    for episode_id, state, *ended in journal.rows(_LIVE):
        held = journal.episode_tokens([episode_id])[episode_id]
        if state in ("done", "failed") and [len(held.tokens), held.next_seq] != ended:
            told = f"has {len(held.tokens)} tokens in {held.next_seq} chunks, not {ended[0]} in {ended[1]}"
            raise damaged(journal.path, f"episode {episode_id} {told}")


def pass_rates(journal: Journal) -> Iterator[tuple[str, list[float | None]]]:
    """Task and rewards of every group that ended, in the order in which they did: what a curriculum has seen."""
    for task_id, rewards in journal.rows(_ENDED):
        yield task_id, json.loads(rewards)


def _restore_counters(scheduler: Scheduler, journal: Journal) -> None:
    def number(sql: str) -> int:
        return int(journal.rows(sql)[0][0])

    scheduler.next_task_index = number("SELECT coalesce(max(task_index) + 1, 0) FROM grp")
    scheduler.next_draw = number("SELECT coalesce(max(drawn) + 1, 0) FROM task")
    scheduler.next_episode_id = number("SELECT coalesce(max(episode_id) + 1, 0) FROM episode")
    scheduler.filtered_groups = number("SELECT count(*) FROM grp WHERE state = 'filtered'")
    retired = "SELECT count(*) FROM grp WHERE state = 'retired' AND uses < ?"
    scheduler.cut_short = int(journal.rows(retired, scheduler.rules.reuse)[0][0])
    scheduler.version = number("SELECT coalesce(max(version), 0) FROM version")
    scheduler.sealed_step = number("SELECT coalesce(max(batch_id), 0) FROM batch")
    scheduler.step = number("SELECT coalesce(max(step), 0) FROM step")
    scheduler.leases.next_lease_id = number("SELECT coalesce(max(lease_id) + 1, 0) FROM lease")
    scheduler.leases.lapsed = number("SELECT count(*) FROM lease WHERE state = 'lapsed'")
    for state, reason, count in journal.rows(_FINAL):
        scheduler.totals[f"{state}: {kind_of(reason)}" if reason else state] += count


def _restore_groups(scheduler: Scheduler, journal: Journal) -> None:
    for group_id, task_index, task_json, needs_version, state, uses in journal.rows(_GROUPS):
        task = msgspec.json.decode(task_json, type=Task)
        # `_restore_batches` takes the batches off again that are not trained yet.
        scheduler.groups[group_id] = Group(
            group_id, task_index, task, needs_version, GroupState(state), uses=uses, trained=uses
        )
    for group_id, episode_id, seed, greedy, state, *ended in journal.rows(_EPISODES):
        group = scheduler.groups[group_id]
        episode = Episode(episode_id, seed, group, bool(greedy), EpisodeState(state))
        (episode.next_seq, episode.length, episode.sampled,
         episode.min_version, episode.max_version, episode.reward) = ended  # fmt: skip
        group.episodes.append(episode)
        scheduler.episodes[episode_id] = episode


def _restore_progress(scheduler: Scheduler, journal: Journal) -> None:
    for episode_id, chunks, *progress in journal.rows(_PROGRESS):
        episode = scheduler.episodes[episode_id]
        episode.next_seq = chunks
        episode.length, episode.sampled, episode.min_version, episode.max_version = progress


def _restore_leases(scheduler: Scheduler, journal: Journal, now: float) -> None:
    for lease_id, episode_id, state, generator, lapsed in journal.rows(_LAST_LEASES):
        episode = scheduler.episodes[episode_id]
        episode.resumed = lapsed > 0
        if state == "active":
            scheduler.leases.adopt(lease_id, episode, generator, now)
        elif state == "done":
            episode.lease_id = lease_id
    for episode in scheduler.episodes.values():
        if episode.state is EpisodeState.QUEUED:
            scheduler.leases.enqueue(episode)
        elif episode.state is EpisodeState.LEASED and episode.lease_id is None:
            raise damaged(journal.path, f"episode {episode.episode_id} is leased but has no active lease")


def _restore_batches(scheduler: Scheduler, journal: Journal) -> None:
    pending = journal.rows(
        "SELECT batch_id, value FROM batch, json_each(group_ids_json) WHERE batch_id > ?"
        " ORDER BY batch_id, json_each.key",
        scheduler.step,
    )
    for step, group_id in pending:
        scheduler.pending.setdefault(step, []).append(group_id)
        scheduler.groups[group_id].trained -= 1
