"""Keeps run.db below `hub.journal_mb`: which token data may go, in which order, a little after each commit.

    commit ──► over the limit? ──no──► rest
                   │ yes
                   ▼
    filtered groups (nothing needs them) ──► retired groups whose batches all lie at or before the oldest kept
                                             checkpoint, oldest batch first ──► below TARGET of the limit: rest

Only rows of `chunk` and `turn` go, an episode as a whole; the account of every episode stays for ever. SQLite puts
the pages on its free list and takes the next chunks' pages from there: the file stops growing, it does not shrink.
With `replay.reuse` above 1 a group goes with its last batch. The run key `reclaimed` says, in the same
transaction, up to which step batches lost tokens ("0": only filtered groups did).

A learner that needs what is gone (somebody deleted its checkpoints) is told so by `TokensGone`. Called by
`asyncrl.commit` in the journal's thread, and by `asyncrl.batches`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl import records
from asyncrl.journal import Journal, JournalError, damaged

TARGET = 0.9
"""Share of the limit at which a sweep ends: removing anew for every chunk would cost more."""
REST = 1.02
"""After a sweep that found too little, the journal may grow by this factor before the next one looks again."""
LEAST_ROWS = 256
"""Rows that a piece may remove however few the commit before it wrote."""
LOOK = 500
"""Groups that one query covers, and episodes that one piece looks at."""

_FILTERED = """
SELECT 0, episode_id FROM grp JOIN episode USING (group_id)
WHERE grp.state = 'filtered' AND group_id >= ? AND group_id < ?
"""
_LAST_BATCHES = """
SELECT max(batch_id), group_id FROM batch, json_each(group_ids_json) JOIN grp ON group_id = value
WHERE batch_id >= ? AND state = 'retired' GROUP BY group_id HAVING max(batch_id) <= ? ORDER BY 1, 2
"""
_EPISODES = "SELECT ?, episode_id FROM episode WHERE group_id IN (SELECT value FROM json_each(?))"
_HELD = """
SELECT (SELECT count(*) FROM chunk WHERE episode_id = ?1) + (SELECT count(*) FROM turn WHERE episode_id = ?1)
"""


class TokensGone(JournalError):
    """A batch is needed whose tokens were removed."""


class Victim(NamedTuple):
    """An episode whose tokens may go."""

    step: int
    """Of the last batch of its group; 0: it was in none."""
    episode_id: int


def kept_steps(journal: Journal) -> list[int]:
    """Steps of the kept checkpoints that a learner would load, oldest first: those not beyond the journal."""
    found = journal.rows("SELECT value FROM run WHERE key = 'checkpoints'")
    last = journal.rows("SELECT coalesce(max(step), 0) FROM step")[0][0]
    return sorted(step for step in json.loads(found[0][0]) if step <= last) if found else []


def reclaimed_step(journal: Journal) -> int | None:
    """Last step whose batch lost tokens; 0: only filtered groups did; None: nobody lost any."""
    found = journal.rows("SELECT value FROM run WHERE key = 'reclaimed'")
    return int(found[0][0]) if found else None


def victims(journal: Journal) -> Iterator[list[Victim]]:
    """Everything that may go, in the order in which it should, a list for each query; some may be gone already."""
    groups = journal.rows("SELECT coalesce(max(group_id) + 1, 0) FROM grp")[0][0]
    for first in range(0, groups, LOOK):
        yield [Victim(*row) for row in journal.rows(_FILTERED, first, first + LOOK)]
    begin, oldest = reclaimed_step(journal) or 0, min(kept_steps(journal), default=0)
    by_step: dict[int, list[int]] = {}
    for step, group_id in journal.rows(_LAST_BATCHES, begin, oldest):
        by_step.setdefault(step, []).append(group_id)
    for step, group_ids in by_step.items():
        yield [Victim(*row) for row in journal.rows(_EPISODES, step, json.dumps(group_ids))]


def explain_missing(journal: Journal, step: int, episode_id: int) -> JournalError:
    """The error for a learner that asks for the batch of `step`, of which an episode has not all its tokens."""
    gone = reclaimed_step(journal) or 0
    if step > gone:
        return damaged(journal.path, f"episode {episode_id} of batch {step} has not the tokens of its row")
    enough = ", ".join(str(kept) for kept in kept_steps(journal) if kept >= gone) or "none"
    return TokensGone(
        f"the learner asks for the batch of step {step}, but the tokens of steps 1 to {gone} were removed from "
        f"{journal.path} (hub.journal_mb): it must start from a checkpoint of step {gone} or later; the journal "
        f"knows of these: {enough}. Restore one in {journal.path.parent / 'checkpoints'}, or start a new run"
    )


class Reclaimer:
    """Keeps one journal below its limit. Use it in the journal's thread only."""

    def __init__(self, journal: Journal, limit_mb: float) -> None:
        """Args: `limit_mb`, MiB of pages in use above which tokens are removed; 0: never."""
        self._journal = journal
        self._limit = int(limit_mb * 2**20)
        self._sweep: Iterator[list[Victim]] | None = None
        self._found: deque[Victim] = deque()
        self._fruitless = (0, 0)
        self._removed = 0

    def due(self) -> bool:
        """Whether `piece` has something to do: a sweep goes on, or the journal is too large and one may help."""
        if self._sweep is not None or not self._limit:
            return self._sweep is not None
        used = self._journal.used_bytes()
        return used > self._limit and self._hopeful(used)

    def piece(self, written: int) -> None:
        """Removes a little if it is due: about twice as many rows as the commit before it wrote (`written`).

        Raises:
            JournalError: the journal cannot be written; nothing was removed.
        """
        if not self.due():
            return
        used = self._journal.used_bytes()
        if self._sweep is None:
            self._sweep = victims(self._journal)
        elif used <= TARGET * self._limit:
            self._rest(used)
            return
        if not self._remove(max(LEAST_ROWS, 2 * written)):
            self._fruitless = (used, min(kept_steps(self._journal), default=0))
            self._rest(used)

    def _hopeful(self, used: int) -> bool:
        """Whether a sweep may find what the last one, which found too little, did not."""
        size, oldest = self._fruitless
        return used > REST * size or min(kept_steps(self._journal), default=0) > oldest

    def _remove(self, wanted: int) -> bool:
        """Removes about `wanted` rows; False: there is nothing more to look at."""
        assert self._sweep is not None
        if not self._found:
            more = next(self._sweep, None)
            if more is None:
                return False
            self._found.extend(more)
        gone: list[records.Record] = []
        rows, step = 0, reclaimed_step(self._journal) or 0
        oldest = min(kept_steps(self._journal), default=0)  # Less than before if one proved damaged.
        for _ in range(min(LOOK, len(self._found))):
            victim = self._found.popleft()
            held = self._journal.rows(_HELD, victim.episode_id)[0][0]
            if held and victim.step <= oldest:
                gone += records.tokens_removed(victim.episode_id)
                rows, step = rows + held, max(step, victim.step)
                self._removed += 1
            if rows >= wanted:
                break
        if gone:
            self._journal.write([*gone, records.run_key("reclaimed", str(step))])
        return True

    def _rest(self, used: int) -> None:
        """Ends a sweep and says what it did."""
        size = f"{used / 2**20:.0f} MiB are used, hub.journal_mb = {self._limit / 2**20:.4g}"
        told = []
        if self._removed:
            step = reclaimed_step(self._journal)
            what = f"tokens of {self._removed} episodes, of batches up to step {step}; {size}"
            told.append(records.event(time.time(), "hub", "reclaimed", what))
        if used > self._limit:
            what = f"{size}, the rest is live or needed by a kept checkpoint: checkpoint more often, or keep fewer"
            told.append(records.event(time.time(), "hub", "journal_over_limit", what))
        if told:
            self._journal.write(told)
        self._sweep, self._removed = None, 0
        self._found.clear()
