"""The embedded engine: continuous batching over a Hugging Face model's own forward, on CPU or GPU.

A `StepEngine` (`asyncrl.generator.engines.base`): synchronous, one thread, one sampled token for each live row
and step. One forward a step takes the last token of every running row together with the whole prompts of the
rows that were just given a slot, so a refill costs no forward of its own, and a request that starts from a
prefix is only a longer prompt. The model's code is not touched: its attention is replaced through transformers'
`AttentionInterface` (`slots.py`), and what cannot run that way is refused at construction (`slot_model.py`).

It is not a serving engine: no paging, no prefix sharing, no truncation of the distribution (top-p, top-k), one
device. `EngineDriver` gives it a thread and makes it asynchronous; the generator process constructs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.generator.engines.base import (
    Delta,
    FinishReason,
    KvMode,
    SamplingParams,
    StagedWeights,
    check_request,
)
from asyncrl.generator.engines.sampling import COLDEST, sample, seed_key
from asyncrl.generator.engines.slot_model import SlotModel
from asyncrl.generator.engines.slots import arrange, size_class

_PREFILL_TOKENS = 8192
"""Prompt tokens of one forward (a longer prompt runs alone): bounds the memory and length of a step."""


@dataclass(slots=True, eq=False)
class _Row:
    """One request: queued, or live in the slot that is its index in `TransformersEngine._rows`."""

    rid: str
    ids: list[int]
    """The whole sequence; all but the last token are in the cache while the row is live."""
    limit: int
    """Length of the sequence at which the request ends."""
    key: int
    temperature: float
    stops: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens that no delta has carried yet: the last ones of `ids`."""

    def take(self, version: int, reason: FinishReason | None = None) -> tuple[str, Delta]:
        """Moves the tokens that no delta has carried yet into one."""
        tokens = self.ids[len(self.ids) - len(self.logprobs) :]
        delta = Delta(tokens, self.logprobs, version, reason)
        self.logprobs = []
        return self.rid, delta

    def finished(self) -> FinishReason | None:
        """Why the last token ends the request, if it does."""
        if self.ids[-1] in self.stops:
            return "stop"
        return "length" if len(self.ids) >= self.limit else None


