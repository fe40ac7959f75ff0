"""The engine protocol: what a generator asks of an inference engine.

Two levels. A `StepEngine` is a plain synchronous object that owns a model and decodes one token per row and
step; the embedded engine is one, and an in-process vLLM can be another. An `Engine` is what the episode
loop awaits; `asyncrl.generator.engines.driver.EngineDriver` turns any `StepEngine` into one, with a thread
of its own. Nothing here imports torch.

Token ids go in and come out; text, chat templates and environments are not the engine's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from asyncrl.messages import TensorMeta

KvMode = Literal["keep", "recompute"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled."""

    max_tokens: int
    """Most tokens to sample, at least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling any of these ends the request; the stop token is part of the output."""
    temperature: float = 1.0
    seed: int = 0
    """With the token's position in the whole sequence it fixes the draw, whatever else is in the batch.

    That is the embedded engine's promise. vLLM and SGLang repeat a draw for the same seed, start and batch."""
    adapter: str = ""
    """Folder of a LoRA adapter to sample with; empty: the base weights. Only vLLM has adapters."""


def check_request(
    rid: str,
    ids: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    vocabulary: int,
    *,
    adapters: bool = False,
) -> None:
    """Refuses a request that no engine can run.

    Args:
        rid: name of the request, for the text.
        ids: the prompt's tokens.
        params: how it is sampled.
        max_model_len: longest sequence, prompt included.
        vocabulary: number of tokens that the model knows.
        adapters: whether the engine can sample with a LoRA adapter.

    Raises:
        ValueError: what is wrong with it.
    """
    if not ids:
        raise ValueError(f"request {rid!r} has an empty prompt; sampling needs at least one token to start from")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"request {rid!r}: a prompt of {len(ids)} tokens leaves no room for a sampled one in a context of "
            f"{max_model_len}; raise generator.max_model_len or shorten the prompt"
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ValueError(f"request {rid!r}: token ids must be in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")
    if params.max_tokens < 1 or not params.temperature >= 0:
        raise ValueError(
            f"request {rid!r}: max_tokens must be at least 1 and temperature at least 0, "
            f"got {params.max_tokens} and {params.temperature}"
        )
    if params.adapter and not adapters:
        raise ValueError(f"request {rid!r} asks for adapter {params.adapter!r}; this engine has none, vLLM has")


@dataclass(frozen=True, slots=True)
class Delta:
    """Consecutive new tokens of one request, all sampled by one version of the weights."""

    token_ids: list[int]
    logprobs: list[float]
    """Behaviour log-probs: after the temperature."""
    version: int
    finish_reason: FinishReason | None = None
    """Set on the request's last delta, which may hold no tokens (an abort)."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine's start; readers take differences. Times are seconds of wall clock."""

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    """Held still for weight updates."""
    waiting_s: float = 0.0
    """Nothing to decode."""
    live: int = 0
    """Requests in a slot (a gauge, not a counter)."""
    queued: int = 0
    """Requests without a slot (a gauge)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of shared memory with consecutive tensors, as `asyncrl.weights.buckets` lays them out."""

    address: str
    """What `asyncrl.weights.shared.attach` takes."""
    tensors: Sequence[TensorMeta]


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A whole set of weights, received and checked, ready to be applied in one pause."""

    version: int
    tensors: Sequence[tuple[str, torch.Tensor]] = field(repr=False)
    """Name (as in the Hugging Face model's `named_parameters()`) and value, tied ones once, in host memory."""
    segments: Sequence[Segment] = field(default=(), repr=False)
    """Where the same bytes can be mapped by the engine's other processes; empty: nowhere."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """How long an update took, in seconds of wall clock, once the weights were staged."""

    wait_s: float
    """From the request until decoding stood still; tokens were sampled meanwhile."""
    load_s: float
    """Standing still: loading the weights."""
    resume_s: float
    """Standing still: from loaded weights until decoding could go on."""

    @property
    def pause_s(self) -> float:
        """How long decoding stood still."""
        return self.load_s + self.resume_s


class StepEngine(Protocol):
    """A synchronous engine. Every method is called from one thread only."""

    version: int
    """Version of the weights in use; -1 before the first `load_weights` of an empty model."""

    def add(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queues a request.

        Raises:
            ValueError: the prompt is empty, leaves no room for a token in the context, or `rid` is in use.
        """

    def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all). Each yields a last delta with `finish_reason="abort"`."""

    def step(self) -> list[tuple[str, Delta]]:
        """Refills free slots, decodes one token for every live row, and returns the deltas that are due.

        A delta is due when its request ended, when it holds `flush_tokens` tokens, when the weights changed
        or when `flush` was called since the last step.
        """

    def flush(self) -> None:
        """Makes everything sampled so far due at the next step."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def load_weights(self, weights: StagedWeights, kv: KvMode) -> None:
        """Replaces the weights between two steps, running requests included.

        `keep` goes on with the cached keys and values of the old weights; `recompute` computes those of all
        live rows anew. If this raises, the engine must not be used again.
        """

    def occupancy(self) -> tuple[int, int]:
        """Numbers of requests in a slot and of those waiting for one."""

    def close(self) -> None:
        """Frees what the engine holds."""


class Engine(Protocol):
    """What the episode loop sees. All methods are called on the event loop's thread."""

    @property
    def version(self) -> int:
        """Version of the weights in use."""

    @property
    def stats(self) -> EngineStats:
        """Counters for metrics."""

    def generate(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        """Streams a request's deltas; ends after the one that carries a finish reason.

        Cancelling the consumer aborts the request. Raises what `StepEngine.add` raises, and
        `EngineDead` once the engine has failed.
        """

    async def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all)."""

    async def update(self, weights: StagedWeights, kv: KvMode) -> UpdateTimes:
        """Applies weights to the running engine; no request ends, and none is drained.

        Raises:
            EngineDead: applying failed; the engine is poisoned and its process must be restarted.
        """

    async def close(self) -> None:
        """Stops the engine; idempotent."""


class EngineDead(RuntimeError):
    """The engine failed and cannot be used again; the message carries the first cause."""

    def again(self) -> EngineDead:
        """The same for another consumer: one exception must not be raised in several tasks."""
        error = EngineDead(*self.args)
        error.__cause__ = self.__cause__
        return error
