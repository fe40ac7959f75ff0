"""The metrics of a step's tokens against numpy, on rows made by hand."""

import numpy as np
import pytest
import torch

from asyncrl.learner import dist
from asyncrl.learner.rows import Row
from asyncrl.learner.stats import BUCKETS, LAGS, token_metrics
from asyncrl.trainers.tokens import Tokens
from asyncrl.triton_kernels.rl_head import HeadOutput

LAG = [0, 0, 1, 3, 4, 7, 8, 20, 63, 64, 200, 2]


@pytest.fixture(autouse=True)
def _alone():
    with dist.alone():
        yield


def row_of(behaviour, lag):
    """A row of which only the tokens' data matter."""
    none, n = torch.zeros(0, dtype=torch.int64), len(lag)
    zeros = torch.zeros(n)
    data = Tokens(torch.tensor(behaviour), zeros, zeros, [n], lag=torch.tensor(lag, dtype=torch.int64))
    return Row(none, none, None, none, none, data)


def output_of(logp, entropy, clipped, weight):
    """What the head leaves; a row without tokens has no metrics."""
    metrics = {"clipped": torch.tensor(clipped), "weight": torch.tensor(weight)} if len(logp) else {}
    return HeadOutput(torch.tensor(0.0), torch.tensor(logp), torch.tensor(entropy), metrics, None)


@pytest.fixture
def made():
    """Columns of twelve tokens, and their metrics when they are packed in three rows, one of them empty."""
    rng = np.random.default_rng(0)
    n = len(LAG)
    columns = {
        "logp": -rng.random(n).astype(np.float32),
        "behaviour": -rng.random(n).astype(np.float32),
        "entropy": rng.random(n).astype(np.float32),
        "clipped": (rng.random(n) < 0.5).astype(np.float32),
        "weight": np.where(rng.random(n) < 0.4, 0, rng.random(n)).astype(np.float32),
    }
    rows, outputs = [], []
    for part in (slice(0, 5), slice(5, 5), slice(5, n)):
        cut = {name: column[part] for name, column in columns.items()}
        rows.append(row_of(cut.pop("behaviour"), LAG[part]))
        outputs.append(output_of(**cut))
    return columns, token_metrics(rows, outputs, torch.device("cpu"))


def test_means_and_extremes_equal_numpys(made):
    c, metrics = made
    log = c["logp"].astype(float) - c["behaviour"]
    ratio, lag = np.exp(log), np.array(LAG)
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "chi2": (ratio**2).mean() - 1,
        "kl": (ratio - 1 - log).mean(),
        "kl_k1": -log.mean(),
        "entropy": c["entropy"].mean(),
        "clipped": c["clipped"].mean(),
        "weight_mean": c["weight"].mean(),
        "masked": (c["weight"] == 0).mean(),
        "lag_mean": lag.mean(),
        "lag_max": lag.max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < metrics["masked"] < 1
    assert set(metrics) - set(expected) == {name for name in metrics if "/" in name}


def test_every_lag_has_its_count_and_its_effective_sample_size(made):
    c, metrics = made
    ratio, bins = np.exp(c["logp"].astype(float) - c["behaviour"]), np.minimum(LAG, LAGS - 1)
    expected = {}
    for lag in set(bins.tolist()):
        mine = ratio[bins == lag]
        expected[f"lag_hist/{lag}"] = len(mine)
        expected[f"ess_lag/{lag}"] = mine.sum() ** 2 / (len(mine) * (mine**2).sum())
    found = {name: value for name, value in metrics.items() if name.startswith(("lag_hist/", "ess_lag/"))}
    assert found == pytest.approx(expected, rel=1e-5)


def test_means_by_lag_are_taken_over_buckets_named_by_their_lower_edge(made):
    c, metrics = made
    log = c["logp"].astype(float) - c["behaviour"]
    columns = {
        "ratio_lag": np.exp(log),
        "kl_lag": np.exp(log) - 1 - log,
        "clipped_lag": c["clipped"],
        "masked_lag": c["weight"] == 0,
    }
    lag, expected = np.array(LAG), {}
    for low, high in zip(BUCKETS, [*BUCKETS[1:], np.inf], strict=True):
        inside = (lag >= low) & (lag < high)
        if inside.any():
            expected |= {f"{name}/{low}": column[inside].mean() for name, column in columns.items()}
    found = {name: value for name, value in metrics.items() if name.split("/")[0] in columns}
    assert found == pytest.approx(expected, rel=1e-5)
    assert "ratio_lag/32" in found
    assert "ratio_lag/64" in found


def test_a_bucket_without_tokens_is_left_out():
    rows, outputs = [row_of([-1.0], [5])], [output_of([-1.0], [0.5], [0.0], [1.0])]
    metrics = token_metrics(rows, outputs, torch.device("cpu"))
    assert {name for name in metrics if name.startswith("ratio_lag/")} == {"ratio_lag/4"}


def test_on_policy_tokens_have_a_ratio_of_one_no_divergence_and_a_full_sample_size():
    rows, outputs = [row_of([-1.0, -2.0], [0, 0])], [output_of([-1.0, -2.0], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0])]
    metrics = token_metrics(rows, outputs, torch.device("cpu"))
    names = ("ratio_mean", "ratio_min", "ratio_max", "ess", "chi2", "kl", "kl_k1", "masked")
    assert [metrics[name] for name in names] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_step_without_trained_tokens_reports_zeros():
    metrics = token_metrics([row_of([], [])], [output_of([], [], [], [])], torch.device("cpu"))
    assert set(metrics.values()) == {0.0}
    assert not any("/" in name for name in metrics)
