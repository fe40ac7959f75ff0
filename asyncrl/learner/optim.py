"""The optimiser step on sharded parameters: learning rate, global gradient norm, clipping, AdamW.

It knows parameters and gradients, not losses. Moments are allocated at once, so that a checkpoint has the same
tensors before the first step as after it. Called by `asyncrl.learner.update`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config import Learner


def learning_rate(settings: Learner, step: int, steps: int) -> float:
    """Learning rate of `step` (1, 2, ... `steps`): linear warm-up, then the schedule, down to 0 after the last."""
    warm = settings.warmup_steps
    if step <= warm:
        return settings.lr * step / warm
    left = 1 - (step - 1 - warm) / max(1, steps - warm)
    match settings.schedule:
        case "linear":
            return settings.lr * max(0.0, left)
        case "cosine":
            return settings.lr * 0.5 * (1 - math.cos(math.pi * max(0.0, left)))
        case _:
            return settings.lr


class Optimizer:
    """AdamW over the shards that this rank holds."""

    def __init__(self, model: nn.Module, settings: Learner) -> None:
        """Weight decay leaves out vectors (norms, biases), as is usual."""
        self.named = dict(model.named_parameters())
        parameters = list(self.named.values())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
        for p in parameters:
            self._adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by `name.key`; loading a checkpoint writes into them."""
        return {
            f"{name}.{key}": value for name, p in self.named.items() for key, value in self._adam.state[p].items()
        }

    def squared_norm(self) -> Tensor:
        """[] float64: this rank's part of the squared gradient norm."""
        norms = torch._foreach_norm(self._gradients())
        return torch.stack(norms).double().square().sum()

    def step(self, lr: float, scale: float) -> None:
        """Multiplies the gradients by `scale` and applies one AdamW step."""
        if scale != 1.0:
            torch._foreach_mul_(self._gradients(), scale)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def zero(self) -> None:
        """Forgets the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        """Local parts of all gradients."""
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        return [g.to_local() if isinstance(g, DTensor) else g for g in grads]
