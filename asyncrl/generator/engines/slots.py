"""The slot cache: keys and values of a fixed number of rows, and the attention that reads and writes them.

One tensor, `kv [2, layers, slots, kv_heads, capacity, head_dim]`; a row (a running request) owns one slot. Any
causal language model whose attention goes through transformers' `AttentionInterface` runs on it unchanged: the
model is called with `use_cache=False` and one flat row of tokens, and `slot_attention`, registered under
`SLOT_ATTENTION`, finds the cache in the forward's keyword `slot_cache`. This is not a paged cache: every
slot takes as much memory as the longest row that has been live so far. `SlotModel` is the only caller.

The flat row of one forward holds, in slot order, one token of each decoding row and then whole prompts:

    tokens   d0 d1 d2 d3 │ p4 p4 p4 p4 p4 │ p5 p5 p5        slots 0-3 decode, slots 4 and 5 are prefilled
    slots    0  1  2  3  │ 4  4  4  4  4  │ 5  5  5         nothing is padded but the queries of attention

Decoding is bound by reading the cache, so rows are kept in descending order of size class (powers of two), and
each class attends over its own longest row only: one row of 4,000 tokens does not make sixty short ones pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

SLOT_ATTENTION = "asyncrl_slots"
_SMALLEST_CLASS = 32
"""Rows up to this many positions are one class; each further class is twice as long."""


@cache
def size_class(length: int) -> int:
    """Class of a row with `length` cached positions: 0 up to 32, 1 up to 64, 2 up to 128, ..."""
    return max(0, (length - 1) // _SMALLEST_CLASS).bit_length()


def arrange(classes: Sequence[int | None]) -> list[int]:
    """Orders the live slots by descending class, moving as few rows as possible.

    `classes[i]` is the class of the row in slot i, None for a free slot. Returns for each of the first
    (number of live rows) slots the slot that its row comes from.
    """
    live = [i for i, c in enumerate(classes) if c is not None]
    want = sorted((c for c in classes if c is not None), reverse=True)
    if want == classes:
        return live
    stays = [classes[i] == c for i, c in enumerate(want)]
    # Both the misplaced rows and the places they left free are in descending class order, so they match up.
    movers = iter(sorted((i for i in live if i >= len(want) or not stays[i]), key=lambda i: -(classes[i] or 0)))
    return [i if stay else next(movers) for i, stay in enumerate(stays)]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Slots `low:high`, which attend over their first `length` positions."""

    low: int
    high: int
    length: int
    mask: Tensor | None
    """[rows, 1, 1, length], added to the scores: -inf where the row has no key yet. None: it has all."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Slots `low:high`, whose prompts of similar lengths run in one causal attention of `length` positions."""

    low: int
    high: int
    length: int
    take: Tensor
    """[rows, length] index of each query in the flat row; past a prompt's end, any (the result is not kept)."""
    keep: Tensor
    """[tokens] indices of the real queries among the rows * length."""


@dataclass(slots=True)
class Plan:
    """What one forward does with the cache; made once and used by every layer."""

    slot: Tensor
    """[tokens] slot of each token of the flat row."""
    position: Tensor
    """[tokens] position of each token in its sequence."""
    decode: list[_Decode]
    prefill: list[_Prefill]
    last: Tensor | int
    """`logits_to_keep`: index of each row's last token; 0 (all) when every row only decodes."""
    layers: set[int] = field(default_factory=set)
    """Layers that have attended through the interface; the engine's start-up check reads it."""


class UnsupportedModel(ValueError):
    """A model whose attention the slot cache does not compute; the text says which part, and what to do."""


