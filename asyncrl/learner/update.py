"""One training step from one sealed batch.

    read tokens -> columns of the companions (extra forward passes, if the algorithm needs any) -> shaping,
    rejections, advantages, over the whole batch -> rows -> for each minibatch: for each row forward, RL head,
    backward; one optimiser step (`trained`); the critic's step -> metrics

Collectives of a step, the same on every rank: counts, columns of the whole batch, FSDP's own, one check, two
metric reductions. `Trainer` holds the policy, its optimiser and its companions; it opens no socket and reads no
journal. Called by `asyncrl.learner.process` (batches from the hub), `asyncrl.learner.sft` and
`asyncrl.learner.dpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner import model, rows
from asyncrl.learner.companions import Companions
from asyncrl.learner.critic import Fit
from asyncrl.learner.dist import Ranks, current
from asyncrl.learner.model import LossTerm
from asyncrl.learner.prepare import Prepared, prepare
from asyncrl.learner.rows import Row, Share
from asyncrl.learner.selftest import self_test
from asyncrl.learner.stats import token_metrics
from asyncrl.learner.trained import Trained
from asyncrl.messages import Batch, TensorMeta
from asyncrl.trainers.algorithm import build
from asyncrl.trainers.kl import adapt
from asyncrl.triton_kernels.rl_head import HeadOutput, TokenLoss


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
        shared = config.critic.shared and "value" in self.algorithm.needs
        self.policy = model.load(path, config.model.dtype, self.ranks, value_head=shared)
        self.companions = Companions(config, self.algorithm, self.policy, path, self.ranks)
        idle = config.critic.warmup_steps if "value" in self.algorithm.needs else 0
        # A shared critic trains in the policy's own steps, which therefore cannot be left out.
        self._trained = Trained(
            config, self.policy, config.learner.lr, "the policy", idle_steps=0 if shared else idle
        )
        self._idle_steps = idle
        self.optimizer = self._trained.optimizer
        self.kl_coef = torch.tensor(self.algorithm.settings.kl_coef, dtype=torch.float64)
        """Coefficient of the divergence from the reference now."""
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
            NotFinite: that update was not applied; of several minibatches, those before it were.
            ValueError: the batch does not fit together.
        """
        share = rows.read(batch, tokens, logprobs, step, rows.lag_limit(self.config))
        metrics, columns = self._ask_companions(batch, share, step)
        prepared = prepare(
            batch, share, columns, self.algorithm, self.config.sampling.max_tokens, float(self.kl_coef),
            self.config.learner.minibatches, self.ranks.device,
        )  # fmt: skip
        packed, values = self._rows(share, prepared), self._values(share, prepared, columns)
        outputs, fitted = self._minibatches(packed, values, step, batch.batch_id)
        metrics |= fitted | prepared.metrics | self._batch_metrics(batch, prepared)
        metrics |= token_metrics(packed, outputs, self.ranks.device)
        self.companions.renew_reference(step)
        self._adapt(metrics, int(prepared.outcomes.valid.sum()))
        self.step = step
        return metrics

    def fit(
        self,
        packed: Sequence[Row],
        loss_of: Callable[[Row], TokenLoss],
        step: int,
        batch_id: int,
        joint: Sequence[LossTerm | None] | None = None,
    ) -> tuple[list[HeadOutput], dict[str, float]]:
        """One optimiser step on packed rows whose weights are already global.

        `joint`: for each row, what is added to its loss: see `model.head_loss`.

        Returns:
            The head's outputs by row, and the metrics `loss`, `grad_norm` and `lr`.

        Raises:
            NotFinite: nothing was applied.
        """
        outputs: list[HeadOutput] = []
        terms = [None] * len(packed) if joint is None else joint
        losses = [
            partial(self._forward, row, loss_of(row), term, outputs)
            for row, term in zip(packed, terms, strict=True)
        ]
        fitted = self._trained.fit(losses, step, batch_id)
        return outputs, fitted._asdict()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.learner.model.weights`. Collective."""
        return model.weights(self.policy)

    def manifest(self) -> list[TensorMeta]:
        """Name, dtype and shape of what `weights` yields, in order; no communication."""
        return model.manifest(self.policy, self.config.model.dtype)

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint holds, by name."""
        parameters = {f"model.{name}": p for name, p in self.optimizer.named.items()}
        state = parameters | {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        state |= {f"companion.{name}": value for name, value in self.companions.state().items()}
        return state | ({"kl_coef": self.kl_coef} if self.algorithm.settings.kl_target else {})

    def _ask_companions(self, batch: Batch, share: Share, step: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics of those that learn before they are asked, and what all say about the share's candidates."""
        if not self.companions.wanted:
            return {}, {}
        candidates = rows.build(share, share.candidate, np.ones(len(share.lengths)), {}, self.ranks.device)
        metrics = self.companions.update_before(candidates, batch, share, step)
        return metrics, self.companions.columns(candidates)

    def _minibatches(
        self, packed: Sequence[Row], values: Sequence[Fit] | None, step: int, batch_id: int
    ) -> tuple[list[HeadOutput], dict[str, float]]:
        """One optimiser step for each minibatch; the outputs of all rows, and the means of the steps' metrics.

        Raises:
            ValueError: the rows were not planned for as many minibatches.
        """
        count = self.config.learner.minibatches
        if len(packed) % count:
            raise ValueError(f"batch {batch_id} has {len(packed)} rows, which are not {count} equal minibatches")
        outputs: list[HeadOutput] = []
        found: list[dict[str, float]] = []
        for part in range(count):
            mine = slice(part * len(packed) // count, (part + 1) * len(packed) // count)
            fits = None if values is None else values[mine]
            joint = self.companions.joint_terms(packed[mine], fits, float(self.kl_coef))
            of_part, metrics = self.fit(packed[mine], self._loss_of, step, batch_id, joint)
            metrics |= self.companions.update_critic(packed[mine], fits, step, batch_id)
            outputs += of_part
            found.append(metrics)
        means = {name: float(np.mean([metrics[name] for metrics in found])) for name in found[0]}
        return outputs, means | self.companions.divergence()

    def _forward(
        self, row: Row, token_loss: TokenLoss, joint: LossTerm | None, outputs: list[HeadOutput]
    ) -> Tensor:
        """Loss of one row; its details go to `outputs`."""
        temperature, limit = self.config.sampling.temperature, self.config.learner.head_workspace_mb
        workspace = None if limit is None else limit << 20
        out: HeadOutput = self.policy(
            model.head_loss, row, token_loss, temperature, workspace, self.algorithm.sequence_level, joint
        )
        outputs.append(out._replace(loss=out.loss.detach()))
        return out.loss

    def _loss_of(self, row: Row) -> TokenLoss:
        coef = float(self.kl_coef)
        return lambda logp, entropy, part: self.algorithm.token_loss(logp, entropy, row.tokens[part], coef)

    def _rows(self, share: Share, prepared: Prepared) -> list[Row]:
        """The rows of the trained tokens, each weighted by the aggregation; while a critic warms up, by 0."""
        counted = torch.from_numpy(share.count(prepared.trained)).double()
        parts = np.array(prepared.parts)[share.episode]
        weight = np.zeros(len(parts))
        for part, totals in enumerate(prepared.totals):
            chosen = parts == part
            weight[chosen] = self.algorithm.aggregation(counted[torch.from_numpy(chosen)], totals).numpy()
        if self.step < self._idle_steps:
            weight[:] = 0
        return rows.build(share, prepared.trained, weight, prepared.columns, self.ranks.device)

    def _values(self, share: Share, prepared: Prepared, columns: dict[str, Tensor]) -> list[Fit] | None:
        """For each row, what the critic is fitted to, as a mean over its minibatch; None without a critic."""
        if prepared.targets is None:
            return None
        kept = torch.from_numpy(prepared.trained[share.candidate])
        counted = share.count(prepared.trained)
        ends = np.cumsum(share.row_sizes)
        by_row = [int(counted[end - size : end].sum()) for end, size in zip(ends, share.row_sizes, strict=True)]
        share_of = np.array([1 / totals.tokens for totals in prepared.totals])[prepared.parts][share.episode]
        share_of = share_of * prepared.outcomes.valid.numpy()[share.episode]
        weight = torch.from_numpy(np.repeat(share_of, counted)).float()
        columns_of = (columns["value"][kept], prepared.targets.float()[kept], weight)
        cut = [column.to(self.ranks.device).split(by_row) for column in columns_of]
        return list(zip(*cut, strict=True))

    def _batch_metrics(self, batch: Batch, prepared: Prepared) -> dict[str, float]:
        """What is known of the batch's episodes."""
        episodes = [e for e in batch.episodes if not e.greedy]
        rewards = [e.reward for e in episodes if e.reward is not None]
        sampled, trained = prepared.metrics["tokens_sampled"], prepared.tokens_trained
        return {
            "reward": float(np.mean(rewards)) if rewards else 0.0,
            "tokens_trained": trained,
            "stale_share": 1 - trained / max(sampled, 1),
            "length_sampled": float(np.mean([e.sampled for e in episodes])) if episodes else 0.0,
            "length_trained": trained / sum(totals.sequences for totals in prepared.totals),
        }

    def _adapt(self, metrics: dict[str, float], episodes: int) -> None:
        """Moves the coefficient of an adaptive KL term."""
        settings = self.algorithm.settings
        if settings.kl_target and "reference_kl" in metrics:
            assert settings.kl_horizon is not None
            coef = adapt(
                float(self.kl_coef), metrics["reference_kl"], settings.kl_target, episodes, settings.kl_horizon
            )
            self.kl_coef.fill_(coef)
