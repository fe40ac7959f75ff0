"""An implicit process reward model: rewards of single tokens, learned from nothing but how episodes ended.

Cui et al. 2025 (PRIME, arXiv:2502.01456, sections 3.1 and 3.2). A language model phi is trained so that the sum of
its log-ratios to a frozen reference tells success from failure; the log-ratio of a token is then its reward.

    r_t = beta (log phi_t - log ref_t),   loss = mean over sequences of CE(sigmoid(sum_t r_t), outcome)

How rewards become advantages is `asyncrl.trainers.token_advantages:prime`. Called by `asyncrl.learner.companions`,
which trains the model on a batch before it asks for the batch's rewards, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import model
from asyncrl.learner.dist import Ranks, sum_over_ranks
from asyncrl.learner.reference import Reference
from asyncrl.learner.rows import Row
from asyncrl.learner.trained import Trained
from asyncrl.triton_kernels.rl_head import HeadOutput, TokenLoss


class ProcessReward:
    """phi, its reference and its optimiser. Every method but `state` is collective."""

    def __init__(self, config: Config, path: str | Path, ranks: Ranks) -> None:
        """Loads phi and its reference from one folder; see `asyncrl.learner.model.load` for errors."""
        self._beta, self._temperature = config.process_reward.beta, config.sampling.temperature
        limit = config.learner.head_workspace_mb
        self._workspace = None if limit is None else limit << 20
        self._device = ranks.device
        self._policy = model.load(path, config.model.dtype, ranks)
        self._reference = Reference(path, config.model.dtype, ranks)
        self._trained = Trained(config, self._policy, config.process_reward.lr, "the process reward model")

    def rewards(self, row: Row) -> Tensor:
        """[n] float32, without gradient: beta (log phi - log ref) of each of the row's labels."""
        out = model.logp_of(self._policy, row, self._temperature, self._workspace)
        return self._beta * (out.logp - self._referred(row))

    def update(
        self, rows: Sequence[Row], outcomes: Sequence[Tensor], step: int, batch_id: int
    ) -> dict[str, float]:
        """One optimiser step on how sequences ended.

        Args:
            rows: this rank's.
            outcomes: for each row, [S] of its sequences: 1 success, 0 failure, NaN unknown. A sequence without
                labels is not trained on either.
            step: 1, 2, ...; fixes the learning rate.
            batch_id: for the error.

        Returns:
            The same on every rank: `process_loss`, `process_accuracy` (share of sequences on whose side of 0 the
            sum of rewards was, before the step) and `process_grad_norm`.

        Raises:
            NotFinite: nothing was applied.
        """
        cases = [_Case(row, of_row, self._beta) for row, of_row in zip(rows, outcomes, strict=True)]
        mine = torch.tensor([float(case.known.sum()) for case in cases], dtype=torch.float64).sum()
        sequences = max(1.0, float(sum_over_ranks(mine.to(self._device))))
        losses = [partial(self._loss, case, sequences) for case in cases]
        loss, norm, _ = self._trained.fit(losses, step, batch_id)
        right = sum_over_ranks(torch.stack([case.right for case in cases]).sum(0))
        return {"process_loss": loss, "process_accuracy": float(right) / sequences, "process_grad_norm": norm}

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint holds, by name; the reference never changes."""
        return self._trained.state()

    def _referred(self, row: Row) -> Tensor:
        return self._reference.logp(row, self._temperature, self._workspace)

    def _loss(self, case: _Case, sequences: float) -> Tensor:
        token_loss = case.token_loss(self._referred(case.row), 1 / sequences)
        out: HeadOutput = self._policy(
            model.head_loss, case.row, token_loss, self._temperature, self._workspace, True
        )
        return out.loss


class _Case:
    """A row's sequences and how they ended. S sequences, n labels."""

    def __init__(self, row: Row, outcomes: Tensor, beta: float) -> None:
        self.row, self._beta = row, beta
        device = row.labels.device
        lengths = torch.tensor(row.tokens.lengths, dtype=torch.int64, device=device)
        self._owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self._share = 1 / lengths.clamp(min=1)
        outcomes = outcomes.to(device, torch.float32)
        self.known = ~outcomes.isnan() & (lengths > 0)
        """[S] bool: sequences that are trained on."""
        self._outcome = torch.where(outcomes.isnan(), 0.0, outcomes)
        self.right = torch.zeros((), dtype=torch.float64, device=device)
        """Sequences that the sum of rewards judged rightly so far."""

    def token_loss(self, reference: Tensor, weight: float) -> TokenLoss:
        """`weight` times the cross-entropy of each sequence, in equal parts on its labels."""

        def loss(logp: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            owner = self._owner[part]
            rewards = self._beta * (logp - reference[part])
            total = rewards.new_zeros(len(self._outcome)).index_add(0, owner, rewards)
            each = F.binary_cross_entropy_with_logits(total, self._outcome, reduction="none")
            seen = torch.zeros_like(self.known).index_fill(0, owner, True) & self.known
            self.right += (((total > 0) == (self._outcome > 0.5)) & seen).sum()
            return (weight * seen * self._share * each)[owner], {}

        return loss
