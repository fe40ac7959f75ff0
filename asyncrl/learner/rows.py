"""From a rank's share of a batch to packed rows of tensors.

A token is a candidate if the policy sampled it, it is not the first of its segment, and its episode has a
reward; it is trained if its lag is within the limit too. Its log-prob comes from the hidden state one position
before. Everything else is context. An episode is one segment of its row, or, where the chat template rewrites
earlier turns, one for each branch; its tokens stay one sequence to the loss. On the CPU, segments of a row that
begin with the same prompt share its tokens: a group's prompt is computed once, and only the attention repeats it
(`asyncrl.learner.attention`).

Reading comes before weighting: `read` finds the tokens, the caller counts them over the ranks and makes their
columns, and `build` turns both into rows, of all candidates (to compute something for them) or of the trained
ones.

Called by `asyncrl.learner.update`. Numpy until the last step, no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.attention import Segments, segments
from asyncrl.messages import Batch, Span
from asyncrl.trainers.tokens import Tokens


@dataclass(frozen=True)
class Row:
    """One packed row, ready for the forward. T tokens, n labels."""

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
    """Data of the labels, [n] each."""


@dataclass(frozen=True)
class Share:
    """A rank's tokens, all rows one after the other. F tokens, S sequences, in the order of `Batch.rows`."""

    ids: np.ndarray
    """[F]"""
    behaviour: np.ndarray
    """[F] float32"""
    lag: np.ndarray
    """[F] lag of sampled tokens"""
    candidate: np.ndarray
    """[F] bool"""
    trained: np.ndarray
    """[F] bool: of the candidates, those within the lag limit"""
    lengths: np.ndarray
    """[S] tokens of each sequence, all its branches together"""
    branches: list[list[int]]
    """[S] tokens of each branch of a sequence: a branch sees nothing of the others"""
    prompts: list[list[int]]
    """[S] observed tokens that each branch begins with"""
    episode: np.ndarray
    """[S] index into `Batch.episodes`"""
    row_sizes: list[int]
    """Sequences of each row."""

    def count(self, mask: np.ndarray) -> np.ndarray:
        """[S] tokens of each sequence that are in a mask [F]."""
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(owner[mask], minlength=len(self.lengths))


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
    branches = [[sum(span.n for span in branch) for branch in _branches(run)] for run in batch.spans]
    prompts = [[0 if branch[0].sampled else branch[0].n for branch in _branches(run)] for run in batch.spans]
    starts = np.array([n for lengths_of in branches for n in lengths_of], dtype=np.int64)
    candidate[np.cumsum(starts) - starts] = False
    trained = candidate if limit is None else candidate & (lag <= limit)
    row_sizes = [len(row) for row in batch.rows]
    return Share(ids, logprobs, lag, candidate, trained, lengths, branches, prompts, episode, row_sizes)


def _branches(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of each branch of an episode."""
    branches: list[list[Span]] = []
    for span in spans:
        if span.fork or not branches:
            branches.append([])
        branches[-1].append(span)
    return branches


def build(
    share: Share, mask: np.ndarray, weight: np.ndarray, columns: Mapping[str, Tensor], device: torch.device
) -> list[Row]:
    """The rows of a share, with labels where the mask is.

    Args:
        share: from `read`.
        mask: [F] bool, a subset of the share's candidates.
        weight: [S], weight of each label of a sequence.
        columns: [C] each, one number for each candidate: further fields of `Tokens`.
        device: where the tensors go.
    """
    counted = share.count(mask)
    kept = torch.from_numpy(mask[share.candidate])
    full = {name: column[kept].float() for name, column in columns.items()}
    full |= {"weight": torch.from_numpy(np.repeat(weight, counted)).float()}
    full |= {"behaviour": torch.from_numpy(share.behaviour[mask]), "lag": torch.from_numpy(share.lag[mask])}
    rows, token, label, sequence = [], 0, 0, 0
    for size in share.row_sizes:
        mine = slice(sequence, sequence + size)
        part = slice(token, token + int(share.lengths[mine].sum()))
        labels = slice(label, label + int(counted[mine].sum()))
        token, label, sequence = part.stop, labels.stop, mine.stop
        tokens = {name: column[labels].to(device) for name, column in full.items()}
        if "advantage" not in tokens:
            tokens["advantage"] = torch.zeros_like(tokens["weight"])
        data = Tokens(lengths=counted[mine].tolist(), **tokens)
        rows.append(_row(share, part, mine, np.flatnonzero(mask[part]), data, device))
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


def _row(share: Share, part: slice, mine: slice, label: np.ndarray, tokens: Tokens, device: torch.device) -> Row:
    """One row. An empty one becomes a single token that trains nothing: all ranks run the same collectives."""
    lengths = np.array([n for branches in share.branches[mine] for n in branches], dtype=np.int64)
    prompts = np.array([n for branches in share.prompts[mine] for n in branches], dtype=np.int64)
    ids = share.ids[part]
    if not len(lengths):
        lengths, prompts, ids = np.array([1]), np.array([0]), np.array([0])
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if device.type != "cpu":  # The GPU's kernels take every segment whole.
        prompts = np.zeros_like(prompts)
    stored, owner = _shared(ids, lengths, prompts)

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, torch.int64)

    return Row(
        ids=move(ids[stored]),
        positions=move(positions[stored]),
        segments=segments(lengths.tolist(), owner).to(device),
        states=move(owner[label - 1]),
        labels=move(ids[label]),
        tokens=tokens,
    )
