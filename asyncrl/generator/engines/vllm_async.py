"""vLLM in processes of its own, for tensor and data parallelism: an `Engine` over vLLM's `AsyncLLM`.

    this process (event loop)                            vLLM's processes
    ─────────────────────────                            ────────────────
    generate() ── task for each request ── AsyncLLM ───▶ engine core: scheduler ──▶ workers: model shards
        ◀── deltas ── _Stream ◀──────────────────────────────┘                        ▲
    update():  pause(keep) · cut every stream · start, update, finish ───────────────┘ map the staged bytes,
               resume                                                                   copy their shard
    watch():   twice a second: everything sampled is due; a dead or silent engine is found out

    | waits for          | who                 | limit                                            |
    |--------------------|---------------------|--------------------------------------------------|
    | tokens             | consumers           | `generator.stall_s` without any token            |
    | an update's calls  | update()            | `generator.stall_s` each, or the engine's death  |
    | the end of one     | new requests        | the update's own limits                          |

Which version sampled a token: outputs come from the engine core in order, and after the answer to `pause` nothing
is sampled. So what arrives before that answer is of the old version; outputs that are still on their way through
this process's tasks are waited for before the weights change. vLLM from 0.32 on says at a request's end which
version sampled which tokens; a contradiction to what was streamed is the engine's death, never a wrong label.

Failures between start and finish leave the workers without weights; so does a dead worker. Either way the engine
is dead: every consumer gets `EngineDead`, the generator process ends, and its episodes continue elsewhere.
Called by `asyncrl.generator.engines.vllm.open_vllm`. Tensor and data parallelism need GPUs and have not been run;
one worker beside this process is what the tests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import Any, TypeVar

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
from asyncrl.generator.engines.vllm_settings import BACKEND, arguments, check_adapter, check_names

T = TypeVar("T")
FLUSH_S = 0.5
"""Tokens reach their consumers at most about this many seconds after they were sampled."""
_IDLE_TURNS = 16
"""Turns of the event loop without any output, after which none is on its way through this process's tasks."""


