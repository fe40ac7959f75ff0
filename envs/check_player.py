"""Plays one episode of an environment from a script, as the episode loop would, and judges each answer.

It knows neither what the scripts mean nor how findings are shown. Every call has the time limit; what is being
called is told beforehand, because a call that blocks the event loop can only be ended from outside. Called by
`asyncrl.envs.check_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from asyncrl.envs.base import Env, Environment, Message, Start, Step, Truncates
from asyncrl.envs.rewards import RewardFault, named
from asyncrl.messages import EpisodeStatus, Task

T = TypeVar("T")
Tell = Callable[[str, Any], None]
"""Takes a kind (`now`, `problem`, `note`, ...) and what there is to say."""
SHOWN = 160
"""Most characters of a value in a sentence."""


class Broken(Exception):
    """The episode cannot go on; the problem has been told."""


@dataclass(slots=True)
class Trace:
    """What an episode answered."""

    start: Start
    steps: list[Step] = field(default_factory=list)
    truncated: dict[str, float] = field(default_factory=dict)
    """Rewards for having been cut off at the end of the script."""

    @property
    def score(self) -> float | None:
        """The episode's reward; None if it has none."""
        given = [self.truncated, *(named(step.rewards) for step in self.steps)]
        values = [value for rewards in given for value in rewards.values()]
        return sum(values) if values else None

    def answers(self, turn: int = 0) -> list[Any]:
        """All that must be the same in another episode with the same messages, from a turn on."""
        return [[step.done, named(step.rewards), step.messages] for step in self.steps[turn:]]

    def text(self) -> str:
        """The whole episode as text."""
        return json.dumps([self.start.messages, self.start.tools, self.answers(), self.truncated])


class Player:
    """Plays episodes.

    Args:
        environment: makes them.
        limit_s: time limit of each call.
        tell: takes what is found.
    """

    def __init__(self, environment: Environment, limit_s: float, tell: Tell) -> None:
        self.environment, self.limit_s, self.tell = environment, limit_s, tell
        self.seconds: dict[str, list[float]] = {"task": [], "reset": [], "step": []}

    # ---- episodes ------------------------------------------------------------------------------------

    async def play(self, task: Task, messages: Sequence[Message], where: str) -> Trace:
        """A whole episode: reset, a step for each message until it is done, close.

        Raises:
            Broken: it failed.
        """
        env = self.make(where)
        try:
            trace = Trace(await self.reset(env, task, where))
            trace.steps = await self.go_on(env, messages, where)
            if not trace.steps[-1].done and isinstance(env, Truncates):
                status = EpisodeStatus.TRUNCATED_TURNS.value
                given = await self.ask("truncated", lambda: env.truncated(status), dict, where)
                trace.truncated = self._named(given, "truncated", where)
            return trace
        finally:
            await self.close(env, where)

    async def go_on(self, env: Env, messages: Sequence[Message], where: str) -> list[Step]:
        """Steps until the episode is done or the messages are at their end."""
        steps: list[Step] = []
        for message in messages:
            steps.append(await self.step(env, message, where))
            if steps[-1].done:
                break
        return steps

    # ---- calls ---------------------------------------------------------------------------------------

    def make(self, where: str) -> Env:
        """A new episode."""
        return self.guard("make", self.environment.make, where)

    async def reset(self, env: Env, task: Task, where: str) -> Start:
        """Starts an episode; its messages are judged."""
        start = await self.ask("reset", lambda: env.reset(task), Start, where)
        wrong = _wrong_messages(start.messages) or _wrong_tools(start.tools)
        if not wrong and not start.messages:
            wrong = "gave no message; the policy needs something to answer"
        self._judge(wrong, "reset", where)
        return start

    async def step(self, env: Env, message: Message, where: str) -> Step:
        """Gives a message to an episode; the answer is judged."""
        # A copy, so that an environment that changes the message is found out by what it says the next time.
        given = json.loads(json.dumps(message))
        step = await self.ask("step", lambda: env.step(given), Step, where)
        wrong = _wrong_messages(step.messages)
        if not wrong and not step.done and not step.messages:
            wrong = "is not done and gave no message; the policy would have nothing to answer"
        self._judge(wrong, "step", where)
        self._named(step.rewards, "step", where)
        self._named(step.info, "step's info", where)
        return step

    async def close(self, env: Env, where: str) -> None:
        """Closes an episode. A failure is told, and harms nothing else."""
        with contextlib.suppress(Broken):
            await self.ask("close", env.close, object, where)

    async def ask(self, what: str, question: Callable[[], Awaitable[T]], kind: type, where: str) -> T:
        """Calls a method within the time limit.

        Raises:
            Broken: it raised, took too long, or returned something else than `kind`.
        """
        self.tell("now", f"{what} ({where})")
        began = time.perf_counter()
        pending = self.guard(what, question, where)
        if not inspect.isawaitable(pending):
            self._broken(f"{what} is sync", f"{what} is no coroutine function; write `async def {what}`")
        try:
            async with asyncio.timeout(self.limit_s):
                answer = await pending
        except TimeoutError:
            self._broken(f"{what} slow", f"{what} did not answer within {self.limit_s:g} s ({where})")
        except (Exception, SystemExit) as error:
            self._raised(what, error, where)
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)
        if not isinstance(answer, kind):
            self._broken(f"{what} kind", f"{what} returned {type(answer).__name__}, not {kind.__name__} ({where})")
        return answer

    def guard(self, what: str, call: Callable[[], T], where: str) -> T:
        """Calls what awaits nothing.

        Raises:
            Broken: it raised.
        """
        self.tell("now", f"{what} ({where})")
        try:
            return call()
        except (Exception, SystemExit) as error:
            self._raised(what, error, where)
            raise  # Never reached: the line above raises.

    # ---- findings ------------------------------------------------------------------------------------

    def problem(self, key: str, sentence: str) -> None:
        """Something is wrong. Of several with the same key the first sentence is shown."""
        self.tell("problem", [key, sentence])

    def _raised(self, what: str, error: BaseException, where: str) -> None:
        name = type(error).__name__
        self._broken(f"{what} {name}", f"{what} raised {name}: {shown(error)} ({where})")

    def _broken(self, key: str, sentence: str) -> None:
        self.problem(key, sentence)
        raise Broken(sentence) from None

    def _judge(self, wrong: str, what: str, where: str) -> None:
        if wrong:
            self._broken(f"{what} {wrong[:20]}", f"{what} {wrong} ({where})")

    def _named(self, values: Any, what: str, where: str) -> dict[str, float]:
        try:
            return named(dict(values))
        except (RewardFault, TypeError, ValueError) as error:
            self._broken(f"{what} number", f"{what} gave {shown(values)}: {error} ({where})")
            raise  # Never reached: the line above raises.


