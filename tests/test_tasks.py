"""The order of the training tasks: without a curriculum, with one, and after a restart of the hub."""

import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Env
from asyncrl.envs.base import Split
from asyncrl.groups import Episode, EpisodeState, Group
from asyncrl.journal import Journal
from asyncrl.messages import Task
from asyncrl.records import Record, episode, episode_ended, group, group_state, task
from asyncrl.tasks import Tasks


class Three:
    """Three tasks, again and again; `answer` is that of all."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def task(self, split: Split, index: int) -> Task:
        if index > 60:
            raise IndexError(index)
        return Task(f"task/{index % 3}", [], self.answer)

    def make(self) -> Any:
        raise AssertionError("no episode is played here")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "run.db", "run", "{}")


def tasks(journal: Journal, **settings: Any) -> Tasks:
    return Tasks(Env.model_validate({"revisit": 0.01} | settings), Three(), journal)


def test_without_a_curriculum_every_task_is_drawn(journal: Journal) -> None:
    drawn = tasks(journal)
    assert [drawn.draw(index)[0] for index in range(5)] == [0, 1, 2, 3, 4]


def _ends(members: list[tuple[float | None, bool]], name: str) -> Group:
    """A group whose episodes have ended: reward and whether it is greedy; None: it failed."""
    ended = Group(0, 0, Task(name, []), 0)
    for reward, greedy in members:
        state = EpisodeState.FAILED if reward is None else EpisodeState.DONE
        ended.episodes.append(Episode(0, 0, ended, greedy, state, reward=reward))
    return ended


GROUPS: list[tuple[str, list[tuple[float | None, bool]]]] = [
    ("task/1", [(1.0, False), (0.0, False), (1.0, True)]),
    ("task/0", [(1.0, False), (1.0, False), (0.0, True)]),
    ("task/1", [(0.0, False), (None, False), (1.0, True)]),
    ("task/2", [(0.0, False), (1.0, False), (0.0, True)]),
]


def _journalled() -> list[Record]:
    """The rows of `GROUPS`, which have ended in this order but were admitted in the opposite one."""
    rows, last = [], len(GROUPS) - 1
    for place, (name, members) in enumerate(GROUPS):
        number = last - place
        rows += [task(number, number, Task(name, [])), group(number, number, 0, 0.0)]
        for member, (reward, greedy) in enumerate(members):
            episode_id = 10 * number + member
            rows.append(episode(episode_id, number, 0, greedy))
            state = "failed" if reward is None else "done"
            rows.append(
                episode_ended(
                    episode_id, state=state, reason="", status="completed", reward=reward, rewards={}, turns=1,
                    info={}, next_seq=1, length=1, sampled=1, min_version=0, max_version=0,
                    ended=100.0 + 10 * place + member,
                )
            )  # fmt: skip
        rows.append(group_state(number, "filtered" if place % 2 else "complete"))
    return rows


def test_a_restarted_hub_draws_the_tasks_that_it_would_have_drawn(journal: Journal) -> None:
    lived = tasks(journal, pass_rate=[0.2, 0.8])
    for name, members in GROUPS:
        for each in _ends(members, name).episodes:
            lived.ended(each)
    journal.write(_journalled())
    restarted = tasks(journal, pass_rate=[0.2, 0.8])
    order = [lived.draw(index)[0] for index in range(50)]
    assert order == [restarted.draw(index)[0] for index in range(50)]
    # task/0 was always solved, task/1 last never, and task/2 in between; a hundredth of the others is revisited.
    assert sum(index % 3 == 2 for index in order) > 45


def test_a_group_has_a_pass_rate_only_when_its_last_episode_has_ended(journal: Journal) -> None:
    drawn = tasks(journal, pass_rate=[0.2, 0.8])
    running = _ends([(1.0, False), (1.0, False)], "task/0")
    running.episodes[1].state = EpisodeState.LEASED
    drawn.ended(running.episodes[0])
    assert drawn.draw(0)[0] == 0
    running.episodes[1].state = EpisodeState.DONE
    drawn.ended(running.episodes[1])
    assert drawn.draw(0)[0] == 1


@pytest.mark.parametrize(
    ("answer", "error"), [(1 << 70, OverflowError), ("\ud800", UnicodeEncodeError), (object(), TypeError)]
)
def test_a_task_that_cannot_travel_is_refused_where_it_is_drawn(
    journal: Journal, answer: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Tasks(Env(), Three(answer), journal).draw(0)


def test_a_task_is_the_same_before_and_after_the_journal(journal: Journal) -> None:
    drawn = Tasks(Env(), Three({7: ("a", math.inf)}), journal).draw(0)[1]
    journal.write([task(0, 0, drawn)])
    assert drawn == journal.task(0)
    assert drawn.answer == {"7": ["a", None]}
