"""The embedded engine for deterministic runs: what a request gets does not depend, bit for bit, on its neighbours.

A matrix product adds up in an order that depends on its shape, so the logits of one row differ in their last bits
with the number of rows beside it. Here every forward has one shape: one token for every slot (a free slot computes
a token that nobody reads), attention over the whole capacity with a mask (a masked key adds an exact 0), and
sampling of all slots at once. A prompt, and the prefix of an episode that is continued, go the same way, token by
token. So keys, values and logits at a position are a function of the weights and of the tokens up to there, and of
nothing else: not of slot, neighbours, chunk boundaries, nor of the process that computed the tokens before.

    slot     0        1        2        3
    token    p5 ─┐    s9 ─┐    p0 ─┐    –        p: of a prompt, its logits are not used until the last one
    logits   ·   │    s10 ◀┘   ·   │    ·        s: sampled
             next: p6          next: p1

That rows of one product do not influence one another is true of the CPU libraries that PyTorch uses, but nobody
promises it: the engine tries it with its own model at the start, and refuses to start where it is not so.

It costs speed: every token of a prompt is a step, and a step costs the same with one live row as with all
(`tests/benchmarks/invariant.py`). Opened by `asyncrl.generator.engines.select` for `run.deterministic`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.generator.engines.base import KvMode, SamplingParams, StagedWeights
from asyncrl.generator.engines.sampling import sample
from asyncrl.generator.engines.transformers import TransformersEngine

_SEED = 7
Request = tuple[list[int], int]
"""Prompt and number of tokens to sample, of the self-test."""


class NotInvariant(ValueError):
    """The same request gave different bits beside different ones; the text says what to do."""


class InvariantEngine(TransformersEngine):
    """`TransformersEngine` with forwards of one shape; see the module docstring."""

    def __init__(self, model: Any, **options: Any) -> None:
        """Takes what `TransformersEngine` takes, and tries whether this model computes rows independently here.

        Raises:
            NotInvariant: it does not.
            ValueError: see `TransformersEngine`.
        """
        super().__init__(model, **options)
        self._rows = [None] * self._slots
        # Positions of each slot's row that are in the cache; the token at that index is the next to compute.
        self._cached = [0] * self._slots
        self._self_test()

    def load_weights(self, weights: StagedWeights, kv: KvMode) -> None:
        """Copies the tensors into the parameters; see `StepEngine.load_weights`."""
        super().load_weights(weights, "keep")
        if kv == "recompute":
            self._cached = [0] * self._slots

    def _advance(self) -> None:
        """Gives free slots to requests that wait, and computes the next token of every slot."""
        for slot, row in enumerate(self._rows):
            if row is None and self._queue:
                self._rows[slot], self._cached[slot] = self._queue.popleft(), 0
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        if not live:
            return
        tokens, logprobs = self._forward_all()
        ending = []
        for slot in live:
            self._cached[slot] += 1
            row = self._rows[slot]
            if row is not None and self._cached[slot] == len(row.ids):
                ending.append(slot)
        self._record(ending, [tokens[slot] for slot in ending], [logprobs[slot] for slot in ending])

    def _forward_all(self) -> tuple[list[int], list[float]]:
        """One forward of one token for each slot; what each would sample next, and its log-prob."""
        columns = [
            (row.ids[at], at, row.key) if row else (0, 0, 0)
            for row, at in zip(self._rows, self._cached, strict=True)
        ]
        ids, positions, keys = torch.tensor(columns, device=self._device).T.contiguous()
        temperatures = torch.tensor([row.temperature if row else 1.0 for row in self._rows], device=self._device)
        logits = self._model.logits(ids, self._model.cache.begin_whole(positions))
        tokens, logprobs = sample(logits, temperatures, keys, positions + 1)
        return tokens.tolist(), logprobs.tolist()

    # ---- the self-test --------------------------------------------------------------------------

    def _self_test(self) -> None:
        """The same request alone; among others, in many slots; and continued from a prefix: bitwise equal?"""
        draw = random.Random(_SEED)

        def prompt(length: int) -> list[int]:
            return [draw.randrange(self._model.vocab) for _ in range(length)]

        asked, wanted = prompt(min(3, self._max_len - 1)), min(4, max(1, self._max_len - 3))
        (alone,) = self._sampled([(asked, wanted)])
        half = wanted // 2
        again: Request = ([*asked, *(token for token, _ in alone[:half])], wanted - half)
        crowd: list[Request] = []
        for _ in range(self._slots):
            crowd += [(asked, wanted), (prompt(draw.randint(1, len(asked))), draw.randint(1, wanted)), again]
        found = self._sampled(crowd)
        if any(each != alone for each in found[::3]) or any(each != alone[half:] for each in found[2::3]):
            raise NotInvariant(
                f"{self._model.name} gave a request other bits beside other requests, in batches of one shape, so "
                "no run with it is deterministic. A mixture of experts does so, and this CPU's matrix library may "
                f"with {self._slots} rows: try --generator.slots 8, 16, 32 or 64, or leave --deterministic out"
            )

    def _sampled(self, requests: Sequence[Request]) -> list[list[tuple[int, float]]]:
        """The tokens and log-probs of requests that all have the same seed."""
        found: dict[str, list[tuple[int, float]]] = {str(index): [] for index in range(len(requests))}
        for rid, (prompt, tokens) in zip(found, requests, strict=True):
            self.add(rid, prompt, SamplingParams(max_tokens=tokens, seed=_SEED))
        while self.has_work():
            for rid, delta in self.step():
                found[rid] += zip(delta.token_ids, delta.logprobs, strict=True)
        return list(found.values())
