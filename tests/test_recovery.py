"""What comes back from the journal, case by case; `test_recovery_machine` kills the hub at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl import records
from asyncrl.groups import Rules
from asyncrl.journal import Journal, JournalError
from asyncrl.messages import Chunk, EpisodeEnd, Task, Turn
from asyncrl.recovery import restore
from asyncrl.scheduler import Scheduler, Verdict

LEASE_S = 10.0
RULES = Rules(
    groups_per_step=2, group_size=2, max_lag=1, over_age="train", reuse=1, order="fifo", steps=4,
    lease_s=LEASE_S, heartbeat_s=1.0, seed=3, ranks=2, token_budget=10_000, minibatches=1, greedy=False,
)  # fmt: skip


def keep(rewards: Sequence[float | None]) -> str | None:
    return None


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "run.db", "a-run", "{}")


def test_a_new_run_starts_from_an_empty_journal(journal: Journal) -> None:
    scheduler = restore(RULES, keep, journal, 0.0)
    assert scheduler.counts() == Scheduler(RULES, keep).counts()
    assert (scheduler.version, scheduler.step, scheduler.sealed_step, scheduler.next_draw) == (0, 0, 0, 0)


def test_a_lease_from_before_the_restart_is_valid_for_another_lease_time(journal: Journal) -> None:
    scheduler = Scheduler(RULES, keep)
    scheduler.generator_joined("g", "first", 4, 0, [], 0.0)
    scheduler.admit(Task("t", []), 0.0)
    first, second = scheduler.grant(0.0)
    journal.write(scheduler.take_records())

    again = restore(RULES, keep, journal, 500.0)
    assert again.next_deadline() == 500.0 + LEASE_S
    assert again.grant(500.0) == []  # Its generator has not said hello, so its capacity is not known.
    assert again.chunk(Chunk(first.lease_id, first.episode_id, 0, 4, 0, True)) is Verdict.ACCEPTED
    assert again.generator_joined("g", "first", 4, 0, [second.lease_id], 501.0) == []
    assert again.counts()["queued"] == 1
    again.heartbeat("g", [], 600.0)
    assert [grant.deadline for grant in again.lapse(600.0)] == [510.0]


def test_a_turn_is_taken_after_its_chunks_from_the_lease_that_runs_its_episode(journal: Journal) -> None:
    scheduler = Scheduler(RULES, keep)
    scheduler.generator_joined("g", "first", 4, 0, [], 0.0)
    scheduler.admit(Task("t", []), 0.0)
    lease, other = scheduler.grant(0.0)
    answered = Turn(lease.lease_id, lease.episode_id, 1, 2, [])
    chunks = [Chunk(lease.lease_id, lease.episode_id, seq, 4, 0, True) for seq in range(2)]
    assert scheduler.chunk(chunks[0]) is Verdict.ACCEPTED
    assert scheduler.turn(answered) is Verdict.EARLY
    assert scheduler.chunk(chunks[1]) is Verdict.ACCEPTED
    # It may come again: the hub had written it, and was killed before it could say so.
    assert [scheduler.turn(answered), scheduler.turn(answered)] == [Verdict.ACCEPTED] * 2
    assert scheduler.turn(Turn(other.lease_id, lease.episode_id, 1, 2, [])) is Verdict.REFUSED
    end = EpisodeEnd(lease.lease_id, lease.episode_id, 2, "completed", 1.0, 1)
    assert scheduler.end(end, 1.0) is Verdict.ACCEPTED
    assert scheduler.turn(answered) is Verdict.DUPLICATE
    scheduler.heartbeat("g", [], LEASE_S)
    scheduler.lapse(LEASE_S)
    assert scheduler.turn(Turn(other.lease_id, other.episode_id, 0, 0, [])) is Verdict.REFUSED


def test_chunks_with_a_hole_are_an_error_that_names_the_episode(journal: Journal) -> None:
    scheduler = Scheduler(RULES, keep)
    scheduler.admit(Task("t", []), 0.0)
    journal.write([*scheduler.take_records(), records.chunk(Chunk(0, 1, 0, 4, 0, True), bytes(16), bytes(16))])
    journal.write([records.chunk(Chunk(0, 1, 2, 4, 0, True), bytes(16), bytes(16))])
    with pytest.raises(JournalError, match=r"chunk 1 of episode 1 is missing \(the next is 2\)"):
        restore(RULES, keep, journal, 0.0)
