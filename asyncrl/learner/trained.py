"""A model that trains: its optimiser, and one optimiser step on the losses of some rows.

It knows neither what the losses mean nor where rows come from. Its settings are the learner's, but for the
learning rate. Used by `asyncrl.learner.update` for the policy, and by `critic` and `process_reward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import model
from asyncrl.learner.dist import sum_over_ranks
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.model import Policy
from asyncrl.learner.optim import Optimizer, learning_rate


class Fitted(NamedTuple):
    """What a step did: the loss and the norm of its gradient over all ranks, and the learning rate."""

    loss: float
    grad_norm: float
    lr: float


class Trained:
    """Shards and optimiser of one model."""

    def __init__(self, config: Config, policy: Policy, lr: float, name: str, idle_steps: int = 0) -> None:
        """`lr` is the peak learning rate; `name` is the model's in errors: "the critic". In the first `idle_steps`
        nothing is applied; the schedule begins after them."""
        self.policy = policy
        self._name, self._steps, self._idle = name, config.train.steps, idle_steps
        self._settings = config.learner.model_copy(update={"lr": lr})
        self._root = model.units(policy)[0]
        for unit in model.units(policy):
            # Plain sums: the losses are divided by global counts already.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self.optimizer = Optimizer(policy, self._settings)

    def fit(self, losses: Sequence[Callable[[], Tensor]], step: int, batch_id: int) -> Fitted:
        """One optimiser step on the sum of losses over all rows of all ranks. Collective.

        Args:
            losses: for each row, its forward to the loss []. Every rank has as many.
            step: 1, 2, ...; fixes the learning rate.
            batch_id: for the error.

        Raises:
            NotFinite: nothing was applied.
        """
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self.optimizer.named.values())).device)
        for i, forward in enumerate(losses):
            self._root.set_requires_gradient_sync(i == len(losses) - 1)
            loss = forward()
            loss.backward()
            total += loss.detach()
        loss_of_all, squared = sum_over_ranks(torch.stack([total, self.optimizer.squared_norm()])).tolist()
        for what, number in (("loss", loss_of_all), ("gradient norm", squared)):
            if not math.isfinite(number):
                self.optimizer.zero()
                raise NotFinite(step, batch_id, f"{self._name}'s {what}")
        norm = math.sqrt(squared)
        lr = 0.0
        if step > self._idle:
            lr = learning_rate(self._settings, step - self._idle, self._steps - self._idle)
            self.optimizer.step(lr, min(1.0, self._settings.grad_clip / (norm + 1e-6)))
        self.optimizer.zero()
        return Fitted(loss_of_all, norm, lr)

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint holds, by name."""
        parameters = {f"model.{name}": p for name, p in self.optimizer.named.items()}
        return parameters | {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
