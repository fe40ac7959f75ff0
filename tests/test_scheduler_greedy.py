"""Greedy baselines (ReMax): one more episode in each group, leased like any other, in no row and in no filter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.groups import rows_of
from asyncrl.leases import Grant
from asyncrl.messages import Chunk, EpisodeEnd, EpisodeMeta, Task
from asyncrl.packing import plan
from asyncrl.scheduler import Rules, Scheduler, Verdict
from asyncrl.trainers.filters import equal_rewards, keep_all

RULES = Rules(
    groups_per_step=1, group_size=2, max_lag=0, over_age="train", reuse=1, order="fifo", steps=10,
    lease_s=10.0, heartbeat_s=1.0, seed=0, ranks=1, token_budget=1000, minibatches=1, greedy=True,
)  # fmt: skip


def start(rules: Rules = RULES, keep: Callable[..., str | None] = keep_all) -> tuple[Scheduler, list[Grant]]:
    """A scheduler with all that it admits leased to one generator, and the grants in the order of episodes."""
    scheduler = Scheduler(rules, keep)
    while scheduler.may_admit():
        scheduler.admit(Task(f"task-{scheduler.next_task_index}", []), 0.0)
    scheduler.generator_joined("g", "first", 100, 0, [], 0.0)
    return scheduler, scheduler.grant(0.0)


def run(scheduler: Scheduler, grant: Grant, reward: float | None, n: int = 5) -> None:
    chunk = Chunk(grant.lease_id, grant.episode_id, grant.next_seq, n, 0, True)
    assert scheduler.chunk(chunk) is Verdict.ACCEPTED
    status = "failed_time" if reward is None else "completed"
    end = EpisodeEnd(grant.lease_id, grant.episode_id, grant.next_seq + 1, status, reward, 1)
    assert scheduler.end(end, 1.0) is Verdict.ACCEPTED
    scheduler.check()


def final(scheduler: Scheduler) -> dict[str, int]:
    return {name: n for name, n in scheduler.totals.items() if n}


def test_the_last_episode_of_each_group_is_greedy_and_only_that() -> None:
    _, grants = start(replace(RULES, groups_per_step=2))
    assert [(grant.group_id, grant.greedy) for grant in grants] == [
        (0, False), (0, False), (0, True), (1, False), (1, False), (1, True),
    ]  # fmt: skip


def test_a_greedy_episode_that_lost_its_lease_is_greedy_again() -> None:
    scheduler, grants = start()
    scheduler.chunk(Chunk(grants[2].lease_id, grants[2].episode_id, 0, 4, 0, True))
    scheduler.generator_left("g")
    scheduler.generator_joined("h", "first", 100, 0, [], 5.0)
    again = scheduler.grant(5.0)
    assert [(grant.episode_id, grant.greedy, grant.next_seq) for grant in again] == [
        (0, False, 0), (1, False, 0), (2, True, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1.0, 1.0, 0.0], False), ([0.0, 0.0, 1.0], False), ([0.0, 1.0, 1.0], True), ([0.0, 1.0, None], True)],
)
def test_a_group_filter_sees_the_rewards_of_the_others_only(rewards: list[float | None], kept: bool) -> None:
    seen: list[list[float]] = []

    def keep(given: list[float]) -> str | None:
        seen.append(given)
        return equal_rewards(given)

    scheduler, grants = start(keep=keep)
    for grant, reward in zip(grants, rewards, strict=True):
        run(scheduler, grant, reward)
    assert seen == [rewards[:2]]
    assert scheduler.counts()["groups complete"] == kept
    assert final(scheduler).get("filtered: equal rewards", 0) == (0 if kept else 3)


def test_a_group_is_complete_only_when_its_baseline_has_ended_too() -> None:
    scheduler, grants = start()
    run(scheduler, grants[0], 0.0)
    run(scheduler, grants[1], 1.0)
    assert scheduler.seal(2.0) is None
    run(scheduler, grants[2], 0.5)
    assert scheduler.seal(2.0) is not None


def test_a_baseline_is_no_second_rewarded_episode() -> None:
    scheduler, grants = start()
    for grant, reward in zip(grants, [1.0, None, 0.0], strict=True):
        run(scheduler, grant, reward)
    assert final(scheduler) == {"failed: time": 1, "filtered: fewer than two rewarded episodes": 2}


def test_one_sampled_episode_and_its_baseline_are_a_group() -> None:
    scheduler, grants = start(replace(RULES, group_size=1))
    run(scheduler, grants[0], 1.0)
    run(scheduler, grants[1], 0.0)
    sealed = scheduler.seal(2.0)
    assert sealed is not None
    assert (sealed.episode_ids, sealed.plan) == ([0, 1], [[[0]]])


def test_a_baseline_is_listed_in_the_batch_packed_in_no_row_and_ends_with_its_group() -> None:
    scheduler, grants = start(replace(RULES, groups_per_step=2, ranks=2))
    for grant, n in zip(grants, [9, 5, 900, 3, 7, 900], strict=True):
        run(scheduler, grant, float(grant.episode_id % 2), n=n)
    sealed = scheduler.seal(2.0)
    assert sealed is not None
    assert sealed.episode_ids == [0, 1, 2, 3, 4, 5]
    assert sealed.plan == [[[0, 3]], [[1, 4]]]  # 9 + 3 and 5 + 7 tokens: the long baselines weigh nothing
    scheduler.step_done(1)
    assert final(scheduler) == {"trained": 6}
    assert not scheduler.episodes


def test_a_baseline_that_failed_is_absent_from_its_batch() -> None:
    scheduler, grants = start()
    for grant, reward in zip(grants, [1.0, 0.0, None], strict=True):
        run(scheduler, grant, reward)
    sealed = scheduler.seal(2.0)
    assert sealed is not None
    assert (sealed.episode_ids, sealed.plan) == ([0, 1], [[[0, 1]]])
    scheduler.step_done(1)
    assert final(scheduler) == {"failed: time": 1, "trained": 2}


def test_priority_is_the_spread_of_the_others() -> None:
    scheduler, grants = start(replace(RULES, max_lag=1, order="priority"))
    for grant, reward in zip(grants, [0.4, 0.5, 9.0, 0.0, 1.0, 0.5], strict=True):
        run(scheduler, grant, reward)
    sealed = scheduler.seal(2.0)
    assert sealed is not None
    assert sealed.group_ids == [1]


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=20), st.integers(1, 4))
def test_rows_are_the_plan_of_the_others_with_the_indices_of_all(
    episodes: list[tuple[int, bool]], ranks: int
) -> None:
    metas = [EpisodeMeta(i, 0, 1.0, "completed", n, 1, greedy=greedy) for i, (n, greedy) in enumerate(episodes)]
    others = [meta for meta in metas if not meta.greedy]
    rows = [[[metas[i] for i in row] for row in rank] for rank in rows_of(metas, ranks, 100, 1)]
    planned = plan([meta.length for meta in others], ranks, 100)
    assert rows == [[[others[i] for i in row] for row in rank] for rank in planned]