class SlotCache:
    """Keys and values of all slots, and the plan of the forward that is running."""

    def __init__(self, config: Any, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """A cache for a model with this (text) configuration; it grows with the longest row, up to `max_len`."""
        self.layers: int = config.num_hidden_layers
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv = torch.zeros(2, self.layers, slots, heads, 0, width, dtype=dtype, device=device)
        self.max_len = max_len
        self.plan: Plan | None = None
        self._steps = torch.arange(max(slots, max_len), device=device)

    def reserve(self, length: int) -> None:
        """Makes room for rows of `length` positions. Short rows that stand densely are also read faster."""
        capacity = self.kv.shape[4]
        if length > capacity:
            wanted = max(length, capacity * 5 // 4)
            grown = min(self.max_len, -(-wanted // _SMALLEST_CLASS) * _SMALLEST_CLASS)
            self.kv = torch.nn.functional.pad(self.kv, (0, 0, 0, grown - capacity))

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of slots `source` to slots `target`, all at once."""
        device = self.kv.device
        rows = self.kv[:, :, torch.tensor(source, device=device), :, :length]
        self.kv[:, :, torch.tensor(target, device=device), :, :length] = rows

    def begin(self, lengths: Sequence[int], prompts: Sequence[int], positions: Tensor) -> Plan:
        """Plans a forward.

        Args:
            lengths: for slots 0, 1, ...: positions that the decoding row attends to, its new token included.
            prompts: for the slots after those, longest first: tokens of the prompt that is prefilled.
            positions: [tokens] position of every token of the flat row.
        """
        self.reserve(max(*lengths, *prompts, 0, 0))
        decode, low = [], 0
        for _, group in groupby(lengths, key=size_class):
            rows = list(group)
            high, length = low + len(rows), max(rows)
            mask = None if min(rows) == length else self._mask(positions[low:high], length)
            decode.append(_Decode(low, high, length, mask))
            low = high
        slot = self._steps[: len(lengths)]
        last: Tensor | int = 0
        prefill: list[_Prefill] = []
        if prompts:
            counts = torch.tensor(prompts, device=positions.device)
            new = self._steps[low : low + len(prompts)].repeat_interleave(counts, output_size=sum(prompts))
            slot = torch.cat((slot, new))
            ends = counts.cumsum(0) + low
            last = torch.cat((self._steps[:low], ends - 1))
            prefill = self._group_prompts(low, prompts, ends - counts)
        self.plan = Plan(slot, positions, decode, prefill, last)
        return self.plan

    def begin_whole(self, positions: Tensor) -> Plan:
        """Plans a forward of one token for every slot, over all `max_len` positions: of one shape, whatever runs.

        Args:
            positions: [slots] position of each slot's token.
        """
        self.reserve(self.max_len)
        rows = _Decode(0, len(positions), self.max_len, self._mask(positions, self.max_len))
        self.plan = Plan(self._steps[: len(positions)], positions, [rows], [], 0)
        return self.plan

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """`_Decode.mask` of rows whose newest tokens stand at `positions` [rows]."""
        future = self._steps[:length] > positions[:, None]
        mask = torch.zeros(future.shape, dtype=self.kv.dtype, device=self.kv.device)
        return mask.masked_fill_(future, -torch.inf)[:, None, None]

    def _group_prompts(self, low: int, prompts: Sequence[int], starts: Tensor) -> list[_Prefill]:
        """Cuts the prompts, longest first, where the class changes, so that padding is at most one half."""
        groups, first = [], 0
        for _, group in groupby(prompts, key=size_class):
            rows = list(group)
            steps = self._steps[: rows[0]]
            counts = torch.tensor(rows, device=starts.device)[:, None]
            take = starts[first : first + len(rows), None] + steps.minimum(counts - 1)
            keep = (steps < counts).flatten().nonzero()[:, 0]
            groups.append(_Prefill(low + first, low + first + len(rows), rows[0], take, keep))
            first += len(rows)
        return groups

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [kv_heads, tokens, head_dim] of one layer; returns the layer's whole keys and values."""
        plan = self.running
        plan.layers.add(layer)
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[plan.slot, :, plan.position] = key.transpose(0, 1)
        values[plan.slot, :, plan.position] = value.transpose(0, 1)
        return keys, values

    @property
    def running(self) -> Plan:
        """The plan of the running forward."""
        if self.plan is None:
            raise RuntimeError("the slot cache was used before SlotCache.begin planned a forward")
        return self.plan


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    slot_cache: SlotCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the flat row over the slot cache, in the form that `AttentionInterface` calls.

    Args:
        module: the attention layer, which knows its `layer_idx`.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: like `key`.
        attention_mask: not used; each row attends to its own past.
        scaling: factor of the scores.
        dropout: not used; the engine runs the model in evaluation mode.
        slot_cache: the cache, handed through the model's forward.
        options: what else the model asks of its attention; what changes the result is refused.

    Returns:
        The output, [1, tokens, heads, head_dim], and no attention weights.

    Raises:
        UnsupportedModel: the model needs a kind of attention that the slot cache does not compute.
    """
    if slot_cache is None:
        raise UnsupportedModel(f"{type(module).__name__} does not hand the forward's keywords to its attention")
    _refuse_unknown(module, slot_cache, options)
    keys, values = slot_cache.write(module.layer_idx, key[0], value[0])
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    flat, parts = query[0].transpose(0, 1), []
    for d in slot_cache.running.decode:
        # The heads that share a key head stand as the queries of one sequence: keys are read once, not repeated.
        q = flat[d.low : d.high].reshape(-1, kv_heads, heads // kv_heads, width)
        k, v = keys[d.low : d.high, :, : d.length], values[d.low : d.high, :, : d.length]
        parts.append(
            scaled_dot_product_attention(q, k, v, attn_mask=d.mask, scale=scaling).reshape(-1, heads, width)
        )
    for p in slot_cache.running.prefill:
        # Positions past a shorter prompt's end hold what an earlier row left there; causality hides them.
        k, v = keys[p.low : p.high, :, : p.length], values[p.low : p.high, :, : p.length]
        q = flat[p.take].transpose(1, 2)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads)
        parts.append(out.transpose(1, 2).reshape(-1, heads, width)[p.keep])
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _refuse_unknown(module: Any, cache: SlotCache, options: dict[str, Any]) -> None:
    """Raises for options of the attention that would be silently ignored."""
    window = options.get("sliding_window")
    if window is not None and window < cache.max_len:
        raise UnsupportedModel(
            f"{type(module).__name__} attends over a sliding window of {window} positions, which slots do not "
            f"compute; a max_model_len of at most {window} makes the window irrelevant (it is {cache.max_len})"
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} needs attention with {name}, which slots do not compute"
            )


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
