"""The reference model: a frozen policy, from which the policy's divergence is measured.

It has shards like the policy's, but no gradients and no optimiser. It changes only when it becomes a copy of the
policy (`algo.reference_every`). Called by `asyncrl.learner.companions`, `process_reward` and `full_kl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.config import Dtype
from asyncrl.learner import model
from asyncrl.learner.dist import Ranks
from asyncrl.learner.model import Policy
from asyncrl.learner.rows import Row


class Reference:
    """A frozen policy. Every method but `state` is collective."""

    def __init__(self, path: str | Path, dtype: Dtype, ranks: Ranks) -> None:
        """Loads the Hugging Face folder; see `asyncrl.learner.model.load` for errors."""
        self._policy = model.load(path, dtype, ranks).requires_grad_(False)
        self._shards = dict(self._policy.named_parameters())

    def logp(self, row: Row, temperature: float, workspace_bytes: int | None = None) -> Tensor:
        """[n] float32 log-probs of a row's labels, without gradient. `workspace_bytes`: see `rl_head`."""
        return model.logp_of(self._policy, row, temperature, workspace_bytes).logp

    @contextmanager
    def whole(self, row: Row) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """A row's hidden states [n, D] and the LM head as `model.head` gives it, while a `with` block lasts."""
        with torch.no_grad():
            hidden = self._policy(model.states, row)
        try:
            yield hidden, model.head(self._policy.hf)
        finally:
            model.release(self._policy)

    @torch.no_grad()
    def copy_from(self, policy: Policy) -> None:
        """Becomes a copy of the policy, shard by shard, in place. Nothing is sent.

        Raises:
            KeyError: the policy is of another architecture.
        """
        model.release(policy)
        theirs = dict(policy.named_parameters())
        for name, shard in self._shards.items():
            _local(shard).copy_(_local(theirs[name]))

    def state(self) -> dict[str, Tensor]:
        """The live shards by name, for a checkpoint."""
        return dict(self._shards)


def _local(shard: Tensor) -> Tensor:
    return shard.to_local() if isinstance(shard, DTensor) else shard
