"""The whole batch's tokens on every rank, for what cannot be decided from one rank's share.

A rank holds the candidate tokens of its own episodes. `Whole` knows where they are among those of all ranks, in
the order of `Batch.episodes`: `gather` turns a column of the share into the batch's, `mine` cuts the share's
part out again. Everything else about a batch (advantages, rejections, marks) is then a pure function, the same
on every rank and whatever the packing. Called by `asyncrl.learner.update`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.dist import sum_over_ranks
from asyncrl.learner.rows import Share


class Whole:
    """Counts and places of a batch's tokens: C candidates in the share, N in the batch, E episodes."""

    def __init__(self, share: Share, episodes: int, device: torch.device) -> None:
        """Counts over the ranks. Collective."""
        self._device = device
        candidates, trained = share.count(share.candidate), share.count(share.trained)
        counts = torch.zeros(2, episodes, dtype=torch.float64, device=device)
        owner = torch.from_numpy(share.episode).to(device)
        for row, counted in zip(counts, (candidates, trained), strict=True):
            row.index_add_(0, owner, torch.from_numpy(counted).to(device, torch.float64))
        self.lengths, self.trained = sum_over_ranks(counts).cpu().long()
        """[E] int64 each: candidate and trained tokens of each episode."""
        self.total = int(self.lengths.sum())
        """N."""
        start = (self.lengths.cumsum(0) - self.lengths).numpy()[share.episode]
        within = np.arange(candidates.sum()) - np.repeat(np.cumsum(candidates) - candidates, candidates)
        self._place = torch.from_numpy(np.repeat(start, candidates) + within)

    def gather(self, column: Tensor) -> Tensor:
        """[C] to [N] float64 on the CPU. Collective."""
        full = torch.zeros(self.total, dtype=torch.float64)
        full[self._place] = column.double().cpu()
        return sum_over_ranks(full.to(self._device)).cpu()

    def mine(self, column: Tensor) -> Tensor:
        """[N] to [C]."""
        return column[self._place]
