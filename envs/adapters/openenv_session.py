"""One session of an OpenEnv server, over its WebSocket: JSON messages, one answer for each.

    {"type": "reset", "data": {"seed": 7}}    →  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {the action}}    →  the same, or {"type": "error", "data": {"code", "message"}}

The server ends the session when the connection ends. Nothing of OpenEnv is imported, so any version of it can run
on the other side that speaks this protocol (tried with 0.10.0). Called by `asyncrl.envs.adapters.openenv`.
Source: the server of https://github.com/meta-pytorch/OpenEnv (openenv.core.env_server.http_server).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncrl.envs.base import ToolFault

if TYPE_CHECKING:
    import aiohttp

ABOUT_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action can cause; with all others there is no session."""
_CAPACITY = "CAPACITY_REACHED"


class Refused(Exception):
    """The server answered a reset or an action with an error; the session goes on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answers to a reset or a step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """A connection to a server, opened by the first message. Every wait ends after `limit_s` seconds."""

    def __init__(self, url: str, limit_s: float) -> None:
        self._url = url
        self._limit_s = limit_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action, without the field `metadata`, which is for programs.

        Raises:
            ToolFault: the server cannot be reached, or does not tell.
        """
        import aiohttp

        try:
            async with asyncio.timeout(self._limit_s), self._client().get(f"{self._url}/schema") as response:
                response.raise_for_status()
                schema = (await response.json())["action"]
                properties = {name: kind for name, kind in schema["properties"].items() if name != "metadata"}
        except TimeoutError:
            raise self._late("for its schema") from None
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._gone(f"GET /schema: {type(error).__name__}: {error}") from error
        return {**schema, "properties": properties}

    async def reset(self, data: dict[str, Any]) -> Answer:
        """Starts an episode.

        Raises:
            Refused: the environment on the server raised.
            ToolFault: the server cannot be reached, is full, or did not answer in time.
        """
        return await self._ask("reset", data)

    async def step(self, action: dict[str, Any]) -> Answer:
        """Does an action. Raises as `reset` does; `Refused` also if the action is malformed."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """Ends the session, and with it the environment on the server."""
        socket, self._socket = self._socket, None
        http, self._http = self._http, None
        try:
            if socket is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limit_s):
                        await socket.close()
        finally:
            if http is not None:
                await http.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> Answer:
        import aiohttp

        try:
            async with asyncio.timeout(self._limit_s):
                if self._socket is None:
                    self._socket = await self._client().ws_connect(f"{self._url}/ws", max_msg_size=0)
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._socket.receive()
        except TimeoutError:
            raise self._late(f"to {kind!r}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._gone(f"it ended the connection instead of answering to {kind!r}")
        return self._read(message.data)

    def _read(self, text: str) -> Answer:
        try:
            said = json.loads(text)
            data = said["data"]
            if said["type"] == "error":
                raise self._error(str(data.get("code")), data)
            reward = data.get("reward")
            return Answer(data["observation"], None if reward is None else float(reward), bool(data.get("done")))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._gone(f"its answer is none of OpenEnv's: {type(error).__name__}: {error}") from error

    def _error(self, code: str, data: dict[str, Any]) -> Exception:
        said = str(data.get("message") or code)
        if code in ABOUT_THE_ACTION:
            wrong = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in data.get("errors") or []]
            return Refused(". ".join([said, *wrong]))
        if code == _CAPACITY:
            said += "; give its create_app a larger max_concurrent_envs, or have fewer episodes at once"
        return self._gone(f"{code}: {said}")

    def _client(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http

    def _gone(self, why: str) -> ToolFault:
        return ToolFault(f"the OpenEnv server at env.args.url = {self._url!r} cannot be used: {why}")

    def _late(self, what: str) -> ToolFault:
        return self._gone(f"no answer {what} within env.args.timeout_s = {self._limit_s:g} s")


def server_url(url: object) -> str:
    """Checks the address of a server and returns it without a slash at its end.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"env.args.url = {url!r}: must be a server's address, such as 'http://localhost:8000'")
    return str(url).rstrip("/")
