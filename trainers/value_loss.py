"""The loss of a critic: squared error of its values, of which none may leave the old one far behind.

A plain function of tensors. Called by `asyncrl.learner.critic`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2).

    A value that has moved towards its target by more than `clip` gets no further gradient; one that has moved away
    is pulled back. From the implementation of PPO by its authors (Schulman et al. 2017, arXiv:1707.06347); the
    paper clips the policy only. The first update from V_old clips nothing.

    Args:
        value: [n] V, with gradient.
        old: [n] V_old, the value that the advantages were made with.
        target: [n] G, the return.
        clip: largest change that counts, in units of the value; 0: no clipping.

    Returns:
        The losses [n], and [n] 1 where the clipped error was taken, else 0.
    """
    plain = (value - target).square()
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain)
    moved = value.detach() - old
    error = (old + moved.clamp(-clip, clip) - target).square()
    # Inside the range both errors are the same but for rounding, and the plain one carries the gradient.
    clipped = (moved.abs() > clip) & (error > plain)
    return 0.5 * torch.where(clipped, error, plain), clipped.to(plain.dtype)
