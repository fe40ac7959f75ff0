"""Cuts a sealed batch into the shares that the learner's ranks ask for.

It reads the journal and builds messages; it decides nothing (the scheduler sealed the batch and its plan).
Called by the hub, in its journal thread.
"""

from __future__ import annotations

import numpy as np

from asyncrl.config import Config
from asyncrl.groups import rows_of
from asyncrl.journal import Journal
from asyncrl.messages import Batch, NextBatch
from asyncrl.reclaim import explain_missing


class BatchDesk:
    """Answers `NextBatch` for batches that are in the journal, as often as it is asked."""

    def __init__(self, journal: Journal, config: Config) -> None:
        self._journal = journal
        self._config = config

    def share(self, wanted: NextBatch) -> tuple[Batch, list[memoryview]]:
        """The share of one rank, and its two frames: tokens (int32) and log-probs (float32).

        The plan was made for the number of ranks that the run was configured with. A learner of another
        size gets a plan of its own, which depends on the batch alone and so is the same for all its ranks.

        Raises:
            TokensGone: tokens of the batch were removed from the journal (`asyncrl.reclaim`).
            JournalError: tokens are damaged or missing.
        """
        sealed = self._journal.batch(wanted.step)
        rows = sealed.plan
        if len(rows) != wanted.ranks:
            learner = self._config.learner
            rows = rows_of(sealed.episodes, wanted.ranks, learner.token_budget, learner.minibatches)
        mine = rows[wanted.rank]
        order = [index for row in mine for index in row]
        ids = [sealed.episodes[index].episode_id for index in order]
        held = self._journal.episode_tokens(ids)
        for index in order:
            episode = sealed.episodes[index]
            if len(held[episode.episode_id].tokens) != episode.length:
                raise explain_missing(self._journal, wanted.step, episode.episode_id)
        tokens = np.concatenate([held[i].tokens for i in ids]) if ids else np.empty(0, np.int32)
        logprobs = np.concatenate([held[i].logprobs for i in ids]) if ids else np.empty(0, np.float32)
        spans = [list(held[i].spans) for i in ids]
        batch = Batch(wanted.step, sealed.batch_id, list(sealed.episodes), mine, spans)
        return batch, [tokens.data.cast("B"), logprobs.data.cast("B")]
