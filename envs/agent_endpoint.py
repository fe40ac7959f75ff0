"""A local HTTP server that answers the chat-completions requests of agents with what the policy says.

    agent ──POST /v1/chat/completions, key──▶ Exchange.asked ──▶ new messages ──▶ policy
    agent ◀──assistant message, tool calls──  Exchange.answer ◀── what it said ◀──┘

One server for each event loop, started at the first episode and alive as long as the loop. The API key names the
episode. An agent may only append: a request that rewrites what was said, changes the tools, asks for more than one
choice, or comes while another one waits is refused with status 400, and the episode fails for that reason, because
its tokens would no longer be one conversation. A stream is sent as one chunk. What the request says about sampling
(temperature, max_tokens, stop) is ignored: the run's own settings apply.

`asyncrl.envs.agent` makes environments of it. Needs aiohttp (`pip install 'asyncrl[http]'`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.envs.base import Message
from asyncrl.envs.openai_messages import Calls, Refused, chunk, completion, from_openai, same, to_openai

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 64 << 20
HEADERS = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What an agent wants an answer to."""

    messages: list[Message]
    """Those that were not in its last request, nor the answer to it."""
    tools: list[dict[str, Any]]


class Exchange:
    """One agent's requests and the policy's answers. An agent has one request at a time."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.refused: Refused | None = None
        """Why the episode cannot go on."""
        self.changed = asyncio.Event()
        """Set when there is a request, or none can be answered any more."""
        self._said: list[dict[str, Any]] = []
        """The conversation so far, as the agent has it."""
        self._tools: list[dict[str, Any]] | None = None
        self._calls: Calls = {}
        self._turn = 0
        self._asked: Asked | None = None
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    def take(self) -> Asked | None:
        """The request that waits, once."""
        asked, self._asked = self._asked, None
        self.changed.clear()
        return asked

    def answer(self, message: Message) -> None:
        """Answers the waiting request with what the policy said.

        Raises:
            Refused: the agent has asked for something else meanwhile, which cannot be answered.
            RuntimeError: nobody waits.
        """
        if self.refused is not None:
            raise self.refused
        if self._answer is None or self._answer.done():
            raise RuntimeError("no request of the agent waits for this message")
        said = to_openai(message, self._turn, self._calls)
        self._said.append(said)
        self._turn += 1
        self._answer.set_result(said)

    def refuse(self, why: Refused) -> None:
        """Answers the waiting request, and all later ones, with a refusal."""
        self.refused = self.refused or why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self.refused)
        self.changed.set()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response to a request of the agent.

        Raises:
            Refused: there is none.
        """
        try:
            self._accept(body)
        except Refused as why:
            self.refuse(why)
            raise
        except (
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # A call that is a text, a role that is a list...
            malformed = Refused(f"the request is none of chat completions: {type(error).__name__}: {error}")
            self.refuse(malformed)
            raise malformed from error
        assert self._answer is not None
        said = await self._answer
        return completion(said, str(body.get("model", "policy")), self._turn)

    def _accept(self, body: dict[str, Any]) -> None:
        if self.refused is not None:
            raise self.refused
        if self._answer is not None and not self._answer.done():
            raise Refused(
                "two requests at a time: an episode is one conversation, so the agent must wait for answers"
            )
        if body.get("n") not in (None, 1):
            raise Refused(f"n = {body['n']}: there is one choice; start more episodes instead")
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list):
            raise Refused("the request has no list of messages")
        if self._tools is not None and tools != self._tools:
            raise Refused("the tools have changed: the policy was told of other ones at the start of the episode")
        new = self._new(messages)
        self._asked = Asked([from_openai(message, self._calls) for message in new], tools)
        self._said, self._tools = list(messages), tools
        self._answer = asyncio.get_running_loop().create_future()
        self.changed.set()

    def _new(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages after those of the conversation so far, which must all be there."""
        for number, (before, now) in enumerate(zip(self._said, messages, strict=False)):
            if not isinstance(now, dict) or not same(before, now):
                raise Refused(
                    f"the request rewrites the conversation: message {number} was {before!r:.200} and is now "
                    f"{now!r:.200}. An agent may only append to it"
                )
        new = messages[len(self._said) :]
        if not new:
            raise Refused(
                f"the request has {len(messages)} messages after a conversation of {len(self._said)}; it must add "
                "to all of them, the assistant's answers included"
            )
        return new


class AgentEndpoint:
    """The server of the running event loop: `await AgentEndpoint.here(host)`."""

    _servers: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[AgentEndpoint]]] = {}

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        """What an OpenAI client calls so: `http://host:port/v1`."""
        self._exchanges: dict[str, Exchange] = {}

    @classmethod
    async def here(cls, host: str) -> AgentEndpoint:
        """The server of the running loop at an address of this machine.

        Raises:
            ModuleNotFoundError: aiohttp is not installed.
            OSError: the address is none of this machine's.
        """
        loop = asyncio.get_running_loop()
        started = cls._servers.get((loop, host))
        if started is None or (started.done() and started.exception() is not None):
            cls._servers = {key: task for key, task in cls._servers.items() if not key[0].is_closed()}
            started = cls._servers[loop, host] = asyncio.create_task(cls._start(host))
        return await asyncio.shield(started)

    def open(self) -> Exchange:
        """A new episode's exchange."""
        exchange = Exchange(f"episode-{secrets.token_urlsafe(16)}")
        self._exchanges[exchange.key] = exchange
        return exchange

    def also(self, key: str, session: str) -> None:
        """Lets requests name an open episode by the header X-Session-ID too, for agents that share a key."""
        self._exchanges[session] = self._exchanges[key]

    def close(self, exchange: Exchange) -> None:
        """Forgets an episode; its agent is told so, should it still ask."""
        self._exchanges = {key: other for key, other in self._exchanges.items() if other is not exchange}
        exchange.refuse(Refused("the episode is over"))

    @classmethod
    async def _start(cls, host: str) -> AgentEndpoint:
        try:
            from aiohttp import web
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"agents need aiohttp: pip install 'asyncrl[http]' ({error})") from error
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        runner = web.AppRunner(app, access_log=None)
        endpoint = cls("")
        app.router.add_post("/v1/chat/completions", endpoint._on_request)
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port = runner.addresses[0][1]
        endpoint.base_url = f"http://{host}:{port}/v1"
        return endpoint

    async def _on_request(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = request.headers.get("X-Session-ID", "")
        exchange = self._exchanges.get(bearer) or self._exchanges.get(session)
        if exchange is None:
            return _error(401, "invalid_api_key", "this API key is that of no episode, or the episode is over")
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise Refused("the request is no JSON object")
            response = await exchange.complete(body)
        except json.JSONDecodeError as error:
            return _error(400, "invalid_request_error", f"the request is no JSON: {error}")
        except CutOff as why:
            return _error(400, "context_length_exceeded", str(why))
        except Refused as why:
            return _error(400, "invalid_request_error", str(why))
        if not body.get("stream"):
            return web.json_response(response, headers=HEADERS)
        events = [json.dumps(chunk(response)), "[DONE]"]
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream", headers=HEADERS)


class CutOff(Refused):
    """The episode was cut off: the agent is told what a server says whose context is full."""


def _error(status: int, code: str, text: str) -> web.Response:
    from aiohttp import web

    return web.json_response(
        {"error": {"message": text, "type": "invalid_request_error", "code": code}}, status=status
    )
