"""A connection to an MCP server, held by a task of its own, so that a server's end never ends its caller.

    command   a process of our own, over its stdin and stdout; it ends with the connection
    url       a server elsewhere, over Streamable HTTP
    server    an object in this process, `package.module:object` or `path/file.py:object`

The library ties a connection to the task that opened it and cancels that task when the transport breaks; here that
task is not the episode's. Called by `asyncrl.envs.adapters.mcp`. Source: the MCP Python SDK, version 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.base import ToolFault
from asyncrl.envs.registry import GROUP, load_plugin

CLOSE_S = 8.0
"""Limit of closing a connection. The library gives a process 2 s to end by itself, and 2 s more to be ended."""


class ToolError(Exception):
    """The server answered a call with an error, which is for the model."""


@dataclass(frozen=True, slots=True)
class Where:
    """A server; one of `command`, `url` and `server` is set."""

    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Of the command; the SDK passes on only a few variables of ours, PATH and HOME among them."""
    url: str = ""
    server: str = ""

    def target(self) -> Any:
        """What the library's client connects to.

        Raises:
            PluginError: `server` names no object.
        """
        if self.url:
            return self.url
        if self.server:
            return load_plugin(GROUP, self.server, "MCP server")
        stdio = load_extra("mcp.client.stdio", "mcp", "mcp")
        return stdio.StdioServerParameters(
            command=self.command[0], args=[*self.command[1:]], env=self.environment or None
        )

    def __str__(self) -> str:
        return self.url or self.server or " ".join(self.command)


class Connection:
    """One session with a server. `open` once, `close` always."""

    def __init__(self, where: Where, open_s: float) -> None:
        self._where = where
        self._open_s = open_s
        self._settled = asyncio.Event()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._lost: BaseException | None = None
        self.tools: list[Any] = []
        """As the server lists them, once it is open."""
        self.users = 0
        """Of a shared connection: the episodes that have it."""

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._client is not None

    async def open(self) -> None:
        """Connects, and asks for the tools.

        Raises:
            ToolFault: the server cannot be reached or started, or did not answer in time.
        """
        self._task = asyncio.create_task(self._hold(), name=f"mcp {self._where}")
        try:
            async with asyncio.timeout(self._open_s):
                await self._settled.wait()
        except TimeoutError:
            raise self._gone(f"it did not answer within env.args.open_timeout_s = {self._open_s:g} s") from None
        if not self.alive:
            raise self._gone(_reason(self._lost)) from self._lost

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool and returns its answer as text; the caller sets the time limit.

        Raises:
            ToolError: the server answered with an error.
            ToolFault: the connection is gone.
        """
        mcp = load_extra("mcp", "mcp", "mcp")
        if not self.alive:
            raise self._gone(_reason(self._lost)) from self._lost
        try:
            result = await self._client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == mcp.types.CONNECTION_CLOSED or await self._ended():
                raise self._gone(_reason(self._lost or error)) from error
            raise ToolError(error.message) from error
        except Exception as error:
            if await self._ended():
                raise self._gone(_reason(self._lost or error)) from error
            raise
        if result.is_error:
            raise ToolError(text_of(result))
        return text_of(result)

    async def close(self) -> None:
        """Ends the session, and the process if it is our own."""
        self._ending.set()
        if self._task is None:
            return
        if self.alive:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not self._task.done():  # It hangs, or it was given up while it was being opened.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def _hold(self) -> None:
        try:
            async with self._connected() as client:
                tools = await _all_tools(client)
                self.tools, self._client = tools, client
                self._settled.set()
                await self._ending.wait()
        except BaseException as error:  # Kept for whoever calls next; nobody awaits this task's result.
            self._lost = error
        finally:
            self._client = None
            self._settled.set()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        async with load_extra("mcp", "mcp", "mcp").Client(self._where.target()) as client:
            yield client

    async def _ended(self) -> bool:
        """Whether the connection has ended, or is about to: a broken one takes a moment to notice."""
        assert self._task is not None  # Only an open connection is called.
        await asyncio.wait({self._task}, timeout=0.1)
        return self._task.done()

    def _gone(self, why: str) -> ToolFault:
        return ToolFault(f"the MCP server {str(self._where)!r} cannot be used: {why}")


class Shared:
    """One connection for all episodes at a time: opened for the first, closed after the last."""

    def __init__(self, where: Where, open_s: float) -> None:
        self._where, self._open_s = where, open_s
        self._current: Connection | None = None
        self._opening = asyncio.Lock()

    async def take(self) -> Connection:
        """The connection; a new one if there is none, or the last one broke.

        Raises:
            ToolFault: see `Connection.open`.
        """
        async with self._opening:
            if self._current is None or not self._current.alive:
                opened = Connection(self._where, self._open_s)
                try:
                    await opened.open()
                except BaseException:
                    await opened.close()
                    raise
                self._current = opened
            self._current.users += 1
            return self._current

    async def give(self, connection: Connection) -> None:
        """Gives it back."""
        connection.users -= 1
        if not connection.users:
            if self._current is connection:
                self._current = None
            await connection.close()


def schema_of(tool: Any) -> dict[str, Any]:
    """A listed tool as chat templates take it."""
    told = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": told}


def text_of(result: Any) -> str:
    """A result as text: its texts, a note for what is none, or its JSON if there is no content at all."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_part(part) for part in result.content)


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def _part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    return f"[{part.type}, which cannot be shown]"


def _reason(error: BaseException | None) -> str:
    """What went wrong, without the groups that the library wraps it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error is not None else "the connection has ended"
