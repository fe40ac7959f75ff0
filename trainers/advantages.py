"""Advantage estimators that give every episode one number, from how the whole batch ended.

Every learner rank holds all outcomes of a batch, so an estimator communicates nothing. An episode that is not
valid (it failed, it is greedy, or a rejection emptied it) counts in no mean and has advantage 0; so has the only
valid episode of a group wherever the group is the baseline. Estimators that need a number for each token are in
`asyncrl.trainers.token_advantages`; names, parameters and defaults are in `asyncrl.trainers.parts`. Called through
`asyncrl.trainers.algorithm.Algorithm.estimate`, after shaping and rejection.

All take `Outcomes` and return [E] float64. In the formulas R is an episode's reward, and mean, std (n - 1) and n
are those of the valid episodes of its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.trainers.outcomes import Outcomes, whitened

# ---- the reward against its group ------------------------------------------------------------------


def reinforce(outcomes: Outcomes) -> Tensor:
    """A = R, without a baseline. Williams 1992, section 5."""
    return torch.where(outcomes.valid, outcomes.reward, 0.0)


def grpo(outcomes: Outcomes) -> Tensor:
    """A = (R - mean) / (std + 1e-6).

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; std with n - 1, as in the common implementations.
    """
    centred = outcomes.centred(outcomes.reward)
    variance = outcomes.group_sum(centred.square()) / (outcomes.group_size() - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-6)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """A = R - mean: without the division by the standard deviation, which favours easy and hard tasks.

    Liu et al. 2025 (arXiv:2503.20783), section 3.
    """
    return outcomes.centred(outcomes.reward)


def rloo(outcomes: Outcomes) -> Tensor:
    """A = R - the mean of the group's other rewards = n / (n - 1) (R - mean).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    size = outcomes.group_size()
    return outcomes.centred(outcomes.reward) * size / (size - 1).clamp(min=1)


def opo(outcomes: Outcomes) -> Tensor:
    """A = R - sum(length R) / sum(length) over the group; the length is the number of sampled tokens.

    The baseline of least variance, if a sequence's squared gradient norm grows as its length. Hao et al. 2025
    (arXiv:2505.23585), the practical form of the optimal baseline.
    """
    length = outcomes.lengths.double()
    baseline = outcomes.group_sum(length * outcomes.reward) / outcomes.group_sum(length).clamp(min=1)
    return torch.where(outcomes.compared(), outcomes.reward - baseline, 0.0)


def gpg(outcomes: Outcomes) -> Tensor:
    """A = B / (B - M) (R - mean), with B valid episodes in the batch, M of them in groups whose rewards are equal.

    Those M have no gradient but count in the loss's mean; the factor takes them out of it. Chu et al. 2025
    (arXiv:2504.02546), accurate gradient estimation, with F_norm = 1.
    """
    alpha = outcomes.valid.sum() / _differs(outcomes).sum().clamp(min=1)
    return alpha * outcomes.centred(outcomes.reward)


def pass_k(outcomes: Outcomes) -> Tensor:
    """A = R - the second best reward for the best episode of a group (the first of equals), 0 for the others.

    It is the best reward of the group minus the best without that episode: the gradient of pass@n. Tang et al.
    2025 (arXiv:2503.19595), the leave-one-out estimator.
    """
    rank = outcomes.rank(outcomes.reward)
    second = outcomes.group_sum(torch.where(rank == 1, outcomes.reward, 0.0))
    return torch.where(outcomes.compared() & (rank == 0), outcomes.reward - second, 0.0)


def remax(outcomes: Outcomes) -> Tensor:
    """A = R - the reward of the group's greedy episode (of several: their mean).

    Without one that has a reward, because it failed, the baseline is the group's mean. Li et al. 2023
    (arXiv:2310.10505), algorithm 1.
    """
    centred = outcomes.centred(outcomes.reward)
    if outcomes.greedy is None:
        return centred
    greedy = replace(outcomes, valid=outcomes.greedy)
    size = greedy.group_size()
    baseline = greedy.group_sum(outcomes.reward) / size.clamp(min=1)
    return torch.where(outcomes.valid & (size > 0), outcomes.reward - baseline, centred)


# ---- and against the batch -------------------------------------------------------------------------


def gdpo(outcomes: Outcomes, *, weights: Mapping[str, float]) -> Tensor:
    """A = whiten(sum over the named rewards k of w_k (R_k - mean_k) / (std_k + 1e-6)).

    Whitened over the episodes of the batch, std with n - 1; episodes that are alone in their group are left out.
    An episode without reward k is in no mean of it and gets 0 from it. Without named rewards: the reward itself,
    as if it were the only one. Shaping and a KL term change the reward, not the named ones. Liu et al. 2026
    (arXiv:2601.05242), section 3.

    Args:
        outcomes: see the module.
        weights: w_k by name; 1 for a name that is not there. A run that gives none takes `reward.weights`.
    """
    total = torch.zeros_like(outcomes.reward)
    for name, reward in (outcomes.rewards or {"": outcomes.reward}).items():
        given = replace(outcomes, reward=reward, valid=outcomes.valid & ~reward.isnan())
        total += weights.get(name, 1.0) * grpo(given)
    return whitened(total, outcomes.compared())


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """A = whiten(R - mean): over all tokens of the batch, so that an episode counts as often as it has tokens.

    The std is that of the tokens (n - 1); episodes that are alone in their group are left out. Hu et al. 2025
    (arXiv:2501.03262), section 3, REINFORCE++ with baseline.
    """
    weight = outcomes.lengths.double() * outcomes.compared()
    return whitened(outcomes.centred(outcomes.reward), weight)


# ---- pairs -----------------------------------------------------------------------------------------


def dpo(outcomes: Outcomes, *, beta: float) -> Tensor:
    """A = +- beta sigmoid(-beta m) S / P: the gradient of DPO's loss on the best and the worst of every group.

    m = sum(log pi - log ref) of the best - the same of the worst. With the loss -A log pi, summed over tokens and
    divided by the S valid sequences that have tokens (`aggregation:sequence_sum`), the gradient is that of the
    mean of -log sigmoid(beta m) over the P groups whose rewards differ; of equal rewards the first counts.
    Rafailov et al. 2023 (arXiv:2305.18290), equation 7; on pairs sampled while training: Guo et al. 2024
    (arXiv:2402.04792).

    Args:
        outcomes: with the columns `logp` and `reference`.
        beta: strength of the tie to the reference.
    """
    differs = _differs(outcomes)
    best = differs & (outcomes.rank(outcomes.reward) == 0)
    worst = differs & (outcomes.rank(-outcomes.reward) == 0)
    gain = outcomes.token_sum(outcomes.columns["logp"] - outcomes.columns["reference"])
    margin = outcomes.group_sum(torch.where(best, gain, 0.0) - torch.where(worst, gain, 0.0))
    sequences = (outcomes.valid & (outcomes.lengths > 0)).sum()
    force = beta * torch.sigmoid(-beta * margin) * sequences / best.sum().clamp(min=1)
    return torch.where(best, force, 0.0) - torch.where(worst, force, 0.0)


def _differs(outcomes: Outcomes) -> Tensor:
    """[E] bool: the episode is valid, and the rewards of its group are not all equal."""
    return outcomes.valid & (outcomes.group_max(outcomes.reward) > outcomes.group_min(outcomes.reward))
