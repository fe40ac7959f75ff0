"""The tools of an MCP server as an environment: tasks from rows, tools from the server, a reward from a function.

    env.args = {"command": ["uvx", "mcp-server-time"], "path": "train.jsonl", "reward": "judge.py:right"}

An episode goes on while the assistant calls tools, as in `asyncrl.envs.tool_env`. An error of a tool is a message
that the model sees; a server that is gone fails the episode as `failed_tool`. Each episode has a session of its
own (with `command`, a process of its own), or all share one.

When a generator dies: with a shared session, the finished turns are taken over as recorded and nothing is called
again. With sessions of their own the state is lost with the session, so the finished turns' calls are made again
in a new one; an episode that called a tool with side effects then fails. In both, the calls of the turn that was
interrupted are made again, unless they have side effects: then the model is told that what became of them is
unknown.

Called through the entry point `mcp` (`asyncrl.envs.registry.load`). Needs the extra `asyncrl[mcp]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.adapters.mcp_session import Connection, Shared, Where, schema_of
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.registry import load_plugin
from asyncrl.envs.rewards import GROUP, RewardCall, own_reward
from asyncrl.envs.rows import read
from asyncrl.envs.sources import Rows, TaskSource
from asyncrl.envs.tool_env import Rules, ToolEpisode
from asyncrl.envs.tools import Tool, Tools
from asyncrl.messages import Task


@dataclass(frozen=True, slots=True)
class McpEnv:
    """The environment."""

    where: Where
    shared: Shared | None
    """Holds the session that all episodes share; None: each has its own."""
    tasks: TaskSource
    reward: RewardCall | None
    rules: Rules
    tools: tuple[str, ...]
    """The names of those that the model is given; empty: all."""
    side_effects: bool | frozenset[str]
    open_timeout_s: float
    tool_timeout_s: float

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: there are no more.
        """
        return self.tasks.task(split, index)

    def make(self) -> McpEpisode:
        """A new, unused episode."""
        return McpEpisode(self)


