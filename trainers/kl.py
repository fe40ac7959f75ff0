"""Estimates of the divergence from the reference model, token by token, and the adaptive coefficient.

Every estimate is `(logp [n], reference [n]) -> [n]` with d = log pi - log ref of the sampled tokens. As a term of
the loss its gradient matters, as a term of the reward its value. Names: Schulman 2020, "Approximating KL
divergence". The expected value of k1 and k3 is KL(pi || ref), where pi sampled the tokens; the expected gradient
is that of this KL for k2, but 0 for k1, and that of KL(ref || pi) for k3. The `_straight` ones have the value of
their name and the gradient of k2 (Liu et al. 2025, arXiv:2510.01555).

Called by `asyncrl.trainers.algorithm` and, for the coefficient, by `asyncrl.learner.update`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainers.losses import MAX_LOG_RATIO

ERROR = 0.2
"""Largest relative error that one step of the adaptive coefficient acts on."""


def none(logp: Tensor, reference: Tensor) -> Tensor:
    """0."""
    return torch.zeros_like(logp)


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    """d = log pi - log ref. For the reward: in a loss its expected gradient is 0."""
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, d = log pi - log ref."""
    return (logp - reference).square() / 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d, d = log pi - log ref: never negative. The exponent is clamped to plus or minus 20."""
    d = logp - reference
    return (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + d


def absolute(logp: Tensor, reference: Tensor) -> Tensor:
    """|d|, d = log pi - log ref."""
    return (logp - reference).abs()


def k1_straight(logp: Tensor, reference: Tensor) -> Tensor:
    """The value of `k1` with the gradient of `k2`."""
    return _straight(k1(logp, reference), logp, reference)


def k3_straight(logp: Tensor, reference: Tensor) -> Tensor:
    """The value of `k3` with the gradient of `k2`."""
    return _straight(k3(logp, reference), logp, reference)


def absolute_straight(logp: Tensor, reference: Tensor) -> Tensor:
    """The value of `absolute` with the gradient of `k2`."""
    return _straight(absolute(logp, reference), logp, reference)


def adapt(coef: float, divergence: float, target: float, episodes: int, horizon: float) -> float:
    """The coefficient for the next step: larger if the divergence was above its target, smaller if below.

    coef (1 + clip(divergence / target - 1, -0.2, 0.2) episodes / horizon). Ziegler et al. 2019 (arXiv:1909.08593),
    section 2.2.

    Args:
        coef: the coefficient of this step.
        divergence: mean over the step's tokens.
        target: what the divergence should be; above 0.
        episodes: trained in this step.
        horizon: episodes over which the coefficient moves by the factor of the error.
    """
    error = min(max(divergence / target - 1, -ERROR), ERROR)
    return coef * (1 + error * episodes / horizon)


def _straight(value: Tensor, logp: Tensor, reference: Tensor) -> Tensor:
    gradient = k2(logp, reference)
    return value.detach() + (gradient - gradient.detach())