# ---- machinery -----------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value, cut to a length that fits a sentence."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def difference(one: str, other: str) -> str:
    """Both texts from shortly before the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - 40)
    return f"{one[begin : same + 60]!r} and {other[begin : same + 60]!r}"


def travels(value: Any) -> str:
    """What is wrong with a value that goes through the journal and over the network; empty if nothing is."""
    try:
        back = (
            msgspec.json.decode(msgspec.json.encode(value)),
            msgspec.msgpack.decode(msgspec.msgpack.encode(value)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        return f"cannot be written as JSON: {error}"
    return "" if back == (value, value) else "is not the same after a round trip through JSON"


def _wrong_messages(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return f"gave messages = {shown(messages)}, which is no list of tables"
    for message in messages:
        if "role" not in message or not isinstance(message.get("content", ""), str):
            return f"gave the message {shown(message)}; it needs a `role`, and a text as `content`"
        if message["role"] == "tool" and not {"name", "tool_call_id", "content"} <= message.keys():
            return f"gave the tool's answer {shown(message)}; it needs `name`, `tool_call_id` and `content`"
    if messages and messages[-1]["role"] == "assistant":
        return "gave a last message that is the assistant's, so the policy would answer itself"
    wrong = travels(messages)
    return f"gave messages of which one {wrong}: {shown(messages)}" if wrong else ""


def _wrong_tools(tools: Any) -> str:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f'gave the tool {shown(tool)}; its form is {{"type": "function", "function": {{"name": ...}}}}'
        if not isinstance(function.get("parameters", {}), dict):
            return f"gave the tool {shown(tool)}; its parameters are no JSON schema"
    wrong = travels(tools)
    return f"gave tools of which one {wrong}: {shown(tools)}" if wrong else ""
