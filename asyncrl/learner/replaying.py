"""Learner updates once more, from a run's journal: what they give now, beside what the run recorded.

    checkpoint at or before first - 1 ──▶ catch up ──▶ first … last: train, compare ──▶ state at last
                                             └─ a copy, with another algorithm ──▶ first … last ──▶ distance

No hub, no generators: `asyncrl.batches` reads the sealed batches from run.db, which is opened read-only, and
`asyncrl.learner.update` trains on them. Nothing of the run is written. Called by `asyncrl.replay` on every rank,
within a process group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.batches import BatchDesk
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.learner.checkpoint import CheckpointBroken, Checkpointer
from asyncrl.learner.digest import digest
from asyncrl.learner.dist import max_over_ranks, sum_over_ranks
from asyncrl.learner.export import export
from asyncrl.learner.update import Trainer
from asyncrl.messages import NextBatch
from asyncrl.metrics.reader import learned


class Step(NamedTuple):
    """One update: as it was recorded, and as it is now."""

    step: int
    recorded: dict[str, float]
    replayed: dict[str, float]
    recorded_digest: str
    """Empty: the run recorded none."""
    digest: str


class Distance(NamedTuple):
    """How far weights are from others: norm of the difference over the others' norm, largest single difference."""

    relative: float
    largest: float


@dataclass
class Replayed:
    """What came of a replay; the same on every rank."""

    start: int
    """Step of the checkpoint that it began with; 0: the initial model."""
    steps: list[Step] = field(default_factory=list)
    checkpoints: dict[int, Distance] = field(default_factory=dict)
    """The run's checkpoints among the replayed steps: distance of the replayed weights."""
    unequal: list[int] = field(default_factory=list)
    """Steps of those that differ, in weights, moments or anything else, by a bit."""
    other: list[Step] | None = None
    """The same steps with another algorithm."""
    moved: Distance | None = None
    """Distance of its weights at the end."""


def replay(
    run_dir: Path, config: Config, other: Config | None, first: int, last: int, out: Path | None
) -> Replayed:
    """Trains steps `first` to `last` again. Collective.

    Args:
        run_dir: the run's folder.
        config: the run's own; its `learner.ranks` may be another one.
        other: the same with another algorithm, which is trained besides, from the same state before `first`.
        first: 1, 2, ...
        last: a step that the run has recorded.
        out: folder to make, for the policy at the end (of the other algorithm, if there is one).

    Raises:
        JournalError: tokens are damaged, or were removed.
        CheckpointBroken, FileNotFoundError, ValueError: a checkpoint or model cannot be loaded.
        NotFinite: an update cannot be applied.
    """
    journal = Journal.open(run_dir / "run.db", read_only=True)
    try:
        own = _Updates(journal, run_dir, config)
        found = Replayed(own.checkpointer.load_latest(own.trainer, first - 1))
        for step in range(found.start + 1, first):
            own.train(step)
        before = _copied(own.trainer.state()) if other is not None else {}
        for update in own.steps(first, last):
            found.steps.append(update)
            held = own.stored(update.step)
            if held is not None:
                found.checkpoints[update.step] = distance(own.trainer.state(), held)
                if digest(held) != update.digest:
                    found.unequal.append(update.step)
        trainer = own.trainer
        if other is not None:
            after = _copied(trainer.state())
            changed = _Updates(journal, run_dir, other)
            _adopt(changed.trainer, before, first - 1)
            found.other = list(changed.steps(first, last))
            trainer, found.moved = changed.trainer, distance(changed.trainer.state(), after)
        if out is not None:
            assert config.model.path is not None
            export(trainer, Path(config.model.path), out)
    finally:
        journal.close()
    return found


class _Updates:
    """A trainer and the batches that it trains on."""

    def __init__(self, journal: Journal, run_dir: Path, config: Config) -> None:
        assert config.model.path is not None
        self._journal, self._desk = journal, BatchDesk(journal, config)
        self.trainer = Trainer(config, config.model.path)
        self.checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint)

    def train(self, step: int) -> dict[str, float]:
        """One update; its metrics."""
        ranks = self.trainer.ranks
        batch, (tokens, logprobs) = self._desk.share(NextBatch(step, ranks.rank, ranks.world_size))
        return self.trainer.train(
            batch, np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32), step
        )

    def stored(self, step: int) -> dict[str, Tensor] | None:
        """The state in the run's checkpoint of a step; None: there is none, or a run that goes on deletes it."""
        there = torch.tensor(step in self.checkpointer.complete())
        dist.broadcast(there, 0)  # Rank 0's look counts: the folder may change between two.
        if not there:
            return None
        try:
            return self.checkpointer.tensors(self.trainer, step)
        except CheckpointBroken:
            if step in self.checkpointer.complete():
                raise
            return None

    def steps(self, first: int, last: int) -> Iterator[Step]:
        """Trains; each step beside its record."""
        for step in range(first, last + 1):
            metrics = self.train(step)
            text, recorded = self._journal.rows("SELECT metrics_json, digest FROM step WHERE step = ?", step)[0]
            yield Step(step, learned(json.loads(text)), metrics, recorded, digest(self.trainer.state()))


@torch.no_grad()
def distance(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Distance:
    """How far the weights (`model.…`) of a state are from another's. Collective."""
    squares = torch.zeros(2, dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for name, tensor in state.items():
        if name.startswith("model.") and name in other:
            mine, theirs = _local(tensor).double(), _local(other[name]).double()
            gap = mine - theirs
            squares += torch.stack([gap.square().sum(), theirs.square().sum()]).cpu()
            largest = torch.maximum(largest, gap.abs().max().cpu()) if gap.numel() else largest
    device = next(_local(tensor).device for name, tensor in state.items() if name.startswith("model."))
    gap_of_all, norm_of_all = sum_over_ranks(squares.to(device)).tolist()
    return Distance(math.sqrt(gap_of_all / max(norm_of_all, 1e-300)), float(max_over_ranks(largest.to(device))))


@torch.no_grad()
def _adopt(trainer: Trainer, state: Mapping[str, Tensor], step: int) -> None:
    """Goes on from another trainer's state. What that one did not have (a critic, say) begins as in a new run."""
    for name, tensor in trainer.state().items():
        if name in state:
            tensor.copy_(state[name])
    trainer.step = step


@torch.no_grad()
def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
