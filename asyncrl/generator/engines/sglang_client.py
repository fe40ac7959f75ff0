"""HTTP to one SGLang server: calls with a time limit, and the event stream of `/generate`.

It knows the server's wire format (JSON; `data: {...}` lines that end with `data: [DONE]`) and nothing of
engines, versions or updates. Called by the other `sglang` modules, on the event loop. Read from the source of
SGLang 0.5.23 (`entrypoints/http_server.py`, `managers/tokenizer_manager.py`), not run against it.

What the server does that shapes this module:

* A refused request is an event `{"error": {...}}` in a stream of status 200, or an `abort` with a status code.
* Chunks hold the new tokens, or, from a server without --incremental-streaming-output, all tokens so far. Chunks
  that the reader is late for are merged; the merged one has the metadata of the last.
* JSON has no NaN: a log-prob that is not a number arrives as null.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from asyncrl.generator.engines.base import FinishReason

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class ServerFailed(RuntimeError):
    """The server cannot be reached, is silent, or answered with a failure or with what it must not answer."""


class RequestRefused(ValueError):
    """The server refuses this one request; the text is the server's."""


class Span(msgspec.Struct):
    """Tokens `start`..`end` of a request were sampled by the weights `version`; the server's `weight_versions`."""

    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    finish_reason: dict[str, Any] | None = None
    weight_version: str = ""
    weight_versions: list[Span] | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a request."""

    token_ids: list[int]
    logprobs: list[float]
    total: int
    """Tokens of the request so far, these included, as the server counts them."""
    tag: str
    """The server's `weight_version` when it handled the chunk, after the tokens were sampled."""
    reason: FinishReason | None = None
    spans: list[Span] | None = None
    """Which weights sampled which tokens; in the last chunk only."""


class Client:
    """Calls to the server at `url`. Made and used on the event loop."""

    def __init__(self, url: str, connect_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = connect_s
        self.heard = 0.0
        """Loop time at which the server last sent anything."""
        # A new connection for each call: a kept one may be closed by the server in the moment it is used again,
        # which looks like the server's death. As many as there are requests; the default limit is 100.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def call(
        self, path: str, body: dict[str, Any] | None = None, *, limit_s: float, tolerant: bool = False
    ) -> Any:
        """POSTs `body` (None: GETs) and returns the decoded answer, None for an empty one.

        Args:
            path: `/name` of the endpoint.
            body: what to send, as JSON.
            limit_s: longest wait for the whole answer.
            tolerant: a refusal (status 400) is an answer like any other.

        Raises:
            ServerFailed: no answer in time, another status than 200, or `"success": false`.
        """
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                raw = await response.read()
        except TimeoutError:
            raise ServerFailed(f"{method} {self.url}{path}: no answer within {limit_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ServerFailed(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        self.heard = asyncio.get_running_loop().time()
        if tolerant and response.status == 400:
            return None
        if response.status != 200:
            text = raw[:500].decode(errors="replace")
            raise ServerFailed(f"{method} {self.url}{path}: status {response.status}: {text}")
        answer = msgspec.json.decode(raw) if raw.strip() else None
        if isinstance(answer, dict) and answer.get("success") is False and not tolerant:
            raise ServerFailed(f"{method} {self.url}{path}: {answer.get('message')}")
        return answer

    async def generate(self, body: dict[str, Any], incremental: bool) -> AsyncGenerator[Chunk, None]:
        """Streams a request's chunks; ends after the one with a reason. Closing it closes the connection.

        Raises:
            ServerFailed: the connection broke, or what came cannot be right.
            RequestRefused: the server does not take this request.
        """
        seen = 0
        try:
            async with self._session.post(self.url + "/generate", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    kind = RequestRefused if response.status == 400 else ServerFailed
                    raise kind(f"POST {self.url}/generate: status {response.status}: {text}")
                rest = b""
                async for data in response.content.iter_any():
                    self.heard = asyncio.get_running_loop().time()
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event.strip() == b"data: [DONE]":
                            raise ServerFailed(f"{self.url}: a request's stream ended without a finish reason")
                        chunk = _chunk(event, 0 if incremental else seen)
                        seen += len(chunk.token_ids)
                        yield chunk
                        if chunk.reason is not None:
                            # Up to its end: the server takes an early close for a lost client.
                            with contextlib.suppress(TimeoutError):
                                async with asyncio.timeout(self._timeout_s):
                                    await response.read()
                            return
        except aiohttp.ClientError as error:
            raise ServerFailed(f"POST {self.url}/generate: {type(error).__name__}: {error}") from error
        raise ServerFailed(f"{self.url}: the connection of a request was closed before its end")


def _chunk(event: bytes, skip: int) -> Chunk:
    """Decodes `data: {...}`; `skip` tokens of it are known already."""
    try:
        message = _EVENT.decode(event.strip().removeprefix(b"data:"))
    except msgspec.DecodeError as error:
        text = event[:200].decode(errors="replace")
        raise ServerFailed(f"an event of /generate cannot be read ({error}): {text}") from error
    meta = message.meta_info
    if message.error is not None or meta is None:
        raise _refusal(message.error)
    reason = meta.finish_reason
    if reason is not None and (status := reason.get("status_code")) is not None:
        # The server's own abort: the request's fault (400) or its own (503: out of memory, out of time).
        kind = RequestRefused if status == 400 else ServerFailed
        raise kind(f"the server gave the request up (status {status}): {reason.get('message')}")
    tokens, logprobs = message.output_ids[skip:], meta.output_token_logprobs[skip:]
    if reason is not None and reason.get("type") == "abort":
        # The answer of a request that was aborted in the queue repeats its last token.
        return Chunk([], [], meta.completion_tokens, meta.weight_version, "abort")
    if [token for _, token, _ in logprobs] != tokens or any(lp is None for lp, _, _ in logprobs):
        raise ServerFailed(
            f"tokens {tokens[:5]} came with log-probs {logprobs[:5]}: they do not match, or are not finite "
            "(weights or activations overflowed: look at the learner's last steps, or use float32)"
        )
    return Chunk(
        tokens,
        [lp for lp, _, _ in logprobs if lp is not None],
        meta.completion_tokens,
        meta.weight_version,
        _REASONS[reason["type"]] if reason is not None else None,
        meta.weight_versions,
    )


def _refusal(error: Any) -> Exception:
    if isinstance(error, dict) and error.get("code") == 400:
        return RequestRefused(f"the server refuses the request: {error.get('message')}")
    return ServerFailed(f"the server failed in a request: {error}")
