"""Which generator runs which episode: the queue, the generators, and the leases between them.

A part of `asyncrl.scheduler`, which is its only caller. Pure: no I/O and no clock. A lease is granted to a
generator with free capacity and new enough weights, extended by heartbeats, and either ends with its
episode or lapses; a lapsed lease is never valid again, and its episode goes back to the front of the queue.

What a broken connection does to a lease: if it was lost on its way, the generator's next Hello does not name it,
and it lapses at once. If it is still on its way when that Hello is sent, it lapses as well: the generator that
then runs it is told by a Revoke, and what it streamed of it is refused, so nothing is lost and nothing kept twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl import records
from asyncrl.groups import Episode, EpisodeState
from asyncrl.messages import Task
from asyncrl.records import Record

AWAY_S = 5.0
"""A generator that was not heard for this long, or for three heartbeats, is away (its link, its machine, or it
hangs): what is sent to it would be lost. Its leases stay valid until their deadline, and while all are away."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, as it was granted. `next_seq` chunks of the episode are durable already (its prefix)."""

    lease_id: int
    episode_id: int
    group_id: int
    task: Task
    seed: int
    greedy: bool
    generator: str
    next_seq: int
    deadline: float


@dataclass(slots=True)
class Generator:
    """A generator that said hello, or that holds leases from before the hub's restart."""

    name: str
    incarnation: str | None
    """None after a hub's restart, until it says hello: then any incarnation is taken for the same."""
    capacity: int
    version: int
    """The version that it samples with."""
    heard: float
    """When it gave its last sign of life; one that is away gets no new leases."""
    leases: set[int] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Episodes that it can still take."""
        return self.capacity - len(self.leases)


class Leases:
    """The lease table. Every change is written to `log` as records."""

    def __init__(self, lease_s: float, heartbeat_s: float, log: list[Record]) -> None:
        self.lease_s = lease_s
        self._away_s = max(AWAY_S, 3 * heartbeat_s)
        self.generators: dict[str, Generator] = {}
        self.active: dict[int, Grant] = {}
        self.deadlines: dict[int, float] = {}
        self.next_lease_id = 0
        self.lapsed = 0
        self._log = log
        self._holders: dict[int, Episode] = {}  # lease id -> the episode that it runs
        # One heap per version that the episodes need. Few such versions exist at a time, so a generator that
        # lags behind finds the first episode that it may run without walking past those that it may not.
        self._queues: dict[int, list[tuple[bool, int, Episode]]] = {}
        # Every active lease has exactly one entry. Extending a lease changes only `deadlines`; the entry is
        # put right when it comes to the front.
        self._expiry: list[tuple[float, int]] = []

    @property
    def queued(self) -> int:
        """Episodes that wait for a generator."""
        return sum(map(len, self._queues.values()))

    @property
    def free(self) -> int:
        """Episodes that all generators together can still take."""
        return sum(max(0, generator.free) for generator in self.generators.values())

    def enqueue(self, episode: Episode) -> None:
        """Queues an episode: those that lost a lease first, then the oldest."""
        queue = self._queues.setdefault(episode.group.needs_version, [])
        heapq.heappush(queue, (not episode.resumed, episode.episode_id, episode))

    # ---- generators ----

    def join(
        self,
        name: str,
        incarnation: str,
        capacity: int,
        version: int,
        named: Iterable[int],
        now: float,
    ) -> list[int]:
        """Takes in a generator; see `Scheduler.generator_joined`."""
        known = self.generators.get(name)
        held = known.leases if known else set()
        same = known is not None and known.incarnation in (None, incarnation)
        kept = held & set(named) if same else set()
        for lease_id in sorted(held - kept):
            self._lapse(lease_id)
        self.generators[name] = Generator(name, incarnation, capacity, version, now, kept)
        return self.extend(name, named, now)

    def leave(self, name: str) -> list[Grant]:
        """Forgets a generator; its leases lapse and are returned."""
        generator = self.generators.get(name)
        lapsed = [self._lapse(lease_id) for lease_id in sorted(generator.leases)] if generator else []
        self.generators.pop(name, None)
        return lapsed

    def extend(self, name: str, named: Iterable[int], now: float) -> list[int]:
        """A sign of life: extends the named leases that this generator holds; returns the others."""
        generator = self.generators.get(name)
        own: set[int] = set()
        if generator is not None:
            own = generator.leases
            generator.heard = now
        foreign = []
        for lease_id in named:
            if lease_id in own:
                self.deadlines[lease_id] = now + self.lease_s
            else:
                foreign.append(lease_id)
        return foreign

    # ---- leases ----

    def grant(self, now: float) -> list[Grant]:
        """Hands queued episodes to the generators with most free capacity until nothing fits."""
        if not self._queues:
            return []
        since = now - self._away_s
        free = [(-g.free, name) for name, g in self.generators.items() if g.free > 0 and g.heard > since]
        heapq.heapify(free)
        grants = []
        while free:
            _, name = heapq.heappop(free)
            generator = self.generators[name]
            episode = self._take(generator.version)
            if episode is None:
                continue  # Nothing for its version; others may be further.
            grants.append(self._lease(episode, generator, now))
            if generator.free > 0:
                heapq.heappush(free, (-generator.free, name))
        return grants

    def _take(self, version: int) -> Episode | None:
        """Removes the first queued episode that a generator at `version` may run."""
        fits = [needs for needs in self._queues if needs <= version]
        if not fits:
            return None
        needs = min(fits, key=lambda needs: self._queues[needs][0][:2])
        episode = heapq.heappop(self._queues[needs])[2]
        if not self._queues[needs]:
            del self._queues[needs]
        return episode

    def _lease(self, episode: Episode, generator: Generator, now: float) -> Grant:
        lease_id, self.next_lease_id = self.next_lease_id, self.next_lease_id + 1
        episode.state = EpisodeState.LEASED
        self._log.append(records.lease(lease_id, episode.episode_id, generator.name, now))
        self._log.append(records.episode_state(episode.episode_id, EpisodeState.LEASED))
        return self.adopt(lease_id, episode, generator.name, now)

    def adopt(self, lease_id: int, episode: Episode, name: str, now: float) -> Grant:
        """Puts an active lease into the table, with a fresh deadline. Also how recovery brings leases back."""
        # After a hub's restart nothing is known of a generator but its leases, so it gets no new ones.
        generator = self.generators.setdefault(name, Generator(name, None, 0, -1, now))
        deadline = now + self.lease_s
        group = episode.group
        grant = Grant(
            lease_id, episode.episode_id, group.group_id, group.task, episode.seed, episode.greedy, name,
            episode.next_seq, deadline,
        )  # fmt: skip
        episode.lease_id = lease_id
        generator.leases.add(lease_id)
        self.active[lease_id] = grant
        self.deadlines[lease_id] = deadline
        self._holders[lease_id] = episode
        heapq.heappush(self._expiry, (deadline, lease_id))
        return grant

    def finish(self, lease_id: int) -> None:
        """The lease's episode has ended."""
        self._remove(lease_id)
        self._log.append(records.lease_state(lease_id, "done"))

    def lapse(self, now: float) -> list[Grant]:
        """Ends the leases whose deadline has come; while nobody is heard that could go on, they last."""
        lapsed = []
        since = now - min(self._away_s, self.lease_s)
        nobody = all(generator.heard <= since for generator in self.generators.values())
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            lease_id = self._expiry[0][1]
            if nobody:
                self.deadlines[lease_id] = now + self.lease_s
            else:
                lapsed.append(self._lapse(lease_id))
        return lapsed

    def next_deadline(self) -> float | None:
        """The earliest deadline of an active lease."""
        while self._expiry:
            deadline, lease_id = self._expiry[0]
            actual = self.deadlines.get(lease_id)
            if actual == deadline:
                return deadline
            heapq.heappop(self._expiry)
            if actual is not None:
                heapq.heappush(self._expiry, (actual, lease_id))
        return None

    def close(self) -> list[Grant]:
        """Ends every lease and empties the queue: the run is over."""
        closed = [self._remove(lease_id) for lease_id in sorted(self.active)]
        self._log.extend(records.lease_state(grant.lease_id, "lapsed") for grant in closed)
        self._queues.clear()
        return closed

    def _lapse(self, lease_id: int) -> Grant:
        episode = self._holders[lease_id]
        grant = self._remove(lease_id)
        episode.state, episode.lease_id, episode.resumed = EpisodeState.QUEUED, None, True
        self.lapsed += 1
        self._log.append(records.lease_state(lease_id, "lapsed"))
        self._log.append(records.episode_state(episode.episode_id, EpisodeState.QUEUED))
        self.enqueue(episode)
        return grant

    def _remove(self, lease_id: int) -> Grant:
        del self.deadlines[lease_id], self._holders[lease_id]
        grant = self.active.pop(lease_id)
        self.generators[grant.generator].leases.discard(lease_id)
        return grant
