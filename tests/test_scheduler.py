"""The scheduler, by hand: pacing, leases, groups, sealing. `test_scheduler_simulated.py` has the rest."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.groups import EpisodeState
from asyncrl.leases import Grant
from asyncrl.messages import Chunk, EpisodeEnd, Task
from asyncrl.scheduler import Rules, Scheduler, Verdict
from asyncrl.trainers.filters import equal_rewards, keep_all

RULES = Rules(
    groups_per_step=2, group_size=2, max_lag=1, over_age="train", reuse=1, order="fifo", steps=10,
    lease_s=10.0, heartbeat_s=1.0, seed=0, ranks=1, token_budget=1000, minibatches=1, greedy=False,
)  # fmt: skip


def make(keep: Callable[..., str | None] = keep_all, **changes: Any) -> Scheduler:
    return Scheduler(replace(RULES, **changes), keep)


def admit_all(scheduler: Scheduler) -> int:
    count = 0
    while scheduler.may_admit():
        scheduler.admit(Task(f"task-{scheduler.next_task_index}", []), 0.0)
        count += 1
    return count


def join(scheduler: Scheduler, name: str = "g", capacity: int = 100, version: int = 0) -> None:
    scheduler.generator_joined(name, "first", capacity, version, [], 0.0)


def run(
    scheduler: Scheduler,
    grant: Grant,
    reward: float | None = 1.0,
    *,
    n: int = 5,
    version: int = 0,
    status: str = "completed",
) -> None:
    assert (
        scheduler.chunk(Chunk(grant.lease_id, grant.episode_id, grant.next_seq, n, version, True))
        is Verdict.ACCEPTED
    )
    end = EpisodeEnd(grant.lease_id, grant.episode_id, grant.next_seq + 1, status, reward, 1)
    assert scheduler.end(end, 1.0) is Verdict.ACCEPTED


def start(scheduler: Scheduler) -> list[Grant]:
    """Admits all, joins one generator, and returns the grants in the order of episodes."""
    admit_all(scheduler)
    join(scheduler)
    return scheduler.grant(0.0)


def final(scheduler: Scheduler) -> dict[str, int]:
    return {name: n for name, n in scheduler.totals.items() if n}


# ---- admission -----------------------------------------------------------------------------------


def test_rules_are_read_from_the_configuration() -> None:
    config = Config.model_validate({"train": {"steps": 7}, "replay": {"reuse": 3}, "learner": {"ranks": 2}})
    rules = Rules.from_config(config, greedy=False)
    assert (rules.steps, rules.reuse, rules.ranks, rules.groups_per_step) == (7, 3, 2, 32)
    assert (rules.group_size, rules.episodes_per_group) == (8, 8)
    assert Rules.from_config(config, greedy=True).episodes_per_group == 9


def test_waiting_for_the_oldest_contradicts_another_order() -> None:
    with pytest.raises(ValueError, match=r'replay\.order = "freshest"; set replay\.order = "fifo"'):
        replace(RULES, over_age="wait", order="freshest")


@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 12), st.integers(1, 20))
def test_admission_is_paced_by_the_published_version(lag: int, size: int, version: int, steps: int) -> None:
    scheduler = make(max_lag=lag, groups_per_step=size, steps=steps, group_size=1)
    scheduler.published(version)
    assert admit_all(scheduler) == min((lag + version + 1) * size, steps * size)
    with pytest.raises(RuntimeError, match="allowed at version"):
        scheduler.admit(Task("x", []), 0.0)


def test_an_older_version_that_is_published_again_changes_nothing() -> None:
    scheduler = make()
    scheduler.published(3)
    scheduler.published(1)
    assert scheduler.version == 3


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 6), st.integers(0, 30))
def test_a_group_never_needs_a_newer_version_than_the_one_that_admitted_it(
    size: int, reuse: int, lag: int, version: int
) -> None:
    rules = replace(RULES, groups_per_step=size, reuse=reuse, max_lag=lag, steps=100)
    wanted = rules.groups_wanted(version)
    assert rules.needs_version(wanted - 1) <= version
    assert all(rules.needs_version(n) <= rules.needs_version(n + 1) for n in range(wanted))
    if reuse == 1:
        assert rules.needs_version(wanted - 1) == version


def test_episodes_have_distinct_seeds_that_do_not_change_between_runs() -> None:
    first, second, other = make(), make(), make(seed=1)
    for scheduler in (first, second, other):
        admit_all(scheduler)
    seeds = [episode.seed for episode in first.episodes.values()]
    assert len(set(seeds)) == len(seeds) == 8
    assert seeds == [episode.seed for episode in second.episodes.values()]
    assert not set(seeds) & {episode.seed for episode in other.episodes.values()}
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_filtered_group_gives_its_place_back() -> None:
    scheduler = make(equal_rewards)
    grants = start(scheduler)
    assert not scheduler.may_admit()
    run(scheduler, grants[0], 1.0)
    run(scheduler, grants[1], 1.0)
    assert final(scheduler) == {"filtered: equal rewards": 2}
    assert admit_all(scheduler) == 1
    assert scheduler.counts()["groups running"] == 4


# ---- leases --------------------------------------------------------------------------------------


def test_capacity_is_filled_evenly_and_never_exceeded() -> None:
    scheduler = make()
    join(scheduler, "large", 5)
    join(scheduler, "small", 2)
    admit_all(scheduler)
    grants = scheduler.grant(0.0)
    assert Counter(grant.generator for grant in grants) == {"large": 5, "small": 2}
    # The larger one is filled first until both have the same room left.
    assert [grant.generator for grant in grants[:3]] == ["large"] * 3
    assert [grant.episode_id for grant in grants] == list(range(7))
    assert scheduler.grant(0.0) == []
    scheduler.check()


def test_an_episode_that_lost_its_lease_goes_first_and_carries_its_progress() -> None:
    scheduler = make()
    admit_all(scheduler)
    join(scheduler, "a", 3)
    grants = scheduler.grant(0.0)
    scheduler.chunk(Chunk(grants[2].lease_id, grants[2].episode_id, 0, 4, 0, True))
    lost = scheduler.generator_left("a")
    assert [grant.lease_id for grant in lost] == [0, 1, 2]
    join(scheduler, "b", 4)
    again = scheduler.grant(4.0)
    assert [grant.episode_id for grant in again] == [0, 1, 2, 3]
    assert [grant.next_seq for grant in again] == [0, 0, 1, 0]
    assert [grant.lease_id for grant in again] == [3, 4, 5, 6]
    assert {grant.deadline for grant in again} == {14.0}


def test_a_heartbeat_extends_the_leases_it_names_and_only_those() -> None:
    scheduler = make()
    grants = start(scheduler)
    mine = [grant.lease_id for grant in grants]
    assert scheduler.next_deadline() == 10.0
    assert scheduler.heartbeat("g", [*mine[1:], 999], 6.0) == [999]
    assert scheduler.heartbeat("stranger", mine[:1], 6.0) == mine[:1]
    assert scheduler.lapse(9.9) == []
    assert [grant.lease_id for grant in scheduler.lapse(10.0)] == mine[:1]
    assert scheduler.next_deadline() == 16.0
    assert scheduler.heartbeat("g", mine, 11.0) == mine[:1]
    assert scheduler.heartbeat("g", [], 20.0) == []
    assert len(scheduler.lapse(21.0)) == 7
    assert scheduler.next_deadline() is None
    scheduler.check()


def test_a_silent_generator_gets_no_new_leases_until_it_is_heard_again() -> None:
    scheduler = make()
    join(scheduler, "silent", 100)
    join(scheduler, "alive", 3)
    admit_all(scheduler)
    assert {grant.generator for grant in scheduler.grant(0.0)} == {"silent"}
    scheduler.heartbeat("alive", [], 9.0)
    assert len(scheduler.lapse(10.0)) == 8
    assert [grant.generator for grant in scheduler.grant(10.0)] == ["alive"] * 3
    scheduler.heartbeat("silent", [], 11.0)
    assert [grant.generator for grant in scheduler.grant(11.0)] == ["silent"] * 5


def test_while_nobody_is_heard_leases_last_and_lapse_once_somebody_else_could_go_on() -> None:
    scheduler = make()
    held = [grant.lease_id for grant in start(scheduler)]
    for now in (10.0, 20.0, 25.0, 30.0):
        assert scheduler.lapse(now) == []
    assert scheduler.next_deadline() == 40.0
    assert scheduler.heartbeat("g", held[:1], 39.0) == [], "the link is back: its leases are still its own"
    join(scheduler, "other")
    scheduler.heartbeat("other", [], 40.0)
    assert [grant.lease_id for grant in scheduler.lapse(40.0)] == held[1:]
    scheduler.check()


def test_a_generator_with_rare_heartbeats_is_not_away_between_two() -> None:
    scheduler = make(lease_s=30.0, heartbeat_s=10.0)
    join(scheduler, "g", 100)
    admit_all(scheduler)
    assert scheduler.grant(9.0)


def test_late_chunks_of_a_lapsed_lease_are_refused() -> None:
    scheduler = make()
    old = start(scheduler)[0]
    assert scheduler.chunk(Chunk(old.lease_id, old.episode_id, 0, 3, 0, True)) is Verdict.ACCEPTED
    scheduler.generator_left("g")
    for seq in (0, 1, 2):
        assert scheduler.chunk(Chunk(old.lease_id, old.episode_id, seq, 3, 0, True)) is Verdict.REFUSED
    join(scheduler, "h")
    new = scheduler.grant(0.0)[0]
    assert new.episode_id == old.episode_id
    assert scheduler.chunk(Chunk(old.lease_id, old.episode_id, 1, 3, 0, True)) is Verdict.REFUSED
    late = EpisodeEnd(old.lease_id, old.episode_id, 1, "completed", 1.0, 1)
    assert scheduler.end(late, 0.0) is Verdict.REFUSED
    assert scheduler.chunk(Chunk(new.lease_id, new.episode_id, 1, 3, 0, True)) is Verdict.ACCEPTED


def test_duplicates_are_harmless_and_what_follows_a_gap_must_come_again() -> None:
    scheduler = make()
    grant = start(scheduler)[0]
    first = Chunk(grant.lease_id, grant.episode_id, 0, 3, 0, True)
    second = Chunk(grant.lease_id, grant.episode_id, 1, 2, -1, False)
    end = EpisodeEnd(grant.lease_id, grant.episode_id, 2, "completed", 1.0, 1)
    assert scheduler.chunk(second) is Verdict.EARLY
    assert scheduler.end(end, 0.0) is Verdict.EARLY
    verdicts = [scheduler.chunk(first), scheduler.chunk(first), scheduler.chunk(second), scheduler.chunk(second)]
    assert verdicts == [Verdict.ACCEPTED, Verdict.DUPLICATE] * 2
    assert [scheduler.end(end, 0.0), scheduler.end(end, 0.0)] == [Verdict.ACCEPTED, Verdict.DUPLICATE]
    assert scheduler.chunk(first) is Verdict.DUPLICATE
    assert scheduler.chunk(replace_seq(first, 2)) is Verdict.REFUSED
    episode = scheduler.episodes[grant.episode_id]
    assert (episode.length, episode.sampled, episode.min_version, episode.max_version) == (5, 3, 0, 0)


def replace_seq(chunk: Chunk, seq: int) -> Chunk:
    return Chunk(chunk.lease_id, chunk.episode_id, seq, chunk.n, chunk.version, chunk.sampled)


def test_chunks_that_make_no_sense_are_refused() -> None:
    scheduler = make()
    grant = start(scheduler)[0]
    for n, version in ((0, 0), (-3, 0), (4, -1)):
        assert scheduler.chunk(Chunk(grant.lease_id, grant.episode_id, 0, n, version, True)) is Verdict.REFUSED
    assert scheduler.chunk(Chunk(grant.lease_id, 10**9, 0, 1, 0, True)) is Verdict.REFUSED


def test_a_reconnecting_generator_keeps_what_it_names_and_a_restarted_one_nothing() -> None:
    scheduler = make()
    join(scheduler, "g", 4)
    admit_all(scheduler)
    leases = [grant.lease_id for grant in scheduler.grant(0.0)]
    assert scheduler.generator_joined("g", "first", 4, 0, [leases[0], leases[2], 77], 5.0) == [77]
    assert sorted(scheduler.leases.active) == [leases[0], leases[2]]
    assert scheduler.next_deadline() == 15.0
    assert scheduler.generator_joined("g", "second", 4, 0, [leases[0]], 6.0) == [leases[0]]
    assert not scheduler.leases.active
    assert scheduler.counts()["queued"] == 8
    scheduler.check()


def test_a_generator_with_old_weights_gets_only_what_may_still_be_old() -> None:
    scheduler = make(max_lag=1, groups_per_step=1, group_size=1)
    join(scheduler, "old", 10, version=0)
    admit_all(scheduler)
    assert [grant.group_id for grant in scheduler.grant(0.0)] == [0, 1]
    scheduler.published(2)
    admit_all(scheduler)  # Groups 2 and 3 are due at steps 2 and 3, so they need versions 1 and 2.
    assert scheduler.grant(0.0) == []
    scheduler.generator_version("old", 1)
    assert [grant.group_id for grant in scheduler.grant(0.0)] == [2]
    join(scheduler, "new", 10, version=2)
    assert [grant.generator for grant in scheduler.grant(0.0)] == ["new"]


# ---- the end of episodes and groups -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reward", "n", "reason"),
    [
        ("failed_environment", None, 5, "failed: environment"),
        ("failed_time", None, 5, "failed: time"),
        ("completed", None, 5, "failed: no reward"),
        ("completed", float("nan"), 5, "failed: reward is not finite"),
        ("completed", 1.0, 2000, "failed: longer than learner.token_budget"),
        ("exploded", 1.0, 5, "failed: unknown status"),
    ],
)
def test_an_episode_without_a_usable_reward_fails_for_its_reason(
    status: str, reward: float | None, n: int, reason: str
) -> None:
    scheduler = make(group_size=3)
    grants = start(scheduler)
    run(scheduler, grants[0], reward, status=status, n=n)
    assert final(scheduler) == {reason: 1}
    run(scheduler, grants[1], 0.0)
    run(scheduler, grants[2], 1.0)
    assert scheduler.counts()["groups complete"] == 1
    assert len(scheduler.groups[0].rewarded) == 2


def test_a_named_reward_that_is_not_finite_fails_the_episode_and_none_of_its_rewards_is_kept() -> None:
    scheduler = make()
    grant = start(scheduler)[0]
    scheduler.chunk(Chunk(grant.lease_id, grant.episode_id, 0, 3, 0, True))
    scheduler.take_records()
    scheduler.end(EpisodeEnd(grant.lease_id, 0, 1, "completed", 1.0, 1, "", {"a": 1.0, "b": float("nan")}), 0.0)
    assert final(scheduler) == {"failed: reward is not finite": 1}
    (ended,) = [row.values for row in scheduler.take_records() if "rewards_json" in row.statement.sql]
    assert ended[1:5] == ("reward is not finite: 1.0 {'a': 1.0, 'b': nan}", "completed", None, "{}")


def test_an_episode_in_which_nothing_was_sampled_fails() -> None:
    scheduler = make()
    grant = start(scheduler)[0]
    scheduler.chunk(Chunk(grant.lease_id, grant.episode_id, 0, 3, -1, False))
    scheduler.end(EpisodeEnd(grant.lease_id, grant.episode_id, 1, "completed", 1.0, 1), 0.0)
    assert final(scheduler) == {"failed: nothing was sampled": 1}


def test_a_group_with_one_reward_is_filtered_unless_it_is_a_group_of_one() -> None:
    pair = make()
    grants = start(pair)
    run(pair, grants[0], 1.0)
    run(pair, grants[1], None, status="failed_time")
    assert final(pair) == {"failed: time": 1, "filtered: fewer than two rewarded episodes": 1}
    single = make(group_size=1)
    run(single, start(single)[0], 1.0)
    assert single.counts()["groups complete"] == 1


# ---- sealing -------------------------------------------------------------------------------------


def complete(scheduler: Scheduler, grants: list[Grant], groups: list[int], spread: float = 1.0) -> None:
    for grant in grants:
        if grant.group_id in groups:
            run(scheduler, grant, spread * (grant.episode_id % 2))


def test_a_batch_is_the_oldest_complete_groups_with_a_plan_for_all_their_episodes() -> None:
    scheduler = make(ranks=2)
    grants = start(scheduler)
    complete(scheduler, grants, [3])
    assert scheduler.seal(2.0) is None
    complete(scheduler, grants, [1, 2])
    sealed = scheduler.seal(2.0)
    assert sealed is not None
    assert (sealed.batch_id, sealed.step, sealed.group_ids, sealed.episode_ids) == (1, 1, [1, 2], [2, 3, 4, 5])
    assert sorted(index for rank in sealed.plan for row in rank for index in row) == [0, 1, 2, 3]
    assert len(sealed.plan) == 2
    assert scheduler.seal(2.0) is None


def test_failed_episodes_are_not_part_of_a_batch() -> None:
    scheduler = make(groups_per_step=1, group_size=3)
    grants = start(scheduler)
    run(scheduler, grants[0], 1.0)
    run(scheduler, grants[1], None)
    run(scheduler, grants[2], 0.0)
    sealed = scheduler.seal(0.0)
    assert sealed is not None
    assert sealed.episode_ids == [0, 2]
    scheduler.step_done(1)
    assert final(scheduler) == {"failed: no reward": 1, "trained": 2}


def test_freshest_takes_the_newest_and_priority_the_largest_spread() -> None:
    freshest = make(order="freshest")
    complete(freshest, start(freshest), [0, 1, 3])
    sealed = freshest.seal(0.0)
    assert sealed is not None
    assert sealed.group_ids == [3, 1]
    priority = make(order="priority")
    grants = start(priority)
    for group, spread in ((0, 0.1), (1, 0.5), (2, 1.0), (3, 0.5)):
        complete(priority, grants, [group], spread)
    sealed = priority.seal(0.0)
    assert sealed is not None
    assert sealed.group_ids == [2, 1]


def test_waiting_holds_the_batch_until_the_oldest_group_is_in() -> None:
    scheduler = make(over_age="wait")
    grants = start(scheduler)
    complete(scheduler, grants, [0, 2, 3])
    assert scheduler.seal(0.0) is None
    complete(scheduler, grants, [1])
    sealed = scheduler.seal(0.0)
    assert sealed is not None
    assert sealed.group_ids == [0, 1]


def test_a_group_is_reused_in_different_batches_and_then_retired() -> None:
    scheduler = make(reuse=2, max_lag=0, steps=4)
    complete(scheduler, start(scheduler), [0, 1])
    for step in (1, 2):
        sealed = scheduler.seal(0.0)
        assert sealed is not None
        assert sealed.group_ids == [0, 1]
        assert final(scheduler) == {}
        scheduler.step_done(step)
    assert final(scheduler) == {"trained": 4}
    assert scheduler.seal(0.0) is None
    assert not scheduler.groups


def test_steps_that_are_repeated_after_a_checkpoint_change_nothing() -> None:
    scheduler = make(group_size=1)
    grants = start(scheduler)
    complete(scheduler, grants, [0, 1, 2, 3])
    scheduler.seal(0.0)
    scheduler.seal(0.0)
    scheduler.step_done(2)  # The report of step 1 was lost; step 2 implies it.
    scheduler.take_records()
    scheduler.step_done(1)
    scheduler.step_done(2)
    assert scheduler.take_records() == []
    assert (scheduler.step, final(scheduler)) == (2, {"trained": 4})
    with pytest.raises(RuntimeError, match="step 3 is done but batches are sealed only up to 2"):
        scheduler.step_done(3)


def test_a_run_that_is_over_leaves_no_episode_live() -> None:
    scheduler = make(groups_per_step=1, max_lag=3, steps=3, reuse=2, order="freshest")
    grants = start(scheduler)
    with pytest.raises(RuntimeError, match="finished after 0 of 3 steps"):
        scheduler.finish("run ended")
    complete(scheduler, grants, [1])
    for step in (1, 2):
        scheduler.seal(0.0)
        scheduler.step_done(step)
    complete(scheduler, [grants[0]], [0])
    scheduler.published(2)
    grants += scheduler.grant(0.0)
    complete(scheduler, grants[1:], [0])
    scheduler.seal(0.0)
    scheduler.step_done(3)
    assert scheduler.done
    scheduler.finish("run ended")
    assert not scheduler.episodes
    assert sum(final(scheduler).values()) == scheduler.next_episode_id
    assert not scheduler.may_admit()
    scheduler.check()


def test_episode_states_are_the_words_of_the_schema() -> None:
    assert {state.value for state in EpisodeState} == {"queued", "leased", "done", "failed"}
