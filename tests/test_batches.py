"""Shares of a sealed batch: every rank sees all episodes, and gets the tokens of its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import records
from asyncrl.batches import BatchDesk
from asyncrl.config import Config
from asyncrl.groups import rows_of
from asyncrl.journal import Journal
from asyncrl.messages import Chunk, EpisodeMeta, NextBatch, Task

LENGTHS = {3: 8, 4: 5, 5: 9, 6: 7, 7: 2, 8: 9}
GREEDY = {5, 8}
RANKS, BUDGET = 2, 512


def tokens_of(episode_id: int) -> np.ndarray[Any, Any]:
    return np.arange(LENGTHS[episode_id], dtype="<i4") + 100 * episode_id


@pytest.fixture(params=[1, 2], ids=["whole", "minibatches"])
def minibatches(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def desk(tmp_path: Path, minibatches: int) -> BatchDesk:
    """Two groups of two episodes and a greedy baseline, sealed for two ranks."""
    journal = Journal.create(tmp_path / "run.db", "a-run", "{}")
    journal.write([records.task(0, 0, Task("t", []))])
    metas = []
    for i, n in LENGTHS.items():
        tokens = tokens_of(i)
        journal.write([records.episode(i, i // 3, 0, greedy=i in GREEDY)])
        ended = records.episode_ended(
            i, state="done", reason="", status="completed", reward=i / 8, rewards={"right": i / 8}, turns=1,
            info={}, next_seq=1, length=n, sampled=n, min_version=0, max_version=0, ended=1.0,
        )  # fmt: skip
        chunk = records.chunk(Chunk(0, i, 0, n, 0, True), tokens.tobytes(), (-tokens.astype("<f4")).tobytes())
        journal.write([ended, chunk])
        metas.append(EpisodeMeta(i, i // 3, i / 8, "completed", n, n, {"right": i / 8}, greedy=i in GREEDY))
    plan = rows_of(metas, RANKS, BUDGET, minibatches)
    journal.write([records.batch(1, [1, 2], list(LENGTHS), plan, 7, 2.0)])
    learner = {"ranks": RANKS, "token_budget": BUDGET, "minibatches": minibatches}
    config = Config.model_validate({"learner": learner})
    return BatchDesk(journal, config)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_learner_of_any_size_gets_every_episode_but_the_baselines_in_one_row(
    desk: BatchDesk, minibatches: int, ranks: int
) -> None:
    packed: list[int] = []
    for rank in range(ranks):
        batch, (tokens, logprobs) = desk.share(NextBatch(1, rank, ranks))
        assert [episode.episode_id for episode in batch.episodes] == list(LENGTHS)
        assert {episode.episode_id for episode in batch.episodes if episode.greedy} == GREEDY
        assert all(episode.rewards == {"right": episode.reward} for episode in batch.episodes)
        mine = [batch.episodes[index].episode_id for row in batch.rows for index in row]
        groups = [{batch.episodes[index].group_id for index in row} for row in batch.rows]
        piece, odd = divmod(len(groups), minibatches)
        assert not odd
        if minibatches == 2:
            assert set().union(*groups[:piece]) <= {1}
            assert set().union(*groups[piece:]) <= {2}
        expected = np.concatenate([tokens_of(i) for i in mine] or [np.empty(0, "<i4")])
        assert np.array_equal(np.frombuffer(tokens, "<i4"), expected)
        assert np.array_equal(np.frombuffer(logprobs, "<f4"), -expected.astype("<f4"))
        assert [sum(span.n for span in spans) for spans in batch.spans] == [LENGTHS[i] for i in mine]
        packed += mine
    assert sorted(packed) == sorted(LENGTHS.keys() - GREEDY)
