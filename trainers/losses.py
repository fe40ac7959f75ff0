"""Token-level policy losses: plain PyTorch on vectors of one chunk of tokens.

A loss sees only its tokens' log-probs and precomputed data, never logits; the RL head turns its gradient into the
model's. Off-policy weights, masks, aggregation and the entropy bonus are applied by `asyncrl.trainers.algorithm`,
which is the caller; losses of whole sequences are in `sequence_losses`, those that need the batch's statistics in
`covariance_losses`.

Every loss is `(logp [n], tokens, *, parameters) -> (loss [n], clipped [n] bool)`: `logp` carries gradient, the
rest does not; `tokens.old` is log pi_old, the denominator of the ratio r = pi / pi_old; `clipped` marks tokens
whose gradient or ratio was cut. sg(x) below is x without its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainers.tokens import Tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that a ratio never overflows."""
LARGEST_LOGP = -1e-6
"""Log-probs are kept below this where 1 - pi is needed: float32 has few numbers closer to 1."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the exponent clamped to plus or minus 20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_of(logp: Tensor, old: Tensor) -> Tensor:
    """exp(logp - old), with the exponent clamped to plus or minus 20."""
    return bounded_exp(logp - old)


def proximal(tokens: Tokens) -> Tensor:
    """[n] log pi_old."""
    assert tokens.old is not None, "the caller of a loss sets tokens.old"
    return tokens.old


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(-rA, -clip(r, 1 - clip_low, 1 + clip_high) A), and where the clip decides."""
    plain = -ratio * advantage
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return torch.maximum(plain, bounded), bounded > plain


def unclipped(logp: Tensor) -> Tensor:
    """[n] False."""
    return torch.zeros_like(logp, dtype=torch.bool)


def ppo_clip(
    logp: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, Tensor]:
    """max(-rA, -clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -clip_dual A (0: no such limit).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; asymmetric range: Yu et al. 2025 (arXiv:2503.14476),
    section 3.1; dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    advantage = tokens.advantage
    loss, clipped = clipped_surrogate(ratio_of(logp, proximal(tokens)), advantage, clip_low, clip_high)
    if clip_dual:
        ceiling = torch.where(advantage < 0, -clip_dual * advantage, torch.inf)
        clipped = clipped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    return loss, clipped


def reinforce(logp: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """-A log pi; off-policy weight comes from the correction. Williams 1992."""
    return -tokens.advantage * logp, unclipped(logp)


def cispo(logp: Tensor, tokens: Tokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: clipped tokens keep a gradient.

    MiniMax-M1 2025 (arXiv:2506.13585), section 3.1. No lower bound in the paper: `clip_low` is 1.
    """
    ratio = ratio_of(logp.detach(), proximal(tokens))
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -bounded * tokens.advantage * logp, bounded != ratio


def aipo(logp: Tensor, tokens: Tokens, *, cap: float) -> tuple[Tensor, Tensor]:
    """-sg(min(r, cap)) A log pi.

    Wu et al. 2025 (arXiv:2505.24034, LlamaRL), section 4, where r is the ratio to the behaviour policy
    (`proximal = "behaviour"`) and usual caps are from 2 to 10.
    """
    ratio = ratio_of(logp.detach(), proximal(tokens))
    return -ratio.clamp(max=cap) * tokens.advantage * logp, ratio > cap


def sapo(logp: Tensor, tokens: Tokens, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, where tau is `tau_pos` for A > 0 and else `tau_neg`.

    The gate's slope is 1 at r = 1 and falls on both sides, so nothing is cut. Gao et al. 2025 (arXiv:2511.20347).
    """
    tau = torch.full_like(tokens.advantage, tau_neg).masked_fill(tokens.advantage > 0, tau_pos)
    gate = (tau * (ratio_of(logp, proximal(tokens)) - 1)).sigmoid()
    return -4 / tau * gate * tokens.advantage, unclipped(logp)


def dppo_tv(
    logp: Tensor, tokens: Tokens, *, delta_low: float, delta_high: float, cap: float
) -> tuple[Tensor, Tensor]:
    """-sg(min(r, cap)) A log pi, without tokens whose probability has moved too far in the direction of A.

    Dropped: A > 0 and pi - pi_old > `delta_high`, or A < 0 and pi - pi_old < -`delta_low`. The difference is the
    total variation between both policies, each reduced to this token or any other. DPPO, 2026 (arXiv:2602.04879).
    """
    moved = logp.detach().exp() - proximal(tokens).exp()
    keep = torch.where(tokens.advantage > 0, moved <= delta_high, moved >= -delta_low)
    return _kept(logp, tokens, keep, cap)


def dppo_kl(logp: Tensor, tokens: Tokens, *, delta: float, cap: float) -> tuple[Tensor, Tensor]:
    """-sg(min(r, cap)) A log pi, without tokens whose binary KL has grown too large in the direction of A.

    Dropped: pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) > `delta`, and pi > pi_old for
    A > 0 or pi < pi_old for A < 0. DPPO, 2026 (arXiv:2602.04879).
    """
    now, old = logp.detach().clamp(max=LARGEST_LOGP), proximal(tokens).clamp(max=LARGEST_LOGP)
    others_now, others_old = -now.expm1(), -old.expm1()
    divergence = old.exp() * (old - now) + others_old * (others_old / others_now).log()
    back = torch.where(tokens.advantage > 0, now <= old, now >= old)
    return _kept(logp, tokens, back | (divergence <= delta), cap)


def dro(logp: Tensor, tokens: Tokens, *, beta: float) -> tuple[Tensor, Tensor]:
    """-A log pi + (beta / 2) (log pi - log pi_old)^2.

    Direct Reward Optimisation, Richemond et al. 2024 (arXiv:2405.19107), with A in place of the reward minus the
    learned value, and token by token. With `proximal = "current"` the penalty has no gradient.
    """
    penalty = beta / 2 * (logp - proximal(tokens)).square()
    return penalty - tokens.advantage * logp, unclipped(logp)


def _kept(logp: Tensor, tokens: Tokens, keep: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """-sg(min(r, cap)) A log pi of the tokens to keep; 0 for the others."""
    ratio = ratio_of(logp.detach(), proximal(tokens))
    weight = torch.where(keep, ratio.clamp(max=cap), 0.0)
    return -weight * tokens.advantage * logp, ~keep | (ratio > cap)
