"""Tools from plain functions: they answer the calls of an assistant's message, in parallel and within limits.

    message with tool_calls ──▶ Tools.answer ─┬─ arguments checked against the type hints
                                              ├─ async function: awaited; sync function: in a thread of its own
    Step with one message for each call ◀─────┴─ what was returned, or `error: ...`

Whatever a function does wrong, and whatever the model does wrong in calling it, becomes a text that the model
sees; only a `ToolFault` goes further. Called by environments: `asyncrl.envs.tool_env`, `asyncrl.envs.methods`, and
any other that has tools. Schemas are made by `asyncrl.envs.tool_schema`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from asyncrl.envs.base import Message, Step, ToolFault
from asyncrl.envs.threads import is_async, outcome_of
from asyncrl.envs.tool_schema import Convert, describe

F = TypeVar("F", bound=Callable[..., Any])

THREADS = 32
"""Most calls of one sync tool at a time, hung ones included; further ones wait, within their limit."""
SHOWN = 200
"""Most characters that a model is shown again of a call that cannot be read."""
MARK = "__asyncrl_side_effects__"


def side_effects(function: F) -> F:
    """Marks a function whose call must not be repeated: it writes, sends or buys something."""
    setattr(function, MARK, True)
    return function


def calls_tools(message: Message) -> bool:
    """Whether an assistant's message calls tools, or tries to."""
    return bool(message.get("tool_calls") or message.get("malformed_calls"))


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `Tool.of(function)` makes one; one that is no function is made of its parts."""

    schema: dict[str, Any]
    call: Callable[..., Any]
    """The function, sync or async; takes keyword arguments. What it returns is shown as text, or else as JSON."""
    convert: Convert
    """Checks and converts arguments; raises msgspec.ValidationError."""
    side_effects: bool = False
    timeout_s: float | None = None
    """Time limit of a call in seconds; None: that of its `Tools`."""

    @classmethod
    def of(cls, function: Callable[..., Any], timeout_s: float | None = None) -> Tool:
        """A tool from a plain function or bound method.

        Raises:
            ValueError: a type hint or the docstring is missing or cannot be used; see `asyncrl.envs.tool_schema`.
        """
        schema, convert = describe(function)
        return cls(schema, function, convert, getattr(function, MARK, False), timeout_s)

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.schema["function"]["name"])


class Tools:
    """A set of tools.

    Args:
        tools: functions, or `Tool` objects.
        timeout_s: time limit of each call, in seconds. Keep it below `env.timeout_s`, which limits `answer`.
        one_at_a_time: the calls of a message are made in order, each after the last one's end, and no call begins
            while one that hangs still runs: for the methods of one object. Otherwise they are made in parallel.

    Raises:
        ValueError: a function cannot be a tool, or two have one name.
    """

    def __init__(
        self, tools: Iterable[Callable[..., Any] | Tool], timeout_s: float = 10.0, one_at_a_time: bool = False
    ) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in (each if isinstance(each, Tool) else Tool.of(each) for each in tools):
            if tool.name in self._tools:
                raise ValueError(f"two tools have the name {tool.name!r}; rename one")
            self._tools[tool.name] = tool
        self._timeout_s, self._one_at_a_time = timeout_s, one_at_a_time
        only = asyncio.Semaphore(1)
        self._rooms = {name: only if one_at_a_time else asyncio.Semaphore(THREADS) for name in self._tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    def only(self, names: Iterable[str]) -> Tools:
        """Those with the given names, in that order.

        Raises:
            ValueError: there is no tool of a name.
        """
        names = list(names)
        for name in names:
            if name not in self._tools:
                raise ValueError(f"there is no tool {name!r}; there are: {', '.join(self._tools) or 'none'}")
        some = Tools((self._tools[name] for name in names), self._timeout_s, self._one_at_a_time)
        some._rooms = {name: self._rooms[name] for name in names}
        return some

    def of(self, method: Callable[[str], Callable[..., Any]]) -> Tools:
        """The same tools, each called through what `method` gives for its name, one at a time."""
        own = (replace(tool, call=method(tool.name)) for tool in self._tools.values())
        return Tools(own, self._timeout_s, one_at_a_time=True)

    @property
    def have_effects(self) -> bool:
        """Whether any of them has side effects."""
        return any(tool.side_effects for tool in self._tools.values())

    def effects(self, message: Message) -> list[str]:
        """The names of the tools with side effects that a message calls."""
        called = map(_name, message.get("tool_calls") or [])
        return [name for name in called if name in self._tools and self._tools[name].side_effects]

    async def answer(self, message: Message, interrupted: bool = False) -> Step:
        """Answers all calls of an assistant's message.

        Args:
            message: has `tool_calls`, `malformed_calls` or both.
            interrupted: an earlier process may have made these calls already. Those with side effects are not made
                again; the model is told that what became of them is unknown.

        Returns:
            A step that is not done: one message of the role `tool` for each call, in order, and one for each call
            that cannot be read (without any that can, one user message). `info` has `tool_errors`, of the calls
            that can be read; the generator counts the calls.

        Raises:
            ToolFault: a tool cannot be used at all.
        """
        calls, malformed = message.get("tool_calls") or [], message.get("malformed_calls") or []
        if self._one_at_a_time:
            found = [await self._answer(call, interrupted) for call in calls]
        else:
            found = await self._together(calls, interrupted)
        messages = [_message(call, text) for call, (text, _) in zip(calls, found, strict=True)]
        unread = [f"error: this call cannot be read: {_plain(text)[:SHOWN]}" for text in malformed]
        if calls:
            # A template looks for the call that is answered, and this one has no name and no id of its own.
            messages += [_message(calls[-1], text) for text in unread]
        elif unread:
            messages = [{"role": "user", "content": "\n".join(unread)}]
        return Step(False, messages=messages, info={"tool_errors": sum(wrong for _, wrong in found)})

    # ---- machinery -------------------------------------------------------------------------------

    async def _together(self, calls: list[dict[str, Any]], interrupted: bool) -> list[tuple[str, bool]]:
        """All calls at once. A fault is raised only when the others have ended, so that none is left behind."""
        answers = [self._answer(call, interrupted) for call in calls]
        found: list[tuple[str, bool]] = []
        for each in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            found.append(each)
        return found

    async def _answer(self, call: dict[str, Any], interrupted: bool) -> tuple[str, bool]:
        """What the model is told, and whether that is an error."""
        name = _name(call)
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; there are: {', '.join(self._tools) or 'none'}", True
        try:
            arguments = tool.convert(call["function"].get("arguments") or {})
        except msgspec.ValidationError as error:
            return f"error: {name}: {error}; it takes {_takes(tool)}", True
        if interrupted and tool.side_effects:
            return (
                f"error: {name} was called, but whether the call took effect is unknown; it is not repeated",
                True,
            )
        return await self._called(tool, arguments)

    async def _called(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        limit = self._timeout_s if tool.timeout_s is None else tool.timeout_s
        call, room = partial(tool.call, **arguments), self._rooms[tool.name]
        try:
            returned, error = await outcome_of(call, is_async(tool.call), limit, room)
        except TimeoutError:
            return f"error: {tool.name} did not answer within {limit:g} s", True
        if isinstance(error, ToolFault):
            raise error
        if error is not None:
            return _plain(f"error: {type(error).__name__}: {error}"), True
        try:
            return _plain(returned if isinstance(returned, str) else msgspec.json.encode(returned).decode()), False
        except (TypeError, ValueError) as wrong:
            return f"error: {tool.name} returned {type(returned).__name__}, which is not JSON: {wrong}", True


def _name(call: dict[str, Any]) -> str:
    return str(call["function"].get("name", ""))


def _message(call: dict[str, Any], text: str) -> Message:
    return {"role": "tool", "name": _name(call), "tool_call_id": call.get("id", ""), "content": text}


def _takes(tool: Tool) -> str:
    """Its parameters, as a model reads them best: `city: string, unit: string (optional)`."""
    shape = tool.schema["function"]["parameters"]
    required = shape.get("required", [])
    told = [
        f"{name}: {each.get('type', 'any')}" + ("" if name in required else " (optional)")
        for name, each in shape.get("properties", {}).items()
    ]
    return ", ".join(told) or "no arguments"


def _plain(text: str) -> str:
    """Text that can be encoded: half a surrogate pair, which Python allows, is replaced."""
    return text.encode("utf-8", "replace").decode()
