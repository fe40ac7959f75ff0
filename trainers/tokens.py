"""The data that losses, corrections and rejections see: packed vectors of tokens, and where sequences end.

The same type holds a chunk of tokens inside the RL head's sweep and the whole batch before it. Precomputed and
detached; the current log-probs, which carry gradient, are an argument of their own. Made by the learner's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Precomputed data of n trained tokens, in the order of their labels. Tensors are [n], float32 but `lag`."""

    behaviour: Tensor
    """log mu, as the engine reported it."""
    advantage: Tensor
    weight: Tensor
    """Aggregation weight."""
    lengths: Sequence[int]
    """Trained tokens of each sequence, in the order of the tokens; they add up to n."""
    lag: Tensor | None = None
    """int64: learner version minus the token's version."""
    old: Tensor | None = None
    """Log-prob under the proximal policy, the denominator of a loss's ratio. `Algorithm.token_loss` sets it.
    Before
    that it is the log-prob before the first minibatch, where the algorithm wants that (`recomputed`)."""
    factor: Tensor | None = None
    """Weight from corrections and rejections that saw the whole batch."""
    mark: Tensor | None = None
    """What a loss's `mark` function, which saw the whole batch, made of each token."""
    reference: Tensor | None = None
    """Log-prob under the reference model."""

    def __getitem__(self, chunk: slice) -> Tokens:
        starts = accumulate(self.lengths, initial=0)
        cut = [
            min(start + n, chunk.stop) - max(start, chunk.start)
            for start, n in zip(starts, self.lengths, strict=False)
            if start < chunk.stop and start + n > chunk.start
        ]
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {name: column[chunk] for name, column in held.items() if isinstance(column, Tensor)}
        return replace(self, lengths=cut, **columns)

    def edges(self) -> Tensor:
        """[S + 1] int64: where each sequence starts, and n."""
        return torch.tensor([0, *accumulate(self.lengths)], device=self.weight.device)
