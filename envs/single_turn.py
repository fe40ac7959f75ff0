"""Single-turn environments from data and a reward function: a prompt, an answer, a score.

    asyncrl train --env data --env.args '{"path": "train.jsonl", "reward": "judges.py:right"}'
    SingleTurn(Rows(read("train.jsonl")), right)                                                # from Python

Without a reward function the reward is 1 for an answer that is the task's `answer`, white space around it aside,
else 0. With verl's data and verl's `compute_score` as the reward function it needs nothing else. Called through
the entry point `data`, by hub and generators.
"""

from __future__ import annotations

from typing import Any

from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.registry import load_plugin
from asyncrl.envs.reward_signatures import EpisodeView, RewardFunction
from asyncrl.envs.rewards import GROUP, RewardCall, own_reward
from asyncrl.envs.rows import read, task_of
from asyncrl.envs.sources import Rows, TaskSource
from asyncrl.envs.tool_env import with_system
from asyncrl.messages import EpisodeStatus, Task


def correct(final: str, answer: Any) -> float:
    """1 if what was said is the answer, white space around it aside, else 0."""
    return float(final.strip() == str(answer).strip())


class SingleTurn:
    """The environment.

    Args:
        tasks: where tasks come from, for example `asyncrl.envs.sources.Rows`.
        reward: scores the answer; a function of any signature. Its reward has its name.
        system: system prompt of tasks that have none of their own.
        reward_timeout_s: time limit of the reward function; keep it below `env.timeout_s`.
        name: what reward functions get as the data source of tasks without one.

    Raises:
        ValueError: the reward function has no signature that is known.
    """

    def __init__(
        self,
        tasks: TaskSource,
        reward: RewardFunction = correct,
        *,
        system: str | None = None,
        reward_timeout_s: float = 20.0,
        name: str = "data",
    ) -> None:
        self._tasks, self._system, self._name = tasks, system, name
        self._reward = own_reward(reward, reward_timeout_s)

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: there are no more.
        """
        return self._tasks.task(split, index)

    def make(self) -> SingleTurnEpisode:
        """A new, unused episode."""
        return SingleTurnEpisode(self._reward, self._system, self._name)

    def demonstration(self, task: Task) -> str:
        """The task's answer, for a supervised warm start.

        Raises:
            ValueError: it has none.
        """
        if task.answer is None:
            raise ValueError(f"task {task.id!r} has no 'answer', so there is nothing to demonstrate")
        return str(task.answer)


class SingleTurnEpisode:
    """One episode: a prompt, an answer, done."""

    def __init__(self, reward: RewardCall, system: str | None, name: str) -> None:
        self._reward, self._system, self._name = reward, system, name
        self._task: Task | None = None
        self._prompt: list[Message] = []

    async def reset(self, task: Task) -> Start:
        """Shows the prompt."""
        self._task, self._prompt = task, with_system(task.prompt, self._system)
        return Start(list(self._prompt))

    async def step(self, message: Message) -> Step:
        """Scores the answer.

        Raises:
            RewardFault: the reward function failed.
        """
        if self._task is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        view = EpisodeView(self._task, self._prompt, [message], EpisodeStatus.COMPLETED, self._name)
        return Step(done=True, rewards=dict(await self._reward.of(view)))

    async def close(self) -> None:
        """Holds nothing."""


def make(
    path: str,
    reward: str | None = None,
    eval_path: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
    share: float = 0.1,
    system: str | None = None,
    reward_timeout_s: float = 20.0,
) -> SingleTurn:
    """The entry point.

    Args:
        path: a file of rows, `.jsonl` or `.parquet`; see `asyncrl.envs.rows` for its columns.
        reward: an installed reward function, `package.module:function` or `file.py:function`. Default: exact match
            with the column `answer`.
        eval_path: another file, for evaluation. Default: a share of `path`.
        seed: of the order of the training tasks.
        epochs: training ends after so many passes over the data. Default: never.
        share: without `eval_path`: this part of the rows is held out for evaluation, by a hash of the prompt.
        system: system prompt of rows that have none of their own.
        reward_timeout_s: time limit of the reward function, in seconds.

    Raises:
        ValueError: an argument is out of its range, or a row cannot be used.
    """
    for key, value in (("path", path), ("eval_path", eval_path)):
        if not isinstance(value, str) and (key == "path" or value is not None):
            raise ValueError(f"env.args.{key} = {value!r}: must be the name of a .jsonl or .parquet file")
    if not isinstance(reward_timeout_s, int | float) or not reward_timeout_s > 0:
        raise ValueError(f"env.args.reward_timeout_s = {reward_timeout_s!r}: must be a number above 0, in seconds")
    train = read(path)
    if reward is None and task_of(train[0], "", "").answer is None:
        raise ValueError(f"{train.where(0)}: no 'answer' to compare with; add that column, or set env.args.reward")
    function = correct if reward is None else load_plugin(GROUP, reward, "reward function")
    rows = Rows(train, None if eval_path is None else read(eval_path), seed=seed, epochs=epochs, share=share)
    return SingleTurn(rows, function, system=system, reward_timeout_s=reward_timeout_s)
