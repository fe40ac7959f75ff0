"""An environment from a class whose public methods are tools, in the convention of TRL's `environment_factory`.

    class Counter:
        def reset(self, start: int, **row) -> str | None:  # gets the task's columns; what it returns is shown
            self.value = start
        def add(self, number: int) -> int:                 # a tool, because it has a docstring
            '''Adds to the counter.'''
            self.value += number
            return self.value
        def get_reward(self) -> float: ...                 # optional

    def make() -> MethodEnv:
        return MethodEnv(Counter, Rows(read("train.jsonl")))

There is one instance for each episode, and one call at a time; what is not async runs in a thread of the episode's
own. `reset`, `get_reward` and `close` are no tools. An episode that was lost is brought back in a new instance by
doing its calls again, and must answer as before. So the class must be deterministic (a random one seeds itself in
`reset`, from the task), and must not have done what cannot be done twice (`asyncrl.envs.tools.side_effects`).
Called through a user's entry point, by the hub and the generators.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.envs.own_thread import OwnThread
from asyncrl.envs.reward_signatures import EpisodeView, RewardFunction
from asyncrl.envs.rewards import own_reward
from asyncrl.envs.sources import TaskSource
from asyncrl.envs.threads import is_async, result_of
from asyncrl.envs.tool_env import CallingEpisode, Rules
from asyncrl.envs.tools import Tool, Tools
from asyncrl.messages import Task

RESERVED = ("reset", "get_reward", "close")


class MethodEnv:
    """The environment.

    Args:
        of: the class; it is made without arguments.
        tasks: where tasks come from. `reset` gets `prompt`, `answer` and the metadata as keyword arguments, or
            those of them that it names.
        system, max_turns, tool_timeout_s, reward_timeout_s: as those of `asyncrl.envs.tool_env.ToolEnv`.

    Raises:
        ValueError: the class has no `reset`, or none of its methods can be a tool.
    """

    def __init__(
        self,
        of: type,
        tasks: TaskSource,
        *,
        system: str | None = None,
        max_turns: int = 8,
        tool_timeout_s: float = 10.0,
        reward_timeout_s: float = 20.0,
    ) -> None:
        if not isinstance(of, type) or not callable(getattr(of, "reset", None)):
            raise ValueError(f"{of!r} is no class with a method `reset(self, **row) -> str | None`")
        tools = [Tool.of(MethodType(function, of)) for function in _methods(of)]
        if not tools:
            raise ValueError(f"class {of.__name__} has no tool: a public method with a docstring and type hints")
        self._of, self._tasks = of, tasks
        self._tools = Tools(tools, tool_timeout_s, one_at_a_time=True)
        self._rules = Rules(max_turns, system, of.__name__)
        self._reward_timeout_s = reward_timeout_s

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: there are no more.
        """
        return self._tasks.task(split, index)

    def make(self) -> Env:
        """A new, unused episode; its instance is made when it is reset."""
        kind = EffectfulEpisode if self._tools.have_effects else MethodEpisode
        return kind(self._of, self._tools, self._rules, self._reward_timeout_s)


class MethodEpisode(CallingEpisode):
    """One episode: one instance of the class. A lost one is stepped again, since there is no `replay`."""

    def __init__(self, of: type, tools: Tools, rules: Rules, reward_timeout_s: float) -> None:
        super().__init__(tools, None, rules)
        self._of, self._reward_timeout_s = of, reward_timeout_s
        self._instance: Any = None
        self._thread = OwnThread(of.__name__)

    async def reset(self, task: Task) -> Start:
        """Makes the instance and resets it; what it returns is appended to the task's last message.

        Raises:
            TypeError: it returned neither text nor None.
        """
        start = await super().reset(task)
        self._instance = await self._thread.call(self._of)
        self._tools = self._tools.of(lambda name: self._awaitable(getattr(self._instance, name)))
        if hasattr(self._instance, "get_reward"):
            self._reward = own_reward(self._scoring(), self._reward_timeout_s, "reward")
        reset = self._instance.reset
        shown = await result_of(partial(self._awaitable(reset), **_row(reset, task)), awaits=True)
        if shown is not None and not isinstance(shown, str):
            raise TypeError(f"{self._of.__name__}.reset returned {type(shown).__name__}; return text or None")
        self._prompt = _appended(self._prompt, shown) if shown else self._prompt
        return Start(list(self._prompt), start.tools)

    async def close(self) -> None:
        """Calls the instance's `close`, if it has one."""
        try:
            if callable(getattr(self._instance, "close", None)) and not self._thread.lost:
                await result_of(self._awaitable(self._instance.close), awaits=True)
        finally:
            self._thread.end()

    def _awaitable(self, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        """A method of the instance as an async function: a sync one runs in the thread that made the instance."""
        if is_async(method):
            return method

        async def called(**arguments: Any) -> Any:
            return await self._thread.call(method, **arguments)

        return called

    def _scoring(self) -> RewardFunction:
        """Its `get_reward` as a reward function."""
        get_reward = self._awaitable(self._instance.get_reward)

        async def reward(episode: EpisodeView) -> Any:
            return await get_reward()

        return reward


class EffectfulEpisode(MethodEpisode):
    """One episode of a class with methods that must not be called twice."""

    async def replay(self, message: Message, step: Step) -> None:
        """Does a recorded turn again, if it can be repeated.

        Raises:
            RuntimeError: it cannot.
        """
        await self._again(message, step, "an environment with snapshots could be")


# ---- machinery -----------------------------------------------------------------------------------


def _methods(of: type) -> list[FunctionType]:
    """The methods that are tools, in the order of their names."""
    found = []
    for name in dir(of):
        method = inspect.getattr_static(of, name)
        public = not name.startswith("_") and name not in RESERVED
        if public and isinstance(method, FunctionType) and inspect.getdoc(method):
            found.append(method)
    return found


def _row(reset: Callable[..., Any], task: Task) -> dict[str, Any]:
    """The columns of the task that `reset` takes."""
    row = {"prompt": task.prompt, "answer": task.answer} | task.metadata
    parameters = inspect.signature(reset).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def _appended(prompt: list[Message], shown: str) -> list[Message]:
    """The prompt with a text at the end of its last message, whose content is text or a list of parts."""
    content = prompt[-1].get("content") or ""
    more: Any = shown if isinstance(content, str) else [{"type": "text", "text": shown}]
    return [*prompt[:-1], prompt[-1] | {"content": content + more}]
