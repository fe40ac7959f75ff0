"""The critic: a value of the state before each sampled token, and the step that fits it to the returns.

Two kinds with the same methods: `Critic` has a backbone and an optimiser of its own; `SharedCritic` is a value
head on the policy's hidden states, whose loss is a term of the policy's. Neither knows how returns and advantages
are made from values: that is `asyncrl.trainers.token_advantages`. Called by `asyncrl.learner.companions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import model
from asyncrl.learner.dist import Ranks, sum_over_ranks
from asyncrl.learner.model import Policy
from asyncrl.learner.rows import Row
from asyncrl.learner.trained import Trained
from asyncrl.trainers.value_loss import value_loss

Fit = tuple[Tensor, Tensor, Tensor]
"""What a critic is fitted to, of one row: old values, targets and weights, [n] each. A weight is a label's share
of the mean over the whole batch; labels of weight 0 are not counted."""


class ValueTerm:
    """The value loss of one row as a term of a model's loss; it remembers sums over the row for the metrics."""

    def __init__(self, policy: Policy, clip: float, coef: float, fit: Fit) -> None:
        self._policy, self._clip, self._coef = policy, clip, coef
        self._old, self._target, self._weight = fit
        self.sums = torch.zeros(7, dtype=torch.float64)
        """Loss, labels, clipped ones, and the targets' and the errors' first and second moments."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] hidden states, within the model's forward, to the loss []."""
        value = model.value(self._policy, hidden)
        each, clipped = value_loss(value, self._old, self._target, self._clip)
        loss = (self._weight * each).sum()
        counted = (self._weight > 0).double()
        target, error = self._target.double(), self._target.double() - value.detach().double()
        columns = [torch.ones_like(target), clipped, target, target.square(), error, error.square()]
        self.sums = torch.stack([loss.detach().double(), *((counted * column).sum() for column in columns)])
        return self._coef * loss


class Critic:
    """A value head on a backbone of its own. Every method but `state` is collective."""

    def __init__(self, config: Config, path: str | Path, ranks: Ranks) -> None:
        """Loads the backbone without its LM head; see `asyncrl.learner.model.load` for errors."""
        self._clip = config.critic.clip
        self._policy = model.load(path, config.model.dtype, ranks, lm_head=False, value_head=True)
        self._trained = Trained(config, self._policy, config.critic.lr, "the critic")

    def values(self, row: Row) -> Tensor:
        """[n] float32, without gradient: value of the state before each of the row's labels."""
        return model.values_of(self._policy, row)

    def fit(self, rows: Sequence[Row], fits: Sequence[Fit], step: int, batch_id: int) -> dict[str, float]:
        """One optimiser step of the clipped value loss. `fits` has what each row is fitted to.

        Returns:
            The same on every rank: `value_loss`, `value_clipped` (share of labels), `explained_variance`
            (1 - Var(G - V) / Var(G), V before the step) and `critic_grad_norm`.

        Raises:
            NotFinite: nothing was applied.
        """
        terms = [ValueTerm(self._policy, self._clip, 1.0, fit) for fit in fits]
        losses = [partial(self._loss, row, term) for row, term in zip(rows, terms, strict=True)]
        fitted = self._trained.fit(losses, step, batch_id)
        return _metrics(terms) | {"critic_grad_norm": fitted.grad_norm}

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint holds, by name."""
        return self._trained.state()

    def _loss(self, row: Row, term: ValueTerm) -> Tensor:
        loss: Tensor = self._policy(lambda hf: term(model.states(hf, row)))
        return loss


class SharedCritic:
    """The value head of the policy itself, which the policy's step trains. `values` and `fit` are collective."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """The policy must have been loaded with a value head."""
        self._policy, self._settings = policy, config.critic
        self._terms: list[ValueTerm] = []

    def values(self, row: Row) -> Tensor:
        """[n] float32, without gradient: value of the state before each of the row's labels."""
        return model.values_of(self._policy, row)

    def term(self, old: Tensor, target: Tensor, weight: Tensor) -> ValueTerm:
        """`critic.coef` times the value loss of the next row, for `model.head_loss`."""
        term = ValueTerm(self._policy, self._settings.clip, self._settings.coef, (old, target, weight))
        self._terms.append(term)
        return term

    def fit(self, rows: Sequence[Row], fits: Sequence[Fit], step: int, batch_id: int) -> dict[str, float]:
        """Metrics of the terms that the policy's step has trained; see `Critic.fit`. Nothing is left to train."""
        terms, self._terms = self._terms[-len(rows) :], []  # A step that was not finite leaves its terms behind.
        return _metrics(terms)

    def state(self) -> dict[str, Tensor]:
        """Nothing: the head is among the policy's parameters."""
        return {}


def _metrics(terms: Sequence[ValueTerm]) -> dict[str, float]:
    """Means over the labels of all ranks. Collective."""
    sums = sum_over_ranks(torch.stack([term.sums for term in terms]).sum(0)).tolist()
    loss, n, clipped, *moments = sums
    n = max(n, 1.0)
    of_target, of_error = (
        second / n - (first / n) ** 2 for first, second in zip(moments[::2], moments[1::2], strict=True)
    )
    return {
        "value_loss": loss,
        "value_clipped": clipped / n,
        "explained_variance": 1 - of_error / of_target if of_target > 1e-12 else 0.0,
    }