class McpEpisode(ToolEpisode):
    """One episode: a session of its own, or a part in the shared one."""

    def __init__(self, world: McpEnv) -> None:
        super().__init__(Tools([]), world.reward, world.rules)
        self._world = world
        self._connection: Connection | None = None

    async def reset(self, task: Task) -> Start:
        """Connects to the server and shows the task.

        Raises:
            ToolFault: there is no connection to the server.
            ValueError: the server lacks a tool that was asked for.
        """
        world = self._world
        if world.shared is not None:
            self._connection = await world.shared.take()
        else:
            self._connection = Connection(world.where, world.open_timeout_s)
            await self._connection.open()
        offered = Tools((self._tool(each) for each in self._connection.tools), world.tool_timeout_s)
        self._tools = offered.only(world.tools) if world.tools else offered
        return await super().reset(task)

    async def replay(self, message: Message, step: Step) -> None:
        """Takes a recorded turn over; in a session of its own, by making its calls again.

        Raises:
            RuntimeError: a call has side effects and cannot be made again, or others fail now than did before.
        """
        if self._world.shared is None:
            await self._again(message, step, "with env.args.shared = true it could be")
        else:
            await super().replay(message, step)

    async def close(self) -> None:
        """Ends the session, or gives the shared one back."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._world.shared is not None:
            await self._world.shared.give(connection)
        else:
            await connection.close()

    def _tool(self, listed: Any) -> Tool:
        effects = self._world.side_effects
        has = effects if isinstance(effects, bool) else listed.name in effects
        return Tool(schema_of(listed), self._caller(listed.name), _arguments, side_effects=has)

    def _caller(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            assert self._connection is not None  # Tools are made from an open connection.
            return await self._connection.call(name, arguments)

        return call


def _arguments(given: Any) -> dict[str, Any]:
    """The server checks them against its schema; here they only have to be an object."""
    return msgspec.convert(given, dict[str, Any])


def make(
    command: Sequence[str] = (),
    url: str = "",
    server: str = "",
    path: str = "",
    tasks: Sequence[Mapping[str, Any]] = (),
    eval_path: str = "",
    reward: str = "",
    tools: Sequence[str] = (),
    shared: bool = False,
    side_effects: bool | Sequence[str] = False,
    environment: Mapping[str, str] | None = None,
    system: str | None = None,
    max_turns: int = 8,
    open_timeout_s: float = 20.0,
    tool_timeout_s: float = 10.0,
    reward_timeout_s: float = 20.0,
    seed: int = 0,
    epochs: int | None = None,
    share: float = 0.1,
) -> McpEnv:
    """The entry point. Give one of `command`, `url`, `server`, and one of `path`, `tasks`.

    Args:
        command: starts a server that speaks over stdin and stdout: program and arguments.
        url: address of a server that speaks Streamable HTTP, such as `http://localhost:8000/mcp`.
        server: a server object in this process, `package.module:object` or `path/file.py:object`.
        path: file of the tasks, `.jsonl` or `.parquet`; see `asyncrl.envs.rows` for its columns.
        tasks: the rows themselves.
        eval_path: file of the evaluation split; without it, `share` of the tasks are held out.
        reward: reward function, `package.module:object`, `path/file.py:object` or an entry point; without it the
            environment gives no reward, and `reward.functions` may.
        tools: names of the tools that the model is given; without it, all.
        shared: whether all episodes of a process share one session; right for servers without state.
        side_effects: names of the tools whose calls must not be repeated, or true: all.
        environment: environment variables of `command`.
        system: system prompt of tasks that have none of their own.
        max_turns: the assistant's message with this number is the last one; at most `env.max_turns`.
        open_timeout_s: limit of starting and connecting. `env.timeout_s` limits it as well: keep it above.
        tool_timeout_s: limit of each call; one that takes longer is an error that the model sees.
        reward_timeout_s: limit of the reward function.
        seed, epochs, share: as those of `asyncrl.envs.sources.Rows`.

    Raises:
        ValueError: an argument is out of its range, or a row is no task.
        ModuleNotFoundError: the MCP SDK is not installed.
    """
    where = _where(command, url, server, environment)
    for key, value in (("open_timeout_s", open_timeout_s), ("tool_timeout_s", tool_timeout_s)):
        check_seconds(key, value)
    check_whole("max_turns", max_turns, 1)
    if isinstance(side_effects, str) or isinstance(tools, str):
        raise ValueError("env.args.side_effects and env.args.tools: must be lists of names of tools")
    if bool(path) == bool(tasks):
        raise ValueError("env.args: give either path, a file of tasks, or tasks, the rows themselves")
    evaluation = read(eval_path) if eval_path else None
    source = Rows(read(path) if path else tasks, evaluation, seed=seed, epochs=epochs, share=share)
    scores = own_reward(load_plugin(GROUP, reward, "reward function"), reward_timeout_s) if reward else None
    load_extra("mcp", "mcp", "mcp")
    return McpEnv(
        where=where,
        shared=Shared(where, open_timeout_s) if shared else None,
        tasks=source,
        reward=scores,
        rules=Rules(max_turns, system, "mcp"),
        tools=tuple(tools),
        side_effects=side_effects if isinstance(side_effects, bool) else frozenset(side_effects),
        open_timeout_s=open_timeout_s,
        tool_timeout_s=tool_timeout_s,
    )


def _where(command: Any, url: Any, server: Any, environment: Any) -> Where:
    """The server, checked.

    Raises:
        ValueError: not exactly one is given, or one is malformed.
    """
    given = [key for key, value in (("command", command), ("url", url), ("server", server)) if value]
    if len(given) != 1:
        raise ValueError(
            f"env.args: give one of command, url and server, and not {' and '.join(given) or 'none of them'}"
        )
    if command and (isinstance(command, str) or not all(isinstance(part, str) for part in command)):
        raise ValueError(
            f'env.args.command = {command!r}: must be a list of texts, such as ["uvx", "mcp-server-time"]'
        )
    if url and not str(url).startswith(("http://", "https://")):
        raise ValueError(f"env.args.url = {url!r}: must be an address, such as 'http://localhost:8000/mcp'")
    if server and ":" not in str(server):
        raise ValueError(f"env.args.server = {server!r}: must be 'package.module:object' or 'path/file.py:object'")
    if environment and not all(isinstance(part, str) for pair in environment.items() for part in pair):
        raise ValueError(f"env.args.environment = {environment!r}: must be a table of texts")
    return Where(tuple(command), dict(environment or {}), url, server)
