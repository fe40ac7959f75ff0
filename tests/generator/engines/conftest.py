"""Tiny random models, and the plain forward that the engine is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.generator.engines.base import Delta, SamplingParams
from asyncrl.generator.engines.transformers import TransformersEngine

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

    def make(model: Any = None, **options: Any) -> TransformersEngine:
        options = {"slots": 4, "max_model_len": 128, "flush_tokens": 8} | options
        return TransformersEngine(copy.deepcopy(model) if model is not None else make_model(), **options)

    return make


@pytest.fixture
def runs_of(engine_of: Callable[..., TransformersEngine]) -> Callable[..., Runs]:
    """`Runs` over such an engine."""
    return lambda model=None, **options: Runs(engine_of(model, **options))
