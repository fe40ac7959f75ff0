"""Group commit: what is recorded becomes durable first, what follows from it happens afterwards.

    record(…) ─┐                       ┌──▶ commit thread: Journal.write (one transaction)
    after(…) ──┴─▶ gather while one ───┤                 │ durable
                   commit is running   └◀── actions run ─┘ (acks, leases, batches leave)

Records that come while a commit runs form the next one: commits group themselves under load and are
immediate without it. It does not know what is recorded or sent. Used by the hub's event loop; the one
thread also does the hub's reads, so the journal is never in two threads at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.journal import Journal
from asyncrl.records import Record


class Committer:
    """Owns the journal's thread. All methods are called on the event loop."""

    def __init__(self, journal: Journal, last_call: Callable[[], list[Record]]) -> None:
        """Args: `last_call` yields the scheduler's records, which belong before every pending action."""
        self._journal = journal
        self._last_call = last_call
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
            records, self._records = self._records + self._last_call(), []
            if records:
                started = time.perf_counter()
                await self.read(self._journal.write, records)
                self.seconds += time.perf_counter() - started
                self.commits += 1
            for action in actions:
                action()

    def close(self) -> None:
        """Ends the thread and closes the journal."""
        self._thread.shutdown()
        self._journal.close()
