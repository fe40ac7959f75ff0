"""Attention over packed rows: every segment of a `[1, tokens]` row attends to itself only.

Registered with transformers as `asyncrl_varlen`; a model takes it by name and gets the row's `Segments` as a
keyword argument of its forward. No mask is ever built. On CUDA it is flash_attention_2 where that is
installed, else torch's own variable-length kernel. On the CPU, segments of similar length become one batched
call: they are right-padded to a multiple of 8, which a causal mask makes harmless, and the index plan is made
once per row, not once per layer.

Segments may share tokens: the episodes of a group have one prompt, which is then stored, and computed by
every other part of the model, once per row. Only here is it repeated, for each segment that begins with it.

Models whose attention is more than causal (soft caps, sinks, a window that is shorter than a segment on the
CPU) are refused here; everything else that could go wrong is caught by `asyncrl.learner.selftest`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "asyncrl_varlen"
PAD_TO = 8
SHORT = 32
"""Longest segment, in tokens, that the CPU attends to by plain batched products."""


@dataclass(frozen=True)
class Segments:
    """Where a row's segments lie, in the form that the device's kernel takes."""

    bounds: Tensor
    """[S + 1] int32, cumulative lengths; the last is the row's length."""
    longest: int
    gather: Tensor
    """[P] token of each padded position; a padding position repeats a token of the row (CPU only)."""
    real: Tensor
    """[P, 1] float32: 1 for the position that a token's output is taken from, else 0 (CPU only)."""
    place: Tensor
    """[tokens] that position of each token (CPU only)."""
    copies: Tensor
    """[C] padded positions that hold a shared token once more (CPU only)."""
    copied: Tensor
    """[C] which token that is (CPU only)."""
    blocks: tuple[tuple[int, int], ...]
    """(segments, padded length) of each batched call, in the order of `gather` (CPU only)."""

    def to(self, device: torch.device) -> Segments:
        """The same segments on another device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("bounds", "gather", "real", "place", "copies", "copied")
        }
        return replace(self, **moved)


def segments(lengths: Sequence[int], owner: np.ndarray | None = None) -> Segments:
    """Plans the attention of a row whose segments have these lengths (each at least 1).

    Args:
        lengths: of the segments, one after the other.
        owner: [sum of lengths] the row's token that each of the segments' tokens is; None: each is its own.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    padded = -(-sizes // PAD_TO) * PAD_TO
    gather, place, blocks, offset = [], np.empty(starts[-1], np.int64), [], 0
    for width in np.unique(padded):
        which = np.flatnonzero(padded == width)
        inside = np.arange(width) < sizes[which, None]
        source = starts[which, None] + np.minimum(np.arange(width), sizes[which, None] - 1)
        place[source[inside]] = offset + np.flatnonzero(inside)
        gather.append((source, inside))
        blocks.append((len(which), int(width)))
        offset += source.size
    own = np.arange(starts[-1]) if owner is None else owner
    # The first of a shared token's positions gives its output; all have the same, for all see the same prefix.
    _, first = np.unique(own, return_index=True)
    again = np.setdiff1d(np.arange(starts[-1]), first)
    real = np.zeros((offset, 1), np.float32)
    real[place[first]] = 1
    return Segments(
        bounds=torch.from_numpy(starts.astype(np.int32)),
        longest=int(sizes.max()),
        gather=torch.from_numpy(own[np.concatenate([source.ravel() for source, _ in gather])]),
        real=torch.from_numpy(real),
        place=torch.from_numpy(place[first]),
        copies=torch.from_numpy(place[again]),
        copied=torch.from_numpy(own[again]),
        blocks=tuple(blocks),
    )


class _Reorder(torch.autograd.Function):
    """Rows of `x` between the row's order and the padded order.

    An index_select whose gradient is the inverse index_select: the padding's gradient is 0 by the causal mask
    on the way in, and is made 0 by `real` on the way out. Only the copies of shared tokens are added up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Segments, inward: bool) -> Tensor:
        ctx.row, ctx.inward = row, inward
        return x.index_select(0, row.gather if inward else row.place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row = ctx.row
        if not ctx.inward:
            return grad.index_select(0, row.gather) * row.real.to(grad.dtype), None, None
        back = grad.index_select(0, row.place)
        if len(row.copies):
            back.index_add_(0, row.copied, grad.index_select(0, row.copies))
        return back, None, None


def _padded_sdpa(q: Tensor, k: Tensor, v: Tensor, row: Segments, scale: float | None) -> Tensor:
    """Attention by batched calls; q, k, v are [1, heads, tokens, dim], the result is [tokens, heads, dim]."""
    parts = [x[0].transpose(0, 1) for x in (q, k, v)]
    q, k, v = (_Reorder.apply(x.flatten(1), row, True).view(-1, *x.shape[1:]) for x in parts)
    repeat = q.shape[1] // k.shape[1]
    outs, start = [], 0
    for count, width in row.blocks:
        part = slice(start, start + count * width)
        start = part.stop
        q_, k_, v_ = (x[part].view(count, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if repeat > 1:
            k_, v_ = k_.repeat_interleave(repeat, 1), v_.repeat_interleave(repeat, 1)
        out = _causal(q_, k_, v_, scale)
        outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = torch.cat(outs) if len(outs) > 1 else outs[0]
    return _Reorder.apply(joined, row, False).view(-1, *q.shape[1:])


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of equally long segments; q, k, v are [segments, heads, width, dim].

    The CPU's flash kernel works in blocks that short segments do not fill: below `SHORT` two batched products
    are about twice as fast, forward and backward.
    """
    count, heads, width, dim = q.shape
    if width > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    later = torch.full((width, width), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k, v = (x.reshape(count * heads, width, dim) for x in (q, k, v))
    scores = torch.baddbmm(later.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scale or dim**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(count, heads, width, dim)


def _cuda_varlen(q: Tensor, k: Tensor, v: Tensor, row: Segments, scale: float | None, window: int) -> Tensor:
    """Attention by the GPU's variable-length kernel, -1: no window; the same shapes as `_padded_sdpa`."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    bounds, longest = row.bounds, row.longest
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest,
            softmax_scale=scale, causal=True, window_size=(window, 0 if window >= 0 else -1),
        )  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q, k, v, bounds, bounds, longest, longest,
        scale=scale, window_size=(window, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, heads, tokens, dim] each, to [1, tokens, heads, dim].

    Raises:
        ValueError: the model asks for something that these kernels do not compute.
    """
    on_cpu = query.device.type == "cpu"
    window = sliding_window - 1 if sliding_window is not None and sliding_window < segments.longest else -1
    asked = [name for name in ("softcap", "s_aux") if extra.get(name) is not None]
    asked += ["attention_mask"] if attention_mask is not None else []
    asked += [f"sliding_window = {sliding_window}"] if on_cpu and window >= 0 else []
    if asked:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which packed attention on {query.device.type} "
            "does not compute; this model cannot be trained there"
        )
    if on_cpu:
        return _padded_sdpa(query, key, value, segments, scaling)[None], None
    return _cuda_varlen(query, key, value, segments, scaling, window)[None], None


AttentionInterface.register(NAME, _attend)
