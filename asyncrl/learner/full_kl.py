"""`algo.kl = "full"`: the divergence KL(pi || ref) of each token over the whole vocabulary, as a term of the loss.

Exact, where `asyncrl.trainers.kl` estimates it from the sampled token: no variance, at the cost of the reference's
LM head beside the policy's and of three more products with each. Called by `asyncrl.learner.update` through
`model.head_loss`.
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.learner import model
from asyncrl.learner.model import Policy
from asyncrl.learner.reference import Reference
from asyncrl.learner.rows import Row
from asyncrl.triton_kernels.full_kl import Head, full_kl


class FullKl:
    """The term of one row, a `model.LossTerm`: sum over its labels of scale times KL(pi || ref)."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference,
        row: Row,
        scale: Tensor,
        temperature: float,
        workspace_bytes: int | None,
    ) -> None:
        """`scale` [n]: the coefficient times each label's aggregation weight. `workspace_bytes`: see `full_kl`."""
        self._policy, self._reference, self._row, self._scale = policy, reference, row, scale
        self._temperature, self._workspace = temperature, workspace_bytes
        self.kl: Tensor | None = None
        """[n] float32 divergence of each label's distribution, once the term was computed."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] hidden states, within the policy's forward, to the term []. Runs the reference: collective."""
        with self._reference.whole(self._row) as (other_hidden, other):
            loss, self.kl = full_kl(
                hidden,
                Head(**model.head(self._policy.hf)),
                other_hidden,
                Head(**other),
                self._scale,
                temperature=self._temperature,
                workspace_bytes=self._workspace,
            )
        return loss
