"""Advantage estimators: one number per episode, from the rewards of the whole batch.

Every learner rank sees all episodes of a batch (`messages.Batch.episodes`), so an estimator needs no
communication. An episode without a reward counts in no mean and has advantage 0. Called through
`asyncrl.trainers.algorithm.Algorithm`.

Shapes: E episodes, G groups. All tensors are on the CPU, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """How the episodes of a batch ended."""

    reward: Tensor
    """[E] shaped reward; 0 where there is none."""
    valid: Tensor
    """[E] bool: the episode has a reward."""
    group: Tensor
    """[E] int64, 0 ... G-1."""
    sampled: Tensor
    """[E] number of sampled tokens."""

    def group_sum(self, values: Tensor) -> Tensor:
        """[E] values to [E]: the sum over the valid episodes of each episode's group."""
        groups = int(self.group.max()) + 1 if len(self.group) else 0
        sums = values.new_zeros(groups).index_add(0, self.group, values * self.valid)
        return sums[self.group]

    def group_size(self) -> Tensor:
        """[E] number of valid episodes in each episode's group."""
        return self.group_sum(self.valid.to(self.reward.dtype))

    def centred(self) -> Tensor:
        """[E] reward minus the group's mean reward; 0 for episodes without a reward."""
        mean = self.group_sum(self.reward) / self.group_size().clamp(min=1)
        return (self.reward - mean) * self.valid


def grpo(outcomes: Outcomes) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6); a group of one gives 0.

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; std with n - 1, as in the common implementations.
    """
    centred = outcomes.centred()
    variance = outcomes.group_sum(centred.square()) / (outcomes.group_size() - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-6)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """R - mean_g: without the division by the standard deviation, which favours easy and hard tasks.

    Liu et al. 2025 (arXiv:2503.20783), section 3.
    """
    return outcomes.centred()


def rloo(outcomes: Outcomes) -> Tensor:
    """R minus the mean of the group's other rewards = n / (n - 1) (R - mean_g); a group of one gives 0.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    size = outcomes.group_size()
    return outcomes.centred() * size / (size - 1).clamp(min=1)


def reinforce(outcomes: Outcomes) -> Tensor:
    """R itself, without a baseline. Williams 1992."""
    return outcomes.reward * outcomes.valid


ADVANTAGES: dict[str, Callable[[Outcomes], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}
