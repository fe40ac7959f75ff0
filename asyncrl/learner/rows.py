"""From a rank's share of a batch to packed rows of tensors.

A token is trained if the policy sampled it, it is not the first of its segment, its episode has a reward, and
its lag is within the limit; its log-prob comes from the hidden state one position before. Everything else is
context. On the CPU, sequences of a row that begin with the same prompt share its tokens: a group's prompt is
computed once, and only the attention repeats it (`asyncrl.learner.attention`).

Counting comes before weighting: `read` counts the trained tokens, the caller sums the counts over the ranks, and
`build` turns them into weights.

Called by `asyncrl.learner.update`. Numpy until the last step, no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.attention import Segments, segments
from asyncrl.messages import Batch
from asyncrl.trainers.aggregation import Aggregation, Totals
from asyncrl.trainers.algorithm import Tokens


@dataclass(frozen=True)
class Row:
    """One packed row, ready for the forward. T tokens, n trained tokens."""

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, 0 at each segment's start."""
    segments: Segments
    states: Tensor
    """[n] int64: positions whose hidden state predicts a label."""
    labels: Tensor
    """[n] int64."""
    tokens: Tokens
    """Data of the trained tokens, [n] each."""
    lag: Tensor
    """[n] int64: lag of each trained token."""


@dataclass(frozen=True)
class Share:
    """A rank's tokens, all rows one after the other. F tokens, S sequences, in the order of `Batch.rows`."""

    ids: np.ndarray
    """[F]"""
    behaviour: np.ndarray
    """[F] float32"""
    lag: np.ndarray
    """[F] lag of sampled tokens"""
    trained: np.ndarray
    """[F] bool"""
    lengths: np.ndarray
    """[S]"""
    prompt: np.ndarray
    """[S] observed tokens that the sequence begins with"""
    episode: np.ndarray
    """[S] index into `Batch.episodes`"""
    row_sizes: list[int]
    """Sequences of each row."""
    sampled: int
    """Number of sampled tokens that could be trained were it not for their lag."""

    @property
    def trained_lengths(self) -> np.ndarray:
        """[S] trained tokens of each sequence."""
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(owner[self.trained], minlength=len(self.lengths))


def lag_limit(config: Config) -> int | None:
    """The largest lag that is trained on; None: no limit (`wait` bounds the lag before sealing)."""
    match config.staleness.over_age:
        case "mask":
            return config.staleness.max_lag
        case "train":
            return config.staleness.max_token_age
        case _:
            return None


def read(batch: Batch, ids: np.ndarray, logprobs: np.ndarray, step: int, limit: int | None) -> Share:
    """Reads a rank's share of a batch.

    Args:
        batch: as the hub sent it.
        ids: int32, tokens of the episodes of `batch.rows`, concatenated.
        logprobs: float32, their behaviour log-probs (observed tokens: anything).
        step: the step that trains it; the learner's version is `step - 1`.
        limit: largest lag that is trained on.

    Raises:
        ValueError: lengths, spans and arrays do not fit together.
    """
    episode = np.array([index for row in batch.rows for index in row], dtype=np.int64)
    lengths = np.array([batch.episodes[index].length for index in episode], dtype=np.int64)
    totals = [sum(span.n for span in spans) for spans in batch.spans]
    if totals != lengths.tolist() or len(ids) != lengths.sum() or len(logprobs) != len(ids):
        raise ValueError(
            f"batch {batch.batch_id}: {len(ids)} tokens, {len(logprobs)} log-probs and spans of {sum(totals)} "
            f"tokens do not fit the {lengths.sum()} tokens of {len(lengths)} episodes"
        )
    spans = [span for run in batch.spans for span in run]
    sizes = [span.n for span in spans]
    sampled = np.repeat(np.array([span.sampled for span in spans], dtype=bool), sizes)
    lag = step - 1 - np.repeat(np.array([span.version for span in spans], dtype=np.int64), sizes)
    rewarded = np.array([batch.episodes[index].reward is not None for index in episode], dtype=bool)
    candidate = sampled & np.repeat(rewarded, lengths)
    candidate[(np.cumsum(lengths) - lengths)] = False
    trained = candidate if limit is None else candidate & (lag <= limit)
    row_sizes = [len(row) for row in batch.rows]
    prompt = np.array([0 if run[0].sampled else run[0].n for run in batch.spans], dtype=np.int64)
    return Share(ids, logprobs, lag, trained, lengths, prompt, episode, row_sizes, int(candidate.sum()))


def build(
    share: Share,
    advantages: Sequence[float] | np.ndarray,
    aggregation: Aggregation,
    totals: Totals,
    device: torch.device,
) -> list[Row]:
    """The rows of a share.

    Args:
        share: from `read`.
        advantages: of every episode of the batch.
        aggregation: gives the tokens' weights.
        totals: of the whole batch, over all ranks.
        device: where the tensors go.
    """
    trained = share.trained_lengths
    per_sequence = aggregation(torch.from_numpy(trained).double(), totals).numpy()
    weight = np.repeat(per_sequence, share.lengths).astype(np.float32)
    advantage = np.repeat(np.asarray(advantages)[share.episode], share.lengths).astype(np.float32)
    rows, token, sequence = [], 0, 0
    for size in share.row_sizes:
        mine = slice(sequence, sequence + size)
        part = slice(token, token + int(share.lengths[mine].sum()))
        token, sequence = part.stop, mine.stop
        rows.append(_row(share, part, mine, trained[mine], weight, advantage, device))
    return rows


def _shared(ids: np.ndarray, lengths: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a row are stored (mask), and which stored token each token is (index)."""
    stored = np.ones(len(ids), dtype=bool)
    source = np.arange(len(ids))
    first: dict[bytes, int] = {}
    for start, prompt in zip((np.cumsum(lengths) - lengths).tolist(), prompts.tolist(), strict=True):
        if prompt:
            before = first.setdefault(ids[start : start + prompt].tobytes(), start)
            if before != start:
                stored[start : start + prompt] = False
                source[start : start + prompt] = np.arange(before, before + prompt)
    return stored, (np.cumsum(stored) - 1)[source]


def _row(
    share: Share,
    part: slice,
    mine: slice,
    trained: np.ndarray,
    weight: np.ndarray,
    advantage: np.ndarray,
    device: torch.device,
) -> Row:
    """One row. An empty one becomes a single token that trains nothing: all ranks run the same collectives."""
    lengths, prompts, ids = share.lengths[mine], share.prompt[mine], share.ids[part]
    if not len(lengths):
        lengths, prompts, ids = np.array([1]), np.array([0]), np.array([0])
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if device.type != "cpu":  # The GPU's kernels take every segment whole.
        prompts = np.zeros_like(prompts)
    stored, owner = _shared(ids, lengths, prompts)
    label = np.flatnonzero(share.trained[part])

    def move(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    def of_tokens(values: np.ndarray) -> Tensor:
        return move(values[part][label], torch.float32)

    return Row(
        ids=move(ids[stored].astype(np.int64), torch.int64),
        positions=move(positions[stored], torch.int64),
        segments=segments(lengths.tolist(), owner).to(device),
        states=move(owner[label - 1], torch.int64),
        labels=move(ids[label].astype(np.int64), torch.int64),
        tokens=Tokens(
            behaviour=of_tokens(share.behaviour),
            advantage=of_tokens(advantage),
            weight=of_tokens(weight),
            lengths=trained.tolist(),
        ),
        lag=move(share.lag[part][label], torch.int64),
    )
