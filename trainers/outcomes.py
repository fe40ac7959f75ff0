"""The data that advantage estimators and reward shaping see: how all episodes of a batch ended, and their tokens.

Every learner rank holds the whole batch's outcomes, so an estimator is a pure function and communicates nothing.
An episode without a reward (it failed, or a rejection emptied it) is not `valid`: it counts in no mean and its
advantage is 0. Made by the learner; passed on by `asyncrl.trainers.algorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """E episodes of a batch with N sampled tokens in all, on the CPU. Numbers are float64."""

    reward: Tensor
    """[E] shaped reward; 0 where there is none."""
    valid: Tensor
    """[E] bool: the episode has a reward and is trained; a greedy episode is not."""
    group: Tensor
    """[E] int64, 0 ... G-1."""
    lengths: Tensor
    """[E] int64: sampled tokens of each episode, of which the token columns hold the data; they add up to N."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """[E] each: the environment's rewards by name; NaN where one is missing."""
    greedy: Tensor | None = None
    """[E] bool: a greedy episode that has a reward, which is a baseline and not trained; it is in `reward`."""
    truncated: Tensor | None = None
    """[E] bool: the episode was cut off by a limit."""
    max_tokens: int = 0
    """Most tokens of a turn (`sampling.max_tokens`)."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each, episode by episode: `behaviour` (log mu), `logp` (log pi before the update), `squares` (sum over
    the vocabulary of pi squared), `reference` (log-prob under the reference), `value` (of the state before the
    token), `process` (beta times the log-ratio of the implicit process reward model), `penalty` (KL term of the
    reward, already scaled)."""

    # ---- episodes and their groups -----------------------------------------------------------------

    @property
    def groups(self) -> int:
        """G."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    def group_sum(self, values: Tensor) -> Tensor:
        """[E] values to [E]: the sum over the valid episodes of each episode's group."""
        sums = values.new_zeros(self.groups).index_add(0, self.group, torch.where(self.valid, values, 0.0))
        return sums[self.group]

    def group_max(self, values: Tensor) -> Tensor:
        """[E] values to [E]: the largest among the valid episodes of each episode's group; -inf: there is none."""
        lowest = values.new_full((self.groups,), -torch.inf)
        given = torch.where(self.valid, values, -torch.inf)
        return lowest.scatter_reduce(0, self.group, given, "amax")[self.group]

    def group_min(self, values: Tensor) -> Tensor:
        """[E] values to [E]: the smallest; inf where there is none."""
        return -self.group_max(-values)

    def group_size(self) -> Tensor:
        """[E] number of valid episodes in each episode's group."""
        return self.group_sum(torch.ones_like(self.reward))

    def centred(self, values: Tensor) -> Tensor:
        """[E] values minus their group's mean; 0 for episodes that are not valid."""
        mean = self.group_sum(values) / self.group_size().clamp(min=1)
        return torch.where(self.valid, values - mean, 0.0)

    def compared(self) -> Tensor:
        """[E] bool: valid, and not the only valid episode of its group. Alone there is nothing to compare with."""
        return self.valid & (self.group_size() > 1)

    def rank(self, values: Tensor) -> Tensor:
        """[E] int64: place in the group by falling value, from 0; the first of equals first, invalid ones last."""
        order = torch.where(self.valid, values, -torch.inf).argsort(descending=True, stable=True)
        order = order[self.group[order].argsort(stable=True)]
        sizes = self.group.bincount(minlength=self.groups)
        place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[self.group[order]]
        return torch.empty_like(order).index_copy(0, order, place)

    # ---- tokens ------------------------------------------------------------------------------------

    def edges(self) -> Tensor:
        """[E + 1] int64: where each episode's tokens start, and N."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def spread(self, values: Tensor) -> Tensor:
        """[E] to [N]: every token gets its episode's value."""
        return values.repeat_interleave(self.lengths)

    def token_sum(self, values: Tensor) -> Tensor:
        """[N] to [E]: the sum over each episode's tokens."""
        owner = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return values.new_zeros(len(self.lengths)).index_add(0, owner, values)

    def token_rewards(self) -> Tensor:
        """[N] reward of each token: the episode's at its last token, minus the KL penalty (`penalty`)."""
        rewards = -self.columns["penalty"] if "penalty" in self.columns else self.reward.new_zeros(self.total)
        last = self.edges()[1:] - 1
        ends = self.valid & (self.lengths > 0)
        return rewards.index_add(0, last[ends], self.reward[ends])

    def after_penalty(self) -> Outcomes:
        """With the KL penalty of all its tokens taken from every valid episode's reward."""
        if "penalty" not in self.columns:
            return self
        penalty = self.token_sum(self.columns["penalty"])
        return replace(self, reward=self.reward - torch.where(self.valid, penalty, 0.0))

    @property
    def total(self) -> int:
        """N."""
        return int(self.lengths.sum())


def moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n - 1) of values, each counted `weight` times; those of weight 0 may be NaN.

    A deviation below 1e-8 is rounding and becomes 1: dividing by it would make noise of equal values.
    """
    count = weight.sum()
    values = torch.where(weight > 0, values, 0.0)
    mean = (weight * values).sum() / count.clamp(min=1)
    std = ((weight * (values - mean).square()).sum() / (count - 1).clamp(min=1)).sqrt()
    return mean, torch.where(std > 1e-8, std, 1.0)


def whitened(values: Tensor, weight: Tensor) -> Tensor:
    """(values - mean) / std, see `moments`; 0 where the weight is 0. `weight` may be a mask."""
    mean, std = moments(values, weight)
    return torch.where(weight > 0, (values - mean) / std, 0.0)
