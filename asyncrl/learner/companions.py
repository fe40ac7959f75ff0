"""The models beside the policy that an algorithm asks for, and what they say about a batch's tokens.

    needs        model                                 column
    logp         the policy, before the update         logp: log pi of each token
    squares      the policy, before the update         squares: sum over the vocabulary of pi squared
    reference    a frozen policy                       reference: its log-prob of each token
    value        a critic                              value: of the state before each token
    process      an implicit process reward model      process: its reward of each token

Each column costs a forward pass over the batch; an algorithm that needs nothing has no companion. Called by
`asyncrl.learner.update`, which trains the policy; the models train themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.critic import Critic, Fit, SharedCritic
from asyncrl.learner.dist import Ranks, sum_over_ranks
from asyncrl.learner.full_kl import FullKl
from asyncrl.learner.model import LossTerm, Policy, logp_of
from asyncrl.learner.process_reward import ProcessReward
from asyncrl.learner.reference import Reference
from asyncrl.learner.rows import Row, Share
from asyncrl.messages import Batch
from asyncrl.trainers.algorithm import Algorithm


class Companions:
    """What the algorithm of a run needs; every method is collective."""

    def __init__(
        self, config: Config, algorithm: Algorithm, policy: Policy, path: str | Path, ranks: Ranks
    ) -> None:
        """Loads the models; `path` is the policy's initial folder, which also is the reference."""
        self._config, self._policy = config, policy
        needs = self._needs = algorithm.needs
        self.reference: Reference | None = None
        if needs & {"reference", "reference_model"}:
            self.reference = Reference(path, config.model.dtype, ranks)
        self.critic: Critic | SharedCritic | None = None
        if "value" in needs:
            own = config.critic.path or path
            self.critic = SharedCritic(config, policy) if config.critic.shared else Critic(config, own, ranks)
        process = config.process_reward.path or path
        self.process = ProcessReward(config, process, ranks) if "process" in needs else None
        self._every = algorithm.settings.reference_every or 0
        limit = config.learner.head_workspace_mb
        self._workspace = None if limit is None else limit << 20
        self._divergences: list[FullKl] = []
        self.wanted = bool(needs - {"greedy", "reference_model"})
        """Whether anything has to be computed before the update."""

    def columns(self, packed: Sequence[Row]) -> dict[str, Tensor]:
        """What the algorithm needs to know about the labels of all rows, [C] each, on the CPU."""
        temperature, workspace = self._config.sampling.temperature, self._workspace
        found: dict[str, Tensor] = {}
        if self._needs & {"logp", "squares"}:
            squares = "squares" in self._needs
            outputs = [logp_of(self._policy, row, temperature, workspace, squares) for row in packed]
            found["logp"] = _joined(out.logp for out in outputs)
            if squares:
                found["squares"] = _joined(out.squares for out in outputs if out.squares is not None)
        if self.reference is not None and "reference" in self._needs:
            reference = self.reference
            found["reference"] = _joined(reference.logp(row, temperature, workspace) for row in packed)
        if self.critic is not None:
            found["value"] = _joined(map(self.critic.values, packed))
        if self.process is not None:
            found["process"] = _joined(map(self.process.rewards, packed))
        return found

    def update_before(self, packed: Sequence[Row], batch: Batch, share: Share, step: int) -> dict[str, float]:
        """Trains the process reward model on how the batch's episodes ended, before it is asked; its metrics."""
        if self.process is None:
            return {}
        threshold = self._config.process_reward.threshold
        ended = [batch.episodes[i] for i in share.episode]
        succeeded = [torch.nan if e.reward is None else float(e.reward > threshold) for e in ended]
        outcomes = torch.tensor(succeeded).split(share.row_sizes)
        return self.process.update(packed, list(outcomes), step, batch.batch_id)

    def joint_terms(
        self, packed: Sequence[Row], values: Sequence[Fit] | None, kl_coef: float
    ) -> Sequence[LossTerm | None]:
        """For each row, what the policy's own update trains besides: a value head, or the divergence over the
        whole vocabulary, or both."""
        joint: list[LossTerm | None] = [None] * len(packed)
        if values is not None and isinstance(self.critic, SharedCritic):
            joint = [self.critic.term(*of_row) for of_row in values]
        if self.reference is not None and "reference_model" in self._needs:
            temperature = self._config.sampling.temperature
            for i, row in enumerate(packed):
                scale = kl_coef * row.tokens.weight
                term = FullKl(self._policy, self.reference, row, scale, temperature, self._workspace)
                self._divergences.append(term)
                joint[i] = _both(joint[i], term)
        return joint

    def divergence(self) -> dict[str, float]:
        """Mean over all labels of the divergence over the whole vocabulary that the last update saw."""
        terms, self._divergences = self._divergences, []
        found = [term.kl.double() for term in terms if term.kl is not None]
        if not found:
            return {}
        sums = torch.stack([torch.stack([kl.sum(), torch.ones_like(kl).sum()]) for kl in found]).sum(0)
        total, count = sum_over_ranks(sums).tolist()
        return {"reference_kl": total / max(count, 1.0)}

    def update_critic(
        self, packed: Sequence[Row], values: Sequence[Fit] | None, step: int, batch_id: int
    ) -> dict[str, float]:
        """Trains the critic on the rows that the policy was trained on. Returns metrics."""
        if self.critic is None or values is None:
            return {}
        return self.critic.fit(packed, values, step, batch_id)

    def renew_reference(self, step: int) -> None:
        """After a step: the reference becomes a copy of the policy, where the algorithm wants that."""
        if self.reference is not None and self._every and step % self._every == 0:
            self.reference.copy_from(self._policy)

    def state(self) -> dict[str, Tensor]:
        """Every live tensor that a checkpoint must hold, by name. A reference that never changes is not held."""
        models: dict[str, Callable[[], dict[str, Tensor]]] = {}
        if self.reference is not None and self._every:
            models["reference"] = self.reference.state
        if self.critic is not None:
            models["critic"] = self.critic.state
        if self.process is not None:
            models["process"] = self.process.state
        return {f"{model}.{name}": value for model, state in models.items() for name, value in state().items()}


def _both(first: LossTerm | None, second: LossTerm) -> LossTerm:
    return second if first is None else lambda hidden: first(hidden) + second(hidden)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().float().cpu() for part in parts])
