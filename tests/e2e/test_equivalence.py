"""The asynchronous system does what a plain loop does: same batches, same losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.batches import BatchDesk
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.learner import dist
from asyncrl.learner.update import Trainer
from asyncrl.messages import NextBatch

pytestmark = pytest.mark.slow


def _plain_loop(run_dir: Path) -> list[dict[str, float]]:
    """One process, one rank, no sockets: trains on the run's batches one after the other."""
    journal = Journal.open(run_dir / "run.db")
    config = Config.model_validate_json(journal.get("config_json"))
    desk = BatchDesk(journal, config)
    metrics = []
    with dist.alone():
        trainer = Trainer(config, config.model.path or "")
        for step in range(1, config.train.steps + 1):
            batch, frames = desk.share(NextBatch(step, 0, 1))
            tokens, logprobs = (np.frombuffer(f, t) for f, t in zip(frames, (np.int32, np.float32), strict=True))
            metrics.append(trainer.train(batch, tokens, logprobs, step))
    journal.close()
    return metrics


def _recorded(run_dir: Path) -> list[dict[str, float]]:
    journal = Journal.open(run_dir / "run.db")
    rows = journal.rows("SELECT metrics_json FROM step ORDER BY step")
    journal.close()
    return [json.loads(row[0]) for row in rows]


def _column(metrics: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in metrics]


def test_max_lag_0_is_synchronous_training(start) -> None:
    run = start("--staleness.max_lag", "0", "--algo", "grpo", "--algo.filter", "none", "--steps", "6")
    assert run.wait() == 0, run.output()
    recorded, plain = _recorded(run.dir), _plain_loop(run.dir)
    assert _column(recorded, "loss") == pytest.approx(_column(plain, "loss"), abs=1e-5)
    assert _column(recorded, "grad_norm") == pytest.approx(_column(plain, "grad_norm"), rel=1e-4, abs=1e-5)
    # Every token was sampled by exactly the weights that the plain loop has when it trains on it: its own
    # log-probs and the engine's agree, and the journal says lag 0.
    for row in plain:
        assert row["ratio_min"] == pytest.approx(1.0, abs=1e-3)
        assert row["ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert row["lag_mean"] == 0.0


def test_two_ranks_train_as_one_rank_would_on_the_same_batches(start) -> None:
    run = start("--learner.ranks", "2", "--steps", "6")
    assert run.wait() == 0, run.output()
    recorded, plain = _recorded(run.dir), _plain_loop(run.dir)
    assert _column(recorded, "loss") == pytest.approx(_column(plain, "loss"), abs=1e-5)
    assert _column(recorded, "entropy") == pytest.approx(_column(plain, "entropy"), abs=1e-4)
