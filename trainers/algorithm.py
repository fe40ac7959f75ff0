"""The contract of an algorithm: a frozen bundle of named plain functions, and the loss that they make.

    L = sum_t  a_t [ w_t * loss(log pi_t, log pi_prox_t, A_t)  -  entropy_bonus * H_t ]

`a` comes from the aggregation, `w` from the off-policy correction (pi_prox / mu, detached), A from the
advantage estimator. The proximal policy is either the current one (its ratio is 1 in value, and `w` corrects
the whole distance to the behaviour policy: decoupled PPO, Hilton et al. 2021, arXiv:2110.00641, with one step
per batch) or the behaviour policy (the ratio itself corrects, and w = 1). With `ratio = sequence` the loss sees
the mean of its sequence's log-ratios in place of each token's own: `ppo_clip` is then GSPO (Zheng et al. 2025,
arXiv:2507.18071).

Called by the learner: `estimate` once per batch, `token_loss` by the RL head for every chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from asyncrl.config import Algo
from asyncrl.trainers.advantages import ADVANTAGES, Outcomes
from asyncrl.trainers.aggregation import AGGREGATIONS, Aggregation
from asyncrl.trainers.corrections import CORRECTIONS, Correction
from asyncrl.trainers.losses import LOSSES, TokenLoss
from asyncrl.trainers.presets import resolve
from asyncrl.triton_kernels.segments import sequence_log_ratio


@dataclass(frozen=True)
class Tokens:
    """Precomputed data of n trained tokens, in the order of their labels. Tensors are [n] float32."""

    behaviour: Tensor
    """log mu, as the engine reported it."""
    advantage: Tensor
    weight: Tensor
    """`a`: aggregation weight."""
    lengths: Sequence[int]
    """Trained tokens of each sequence, in the order of the tokens; they add up to n."""

    def __getitem__(self, chunk: slice) -> Tokens:
        starts = accumulate(self.lengths, initial=0)
        cut = [
            min(start + n, chunk.stop) - max(start, chunk.start)
            for start, n in zip(starts, self.lengths, strict=False)
            if start < chunk.stop and start + n > chunk.start
        ]
        return Tokens(self.behaviour[chunk], self.advantage[chunk], self.weight[chunk], cut)

    def edges(self) -> Tensor:
        """[S + 1] int64: where each sequence starts, and n."""
        return torch.tensor([0, *accumulate(self.lengths)], device=self.weight.device)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, ready to run. `settings` is the resolved configuration that the parts read."""

    settings: Algo
    advantage: Callable[[Outcomes], Tensor]
    loss: TokenLoss
    aggregation: Aggregation
    correction: Correction

    @property
    def sequence_level(self) -> bool:
        """Whether `token_loss` must be given whole sequences."""
        return self.settings.ratio == "sequence"

    def token_loss(self, logp: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token; its sum over the batch is the batch's loss.

        Args:
            logp: [n] log-probs of the labels under the current policy, with gradient.
            entropy: [n] entropies of the distributions they were drawn from, with gradient.
            tokens: [n] their data.

        Returns:
            The losses [n], and per-token metrics [n], detached: `clipped` (0 or 1) and `weight` (w).
        """
        old = logp.detach() if self.settings.proximal == "current" else tokens.behaviour
        weight = self.correction(old - tokens.behaviour, self.settings)
        if self.sequence_level:
            ratio = sequence_log_ratio(logp, old, tokens.edges())
            loss, clipped = self.loss(ratio, torch.zeros_like(ratio), tokens.advantage, self.settings)
        else:
            loss, clipped = self.loss(logp, old, tokens.advantage, self.settings)
        loss = weight * loss
        if self.settings.entropy_bonus:
            loss = loss - self.settings.entropy_bonus * entropy
        return tokens.weight * loss, {"clipped": clipped.to(logp.dtype), "weight": weight}


def build(algo: Algo) -> Algorithm:
    """The algorithm that a configuration names.

    Raises:
        ValueError: see `asyncrl.trainers.presets.resolve`.
    """
    settings = resolve(algo)
    return Algorithm(
        settings=settings,
        advantage=ADVANTAGES[settings.advantage or ""],
        loss=LOSSES[settings.loss or ""],
        aggregation=AGGREGATIONS[settings.aggregation or ""],
        correction=CORRECTIONS[settings.correction or ""],
    )
