"""`kill -9` of the hub at any moment: the scheduler that comes back from the journal is the one that died.

A hypothesis state machine plays hub, generators and learner over a real journal. Every event may or may not
be committed before the next; what the world is told (leases, acks, batches) it is told after the commit. A
crash throws away the scheduler and whatever was not committed. Between commits, tokens that no kept checkpoint
needs are removed.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl import reclaim, records
from asyncrl.groups import Rules
from asyncrl.journal import Journal
from asyncrl.messages import Checkpointed, Chunk, EpisodeEnd, Task
from asyncrl.reclaim import Reclaimer
from asyncrl.records import Record
from asyncrl.recovery import restore
from asyncrl.scheduler import Scheduler, Verdict

LEASE_S = 10.0
RULES = Rules(
    groups_per_step=2, group_size=2, max_lag=1, over_age="train", reuse=1, order="fifo", steps=4,
    lease_s=LEASE_S, heartbeat_s=1.0, seed=3, ranks=2, token_budget=10_000, minibatches=1, greedy=False,
)  # fmt: skip
NAMES = ("g0", "g1", "g2")


def differ(rewards: Sequence[float | None]) -> str | None:
    return None if len(set(rewards)) > 1 else "equal rewards"


def tokens_of(episode_id: int, start: int, n: int) -> np.ndarray[Any, Any]:
    """What any generator samples at these positions: a prefix that was lost or doubled would show."""
    return np.arange(start, start + n, dtype="<i4") + 1000 * episode_id


def state_of(scheduler: Scheduler, generators: Sequence[str]) -> dict[str, Any]:
    """Everything that decides on what the scheduler does next, apart from generators that are dead."""
    leases = scheduler.leases
    return {
        "groups": {group_id: replace(group) for group_id, group in scheduler.groups.items()},
        "order": list(scheduler.groups),
        "episodes": sorted(scheduler.episodes),
        "queue": {needs: sorted(entry[:2] for entry in queue) for needs, queue in leases._queues.items()},
        "active": {i: (grant.episode_id, grant.generator) for i, grant in leases.active.items()},
        "deadlines": {i: leases.deadlines[i] for name in generators for i in leases.generators[name].leases},
        "generators": {name: leases.generators[name] for name in generators},
        "pending": scheduler.pending,
        "totals": +scheduler.totals,
        "numbers": (
            scheduler.next_task_index, scheduler.next_episode_id, scheduler.filtered_groups,
            scheduler.version, scheduler.sealed_step, scheduler.step, leases.next_lease_id, leases.lapsed,
        ),
    }  # fmt: skip


@dataclass
class Held:
    """A lease in a generator: where its episode stands."""

    episode_id: int
    seq: int
    position: int


@dataclass
class Generator:
    incarnation: str
    version: int
    capacity: int = 5
    leases: dict[int, Held] = field(default_factory=dict)
    unacked: list[tuple[Chunk, int] | EpisodeEnd] = field(default_factory=list)  # (chunk, position)
    sent: list[tuple[Chunk, int] | EpisodeEnd] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """The hub's three neighbours; `self.scheduler`, `self.rows`, `self.effects` are the hub's memory."""

    @initialize(
        reuse=st.integers(1, 2), lag=st.integers(0, 2), order=st.sampled_from(["fifo", "freshest", "wait"]),
        greedy=st.booleans(),
    )  # fmt: skip
    def begin(self, reuse: int, lag: int, order: str, greedy: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal.create(Path(self.folder.name) / "run.db", "test", "{}")
        over = {"over_age": "wait"} if order == "wait" else {"order": order}
        self.rules = replace(RULES, reuse=reuse, max_lag=lag, greedy=greedy, **over)
        self.rows: list[Record] = []
        self.effects: list[Callable[[], None]] = []
        self.now = 100.0
        self.starts = 0
        self.generators: dict[str, Generator] = {}
        self.dead_leases: list[tuple[int, int]] = []
        self.acked: dict[int, int] = {}  # episode -> tokens that some generator was told are durable
        self.learner_batch = 0  # step of the batch that the learner holds
        self.learner_step = 0
        self.crashes = 0
        self.durable: dict[int, int] = {}  # live episode -> its length at the last commit
        self.kept: list[int] = []  # checkpoints in the learner's folder
        self.reclaimer = Reclaimer(self.journal, 1e-6)
        self.scheduler = restore(self.rules, differ, self.journal, self.now)
        self.join("g0", 0)

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.finish_the_run()
            self.journal.close()
            self.folder.cleanup()

    # ---- the hub ----

    def commit(self) -> None:
        self.journal.write([*self.rows, *self.scheduler.take_records()])
        self.rows = []
        effects, self.effects = self.effects, []
        for effect in effects:
            effect()
        lengths = {episode_id: episode.length for episode_id, episode in self.scheduler.episodes.items()}
        assert all(length >= self.durable.get(episode_id, 0) for episode_id, length in lengths.items())
        self.durable = lengths

    @rule()
    def committed(self) -> None:
        self.commit()

    @rule(lose=st.booleans())
    def hub_dies(self, lose: bool) -> None:
        """The last events may be lost; if none is, the new scheduler must equal the old one."""
        if not lose:
            self.commit()
        before = self.scheduler
        self.rows, self.effects = [], []
        self.crashes += 1
        self.journal.close()
        self.journal = Journal.open(self.journal.path)
        self.reclaimer = Reclaimer(self.journal, 1e-6)
        self.scheduler = restore(self.rules, differ, self.journal, self.now)
        self.scheduler.check()
        for name, generator in self.generators.items():
            self.hello(name, generator)
            if not lose:
                before.generator_joined(
                    name, generator.incarnation, generator.capacity, generator.version,
                    list(generator.leases), self.now,
                )  # fmt: skip
        if not lose:
            alive = list(self.generators)
            assert state_of(self.scheduler, alive) == state_of(before, alive)
        self.commit()
        # Generators send again what was not acked; the learner asks again, or repeats its last report.
        for generator in self.generators.values():
            self.deliver(generator)
        if self.learner_step and self.learner_step > self.scheduler.step:
            self.step_is_done(self.learner_step)
        self.commit()

    def hello(self, name: str, generator: Generator) -> None:
        stray = self.scheduler.generator_joined(
            name, generator.incarnation, generator.capacity, generator.version, list(generator.leases), self.now
        )
        self.effects.append(lambda: self.revoke(generator, stray))

    def revoke(self, generator: Generator, leases: Sequence[int]) -> None:
        for lease_id in leases:
            held = generator.leases.pop(lease_id, None)
            if held is not None:
                self.dead_leases.append((lease_id, held.episode_id))
            generator.unacked = [message for message in generator.unacked if _lease(message) != lease_id]

    # ---- generators ----

    @rule(name=st.sampled_from(NAMES), behind=st.integers(0, 2))
    def join(self, name: str, behind: int) -> None:
        """A start or a restart: nothing of an older incarnation is left."""
        self.forget(name)
        self.starts += 1
        version = max(0, self.scheduler.version - behind)
        self.generators[name] = Generator(str(self.starts), version)
        self.hello(name, self.generators[name])

    @rule(name=st.sampled_from(NAMES), noticed=st.booleans())
    def die(self, name: str, noticed: bool) -> None:
        if name in self.generators:
            self.forget(name)
            if noticed:
                self.scheduler.generator_left(name)

    def forget(self, name: str) -> None:
        gone = self.generators.pop(name, None)
        if gone is not None:
            self.dead_leases += [(lease_id, held.episode_id) for lease_id, held in gone.leases.items()]

    @rule(name=st.sampled_from(NAMES))
    def update_weights(self, name: str) -> None:
        if name in self.generators:
            self.generators[name].version = self.scheduler.version
            self.scheduler.generator_version(name, self.scheduler.version)

    @rule()
    def admit_and_grant(self) -> None:
        while self.scheduler.may_admit():
            self.scheduler.admit(Task(f"t{self.scheduler.next_task_index}", [], answer=1), self.now)
        for grant in self.scheduler.grant(self.now):
            to = self.generators.get(grant.generator)
            incarnation = to.incarnation if to else ""
            self.effects.append(lambda grant=grant, incarnation=incarnation: self.lease(grant, incarnation))

    def lease(self, grant: Any, incarnation: str) -> None:
        generator = self.generators.get(grant.generator)
        if generator is None or generator.incarnation != incarnation:
            return
        prefix, tokens, logprobs = self.journal.prefix(grant.episode_id)
        length = sum(span.n for span in prefix.spans)
        assert prefix.next_seq == grant.next_seq
        assert np.array_equal(np.frombuffer(tokens, "<i4"), tokens_of(grant.episode_id, 0, length))
        assert len(logprobs) == 4 * length
        assert grant.task == self.journal.task(grant.group_id)
        assert grant.greedy == (self.rules.greedy and grant.episode_id % 3 == 2)
        generator.leases[grant.lease_id] = Held(grant.episode_id, grant.next_seq, length)

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 9), n=st.integers(1, 40), sampled=st.booleans())
    def sample(self, name: str, pick: int, n: int, sampled: bool) -> None:
        generator = self.generators.get(name)
        if generator is not None and generator.leases:
            lease_id = sorted(generator.leases)[pick % len(generator.leases)]
            held = generator.leases[lease_id]
            version = generator.version if sampled else -1
            chunk = Chunk(lease_id, held.episode_id, held.seq, n, version, sampled)
            generator.unacked.append((chunk, held.position))
            generator.sent.append((chunk, held.position))
            held.seq, held.position = held.seq + 1, held.position + n
            self.deliver(generator)

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 9), reward=st.sampled_from([0.0, 1.0, 0.0, 1.0, None]))
    def end(self, name: str, pick: int, reward: float | None) -> None:
        generator = self.generators.get(name)
        if generator is not None and generator.leases:
            lease_id = sorted(generator.leases)[pick % len(generator.leases)]
            held = generator.leases.pop(lease_id)
            status = "failed_time" if reward is None else "completed"
            rewards = {} if reward is None else {"right": reward, "polite": 0.0}
            over = EpisodeEnd(lease_id, held.episode_id, held.seq, status, reward, 1, "", rewards)
            generator.unacked.append(over)
            generator.sent.append(over)
            self.deliver(generator)

    @rule(name=st.sampled_from(NAMES), order=st.randoms(use_true_random=False), copies=st.integers(1, 2))
    def a_reconnect(self, name: str, order: Random, copies: int) -> None:
        """What was on its way arrives in any order, some of it twice, and then all of it again, in order."""
        generator = self.generators.get(name)
        if generator is not None:
            shuffled = generator.unacked * copies
            order.shuffle(shuffled)
            self.deliver(generator, shuffled)
            self.deliver(generator)

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 99))
    def an_old_copy_arrives(self, name: str, pick: int) -> None:
        """Of something that was acknowledged long ago, or whose lease is gone: nothing changes."""
        generator = self.generators.get(name)
        if generator is not None and generator.sent:
            message = generator.sent[pick % len(generator.sent)]
            if message not in generator.unacked:
                assert self.receive(message) in (Verdict.DUPLICATE, Verdict.REFUSED)

    @rule(name=st.sampled_from(NAMES), named=st.lists(st.integers(0, 60), max_size=4), hello=st.booleans())
    def leases_are_named_that_are_not_held(self, name: str, named: list[int], hello: bool) -> None:
        """They are revoked, and whose they are keeps them, with the deadline that they had."""
        self.commit()
        generator, leases = self.generators.get(name), self.scheduler.leases
        if generator is None:
            return
        foreign = [lease_id for lease_id in named if lease_id not in generator.leases]
        others = {i: leases.deadlines[i] for i, grant in leases.active.items() if grant.generator != name}
        told = [*generator.leases, *foreign]
        if hello:
            stray = self.scheduler.generator_joined(
                name, generator.incarnation, generator.capacity, generator.version, told, self.now
            )
        else:
            stray = self.scheduler.heartbeat(name, told, self.now)
        assert set(foreign) <= set(stray)
        assert others == {i: leases.deadlines[i] for i, grant in leases.active.items() if grant.generator != name}
        self.effects.append(lambda: self.revoke(generator, stray))

    def receive(self, message: tuple[Chunk, int] | EpisodeEnd) -> Verdict:
        if isinstance(message, EpisodeEnd):
            return self.scheduler.end(message, self.now)
        return self.scheduler.chunk(message[0])

    def deliver(self, generator: Generator, messages: list[tuple[Chunk, int] | EpisodeEnd] | None = None) -> None:
        """Sends everything that is not acked, the way an outbox does; the rest must be duplicates."""
        for message in list(generator.unacked) if messages is None else messages:
            verdict = self.receive(message)
            if verdict is Verdict.ACCEPTED and not isinstance(message, EpisodeEnd):
                chunk, position = message
                tokens = tokens_of(chunk.episode_id, position, chunk.n)
                self.rows.append(records.chunk(chunk, tokens.tobytes(), (-tokens.astype("<f4")).tobytes()))
            if verdict is not Verdict.EARLY:  # What comes too early is not acknowledged, and comes again.
                self.effects.append(lambda message=message, verdict=verdict: self.ack(generator, message, verdict))

    def ack(self, generator: Generator, message: tuple[Chunk, int] | EpisodeEnd, verdict: Verdict) -> None:
        if message in generator.unacked:
            generator.unacked.remove(message)
        if verdict is Verdict.REFUSED:
            self.revoke(generator, [_lease(message)])
        elif not isinstance(message, EpisodeEnd):
            chunk, position = message
            self.acked[chunk.episode_id] = max(self.acked.get(chunk.episode_id, 0), position + chunk.n)

    @precondition(lambda self: self.dead_leases)
    @rule(pick=st.integers(0, 99), seq=st.integers(0, 3))
    def a_late_chunk_arrives(self, pick: int, seq: int) -> None:
        self.commit()
        lease_id, episode_id = self.dead_leases[pick % len(self.dead_leases)]
        if lease_id not in self.scheduler.leases.active:
            chunk = Chunk(lease_id, episode_id, seq, 5, 0, True)
            assert self.scheduler.chunk(chunk) is Verdict.REFUSED

    @rule(name=st.sampled_from(NAMES), seconds=st.floats(0, 8))
    def time_passes(self, name: str, seconds: float) -> None:
        """All generators but one send heartbeats."""
        self.now += seconds
        for other, generator in self.generators.items():
            if other != name:
                stray = self.scheduler.heartbeat(other, list(generator.leases), self.now)
                self.effects.append(lambda g=generator, stray=stray: self.revoke(g, stray))
        self.scheduler.lapse(self.now)

    # ---- the learner ----

    @rule()
    def ask_for_a_batch(self) -> None:
        step = self.learner_step + 1
        if step <= self.scheduler.sealed_step or self.scheduler.seal(self.now) is not None:
            self.effects.append(lambda: setattr(self, "learner_batch", step))

    @rule()
    def train(self) -> None:
        if self.learner_batch == self.learner_step + 1:
            self.learner_step += 1
            self.step_is_done(self.learner_step)

    @rule(keep=st.integers(1, 2))
    def checkpoint(self, keep: int) -> None:
        if self.learner_step:
            self.kept = sorted({*self.kept, self.learner_step})[-keep:]
            self.rows += records.checkpoints(self.now, Checkpointed(self.learner_step, "", self.kept))

    @rule(newest=st.booleans())
    def learner_resumes_from_a_checkpoint(self, newest: bool) -> None:
        """From one that is not beyond the journal, or else from the initial model."""
        self.commit()
        usable = [step for step in self.kept if step <= self.scheduler.step] or [0]
        self.learner_step = self.learner_batch = usable[-1 if newest else 0]

    @rule(pieces=st.integers(1, 6), rows=st.integers(1, 20))
    def tokens_are_reclaimed(self, pieces: int, rows: int) -> None:
        self.commit()
        account = self.account()
        with patch.object(reclaim, "LEAST_ROWS", rows):
            for _ in range(pieces):
                self.reclaimer.piece(0)
        assert self.account() == account
        self.what_is_needed_is_there()

    def account(self) -> list[list[tuple[Any, ...]]]:
        tables = ("grp", "episode", "batch", "step", "lease", "version", "task")
        return [self.journal.rows(f"SELECT * FROM {table}") for table in tables]

    def what_is_needed_is_there(self) -> None:
        """The batches after the oldest usable checkpoint, and every live episode."""
        oldest = min((step for step in self.kept if step <= self.scheduler.step), default=0)
        needed = self.journal.rows(
            "SELECT value, length FROM batch, json_each(episode_ids_json) JOIN episode ON episode_id = value"
            " WHERE batch_id > ?",
            oldest,
        )
        needed += [(i, episode.length) for i, episode in self.scheduler.episodes.items()]
        held = self.journal.episode_tokens([episode_id for episode_id, _ in needed])
        for episode_id, length in needed:
            assert np.array_equal(held[episode_id].tokens, tokens_of(episode_id, 0, length))

    def step_is_done(self, step: int) -> None:
        self.scheduler.step_done(step)
        self.rows.append(records.step(step, step, self.now, {}))

    @rule()
    def publish(self) -> None:
        self.scheduler.published(self.learner_step)
        self.rows.append(records.version(self.learner_step, self.now))

    @rule(train=st.booleans())
    def a_fair_round(self, train: bool) -> None:
        """Every generator gets the weights and ends its episodes. Chance alone would hardly fill a batch."""
        for name in list(self.generators):
            self.update_weights(name)
        self.time_passes("nobody", 4.0)
        self.admit_and_grant()
        self.commit()
        for name, generator in self.generators.items():
            for pick in range(len(generator.leases)):
                self.sample(name, pick, 3, True)
                self.commit()
            for lease_id in sorted(generator.leases):
                self.end(name, 0, float(generator.leases[lease_id].episode_id % 2))
        self.ask_for_a_batch()
        self.commit()
        if train:
            self.train()
            self.publish()
            self.commit()

    # ---- what always holds ----

    @invariant()
    def the_invariants_hold(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def finish_the_run(self) -> None:
        """Whatever happened, a fair rest of the run ends it, and the journal accounts for everything."""
        self.commit()
        if not self.generators:
            self.join("g0", 0)
        for number in range(600):
            if self.scheduler.done:
                break
            self.a_fair_round(train=True)
            if number % 2:
                self.checkpoint(keep=1 + number % 4 // 2)
            self.tokens_are_reclaimed(pieces=number % 5, rows=2)
        assert self.scheduler.done, self.scheduler.counts()
        self.scheduler.finish("run ended")
        self.scheduler.check()
        self.commit()
        self.audit()

    def audit(self) -> None:
        """Reads the tables only."""
        query = self.journal.rows
        episodes = {row[0]: row[1:] for row in query("SELECT episode_id, state, reason, length FROM episode")}
        assert {state for state, _, _ in episodes.values()} <= {"trained", "filtered", "failed"}
        assert all(bool(reason) == (state != "trained") for state, reason, _ in episodes.values())
        batches = query("SELECT batch_id, value FROM batch, json_each(episode_ids_json)")
        uses = Counter(episode_id for _, episode_id in batches)
        assert max(uses.values()) <= self.rules.reuse
        assert len(set(batches)) == len(batches)
        assert set(uses) == {i for i, (state, _, _) in episodes.items() if state == "trained"}
        assert query("SELECT batch_id FROM batch ORDER BY 1") == [(n,) for n in range(1, self.rules.steps + 1)]
        self.audit_rewards_and_rows()
        last = {episode_id: batch_id for batch_id, episode_id in sorted(batches)}
        gone = reclaim.reclaimed_step(self.journal)
        held = self.journal.episode_tokens(sorted(episodes))
        for episode_id, (_, _, length) in episodes.items():
            tokens = held[episode_id].tokens
            assert np.array_equal(tokens, tokens_of(episode_id, 0, len(tokens)))
            if not len(tokens) and gone is not None and last.get(episode_id, 0) <= gone:
                continue  # Reclaimed as a whole.
            assert len(tokens) >= self.acked.get(episode_id, 0)
            assert length in (0, len(tokens))
            assert episode_id not in uses or length
        self.what_is_needed_is_there()
        assert query("SELECT count(*) FROM lease WHERE state = 'active'") == [(0,)]
        assert query("SELECT DISTINCT state FROM grp WHERE state IN ('running', 'complete')") == []

    def audit_rewards_and_rows(self) -> None:
        query = self.journal.rows
        for reward, rewards in query("SELECT reward, rewards_json FROM episode"):
            assert json.loads(rewards) == ({} if reward is None else {"right": reward, "polite": 0.0})
        greedy = {row[0] for row in query("SELECT episode_id FROM episode WHERE greedy")}
        groups = len(query("SELECT group_id FROM grp")) if self.rules.greedy else 0
        assert greedy == {3 * group + 2 for group in range(groups)}
        for ids, plan in query("SELECT episode_ids_json, plan_json FROM batch"):
            sealed = json.loads(ids)
            packed = {sealed[i] for rank in json.loads(plan) for row in rank for i in row}
            assert packed == set(sealed) - greedy


def _lease(message: tuple[Chunk, int] | EpisodeEnd) -> int:
    return message.lease_id if isinstance(message, EpisodeEnd) else message[0].lease_id


World.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
test_a_hub_that_is_killed_at_any_time_loses_nothing_and_trains_nothing_twice = World.TestCase
