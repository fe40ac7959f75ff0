"""An environment from tools, tasks and a reward function.

    def search(query: str) -> str: ...                     # a tool: type hints and a docstring
    def right(final: str, answer: str) -> float: ...       # a reward function, of any signature

    def make() -> ToolEnv:
        return ToolEnv([search], Rows(read("train.jsonl")), right)

An episode goes on while the assistant calls tools (`asyncrl.envs.tools`). Its first message without a call is the
final answer, and so is the one that reaches `max_turns`: the reward function scores the episode, as it does one
that a limit of the run cuts off. For tools that share the state of an episode see `asyncrl.envs.methods`. Called
through a user's entry point, by hub and generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.envs.reward_signatures import EpisodeView, RewardFunction
from asyncrl.envs.rewards import RewardCall, own_reward
from asyncrl.envs.sources import TaskSource
from asyncrl.envs.tools import Tool, Tools, calls_tools
from asyncrl.messages import EpisodeStatus, Task


@dataclass(frozen=True, slots=True)
class Rules:
    """What all episodes of an environment with tools share, but for tools and reward."""

    max_turns: int
    system: str | None
    """System prompt of tasks that have none of their own."""
    name: str
    """The environment's, for reward functions that ask for the data source."""


class ToolEnv:
    """The environment.

    Args:
        tools: plain functions, sync or async, or `Tool` objects. A task may have fewer: `metadata["tools"]` lists
            the names of those that it has.
        tasks: where tasks come from, for example `asyncrl.envs.sources.Rows`.
        reward: scores the episode; its reward has the function's name. None: no reward of its own, but
            `reward.functions` may give some.
        system: system prompt of tasks that have none of their own.
        max_turns: the assistant's message with this number is the last one; `env.max_turns` may be less.
        tool_timeout_s: time limit of each call of a tool, in seconds.
        reward_timeout_s: time limit of the reward function. `env.timeout_s` limits both: keep it above them.
        name: what reward functions get as the data source of tasks without one.

    Raises:
        ValueError: a function cannot be a tool, or the reward function has no signature that is known.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any] | Tool],
        tasks: TaskSource,
        reward: RewardFunction | None,
        *,
        system: str | None = None,
        max_turns: int = 8,
        tool_timeout_s: float = 10.0,
        reward_timeout_s: float = 20.0,
        name: str = "tools",
    ) -> None:
        self._tasks = tasks
        self._tools = Tools(tools, tool_timeout_s)
        self._reward = None if reward is None else own_reward(reward, reward_timeout_s)
        self._rules = Rules(max_turns, system, name)

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: there are no more.
        """
        return self._tasks.task(split, index)

    def make(self) -> Env:
        """A new, unused episode."""
        return ToolEpisode(self._tools, self._reward, self._rules)


class CallingEpisode:
    """One episode in which the assistant calls tools; kinds of it say how a lost one is brought back."""

    def __init__(self, tools: Tools, reward: RewardCall | None, rules: Rules) -> None:
        self._tools, self._reward, self._rules = tools, reward, rules
        self._task: Task | None = None
        self._prompt: list[Message] = []
        self._turns: list[Message] = []
        self._said = 0

    async def reset(self, task: Task) -> Start:
        """Shows the task, and those tools that it has.

        Raises:
            ValueError: its `metadata["tools"]` is no list of names of tools.
        """
        self._task = task
        self._tools = self._tools.only(_names(task)) if task.metadata.get("tools") is not None else self._tools
        self._prompt = with_system(task.prompt, self._rules.system)
        return Start(list(self._prompt), self._tools.schemas)

    async def step(self, message: Message) -> Step:
        """Answers the calls of the message; without any, or at `max_turns`, scores the episode.

        Raises:
            RewardFault: the reward function failed.
            ToolFault: a tool cannot be used at all.
        """
        return await self._step(message, interrupted=False)

    async def interrupted(self, message: Message) -> Step:
        """As `step`, but does not repeat calls with side effects."""
        return await self._step(message, interrupted=True)

    async def truncated(self, status: str) -> dict[str, float | None]:
        """Scores an episode that is cut off, unless nothing was said in it.

        Raises:
            RewardFault: the reward function failed.
        """
        return await self._score(self._task, status) if self._task is not None and self._said else {}

    async def close(self) -> None:
        """Holds nothing."""

    async def _again(self, message: Message, step: Step, hint: str) -> None:
        """Makes the calls of a recorded turn again, whose effects were lost with the process.

        Only how many fail is compared with `step`: its texts are those that the policy saw, cut to their length.

        Raises:
            RuntimeError: a call has side effects, so it cannot be made again (`hint` says what could be done), or
                others fail now than did before.
        """
        effects = self._tools.effects(message)
        if effects:
            raise RuntimeError(
                f"the tool {effects[0]!r} has side effects and was called, so this episode cannot be brought back "
                f"by calling it again; {hint}"
            )
        again = await self._tools.answer(message)
        now, before = again.info["tool_errors"], step.info.get("tool_errors")
        if now != before:
            raise RuntimeError(
                f"{now:g} calls of a finished turn fail when they are made again, and the first time {before} "
                "did; the tools do not repeat themselves"
            )
        self._turns += [message, *step.messages]
        self._said += 1

    async def _step(self, message: Message, interrupted: bool) -> Step:
        if self._task is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        self._turns.append(message)
        self._said += 1
        if not calls_tools(message) or self._said >= self._rules.max_turns:
            return Step(True, await self._score(self._task, EpisodeStatus.COMPLETED))
        step = await self._tools.answer(message, interrupted)
        self._turns += step.messages
        return step

    async def _score(self, task: Task, status: str) -> dict[str, float | None]:
        if self._reward is None:
            return {}
        view = EpisodeView(task, self._prompt, self._turns, status, self._rules.name)
        return dict(await self._reward.of(view))


class ToolEpisode(CallingEpisode):
    """One episode of plain functions. They keep no state here, so a recorded turn is taken over as it is."""

    async def replay(self, message: Message, step: Step) -> None:
        """Takes a recorded turn over; calls nothing."""
        self._turns += [message, *step.messages]
        self._said += 1


def with_system(prompt: list[Message], system: str | None) -> list[Message]:
    """The prompt, begun with a system prompt unless it has one of its own."""
    own = bool(prompt) and prompt[0].get("role") == "system"
    return [*([] if system is None or own else [{"role": "system", "content": system}]), *prompt]


def _names(task: Task) -> list[str]:
    names = task.metadata["tools"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"task {task.id!r}: metadata 'tools' = {names!r}; it must be a list of names of tools")
    return names
