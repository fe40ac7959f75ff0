"""Off-policy masks: which tokens or sequences are too far from the behaviour policy to be trained on.

A rejection sees `log_weight` l = log pi - log mu, [n], detached, where pi is the current policy (not the
proximal one, as corrections do; in the rejections of level "batch" it is the one before the first minibatch) and
mu the behaviour policy. It returns 1.0 for the tokens to keep and 0.0 for the others, [n]. r = exp(l) is the
importance ratio of a token. Bounds are inclusive, and bounds of r are bounds of r itself. Several rejections
multiply. What the loss is divided by stays the number of tokens before any of them.

What the baseline sees. Rejections of level "batch" run before the advantages are estimated; a sequence that they
empty leaves its group's baseline (the learner sets the episode invalid), because a reward that the policy would
hardly have earned must not move the comparison of those that it would. Token masks leave the baseline alone:
they say that one choice was unusual, not that the reward is, and the rest of the episode is trained on it.
`opsm` cannot touch it: it looks at the sign of the advantage, for which the baseline has to be there.

Weights are the business of `asyncrl.trainers.corrections`; `asyncrl.trainers.algorithm` multiplies both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainers.corrections import inside, sequence_ratio
from asyncrl.trainers.losses import bounded_exp
from asyncrl.trainers.tokens import Tokens
from asyncrl.triton_kernels.segments import segment_mean, segment_sum, spread

# ---- tokens: the baseline stays ------------------------------------------------------------------


def token_k1(log_weight: Tensor, tokens: Tokens, *, token_k1_low: float, token_k1_high: float) -> Tensor:
    """Keeps tokens with low <= r <= high. Li et al. 2025 (arXiv:2512.23075)."""
    return inside(bounded_exp(log_weight), token_k1_low, token_k1_high)


def token_k2(log_weight: Tensor, tokens: Tokens, *, token_k2_max: float) -> Tensor:
    """Keeps tokens with l^2 / 2 <= max: symmetric in the log-ratio. arXiv:2512.23075; k2: Schulman 2020."""
    return _at_most(_k2(log_weight), token_k2_max)


def token_k3(log_weight: Tensor, tokens: Tokens, *, token_k3_max: float) -> Tensor:
    """Keeps tokens with r - 1 - l <= max: stricter above r = 1 than below. arXiv:2512.23075; k3: Schulman 2020."""
    return _at_most(_k3(log_weight), token_k3_max)


# ---- whole sequences, before the advantages: those dropped leave the baseline ----------------------


def geometric(log_weight: Tensor, tokens: Tokens, *, geometric_low: float, geometric_high: float) -> Tensor:
    """Keeps sequences with low <= exp(mean_t l_t) <= high: a bound that does not tighten with the length.

    Li et al. 2025 (arXiv:2512.23075).
    """
    return inside(bounded_exp(_mean(log_weight, tokens)), geometric_low, geometric_high)


def product(log_weight: Tensor, tokens: Tokens, *, product_low: float, product_high: float) -> Tensor:
    """Keeps sequences with low <= prod_t r_t <= high, the ratio of the whole answer. arXiv:2512.23075."""
    return inside(sequence_ratio(log_weight, tokens), product_low, product_high)


def sequence_k2(log_weight: Tensor, tokens: Tokens, *, sequence_k2_max: float) -> Tensor:
    """Keeps sequences with mean_t l_t^2 / 2 <= max. arXiv:2512.23075; k2: Schulman 2020."""
    return _at_most(_mean(_k2(log_weight), tokens), sequence_k2_max)


def sequence_k3(log_weight: Tensor, tokens: Tokens, *, sequence_k3_max: float) -> Tensor:
    """Keeps sequences with mean_t (r_t - 1 - l_t) <= max. arXiv:2512.23075; k3: Schulman 2020."""
    return _at_most(_mean(_k3(log_weight), tokens), sequence_k3_max)


def veto(log_weight: Tensor, tokens: Tokens, *, veto_floor: float) -> Tensor:
    """Keeps sequences all of whose tokens have r >= floor.

    One token that the policy would practically never choose makes everything after it another policy's story.
    Ling team 2025 (arXiv:2510.18855).
    """
    edges = tokens.edges()
    below = (bounded_exp(log_weight) < veto_floor).to(log_weight.dtype)
    return _at_most(spread(segment_sum(below, edges), edges, length=len(log_weight)), 0.0)


def m2po(log_weight: Tensor, tokens: Tokens, *, m2po_tau: float) -> Tensor:
    """Keeps the tokens with the smallest l^2, as many as leave the mean of the kept l^2 at most tau.

    That is, drops the largest one by one until the second moment of the log-ratios is within the bound: only
    outliers go, and none while the batch as a whole is close. Zheng et al. 2025 (arXiv:2510.01161). Of equal
    squares the earlier token stays. A sequence that loses all its tokens leaves the baseline; one that loses
    some does not.

    All n tokens form one pool.
    """
    squares, order = log_weight.double().square().sort(stable=True)
    number = torch.arange(1, len(squares) + 1, device=squares.device)
    # The running mean of sorted numbers never falls, so those that pass are the first ones.
    keep = squares.cumsum(0) / number <= m2po_tau
    return torch.zeros_like(log_weight).scatter(0, order, keep.to(log_weight.dtype))


# ---- whole sequences, once the advantages are known: the baseline stays ----------------------------


def opsm(log_weight: Tensor, tokens: Tokens, *, opsm_delta: float) -> Tensor:
    """Drops sequences of negative advantage with mean_t -l_t > delta: off-policy sequence masking.

    Pushing down what the policy has already moved away from teaches nothing and destabilises; successes stay
    however old they are. A sequence's advantage is the mean over its tokens. DeepSeek-V3.2, 2025
    (arXiv:2512.02556).
    """
    drop = (_mean(tokens.advantage, tokens) < 0) & (_mean(-log_weight, tokens) > opsm_delta)
    return (~drop).to(log_weight.dtype)


# ---- machinery -----------------------------------------------------------------------------------


def _k2(log_weight: Tensor) -> Tensor:
    return log_weight.square() / 2


def _k3(log_weight: Tensor) -> Tensor:
    return bounded_exp(log_weight) - 1 - log_weight


def _at_most(values: Tensor, high: float) -> Tensor:
    return (values <= high).to(values.dtype)


def _mean(values: Tensor, tokens: Tokens) -> Tensor:
    """[n]: at every token, the mean over its sequence."""
    edges = tokens.edges()
    return spread(segment_mean(values, edges), edges, length=len(values))