class TransformersEngine:
    """Continuous batching on fixed slots; see the module docstring and `StepEngine` for the methods' contract."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        flush_tokens: int = 128,
        version: int = 0,
    ) -> None:
        """Loads the model, or takes it over, and checks that the slot attention computes what it should.

        Args:
            model: a Hugging Face folder, or a causal language model, which then belongs to the engine.
            slots: rows that are decoded at once.
            max_model_len: longest sequence, prompt included. The cache holds `slots * max_model_len` positions.
            dtype: precision of weights and cache; logits and log-probs are float32.
            device: torch device.
            flush_tokens: a request's delta is due when it holds this many tokens.
            version: version of the weights that the model has; -1 for none.

        Raises:
            ValueError: a size is not positive, or `max_model_len` is beyond the model's positions.
            UnsupportedModel: the model's attention does not run on slots; the text says why.
        """
        if min(slots, flush_tokens) < 1 or max_model_len < 2:
            raise ValueError(
                "need slots >= 1, flush_tokens >= 1 and max_model_len >= 2, "
                f"got {slots=}, {flush_tokens=}, {max_model_len=}"
            )
        self.version = version
        self._slots, self._max_len, self._flush_tokens = slots, max_model_len, flush_tokens
        self._device = torch.device(device)
        self._model = SlotModel(model, slots, max_model_len, dtype, self._device)
        # What a decoding step needs of each slot stays on the device: last token, its position, the seed's key.
        self._state = torch.zeros(3, slots, dtype=torch.int64, device=self._device)
        self._temperatures = torch.ones(slots, device=self._device)
        self._rows: list[_Row | None] = []
        self._queue: deque[_Row] = deque()
        self._by_rid: dict[str, _Row] = {}
        self._due: list[tuple[str, Delta]] = []
        self._flushing = False

    # ---- requests -------------------------------------------------------------------------------

    def add(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queues a request; see `StepEngine.add`."""
        ids = [int(token) for token in prompt_ids]
        if rid in self._by_rid:
            raise ValueError(f"request {rid!r} is already running; every request needs an id of its own")
        check_request(rid, ids, params, self._max_len, self._model.vocab)
        limit = min(len(ids) + params.max_tokens, self._max_len)
        temperature = max(params.temperature, COLDEST)
        row = _Row(rid, ids, limit, seed_key(params.seed), temperature, frozenset(params.stop_token_ids))
        self._queue.append(row)
        self._by_rid[rid] = row

    def abort(self, rids: Iterable[str] | None) -> None:
        """Ends the named requests (None: all); ids that are not running are ignored."""
        ended = {r for rid in (list(self._by_rid) if rids is None else rids) if (r := self._by_rid.pop(rid, None))}
        self._due += [row.take(self.version, "abort") for row in ended]
        self._queue = deque(row for row in self._queue if row not in ended)
        self._rows = [None if row in ended else row for row in self._rows]

    def has_work(self) -> bool:
        """Whether a request runs or waits, or a delta is due."""
        return bool(self._by_rid or self._due)

    def flush(self) -> None:
        """Makes everything sampled so far due at the next step."""
        self._flushing = True

    def occupancy(self) -> tuple[int, int]:
        """Numbers of requests in a slot and of those waiting for one."""
        return len(self._by_rid) - len(self._queue), len(self._queue)

    def close(self) -> None:
        """Ends without deltas; frees model and cache."""
        self._by_rid.clear()
        self._queue.clear()
        self._rows, self._due = [], []
        del self._model

    # ---- stepping -------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Delta]]:
        """Refills free slots, decodes one token for every live row, and returns the deltas that are due."""
        self._advance()
        self._flushing = False
        due, self._due = self._due, []
        return due

    def _advance(self) -> None:
        """Gives free slots to requests that wait, and one sampled token to every live row."""
        rows = self._settle()
        prompts = self._admit(self._slots - len(rows))
        if rows or prompts:
            tokens, logprobs = self._forward(rows, prompts)
            self._rows = [*rows, *prompts]
            self._record(range(len(self._rows)), tokens, logprobs)

    def _settle(self) -> list[_Row]:
        """Moves the live rows to the first slots, in descending size class; returns them in slot order."""
        classes = [None if row is None else size_class(len(row.ids)) for row in self._rows]
        order = arrange(classes)
        rows = [row for source in order if (row := self._rows[source])]
        moves = [(source, target) for target, source in enumerate(order) if source != target]
        if moves:
            source, target = [i for i, _ in moves], [i for _, i in moves]
            self._model.cache.move(source, target, max(len(rows[i].ids) - 1 for i in target))
            self._state[:, target] = self._state[:, source]
            self._temperatures[target] = self._temperatures[source]
        return rows

    def _admit(self, free: int) -> list[_Row]:
        """Takes the requests that get a slot in this step from the queue; the longest comes first."""
        rows: list[_Row] = []
        tokens = 0
        while self._queue and len(rows) < free:
            tokens += len(self._queue[0].ids)
            if rows and tokens > _PREFILL_TOKENS:
                break
            rows.append(self._queue.popleft())
        return sorted(rows, key=lambda row: -len(row.ids))

    def _forward(self, rows: list[_Row], prompts: list[_Row]) -> tuple[list[int], list[float]]:
        """One forward: samples a token for each of `rows` (decoded) and `prompts` (prefilled after them)."""
        low, high = len(rows), len(rows) + len(prompts)
        lengths = [len(row.ids) for row in prompts]
        ids, positions = self._state[0, :low], self._state[1, :low]
        if prompts:
            state = [[row.ids[-1] for row in prompts], [n - 1 for n in lengths], [row.key for row in prompts]]
            self._state[:, low:high] = torch.tensor(state, device=self._device)
            self._temperatures[low:high] = torch.tensor([row.temperature for row in prompts], device=self._device)
            flat = [[t for row in prompts for t in row.ids], [i for n in lengths for i in range(n)]]
            ids, positions = torch.cat((self._state[:2, :low], torch.tensor(flat, device=self._device)), dim=1)
        plan = self._model.cache.begin([len(row.ids) for row in rows], lengths, positions)
        logits = self._model.logits(ids, plan)
        _, position, key = self._state[:, :high]
        position += 1
        tokens, logprobs = sample(logits, self._temperatures[:high], key, position)
        self._state[0, :high] = tokens
        # Tokens and log-probs come to the host in one transfer, the only synchronisation of a decoding step.
        host = torch.stack((tokens, logprobs.double().view(torch.int64))).cpu()
        return host[0].tolist(), host[1].view(torch.float64).tolist()

    def _record(self, slots: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends a step's tokens to the rows in `slots`, ends rows, and collects the deltas that are due."""
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
            row = self._rows[slot]
            assert row is not None
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"weights of version {self.version} give log-probs that are not finite (request {row.rid!r}); "
                    "the weights or the activations overflowed: look at the learner's last steps, or use float32"
                )
            row.ids.append(token)
            row.logprobs.append(logprob)
            reason = row.finished()
            if reason or self._flushing or len(row.logprobs) >= self._flush_tokens:
                self._due.append(row.take(self.version, reason))
            if reason:
                del self._by_rid[row.rid]
                self._rows[slot] = None

    # ---- weights --------------------------------------------------------------------------------

    def load_weights(self, weights: StagedWeights, kv: KvMode) -> None:
        """Copies the tensors into the model's parameters; see `StepEngine.load_weights`.

        With `recompute` the live rows go back to the head of the queue: the next steps prefill them whole.

        Raises:
            ValueError: names or shapes are not those of the model's `named_parameters()`; nothing was changed.
        """
        self._model.load(weights)
        live = [row for row in self._rows if row]
        self._due += [row.take(self.version) for row in live if row.logprobs]
        self.version = weights.version
        if kv == "recompute":
            self._queue.extendleft(reversed(live))
            self._rows = []
