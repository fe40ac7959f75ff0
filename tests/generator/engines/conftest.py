"""Tiny random models, and the plain forward that the engine is compared with."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.generator.engines.base import Delta, Engine, SamplingParams, Segment, StagedWeights, UpdateTimes
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.engines.transformers import TransformersEngine
from asyncrl.weights.buckets import allocate, meta_of, plan, views

VOCAB = 97
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def make_model(seed: int = 0, family: str = "qwen3", vocab: int = VOCAB, **changes: Any) -> Any:
    """A model of two layers whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    shape: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return model_class(config_class(**(shape | changes))).eval()


def plain_logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) - 1, vocab]: log-probs of every next token, from one plain forward without a cache."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1] / temperature, -1)


class Runs:
    """Requests of one engine and what came back for each."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self.deltas: dict[str, list[Delta]] = {}

    def add(self, rid: str, prompt: Sequence[int], **params: Any) -> None:
        self.prompts[rid], self.deltas[rid] = list(prompt), []
        self.engine.add(rid, prompt, SamplingParams(**params))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for rid, delta in self.engine.step():
                self.deltas[rid].append(delta)

    def finish(self) -> Runs:
        for _ in range(10_000):
            if not self.engine.has_work():
                return self
            self.step()
        raise AssertionError("the engine does not come to an end")

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    def logprobs(self, rid: str) -> list[float]:
        return [lp for delta in self.deltas[rid] for lp in delta.logprobs]

    def reason(self, rid: str) -> str | None:
        *others, last = self.deltas[rid]
        assert all(delta.finish_reason is None for delta in others)
        return last.finish_reason

    def error(self, rid: str, model: Any, temperature: float = 1.0) -> float:
        """Largest difference between the request's log-probs and the plain forward's."""
        prompt, tokens = self.prompts[rid], self.tokens(rid)
        plain = plain_logprobs(model, prompt + tokens, temperature)[len(prompt) - 1 :]
        expected = plain.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((expected - torch.tensor(self.logprobs(rid))).abs().max())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model_of() -> Callable[..., Any]:
    """`make_model`."""
    return make_model


@pytest.fixture
def plain() -> Callable[..., torch.Tensor]:
    """`plain_logprobs`."""
    return plain_logprobs


@pytest.fixture
def engine_of() -> Callable[..., TransformersEngine]:
    """An engine over a copy of a model (default: `make_model()`), four slots."""

    def make(model: Any = None, kind: Any = TransformersEngine, **options: Any) -> TransformersEngine:
        options = {"slots": 4, "max_model_len": 128, "flush_tokens": 8} | options
        engine: TransformersEngine = kind(copy.deepcopy(model) if model is not None else make_model(), **options)
        return engine

    return make


@pytest.fixture
def runs_of(engine_of: Callable[..., TransformersEngine]) -> Callable[..., Runs]:
    """`Runs` over such an engine."""
    return lambda model=None, **options: Runs(engine_of(model, **options))


# ---- the conformance suite: engines as the generator process opens them ----------------------------

CASES: dict[str, dict[str, Any]] = {
    "transformers": {"generator": {"engine": "transformers"}},
    "vllm": {"generator": {"engine": "vllm"}, "vllm": {"driver": "inprocess"}},
    "vllm-async": {"generator": {"engine": "vllm"}, "vllm": {"driver": "async"}},
    "sglang": {"generator": {"engine": "sglang"}},
}
SIZES = {"count": 1, "slots": 64, "max_model_len": 512, "chunk_tokens": 8}


class Subject:
    """An open engine, the two models whose weights it is given, and an event loop of its own."""

    def __init__(self, case: str, models: dict[str, Any], folder: Path) -> None:
        self.case, self.models, self.holds = case, models, "a"
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._rids = itertools.count()
        self._server: subprocess.Popen[str] | None = None
        self._closed = False
        settings = copy.deepcopy(CASES[case])
        settings["generator"] |= SIZES
        if case == "sglang":
            settings["sglang"] = {"urls": [self._start_fake(folder)]}
        self.config = Config.model_validate(settings)
        opening = asyncio.to_thread(open_engine, self.config, str(folder), self._loop, 0)
        self.engine: Engine = self._runner.run(opening)

    def _start_fake(self, folder: Path) -> str:
        fake = Path(__file__).with_name("fake_sglang.py")
        command = [sys.executable, "-P", str(fake), "--model-path", str(folder), "--port", "0"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        return str(json.loads(self._server.stdout.readline())["url"])

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the engine's loop."""

        async def limited() -> Any:
            async with asyncio.timeout(120):
                return await work

        return self._runner.run(limited())

    def close(self) -> None:
        """Closes the engine, and the fake server."""
        if self._closed:
            return
        self._closed = True
        self.run(self.engine.close())
        self._runner.close()
        if self.case == "vllm":
            # A generator process ends with its engine. Here the next engine is opened in the same one, where
            # vLLM would give it rotary tables that a failed update has left without data, and would end its
            # process groups when the old engine's objects are collected.
            from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

            _ROPE_DICT.clear()
            del self.engine
            gc.collect()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    # ---- requests

    def ask(self, prompt: Sequence[int], rid: str = "", **params: Any) -> AsyncGenerator[Delta, None]:
        """A request's deltas."""
        stream = self.engine.generate(rid or f"request-{next(self._rids)}", prompt, SamplingParams(**params))
        assert isinstance(stream, AsyncGenerator)
        return stream

    async def whole(self, prompt: Sequence[int], **params: Any) -> list[Delta]:
        """All of a request's deltas."""
        return [delta async for delta in self.ask(prompt, **params)]

    async def all(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[Delta]]:
        """All deltas of requests that run at once; their seeds are their numbers."""
        asked = [self.whole(prompt, **({"seed": i} | params)) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*asked)

    async def gather(self, *works: Awaitable[Any]) -> list[Any]:
        """Runs them at once."""
        return await asyncio.gather(*works)

    # ---- weights

    def staged(self, key: str, version: int) -> StagedWeights:
        """A model's weights, staged as a receiver stages them."""
        return self._stage({name: p.detach() for name, p in self.models[key].named_parameters()}, version)

    def _stage(self, named: dict[str, torch.Tensor], version: int) -> StagedWeights:
        metas = plan([meta_of(name, tensor) for name, tensor in named.items()], 1 << 18)
        self._buffers = allocate(metas)  # They must live as long as they are staged.
        tensors = views([buffer.tensor for buffer in self._buffers], metas)
        for name, tensor in tensors:
            tensor.copy_(named[name])
        segments = [Segment(b.address, bucket) for b, bucket in zip(self._buffers, metas, strict=True)]
        return StagedWeights(version, tensors, segments)

    def wrong_shape(self) -> StagedWeights:
        """Weights with one matrix that does not fit."""
        named = {name: p.detach() for name, p in self.models["b"].named_parameters()}
        named["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 5)
        return self._stage(named, self.engine.version + 1)

    async def load(self, key: str, kv: Any) -> UpdateTimes:
        """Gives the engine a model's weights as its next version."""
        self.holds = key
        return await self.engine.update(self.staged(key, self.engine.version + 1), kv)

    def processes(self) -> list[int]:
        """What runs beside this process and answers its calls."""
        if self._server is not None:
            return [self._server.pid]
        return _descendants("EngineCore") if self.case == "vllm-async" else []

    async def kill(self) -> None:
        """Makes the engine die as it can die: its process, or its thread's engine."""
        if self._server is not None:
            self._server.kill()
        elif self.case == "vllm-async":
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
        else:
            engine: Any = self.engine
            engine._engine.step = None  # whatever goes wrong in the thread is the engine's death

    # ---- the reference

    def plain(self, key: str, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of every next token from one plain forward."""
        return plain_logprobs(self.models[key], ids, temperature)

    def log_ratios(
        self, prompt: Sequence[int], deltas: list[Delta], key: str, temperature: float = 1.0
    ) -> torch.Tensor:
        """Model's minus engine's log-prob of each sampled token."""
        sampled = [token for delta in deltas for token in delta.token_ids]
        reported = torch.tensor([lp for delta in deltas for lp in delta.logprobs])
        plain = self.plain(key, [*prompt, *sampled], temperature)[len(prompt) - 1 :]
        return plain.gather(1, torch.tensor(sampled)[:, None])[:, 0] - reported

    def errors(
        self, prompt: Sequence[int], deltas: list[Delta], key: str, temperature: float = 1.0
    ) -> torch.Tensor:
        """|model's - engine's log-prob| of each sampled token."""
        return self.log_ratios(prompt, deltas, key, temperature).abs()

    def error(self, prompt: Sequence[int], deltas: list[Delta], key: str, temperature: float = 1.0) -> float:
        """The largest of `errors`."""
        return float(self.errors(prompt, deltas, key, temperature).max())


def _descendants(name: str) -> list[int]:
    """This process's children and theirs whose title holds `name`."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join([*child.cmdline(), child.name()]):
                found.append(child.pid)
    return found


def _opener(case: str, head: str, folder: Path) -> Callable[[], Subject]:
    if case.startswith("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    if case == "sglang" and find_spec("aiohttp") is None:
        pytest.skip("aiohttp, which the SGLang engine needs, is not installed")
    changes = {"max_position_embeddings": 512, "tie_word_embeddings": head == "tied"}
    models = {
        key: make_model(seed, architectures=["Qwen3ForCausalLM"], **changes) for seed, key in enumerate("ab")
    }
    models["a"].save_pretrained(folder)
    return lambda: Subject(case, models, folder)


# Beside the process the engine is the same vLLM as within, which is tried with both heads; and the fake SGLang
# server computes with the embedded engine, which is too.
HEADS = {"vllm-async": ("tied",), "sglang": ("tied",)}


@pytest.fixture(
    scope="module",
    params=[f"{case}-{head}" for case in CASES for head in HEADS.get(case, ("tied", "untied"))],
)
def engine_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Subject]:
    """Opens an engine of one kind: `engine_case()`."""
    case, head = request.param.rsplit("-", 1)
    return _opener(case, head, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=list(CASES))
def mortal_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Subject]:
    """The same with one model only, for tests that kill what they open."""
    return _opener(request.param, "tied", tmp_path_factory.mktemp(request.param))
