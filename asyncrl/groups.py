"""The groups and episodes that a scheduler holds in memory, their states, and the order of training.

    episode   QUEUED ──grant──► LEASED ──end──► DONE ──all uses trained──► trained   (final, leaves memory)
                 ▲                │              └───group filtered──────► filtered  (final, leaves memory)
                 └──lapse, left───┘──failed end─────────────────────────► FAILED    (final)

    group     RUNNING ──last end──► COMPLETE ──all uses trained──► retired
                          └──► filtered(reason)

Data and pure functions of it; the transitions are made by `asyncrl.scheduler` and `asyncrl.leases`, and
`asyncrl.recovery` builds the same objects from the journal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import pstdev
from typing import TYPE_CHECKING, Literal

from asyncrl.messages import EpisodeEnd, EpisodeMeta, EpisodeStatus, Task
from asyncrl.packing import minibatch_of, plan_parts

if TYPE_CHECKING:
    from asyncrl.config import Config

Order = Literal["fifo", "freshest", "priority"]

KeepGroup = Callable[[Sequence[float | None]], str | None]
"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): rewards of the episodes that a group would train to
None (keep it) or the reason why it is not trained."""


class EpisodeState(StrEnum):
    """Where an episode of a live group is."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    """Ended with a reward; waits for its group, then for its batches."""
    FAILED = "failed"
    """Ended without one; final."""


class GroupState(StrEnum):
    """Where a live group is."""

    RUNNING = "running"
    COMPLETE = "complete"


@dataclass(slots=True)
class Episode:
    """One attempt at a group's task, as far as scheduling is concerned: no tokens."""

    episode_id: int
    seed: int
    group: Group = field(repr=False, compare=False)
    greedy: bool = False
    """Sampled at temperature 0: the baseline of its group (ReMax, arXiv:2310.10505), the last of its episodes."""
    state: EpisodeState = EpisodeState.QUEUED
    lease_id: int | None = None
    """The lease that runs it or that ended it; None while it is queued."""
    resumed: bool = False
    """Whether it ever lost a lease; such an episode goes before all others."""
    next_seq: int = 0
    """Chunks accepted so far."""
    length: int = 0
    sampled: int = 0
    min_version: int = -1
    """Oldest version that sampled one of its tokens, -1 while there is none."""
    max_version: int = -1
    reward: float | None = None

    @property
    def group_id(self) -> int:
        """Of its group."""
        return self.group.group_id


@dataclass(slots=True)
class Group:
    """The episodes of one task that share a baseline."""

    group_id: int
    task_index: int
    task: Task = field(repr=False)
    needs_version: int
    """A generator must have applied this version or a newer one to run its episodes."""
    state: GroupState = GroupState.RUNNING
    uses: int = 0
    """Batches it was sealed into."""
    trained: int = 0
    """Batches of these that are trained."""
    episodes: list[Episode] = field(default_factory=list)

    @property
    def done(self) -> list[Episode]:
        """The episodes that ended with a reward, in order: the group's share of a batch."""
        return [episode for episode in self.episodes if episode.state is EpisodeState.DONE]

    @property
    def rewarded(self) -> list[Episode]:
        """Those of `done` that are trained on: all but the greedy one."""
        return [episode for episode in self.done if not episode.greedy]

    @property
    def rewards(self) -> list[float]:
        """The rewards of `rewarded`."""
        return [episode.reward for episode in self.rewarded if episode.reward is not None]


