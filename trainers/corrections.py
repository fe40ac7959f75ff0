"""Off-policy corrections: the weight of a token that another policy sampled.

A correction sees `log_weight` = log pi_prox - log mu, [n], where mu is the behaviour policy, and returns the
weight, [n], detached. It never changes the number of tokens that the loss is divided by: a denominator that
shrank with the weights would raise the learning rate of the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.config import Algo
from asyncrl.trainers.losses import MAX_LOG_RATIO

Correction = Callable[[Tensor, Algo], Tensor]


def none(log_weight: Tensor, algo: Algo) -> Tensor:
    """1: the staleness of the data is ignored."""
    return torch.ones_like(log_weight)


def token_tis(log_weight: Tensor, algo: Algo) -> Tensor:
    """min(w, cap): truncated importance sampling, per token.

    Ionides 2008; between an engine and a learner: Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"; the decoupled objective: Hilton et al. 2021 (arXiv:2110.00641).
    """
    return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=algo.correction_cap)


def icepop(log_weight: Tensor, algo: Algo) -> Tensor:
    """w inside [floor, cap], 0 outside. Usual range: 0.5 to 5.

    Ling team 2025 (arXiv:2510.18855); used by INTELLECT-3.
    """
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weight * ((weight >= (algo.correction_floor or 0.0)) & (weight <= (algo.correction_cap or torch.inf)))


CORRECTIONS: dict[str, Correction] = {"none": none, "token_tis": token_tis, "icepop": icepop}
