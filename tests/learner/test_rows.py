"""Rows of episodes whose chat template rewrote earlier turns: a branch is a segment, a sampled token a label.

The shares are those that the hub would cut: two ranks, two minibatches, tokens of several ages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asyncrl import records
from asyncrl.batches import BatchDesk
from asyncrl.config import Config
from asyncrl.groups import rows_of
from asyncrl.journal import Journal
from asyncrl.learner.rows import Share, build, lag_limit, read
from asyncrl.messages import Chunk, EpisodeMeta, NextBatch

Part = tuple[list[int], int, bool, bool]
"""Tokens, version, sampled, fork."""
FORKED: list[Part] = [
    ([1, 2, 3], -1, False, False),
    ([10, 11], 0, True, False),
    ([12], 4, True, False),
    ([1, 2, 3, 40, 41], -1, False, True),
    ([13, 14], 4, True, False),
    ([50], -1, False, False),
    ([15], 0, True, False),
    ([1, 2, 3, 60], -1, False, True),
    ([16], 5, True, False),
]
PLAIN: list[Part] = [([1, 2, 3], -1, False, False), ([20, 21], 5, True, False)]
OLD: list[Part] = [([1, 2, 3], -1, False, False), ([30], 0, True, False), ([1, 2], -1, False, True)]
EPISODES = {0: FORKED, 1: PLAIN, 2: OLD, 3: PLAIN}
STEP = 6


def _shares(folder: Path, over_age: str) -> list[tuple[Share, list[int]]]:
    """What each of two ranks reads, and which episodes it holds."""
    config = Config.model_validate(
        {
            "staleness": {"over_age": over_age, "max_lag": 2, "max_token_age": 99},
            "learner": {"ranks": 2, "minibatches": 2, "token_budget": 30},
            "generator": {"max_model_len": 30},
            "sampling": {"max_tokens": 8},
            "train": {"groups_per_step": 2, "group_size": 2},
        }
    )
    journal = Journal.create(folder / "run.db", "run", "{}")
    rows = []
    for episode, parts in EPISODES.items():
        length, sampled = sum(len(p[0]) for p in parts), sum(len(p[0]) for p in parts if p[2])
        rows.append(records.episode(episode, episode // 2, 0))
        rows.append(
            records.episode_ended(
                episode, state="done", reason="", status="completed", reward=1.0, rewards={}, turns=1, info={},
                next_seq=len(parts), length=length, sampled=sampled, min_version=0, max_version=5, ended=0.0,
            )
        )  # fmt: skip
        for seq, (ids, version, was_sampled, fork) in enumerate(parts):
            logprobs = -np.array(ids, "<f4")
            header = Chunk(0, episode, seq, len(ids), version, was_sampled, fork)
            rows.append(records.chunk(header, np.array(ids, "<i4").tobytes(), logprobs.tobytes()))
    metas = [
        EpisodeMeta(e, e // 2, 1.0, "completed", sum(len(p[0]) for p in parts), 1) for e, parts in EPISODES.items()
    ]
    rows.append(records.batch(STEP, [0, 1], list(EPISODES), rows_of(metas, 2, 30, 2), 0, 0.0))
    journal.write(rows)
    shares = []
    for rank in range(2):
        batch, (ids, logprobs) = BatchDesk(journal, config).share(NextBatch(STEP, rank, 2))
        tokens, behaviour = np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32)
        shares.append(
            (read(batch, tokens, behaviour, STEP, lag_limit(config)), [i for r in batch.rows for i in r])
        )
    return shares


def _labels(share: Share) -> list[list[int]]:
    """The labels of each sequence; each row is checked on the way."""
    found = []
    for row in build(share, share.trained, np.ones(len(share.lengths)), {}, torch.device("cpu")):
        assert torch.equal(row.tokens.behaviour, -row.labels.float())
        # No label is predicted from another branch: its state is the token that stands before it in its own.
        before = {10: 3, 11: 10, 12: 11, 13: 41, 14: 13, 15: 50, 16: 60, 20: 3, 21: 20, 30: 3}
        assert row.ids[row.states].tolist() == [before[label] for label in row.labels.tolist()]
        # What stands between the start of its branch and a label has consecutive positions.
        position = {10: 3, 11: 4, 12: 5, 13: 5, 14: 6, 15: 8, 16: 4, 20: 3, 21: 4, 30: 3}
        assert row.positions[row.states].tolist() == [position[label] - 1 for label in row.labels.tolist()]
        found += [part.tolist() for part in row.labels.split(list(row.tokens.lengths))]
    return found


def _sampled(episode: int, oldest: int) -> list[int]:
    return [i for ids, version, sampled, _ in EPISODES[episode] if sampled and version >= oldest for i in ids]


def test_every_sampled_token_of_every_branch_is_a_label_once_on_one_rank(tmp_path: Path) -> None:
    shares = _shares(tmp_path, "train")
    assert sorted(i for _, episodes in shares for i in episodes) == [0, 1, 2, 3]
    for share, episodes in shares:
        assert _labels(share) == [_sampled(episode, 0) for episode in episodes]


def test_over_age_tokens_of_any_branch_are_masked_and_stay_context(tmp_path: Path) -> None:
    for share, episodes in _shares(tmp_path, "mask"):
        assert _labels(share) == [_sampled(episode, STEP - 1 - 2) for episode in episodes]
        assert share.count(share.candidate).tolist() == [len(_sampled(episode, 0)) for episode in episodes]
