"""Which training task comes next: the environment's in their order, less those that the curriculum leaves out.

The order is the environment's own (shuffled by its seed), the place in it is the scheduler's, who journals it, and
the pass rates of a restarted hub come from the journal: the same tasks are drawn with and without a crash. Called
by the hub.
"""

from __future__ import annotations

import msgspec

from asyncrl.config import Env
from asyncrl.curriculum import Curriculum
from asyncrl.envs.base import Environment
from asyncrl.groups import Episode, EpisodeState
from asyncrl.journal import Journal
from asyncrl.messages import Task
from asyncrl.recovery import pass_rates
from asyncrl.watchdog import watchdog

TASK_S = 600.0
"""Longest time that an environment may take for one training task; the hub does nothing else meanwhile."""


class Tasks:
    """The training tasks of a run."""

    def __init__(self, settings: Env, environment: Environment, journal: Journal) -> None:
        self._environment = environment
        self._curriculum: Curriculum | None = None
        if settings.pass_rate is not None:
            self._curriculum = Curriculum(*settings.pass_rate, settings.revisit)
            for task_id, rewards in pass_rates(journal):
                self._curriculum.record(task_id, rewards)

    def draw(self, index: int) -> tuple[int, Task]:
        """The first wanted task from `index` on, and its own index.

        Raises:
            IndexError: the environment has no more training tasks.
            Exception: whatever else the environment raises, or `plain`.
        """
        while True:
            what = f"training task {index} of the environment"
            with watchdog.waiting(what, TASK_S, "tasks.TASK_S", blocks_loop=True):
                task = plain(self._environment.task("train", index))
            if self._curriculum is None or self._curriculum.wants(task.id, index):
                return index, task
            index += 1

    def ended(self, episode: Episode) -> None:
        """An episode has ended; with the last one of its group, the group has a pass rate."""
        group = episode.group
        if self._curriculum is not None and all(
            each.state in (EpisodeState.DONE, EpisodeState.FAILED) for each in group.episodes
        ):
            self._curriculum.record(group.task.id, group.rewards)


def plain(task: Task) -> Task:
    """A task as the journal keeps it, so that its first lease and one after a restart of the hub carry the same.

    Raises:
        TypeError: something in it has no JSON.
        UnicodeEncodeError: a text in it is none.
        OverflowError: a whole number in it has more than 64 bits.
        msgspec.ValidationError: it is no task.
    """
    same = msgspec.json.decode(msgspec.json.encode(task), type=Task)
    msgspec.msgpack.encode(same)  # JSON has whole numbers of any size, a lease does not.
    return same
