"""One request in vLLM's terms, and its answers in ours.

Shared by the two vLLM engines; imports vLLM, so it is imported only by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from asyncrl.config import Vllm
from asyncrl.generator.engines.base import Delta, FinishReason, SamplingParams

_REASONS: dict[str | None, FinishReason | None] = {
    None: None,
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


def asked(
    ids: Sequence[int], params: SamplingParams, version: int, settings: Vllm
) -> tuple[TokensPrompt, VllmSamplingParams, LoRARequest | None]:
    """A request as vLLM takes it: prompt, sampling parameters, adapter."""
    return _prompt(ids, version, settings), _sampling(params, len(ids), settings), _lora(params.adapter)


def _prompt(ids: Sequence[int], version: int, settings: Vllm) -> TokensPrompt:
    """The prompt, its prefix-cache entries kept apart by the version that computes them.

    Without the salt a request that comes after an update would be served keys and values of the old weights,
    silently: vLLM does not empty its prefix cache while requests run.
    """
    prompt = TokensPrompt(prompt_token_ids=list(ids))
    if settings.prefix_cache:
        prompt["cache_salt"] = f"v{version}"
    return prompt


def _sampling(params: SamplingParams, prompt_tokens: int, settings: Vllm) -> VllmSamplingParams:
    """How the request is sampled; every default of vLLM's that matters is overridden.

    vLLM's random numbers are a stream that starts with the request. So that a request which continues from a
    prefix does not repeat the numbers that its beginning used, the stream depends on where it starts.
    """
    return VllmSamplingParams(
        max_tokens=params.max_tokens,  # vLLM's default is 16
        temperature=params.temperature,
        top_p=1.0,
        top_k=0,
        seed=(params.seed * 0x9E3779B1 + prompt_tokens) % 2**62 if settings.seeds else None,
        logprobs=0,  # the sampled token's alone
        stop_token_ids=list(params.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _lora(adapter: str) -> LoRARequest | None:
    if not adapter:
        return None
    # vLLM tells adapters apart by a positive number.
    number = int.from_bytes(adapter.encode(), "big") % (2**31 - 1) + 1
    return LoRARequest(adapter, number, adapter)


@dataclass(slots=True)
class Answer:
    """What one request has sampled and no delta has carried yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, output: CompletionOutput) -> None:
        """Adds what vLLM reports.

        Raises:
            RuntimeError: vLLM ended the request for a reason that no request of ours has.
        """
        tokens = list(output.token_ids)
        entries: Any = output.logprobs or []
        self.token_ids += tokens
        self.logprobs += [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
        if output.finish_reason not in _REASONS:
            raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r} ({output.stop_reason!r})")
        self.reason = _REASONS[output.finish_reason]

    def delta(self, version: int) -> Delta:
        """Moves it into a delta."""
        delta = Delta(self.token_ids, self.logprobs, version, self.reason)
        self.token_ids, self.logprobs = [], []
        return delta
