"""Group commit: what is recorded becomes durable first, what follows from it happens afterwards.

    record(…) ─┐                       ┌──▶ commit thread: Journal.write (one transaction)
    after(…) ──┴─▶ gather while one ───┤                 │ durable
                   commit is running   └◀── actions run ─┘ (acks, leases, batches leave); then reclaiming

Records that come while a commit runs form the next one: commits group themselves under load and are
immediate without it. A slow disk makes commits rare and large, and everything that waits for them late; nothing
else changes, and the event `slow_disk` says so. It does not know what is recorded or sent. Used by the hub's event
loop; the one thread also does the hub's reads, so the journal is never in two threads at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl import records
from asyncrl.journal import Journal
from asyncrl.reclaim import Reclaimer
from asyncrl.records import Record

SLOW_COMMIT_S = 5.0
"""A commit that takes longer is an event: leases, acks and batches wait for it."""


class Committer:
    """Owns the journal's thread. All methods are called on the event loop."""

    def __init__(self, journal: Journal, last_call: Callable[[], list[Record]], reclaimer: Reclaimer) -> None:
        """Args: `last_call` yields the scheduler's records, which belong before every pending action."""
        self._journal = journal
        self._last_call = last_call
        self._reclaimer = reclaimer
        self._reclaim = False
        self._records: list[Record] = []
        self._actions: list[Callable[[], object]] = []
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._loop = asyncio.get_running_loop()
        self.commits = 0
        self.seconds = 0.0
        """Time spent in commits since the counters were read and reset by the hub's report."""

    def record(self, *records: Record) -> None:
        """Adds records to the next commit."""
        self._records += records
        self._work.set()

    def after(self, action: Callable[[], object]) -> None:
        """Runs `action` on the loop once everything that is recorded so far is durable."""
        self._actions.append(action)
        self._work.set()

    async def read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a read of the journal in its thread."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def run_forever(self) -> None:
        """Commits until cancelled.

        Raises:
            JournalError: a commit failed; nothing of it was written, and no action that depends on it ran.
        """
        while True:
            await self._work.wait()
            self._work.clear()
            actions, self._actions = self._actions, []
            taken, self._records = self._records + self._last_call(), []
            if taken:
                await self._commit(taken)
            for action in actions:
                action()
            if taken and self._reclaim:
                await self.read(self._reclaimer.piece, len(taken))

    async def _commit(self, taken: list[Record]) -> None:
        started = time.perf_counter()
        await self.read(self._write, taken)
        took = time.perf_counter() - started
        self.seconds += took
        self.commits += 1
        if took > SLOW_COMMIT_S:
            what = f"a commit of {len(taken)} rows took {took:.1f} s: is the disk of run.db shared or failing?"
            self.record(records.event(time.time(), "hub", "slow_disk", what))

    def _write(self, taken: list[Record]) -> None:
        """In the journal's thread; looks at the size there, so that a commit costs one way to it and back."""
        self._journal.write(taken)
        self._reclaim = self._reclaimer.due()

    def close(self) -> None:
        """Ends the thread and closes the journal."""
        self._thread.shutdown()
        self._journal.close()
