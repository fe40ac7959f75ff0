"""Sampling batches in the learner's own process, with weights that the caller chooses.

The real engine and episode loop, without hub and sockets: groups are drawn until enough of them pass the
algorithm's filter, and packed as the hub packs them. Called by `staleness.py`.
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.generator.engines.base import StagedWeights
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Batch, Chunk, EpisodeEnd, EpisodeMeta, Lease
from asyncrl.packing import plan
from asyncrl.trainers.filters import group_filter
from asyncrl.trainers.presets import resolve

ROUNDS = 4
"""A batch draws at most about this many times its tasks."""
TASKS_PER_SEED = 1_000_000
Episode = tuple[EpisodeMeta, TokenRecord]


class Ends:
    """A sink that keeps how episodes ended; their tokens are in their records."""

    def __init__(self) -> None:
        self.by_id: dict[int, EpisodeEnd] = {}

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        """Takes a chunk."""

    def end(self, end: EpisodeEnd) -> None:
        """Takes the end."""
        self.by_id[end.episode_id] = end


class Actor:
    """The generator's engine and episode loop, and the hub's choice of groups, in this process."""

    def __init__(self, config: Config, world: World, ends: Ends) -> None:
        """The sink of `world` is `ends`."""
        self._config, self._world, self._ends = config, world, ends
        self._keep = group_filter(resolve(config.algo))
        self._groups = itertools.count()
        self.rewards: list[float] = []
        """Of all episodes since the last batch."""

    async def batch(
        self, step: int, weights: dict[str, torch.Tensor], version: int
    ) -> tuple[Batch, np.ndarray, np.ndarray]:
        """The arguments of `Trainer.train` but for the step, sampled with these weights.

        A policy that always or never succeeds passes no filter; then the last groups are the batch.
        """
        await self._world.engine.update(StagedWeights(version, list(weights.items())), "recompute")
        self.rewards = []
        kept: list[list[Episode]] = []
        wanted, drawn = self._config.train.groups_per_step, 0
        while len(kept) < wanted and drawn < ROUNDS * wanted:
            found = await asyncio.gather(*(self._group() for _ in range(wanted - len(kept))))
            drawn += len(found)
            self.rewards += [meta.reward or 0.0 for group in found for meta, _ in group]
            kept += [group for group in found if self._keep([meta.reward for meta, _ in group]) is None]
        return self._packed(step, [episode for group in kept or found for episode in group])

    async def _group(self) -> list[Episode]:
        group, size = next(self._groups), self._config.train.group_size
        index = self._config.run.seed * TASKS_PER_SEED + group
        task = self._world.environment.task("train", index)
        leases = [Lease(group * size + i, group * size + i, task, index * size + i) for i in range(size)]
        return await asyncio.gather(*(self._episode(group, lease) for lease in leases))

    async def _episode(self, group: int, lease: Lease) -> Episode:
        record = TokenRecord()
        await EpisodeRunner(self._world, lease, record).run()
        end = self._ends.by_id.pop(lease.episode_id)
        sampled = sum(span.n for span in record.spans if span.sampled)
        meta = EpisodeMeta(end.episode_id, group, end.reward, end.status, len(record.ids), sampled, end.rewards)
        return meta, record

    def _packed(self, step: int, episodes: list[Episode]) -> tuple[Batch, np.ndarray, np.ndarray]:
        (rows,) = plan([meta.length for meta, _ in episodes], 1, self._config.learner.token_budget)
        records = [episodes[index][1] for row in rows for index in row]
        batch = Batch(step, step, [meta for meta, _ in episodes], rows, [record.spans for record in records])
        tokens = np.concatenate([np.asarray(record.ids, np.int32) for record in records])
        return batch, tokens, np.concatenate([np.asarray(record.logprobs, np.float32) for record in records])
