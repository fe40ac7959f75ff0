"""Off-policy corrections: the weight of a token that another policy sampled.

A correction sees `log_weight` = log pi_prox - log mu, [n], detached, where mu is the behaviour policy, and
returns weights, [n]. It never changes what the loss is divided by: a denominator that shrank with the weights
would raise the learning rate of the tokens that are left. Nor are weights divided by their batch's mean, which
would undo exactly the shrinking that stale data call for.

A weight of 0 drops a token. The corrections of level "batch" can drop a whole sequence, whose reward then says
nothing of the policy that is trained. They run before the advantages are estimated, and the sequences they empty
leave the group's baseline: the learner sets them invalid. Token-level ones drop tokens, not rewards, and leave
it as it is.

Masks without a weight are in `asyncrl.trainers.rejections`; `asyncrl.trainers.algorithm` multiplies both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainers.losses import bounded_exp
from asyncrl.trainers.tokens import Tokens
from asyncrl.triton_kernels.segments import segment_sum, spread


def sequence_ratio(log_weight: Tensor, tokens: Tokens) -> Tensor:
    """[n]: at every token, the product of its sequence's ratios, with its logarithm clamped to plus or minus
    20."""
    edges = tokens.edges()
    return spread(bounded_exp(segment_sum(log_weight, edges)), edges, length=len(log_weight))


def inside(values: Tensor, low: float, high: float) -> Tensor:
    """1.0 where low <= value <= high, else 0.0. The bounds are the value's own, not their reciprocals."""
    return ((values >= low) & (values <= high)).to(values.dtype)


def none(log_weight: Tensor, tokens: Tokens) -> Tensor:
    """1: the staleness of the data is ignored, or the loss's own ratio corrects it."""
    return torch.ones_like(log_weight)


def token_tis(log_weight: Tensor, tokens: Tokens, *, cap: float) -> Tensor:
    """min(w_t, cap): truncated importance sampling, per token.

    Ionides 2008; between an engine and a learner: Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; the decoupled objective: Hilton et al. 2021 (arXiv:2110.00641).
    """
    return bounded_exp(log_weight).clamp(max=cap)


def icepop(log_weight: Tensor, tokens: Tokens, *, low: float, high: float) -> Tensor:
    """w_t inside [low, high], 0 outside.

    Ling team 2025 (arXiv:2510.18855); used by INTELLECT-3. The dropped tokens' episode stays in the baseline: its
    other tokens are trained, and its reward is what they are compared by.
    """
    weight = bounded_exp(log_weight)
    return weight * inside(weight, low, high)


def sequence_tis(log_weight: Tensor, tokens: Tokens, *, cap: float) -> Tensor:
    """min(prod_t w_t, cap) for all tokens of a sequence: truncated importance sampling of whole answers.

    Ionides 2008; Li et al. 2025 (arXiv:2512.23075). Unbiased but for the cap, with a variance that grows with the
    length. No sequence gets 0, so none leaves the baseline.
    """
    return sequence_ratio(log_weight, tokens).clamp(max=cap)


def mis(log_weight: Tensor, tokens: Tokens, *, low: float, high: float) -> Tensor:
    """prod_t w_t inside [low, high], 0 outside, for all tokens of a sequence: masked importance sampling.

    Li et al. 2025 (arXiv:2512.23075). Sequences outside are emptied, and leave the baseline (see the top).
    """
    weight = sequence_ratio(log_weight, tokens)
    return weight * inside(weight, low, high)