class _Stream:
    """One request: what has arrived, and the deltas cut from it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.pump: asyncio.Task[None]
        self.deltas: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()
        self.labels: list[tuple[str, int]] = []
        """Version and number of tokens of each run of tokens."""
        self._labelled = 0
        """Tokens in `answer` that have their label."""

    def label(self, version: int) -> None:
        """Notes that what has arrived was sampled by `version`."""
        new = len(self.answer.token_ids) - self._labelled
        self._labelled += new
        if new and self.labels and self.labels[-1][0] == str(version):
            self.labels[-1] = (str(version), self.labels[-1][1] + new)
        elif new:
            self.labels.append((str(version), new))

    def cut(self, version: int) -> None:
        """Makes what has arrived due, as sampled by `version`."""
        self.label(version)
        self._labelled = 0
        self.deltas.put_nowait(self.answer.delta(version))


class AsyncVllmEngine:
    """An `Engine`; see the module docstring. All methods but the constructor belong to the event loop's thread."""

    def __init__(self, config: Config, model_path: str, loop: asyncio.AbstractEventLoop, version: int) -> None:
        """Starts vLLM's processes, which takes 10 to 20 seconds on a CPU; call it from another thread."""
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        chosen = arguments(config, model_path, inprocess=False)
        check_names(chosen, AsyncEngineArgs)
        transfer = WeightTransferConfig(backend=BACKEND)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(weight_transfer_config=transfer, **chosen))
        self._slots, self._flush_tokens = config.generator.slots, config.generator.chunk_tokens
        self._max_len, self._settings = config.generator.max_model_len, config.vllm
        self._stall_s = config.generator.stall_s
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self.version, self._initial = version, str(version)
        self.stats = EngineStats()
        self._loop = loop
        self._numbers = itertools.count()
        self._running: dict[str, str] = {}
        self._streams: dict[str, _Stream] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        """Cleared during an update: what comes then waits, and gets the new version's cache entries. A request
        that is on its way when the pause begins may read the old version's, as a running one does."""
        self._open.set()
        self._updating = asyncio.Lock()
        self._dead: EngineDead | None = None
        self._heard = self._ticked = time.monotonic()
        self._outputs = 0
        self._watcher: asyncio.Task[None] | None = None

    # ---- requests --------------------------------------------------------------------------------

    async def generate(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas; see `Engine.generate`. Closing or cancelling it aborts the request."""
        if rid in self._running:
            raise ValueError(f"request {rid!r} is already running; every request needs an id of its own")
        check_request(rid, prompt_ids, params, self._max_len, self._vocabulary, adapters=True)
        check_adapter(params.adapter, self._settings)
        self._raise_if_dead()
        # vLLM must never see a name again while late outputs of its last bearer may be on their way.
        number = self._running[rid] = f"{rid}#{next(self._numbers)}"
        stream = self._streams[number] = self._start(number, prompt_ids, params)
        try:
            ended = False
            while not ended:
                delta = await stream.deltas.get()
                if isinstance(delta, EngineDead):
                    raise delta
                ended = delta.finish_reason is not None
                yield delta
        finally:
            del self._running[rid], self._streams[number]
            stream.pump.cancel()  # Which aborts the request, if it still runs.

    def _start(self, number: str, prompt_ids: Sequence[int], params: SamplingParams) -> _Stream:
        from asyncrl.generator.engines.vllm_request import Answer

        if self._watcher is None:
            self._watcher = self._loop.create_task(self._watch(), name="vllm-watch")
        stream = _Stream(Answer())
        pump = self._pump(stream, number, list(prompt_ids), params)
        stream.pump = self._loop.create_task(pump, name=f"request-{number}")
        self._pumps.add(stream.pump)
        stream.pump.add_done_callback(self._pumps.discard)
        self.stats.prefill_tokens += len(prompt_ids)
        return stream

    async def _pump(self, stream: _Stream, number: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Asks vLLM, and takes the outputs as they come, so that none waits where it could change its version.

        The fault boundary of a request: whatever vLLM raises here is the engine's death.
        """
        from asyncrl.generator.engines.vllm_request import asked

        try:
            await self._open.wait()
            prompt, sampling, lora = asked(prompt_ids, params, self.version, self._settings)
            outputs = self._engine.generate(prompt, sampling, number, lora_request=lora)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._take(stream, output.outputs[0])
        except Exception as error:
            self._die(error)

    def _take(self, stream: _Stream, output: Any) -> None:
        answer = stream.answer
        before = len(answer.token_ids)
        answer.take(output)
        self.stats.sampled_tokens += len(answer.token_ids) - before
        self._heard, self._outputs = time.monotonic(), self._outputs + 1
        if not math.isfinite(sum(answer.logprobs)):
            raise FloatingPointError(
                f"weights of version {self.version} give log-probs that are not finite; the weights or the "
                "activations overflowed: look at the learner's last steps, or use float32"
            )
        if answer.reason in ("stop", "length"):  # An aborted one may have been stopped before its account came.
            stream.label(self.version)
            _compare(stream.labels, output, self._initial)
        if answer.reason or len(answer.token_ids) >= self._flush_tokens:
            stream.cut(self.version)

    async def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all); their consumers get a last delta, `finish_reason="abort"`."""
        self._raise_if_dead()
        for rid in list(self._running) if rids is None else rids:
            stream = self._streams.get(self._running.get(rid, ""))
            if stream is not None and stream.answer.reason is None:
                stream.answer.reason = "abort"
                stream.cut(self.version)
                stream.pump.cancel()  # Which aborts it in vLLM.

    # ---- weights ---------------------------------------------------------------------------------

    async def update(self, weights: StagedWeights, kv: KvMode) -> UpdateTimes:
        """Loads a staged version into vLLM's workers while requests stand still; see `Engine.update`."""
        self._raise_if_dead()
        async with self._updating:
            self._raise_if_dead()
            self._open.clear()
            try:
                return await self._update(weights, kv)
            except Exception as error:
                # Between start and finish the workers have no usable weights.
                raise self._die(error) from error
            except asyncio.CancelledError:
                self._die(RuntimeError(f"the update to version {weights.version} was cut short"))
                raise
            finally:
                self._open.set()

    async def _update(self, weights: StagedWeights, kv: KvMode) -> UpdateTimes:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, asked = self._engine, time.perf_counter()
        await self._limited(engine.pause_generation(mode="keep", clear_cache=kv == "recompute"), "pausing")
        await self._quiet()
        for stream in self._streams.values():
            if stream.answer.token_ids:
                stream.cut(self.version)
        stopped = time.perf_counter()
        request = WeightTransferUpdateRequest(update_info=_described(weights))
        await self._limited(engine.start_weight_update(), "starting the update")
        await self._limited(engine.update_weights(request), "loading the weights")
        await self._limited(engine.finish_weight_update(), "finishing the update")
        await self._limited(engine.update_weight_version(str(weights.version)), "naming the version")
        self.version = weights.version
        loaded = time.perf_counter()
        await self._limited(engine.resume_generation(), "resuming")
        resumed = time.perf_counter()
        self.stats.paused_s += resumed - stopped
        self._heard = time.monotonic()
        return UpdateTimes(stopped - asked, loaded - stopped, resumed - loaded)

    async def _quiet(self) -> None:
        """Returns when the outputs that were sent before the pause have reached their streams."""
        turns = 0
        while turns < _IDLE_TURNS:
            seen = self._outputs
            await asyncio.sleep(0)
            turns = turns + 1 if seen == self._outputs else 0

    async def _limited(self, call: Awaitable[T], what: str) -> T:
        """The answer to a call, which vLLM never gives if its engine core dies meanwhile."""
        answer, until = asyncio.ensure_future(call), time.monotonic() + self._stall_s
        try:
            while not (await asyncio.wait({answer}, timeout=FLUSH_S))[0]:
                if self._engine.errored:
                    raise self._engine.dead_error
                if time.monotonic() > until:
                    raise TimeoutError(f"vLLM gave no answer for generator.stall_s = {self._stall_s:g} s: {what}")
            return answer.result()
        finally:
            answer.cancel()

    # ---- life ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Makes tokens due in time, keeps the counters, and finds out an engine that died or hangs."""
        while self._dead is None:
            await asyncio.sleep(FLUSH_S)
            self._count()
            for stream in self._streams.values():
                if stream.answer.token_ids:
                    stream.cut(self.version)
            if self._engine.errored:
                self._die(self._engine.dead_error)
            elif not self._streams or not self._open.is_set():
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self._stall_s:
                limit = f"generator.stall_s = {self._stall_s:g} s"
                self._die(TimeoutError(f"vLLM has sampled nothing for {limit} while requests wait"))

    def _count(self) -> None:
        now, stats = time.monotonic(), self.stats
        if self._streams:
            stats.busy_s += now - self._ticked
        else:
            stats.waiting_s += now - self._ticked
        self._ticked = now
        stats.live = min(len(self._streams), self._slots)
        stats.queued = len(self._streams) - stats.live

    async def close(self) -> None:
        """Ends vLLM's processes; open requests get `EngineDead`. Idempotent."""
        self._dead = self._dead or EngineDead("the engine was closed")
        self._die(self._dead)
        if self._watcher is not None:
            self._watcher.cancel()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown)

    def _die(self, cause: BaseException) -> EngineDead:
        """Ends everything that waits; the first cause stays, and is returned to be raised."""
        if self._dead is None:
            self._dead = EngineDead(f"the engine failed and must be restarted: {type(cause).__name__}: {cause}")
            self._dead.__cause__ = cause
        for stream in self._streams.values():
            if stream.answer.token_ids and stream.answer.reason is None:
                stream.cut(self.version)
            stream.deltas.put_nowait(self._dead.again())
        self._open.set()
        return self._dead.again()

    def _raise_if_dead(self) -> None:
        if self._dead is None and self._engine.errored:
            self._die(self._engine.dead_error)
        if self._dead is not None:
            raise self._dead.again()


def _described(weights: StagedWeights) -> dict[str, Any]:
    """What the workers need to map the staged bytes; see `vllm_worker.StagedUpdate`."""
    return {
        "segments": [
            (segment.address, [(meta.name, meta.dtype, list(meta.shape)) for meta in segment.tensors])
            for segment in weights.segments
        ]
    }


def _compare(labels: list[tuple[str, int]], output: Any, initial: str) -> None:
    """Checks the versions that were streamed against vLLM's own account, which it gives at a request's end.

    vLLM calls the version that it started with "default"; we call it `initial`.
    """
    spans = getattr(output, "weight_versions", None)
    if spans is None:
        return  # vLLM before 0.32.
    told = [(span.version.replace("default", initial), span.end - span.start) for span in spans]
    if told != labels:
        raise RuntimeError(
            f"versions of a request's tokens were streamed as {labels}, and vLLM says {told}; the tokens since "
            "the last update may carry the wrong version"
        )
