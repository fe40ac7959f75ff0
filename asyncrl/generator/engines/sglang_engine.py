"""`SglangEngine`: token ids in and out over HTTP, weights through a local Gloo group, nothing drained.

An `Engine` (see `base`) over one SGLang server. `asyncrl.generator.engines.sglang` opens it.

    consumers              the engine, on the event loop                     SGLang server
    generate() ◀─deltas─── Stream ◀─chunks── a reader for each request ◀──── POST /generate, an event stream
    abort()    ──────────▶ ends the streams ───────────────────────────────▶ /abort_request
    update()   ──────────▶ shuts the gate for new requests; Updater ───────▶ pause, load, go on (sglang_update)
                           every half second: hands on what has come; is the server alive?

    | waits for              | unblocked by        | limit                                                   |
    |------------------------|---------------------|---------------------------------------------------------|
    | a consumer: tokens     | its reader          | generator.stall_s without any sign of life       |
    | a call                 | the server's answer | the same; within an update weights.timeout_s            |
    | a new request: the gate| an update's end     | the update's limits                                     |

How requests are made, and why:

* Which version sampled a token: `sglang_stream`. Why `kv = keep` needs a server without overlap:
  `sglang_server.check`.
* `cache_salt` is the version, so that no new request reads keys of older weights. A request that meets the pause
  on its way to the scheduler may, with `kv = keep`: that is what a running one does.
* SGLang aborts by prefix of the id, so ids are random and of fixed width, and are not the caller's.
* Stop tokens need `ignore_eos` off, so the model's own end-of-sequence tokens also end a request, with `stop`.
* Seeds count only with `--sglang.args '{"enable-deterministic-inference": true}'`; SGLang ignores them
  otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.generator.engines.base import (
    Delta,
    EngineDead,
    EngineStats,
    KvMode,
    SamplingParams,
    StagedWeights,
    UpdateTimes,
    check_request,
)
from asyncrl.generator.engines.sampling import COLDEST
from asyncrl.generator.engines.sglang_client import Client, RequestRefused, ServerFailed
from asyncrl.generator.engines.sglang_server import Server
from asyncrl.generator.engines.sglang_stream import Stream, tag_of
from asyncrl.generator.engines.sglang_update import Updater

FLUSH_S = 0.5
"""Tokens reach their consumers at most about this many seconds after they came."""


class SglangEngine:
    """An `Engine` over one SGLang server; see the module docstring. All methods belong to the event loop."""

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        version: int,
        client: Client,
        updater: Updater,
        info: dict[str, Any],
        server: Server | None,
    ) -> None:
        """Takes over a server that is ready and whose weights count as `version`; `info` is its `/server_info`."""
        self._config, self._vocabulary, self._info = config, vocabulary, info
        self._client, self._updater, self._server = client, updater, server
        self._versions = [version]
        """Version of each serial; the last one is in use."""
        self._streams: dict[str, Stream] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._updating = asyncio.Lock()
        self._dead: EngineDead | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stats = EngineStats()
        self._counted = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(FLUSH_S, self._tick)
        if server is not None:
            self._keep(self._watch(server))

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._versions[-1]

    @property
    def stats(self) -> EngineStats:
        """Counters; `steps` stays 0, because the server does not tell."""
        self._count()
        live = sum(stream.total > 0 for stream in self._streams.values())
        self._stats.live, self._stats.queued = live, len(self._streams) - live
        return self._stats

    # ---- requests -------------------------------------------------------------------------------

    async def generate(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas; see `Engine.generate`. Closing or cancelling it aborts the request."""
        ids = [int(token) for token in prompt_ids]
        if rid in self._streams:
            raise ValueError(f"request {rid!r} is already running; every request needs an id of its own")
        check_request(rid, ids, params, self._config.generator.max_model_len, self._vocabulary)
        self._check_alive()
        self._count()
        stream = self._streams[rid] = Stream(self._config.generator.chunk_tokens, self._versions)
        reader = None
        try:
            await self._gate.wait()
            if not stream.ended:
                self._stats.prefill_tokens += len(ids)
                reader = self._keep(self._read(stream, self._body(stream.id, ids, params)))
            while True:
                delta = await stream.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._count()
            del self._streams[rid]
            if reader is not None and not stream.complete:
                reader.cancel()
                if not stream.ended and self._dead is None:
                    self._keep(self._call("/abort_request", {"rid": stream.id}))
            stream.ended = True

    def _body(self, server_rid: str, ids: list[int], params: SamplingParams) -> dict[str, Any]:
        room = self._config.generator.max_model_len - len(ids)
        return {
            "rid": server_rid,
            "input_ids": ids,
            "stream": True,
            "return_logprob": True,
            "cache_salt": tag_of(self.version, len(self._versions) - 1),
            "sampling_params": {
                "max_new_tokens": min(params.max_tokens, room),
                # Below 1e-6 SGLang samples greedily and reports log-probs of temperature 1.
                "temperature": max(params.temperature, COLDEST),
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "stop_token_ids": list(params.stop_token_ids),
                "sampling_seed": params.seed % 2**63,
            },
        }

    async def _read(self, stream: Stream, body: dict[str, Any]) -> None:
        """Moves a request's chunks into its stream, without ever waiting for the consumer."""
        incremental = bool(self._info.get("incremental_streaming_output"))
        try:
            async for chunk in self._client.generate(body, incremental):
                before = stream.total
                stream.take(chunk, len(self._versions) - 1)
                self._stats.sampled_tokens += stream.total - before
        except RequestRefused as error:
            stream.fail(error)
        except Exception as error:
            self._die(str(error), error)

    async def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all); their consumers get a last delta, `finish_reason="abort"`."""
        self._check_alive()
        names = list(self._streams) if rids is None else [rid for rid in rids if rid in self._streams]
        ended = [self._streams[name] for name in names]
        for stream in ended:
            stream.end("abort")
        await asyncio.gather(*(self._call("/abort_request", {"rid": stream.id}) for stream in ended))
        self._check_alive()

    # ---- weights --------------------------------------------------------------------------------

    async def update(self, weights: StagedWeights, kv: KvMode) -> UpdateTimes:
        """Applies weights between two steps. See `Engine.update`.

        Raises:
            ValueError: the server cannot do it with `kv`; nothing was changed.
        """
        self._check_alive()
        if kv == "keep" and not self._info.get("disable_overlap_schedule"):
            raise ValueError("kv = 'keep' needs an SGLang server with --disable-overlap-schedule")
        if not weights.tensors:
            raise ValueError(f"version {weights.version} holds no tensors")
        async with self._updating:
            self._check_alive()
            self._gate.clear()
            tag = tag_of(weights.version, len(self._versions))
            try:
                times = await self._updater.apply(weights, tag, kv, lambda: self._versions.append(weights.version))
                self._stats.paused_s += times.pause_s
                return times
            except Exception as error:
                raise self._die(f"the update to version {weights.version} failed: {error}", error) from error
            except BaseException as error:
                self._die(f"the update to version {weights.version} was cut short ({type(error).__name__})", error)
                raise
            finally:
                self._client.heard = self._loop.time()
                self._gate.set()

    # ---- life -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends all requests with `EngineDead`, and the server if it is ours. Idempotent."""
        first = self._dead is None
        self._die("the engine was closed")
        self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        elif first:
            await self._updater.leave()
        self._updater.close()
        await self._client.close()

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        """A call whose failure ends the engine."""
        try:
            await self._client.call(path, body, limit_s=self._config.generator.stall_s)
        except ServerFailed as error:
            self._die(str(error), error)

    async def _watch(self, server: Server) -> None:
        self._die(await server.exited())

    def _tick(self) -> None:
        """Twice a second: hands on what has come, and looks whether the server still gives a sign of life."""
        self._timer = self._loop.call_later(FLUSH_S, self._tick)
        limit_s = self._config.generator.stall_s
        if not self._streams or not self._gate.is_set():
            self._client.heard = self._loop.time()
        elif self._loop.time() - self._client.heard > limit_s:
            owed = len(self._streams)
            self._die(
                f"the server at {self._client.url} has been silent for {limit_s:g} s (generator.stall_s) "
                f"while it owed answers to {owed} requests"
            )
        for stream in self._streams.values():
            stream.flush()

    def _die(self, reason: str, cause: BaseException | None = None) -> EngineDead:
        """Ends everything that waits; the first reason stays, and is returned to be raised."""
        if self._dead is None:
            self._dead = EngineDead(f"the SGLang engine failed and must be restarted: {reason}")
            self._dead.__cause__ = cause
        for stream in self._streams.values():
            stream.fail(self._dead.again())
        return self._dead.again()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead.again()

    def _count(self) -> None:
        """Adds the time since the last call to busy or waiting."""
        now = time.perf_counter()
        if self._streams:
            self._stats.busy_s += now - self._counted
        else:
            self._stats.waiting_s += now - self._counted
        self._counted = now

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