class Verdict(StrEnum):
    """What becomes of a chunk or an end."""

    ACCEPTED = "accepted"
    """New and in order: write it, then ack it."""
    DUPLICATE = "duplicate"
    """Held already: ack it."""
    EARLY = "early"
    """A chunk before it has not arrived (a restarted hub missed it): do not ack, both come again in order."""
    REFUSED = "refused"
    """Its lease has lapsed, its episode is over, or it makes no sense."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A batch that was just sealed. `plan` is [rank][row][index into episode_ids], without the greedy episodes."""

    batch_id: int
    step: int
    """Equal to batch_id: the learner step that trains it, 1, 2, ..."""
    group_ids: list[int]
    episode_ids: list[int]
    plan: list[list[list[int]]]
    seed: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that scheduling obeys; see `asyncrl.config` for what each means."""

    groups_per_step: int
    group_size: int
    max_lag: int
    over_age: Literal["train", "mask", "wait"]
    reuse: int
    order: Order
    steps: int
    lease_s: float
    heartbeat_s: float
    seed: int
    ranks: int
    token_budget: int
    minibatches: int
    greedy: bool
    """Every group has one more episode, its greedy baseline."""

    def __post_init__(self) -> None:
        if self.over_age == "wait" and self.order != "fifo":
            raise ValueError(
                f'staleness.over_age = "wait" trains in strict order of admission, which contradicts '
                f'replay.order = "{self.order}"; set replay.order = "fifo", or over_age to train or mask'
            )

    @classmethod
    def from_config(cls, config: Config, *, greedy: bool) -> Rules:
        """Reads them from a run's resolved configuration; `greedy` is its `algo.greedy_baseline`.

        Raises:
            ValueError: `staleness.over_age` and `replay.order` contradict each other.
        """
        return cls(
            groups_per_step=config.train.groups_per_step,
            group_size=config.train.group_size,
            max_lag=config.staleness.max_lag,
            over_age=config.staleness.over_age,
            reuse=config.replay.reuse,
            order=config.replay.order,
            steps=config.train.steps,
            lease_s=config.hub.lease_s,
            heartbeat_s=config.hub.heartbeat_s,
            seed=config.run.seed,
            ranks=config.learner.ranks,
            token_budget=config.learner.token_budget,
            minibatches=config.learner.minibatches,
            greedy=greedy,
        )

    @property
    def episodes_per_group(self) -> int:
        """Episodes that are sampled for a task: `group_size`, and the greedy one."""
        return self.group_size + self.greedy

    def groups_wanted(self, version: int) -> int:
        """Groups, without filtered ones, that may have been admitted once `version` is published.

        With `reuse = 1` this is design.md's `(max_lag + version + 1) * groups_per_step`. A batch needs
        `groups_per_step` *different* groups, so with a reuse of r the groups of one step feed r steps: a new
        block of `groups_per_step` opens every r versions. The newest block was sealed at most r - 1 times
        before the next one opens, whatever the order of training is, so there are always enough groups with
        uses left for the next batch.
        """
        return self.groups_per_step * ((self.max_lag + version) // self.reuse + 1)

    def needs_version(self, ordinal: int) -> int:
        """Oldest version that may sample the group that is the `ordinal`-th (0, 1, ...) of those kept.

        The group is due at step `ordinal // groups_per_step * reuse` (counted from 0), which the learner
        takes at the version of that number, so tokens `max_lag` older are still in time. A group that is
        filtered moves those behind it forward, which only lowers their lag. Never more than the published
        version that admitted the group (`groups_wanted` solved for the version), so it can always be met.
        """
        return max(0, ordinal // self.groups_per_step * self.reuse - self.max_lag)


def in_order(groups: Iterable[Group], order: Order) -> list[Group]:
    """Sorts complete groups, given oldest first, into the order in which they enter a batch."""
    ranked = list(groups)
    if order == "freshest":
        ranked.reverse()
    elif order == "priority":
        ranked.sort(key=lambda group: -pstdev(group.rewards))
    return ranked


def reason_to_filter(group: Group, keep_group: KeepGroup) -> str | None:
    """Why a group whose episodes have all ended is not trained; None: it is complete."""
    rewards = group.rewards
    trainable = sum(not episode.greedy for episode in group.episodes)
    if len(rewards) < min(2, trainable):
        return "fewer than two rewarded episodes"
    return keep_group(rewards)


def rows_of(
    episodes: Sequence[Episode | EpisodeMeta], ranks: int, token_budget: int, minibatches: int
) -> list[list[list[int]]]:
    """Packs a batch for training: [rank][row][index into episodes], minibatch after minibatch.

    Greedy episodes are in no row; a group is whole within its minibatch.
    """
    parts: list[list[int]] = [[] for _ in range(minibatches)]
    for index, part in enumerate(minibatch_of([episode.group_id for episode in episodes], minibatches)):
        if not episodes[index].greedy:
            parts[part].append(index)
    return plan_parts([episode.length for episode in episodes], parts, ranks, token_budget)


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on nothing else (BLAKE2b)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def kind_of(reason: str) -> str:
    """The part of a reason that is counted: what stands before its first colon."""
    return reason.partition(":")[0]


_STATUSES = frozenset(status.value for status in EpisodeStatus)


def reason_of_failure(e: EpisodeEnd, episode: Episode, token_budget: int) -> str | None:
    """Why an ended episode has nothing to train on; None if it has."""
    if e.status not in _STATUSES:
        return f"unknown status: {e.status}"
    if EpisodeStatus(e.status).is_failed:
        return f"{e.status.removeprefix('failed_')}: {e.detail or 'no detail given'}"
    if e.reward is None:
        return "no reward"
    if not all(map(math.isfinite, (e.reward, *e.rewards.values()))):
        return f"reward is not finite: {e.reward} {e.rewards}"
    if episode.sampled == 0:
        return "nothing was sampled"
    if episode.length > token_budget:
        return f"longer than learner.token_budget: {episode.length} tokens"
    return None
