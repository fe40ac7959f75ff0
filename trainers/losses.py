"""Token-level policy losses: plain PyTorch on vectors of one chunk of tokens.

A loss sees only its tokens' log-probs and precomputed data, never logits; the RL head turns its gradient into
the model's. Off-policy weights, masks, aggregation and the entropy bonus are applied by
`asyncrl.trainers.algorithm`, not here.

Every loss has the same signature: `(logp, old, advantage, algo) -> (loss, clipped)`, all [n]; `logp` carries
gradient, `old` is the proximal policy's log-prob and does not. `clipped` marks tokens whose gradient or ratio
was cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.config import Algo

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that a ratio never overflows."""

TokenLoss = Callable[[Tensor, Tensor, Tensor, Algo], tuple[Tensor, Tensor]]


def ratio_of(logp: Tensor, old: Tensor) -> Tensor:
    """exp(logp - old), with the exponent clamped to plus or minus 20."""
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_range(algo: Algo) -> tuple[float, float]:
    """The interval that a clipped ratio is kept in."""
    return 1 - (algo.clip_low or 0.0), 1 + (algo.clip_high or 0.0)


def ppo_clip(logp: Tensor, old: Tensor, advantage: Tensor, algo: Algo) -> tuple[Tensor, Tensor]:
    """max(-rA, -clip(r, 1 - low, 1 + high) A), and for A < 0 at most -cA where c is `clip_dual`.

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; asymmetric range: Yu et al. 2025 (arXiv:2503.14476),
    section 3.1; dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    ratio = ratio_of(logp, old)
    plain = -ratio * advantage
    bounded = -ratio.clamp(*clip_range(algo)) * advantage
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if algo.clip_dual:
        ceiling = torch.where(advantage < 0, -algo.clip_dual * advantage, torch.inf)
        clipped = clipped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    return loss, clipped


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, algo: Algo) -> tuple[Tensor, Tensor]:
    """-A log pi; off-policy weight comes from the correction. Williams 1992."""
    return -advantage * logp, torch.zeros_like(logp, dtype=torch.bool)


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, algo: Algo) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: clipped tokens keep a gradient.

    MiniMax-M1 2025 (arXiv:2506.13585), section 3.1. No lower bound in the paper: `clip_low` close to 1.
    """
    ratio = ratio_of(logp.detach(), old)
    bounded = ratio.clamp(*clip_range(algo))
    return -bounded * advantage * logp, bounded != ratio


LOSSES: dict[str, TokenLoss] = {"ppo_clip": ppo_clip, "reinforce": reinforce, "cispo": cispo}
