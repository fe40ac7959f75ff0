"""One optimiser step from one sealed batch.

    read rows -> count trained tokens over the ranks -> advantages, weights -> for each row: forward, RL head,
    backward -> loss and gradient norm over the ranks -> finite? -> clip, AdamW -> metrics

Collectives of a step, the same on every rank: two counts, FSDP's own, one check, two metric reductions.
`Trainer` holds the policy and its optimiser; it opens no socket and reads no journal. Called by
`asyncrl.learner.process` (batches from the hub) and `asyncrl.learner.sft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import model, rows
from asyncrl.learner.dist import Ranks, current, sum_over_ranks
from asyncrl.learner.optim import Optimizer, learning_rate
from asyncrl.learner.rows import Row, Share
from asyncrl.learner.selftest import self_test
from asyncrl.learner.stats import token_metrics
from asyncrl.messages import Batch, TensorMeta
from asyncrl.trainers.advantages import Outcomes
from asyncrl.trainers.aggregation import Totals
from asyncrl.trainers.algorithm import build
from asyncrl.trainers.shaping import overlong_penalty
from asyncrl.triton_kernels.rl_head import HeadOutput, TokenLoss


class NotFinite(RuntimeError):
    """The loss or the gradient norm is not finite; nothing was applied. Raised on every rank."""

    def __init__(self, step: int, batch_id: int, what: str) -> None:
        super().__init__(
            f"step {step}: {what} of batch {batch_id} is not finite; the step was not applied and the batch is "
            "kept in run.db. A lower learner.lr, or model.dtype = 'float32', is the usual remedy."
        )
        self.step, self.batch_id, self.what = step, batch_id, what


class Trainer:
    """The learner of one rank: policy shards, optimiser, algorithm. Every method that trains is collective."""

    def __init__(self, config: Config, path: str | Path) -> None:
        """Loads the model at `path`; `dist.init` comes first.

        Raises:
            FileNotFoundError, ValueError: see `asyncrl.learner.model.load`.
        """
        self.config = config
        self.ranks: Ranks = current(config.learner.device)
        self.algorithm = build(config.algo)
        self.policy = model.load(path, config.model.dtype, self.ranks)
        self._root = model.units(self.policy)[0]
        for unit in model.units(self.policy):
            # Plain sums: the losses are divided by global counts already.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self.optimizer = Optimizer(self.policy, config.learner)
        self.step = 0
        """Last step that was applied; the version of the weights."""

    def self_test(self) -> float:
        """Refuses a model that packed rows would train wrongly. Collective.

        Raises:
            PackingMismatch: see `asyncrl.learner.selftest`.
        """
        return self_test(self.policy, self.config.model.dtype, self.ranks.device)

    def train(self, batch: Batch, tokens: np.ndarray, logprobs: np.ndarray, step: int) -> dict[str, float]:
        """Trains on this rank's share of a batch and returns the step's metrics, the same on every rank.

        Args:
            batch: the share, as the hub sent it.
            tokens: int32, the tokens of `batch.rows`' episodes, in order.
            logprobs: float32, their behaviour log-probs.
            step: 1, 2, ...; fixes lags and learning rate.

        Raises:
            NotFinite: nothing was applied.
            ValueError: the batch does not fit together.
        """
        share = rows.read(batch, tokens, logprobs, step, rows.lag_limit(self.config))
        totals, sampled = self._count(share)
        rewards, advantages = self._advantages(batch)
        packed = rows.build(share, advantages, self.algorithm.aggregation, totals, self.ranks.device)
        outputs, metrics = self.fit(packed, self._loss_of, step, batch.batch_id)
        metrics |= token_metrics(packed, outputs, self.ranks.device)
        trained = sum(value for name, value in metrics.items() if name.startswith("lag_hist/"))
        metrics |= {
            "reward": float(np.mean(rewards)) if rewards else 0.0,
            "advantage_abs": float(np.abs(advantages).mean()) if len(advantages) else 0.0,
            "tokens_sampled": sampled,
            "tokens_trained": trained,
            "stale_share": 1 - trained / max(sampled, 1),
            "length_sampled": float(np.mean([e.sampled for e in batch.episodes])) if batch.episodes else 0.0,
            "length_trained": trained / max(totals.sequences, 1),
        }
        return metrics

    def fit(
        self, packed: Sequence[Row], loss_of: Callable[[Row], TokenLoss], step: int, batch_id: int
    ) -> tuple[list[HeadOutput], dict[str, float]]:
        """One optimiser step on packed rows whose weights are already global.

        Returns:
            The head's outputs by row, and the metrics `loss`, `grad_norm` and `lr`.

        Raises:
            NotFinite: nothing was applied.
        """
        outputs = []
        for i, row in enumerate(packed):
            self._root.set_requires_gradient_sync(i == len(packed) - 1)
            outputs.append(self._forward_backward(row, loss_of(row)))
        losses = torch.stack([out.loss.double() for out in outputs]).sum()
        loss, squared = sum_over_ranks(torch.stack([losses, self.optimizer.squared_norm()])).tolist()
        for what, value in (("the loss", loss), ("the gradient norm", squared)):
            if not math.isfinite(value):
                self.optimizer.zero()
                raise NotFinite(step, batch_id, what)
        norm = math.sqrt(squared)
        lr = learning_rate(self.config.learner, step, self.config.train.steps)
        self.optimizer.step(lr, min(1.0, self.config.learner.grad_clip / (norm + 1e-6)))
        self.optimizer.zero()
        self.step = step
        return outputs, {"loss": loss, "grad_norm": norm, "lr": lr}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.learner.model.weights`. Collective."""
        return model.weights(self.policy)

    def manifest(self) -> list[TensorMeta]:
        """Name, dtype and shape of what `weights` yields, in order; no communication."""
        return model.manifest(self.policy, self.config.model.dtype)

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint holds, by name."""
        parameters = {f"model.{name}": p for name, p in self.optimizer.named.items()}
        return parameters | {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}

    def _forward_backward(self, row: Row, token_loss: TokenLoss) -> HeadOutput:
        temperature, limit = self.config.sampling.temperature, self.config.learner.head_workspace_mb
        workspace = None if limit is None else limit << 20
        out: HeadOutput = self.policy(
            model.head_loss, row, token_loss, temperature, workspace, self.algorithm.sequence_level
        )
        out.loss.backward()
        return out._replace(loss=out.loss.detach())

    def _loss_of(self, row: Row) -> TokenLoss:
        return lambda logp, entropy, part: self.algorithm.token_loss(logp, entropy, row.tokens[part])

    def _count(self, share: Share) -> tuple[Totals, float]:
        """Trained tokens and sequences, and sampled tokens, of the whole batch."""
        lengths = share.trained_lengths
        mine = [float(lengths.sum()), float((lengths > 0).sum()), float(share.sampled)]
        counts = sum_over_ranks(torch.tensor(mine, dtype=torch.float64, device=self.ranks.device)).tolist()
        return Totals(max(counts[0], 1.0), max(counts[1], 1.0)), counts[2]

    def _advantages(self, batch: Batch) -> tuple[list[float], np.ndarray]:
        """The environment's rewards, and the advantage of every episode of the batch (shaped rewards)."""
        buffer = self.algorithm.settings.overlong_buffer or 0
        shaped = [
            0.0 if e.reward is None
            else e.reward + overlong_penalty(e.sampled, self.config.sampling.max_tokens, buffer)
            for e in batch.episodes
        ]  # fmt: skip
        _, group = np.unique([e.group_id for e in batch.episodes], return_inverse=True)
        outcomes = Outcomes(
            reward=torch.tensor(shaped, dtype=torch.float64),
            valid=torch.tensor([e.reward is not None for e in batch.episodes], dtype=torch.bool),
            group=torch.from_numpy(np.asarray(group, dtype=np.int64)),
            sampled=torch.tensor([e.sampled for e in batch.episodes], dtype=torch.float64),
        )
        rewards = [e.reward for e in batch.episodes if e.reward is not None]
        return rewards, self.algorithm.advantage(outcomes).numpy()
