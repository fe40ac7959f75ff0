"""What a step reports about its tokens: importance ratios, effective sample size, lags, masks, entropy, KL.

Each rank sums over its own tokens; one sum and one maximum over the ranks make the step's metrics. Nothing here
influences training. Called by `asyncrl.learner.update`.

r = pi / mu of the trained tokens, before the update of their minibatch, mu as the engine reported it. Over all
of them:

    ratio_mean, ratio_min, ratio_max    of r
    ess            (sum r)^2 / (n sum r^2), in (0, 1]: effective sample size over sample size (Kong 1992)
    chi2           mean of r^2, minus 1: an estimate of the chi-squared divergence
    kl, kl_k1      estimates of KL(mu || pi): r - 1 - log r, never negative, and -log r, unbiased (Schulman 2020,
                   "Approximating KL divergence")
    clipped        share of tokens whose gradient or ratio the loss cut
    weight_mean    mean weight of corrections and rejections
    masked         share of tokens with weight 0
    entropy, lag_mean, lag_max

and by lag: `lag_hist/k` counts the tokens of lag k, `ess_lag/k` is their effective sample size (k below `LAGS`;
the last bin holds the rest). `ratio_lag/k`, `masked_lag/k`, `clipped_lag/k` and `kl_lag/k` are means over the
lags from k to the next of `BUCKETS`. Bins without tokens are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asyncrl.learner.dist import max_over_ranks, sum_over_ranks
from asyncrl.learner.rows import Row
from asyncrl.trainers.losses import ratio_of
from asyncrl.triton_kernels.rl_head import HeadOutput

LAGS = 64
"""Lags are counted one by one below this; the last bin holds the rest."""
BUCKETS = (0, 1, 2, 3, 4, 8, 16, 32, 64)
"""Smallest lag of each bucket; the last one is open."""
MEANS = ("ratio_mean", "kl", "kl_k1", "entropy", "clipped", "weight_mean", "masked", "lag_mean")
BUCKETED = {"ratio_mean": "ratio_lag", "masked": "masked_lag", "clipped": "clipped_lag", "kl": "kl_lag"}
"""Those of the means that are reported by lag too, and as what."""


def token_metrics(rows: Sequence[Row], outputs: Sequence[HeadOutput], device: torch.device) -> dict[str, float]:
    """Metrics of all trained tokens of all ranks; see the module docstring. Collective."""
    columns, lag = _columns(rows, outputs, device)
    ratio, ones = columns["ratio_mean"], torch.ones_like(columns["ratio_mean"])
    bucket = torch.bucketize(lag, torch.tensor(BUCKETS, device=device), right=True) - 1
    parts = [
        *(columns[name].sum()[None] for name in MEANS),
        *(_by(lag.clamp(max=LAGS - 1), values, LAGS) for values in (ones, ratio, ratio.square())),
        *(_by(bucket, values, len(BUCKETS)) for values in (ones, *(columns[name] for name in BUCKETED))),
    ]
    sums = sum_over_ranks(torch.cat(parts))
    edge = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    largest = [torch.cat([values, edge]).max() for values in (ratio, -ratio, lag.double())]
    return _named(sums.tolist(), max_over_ranks(torch.stack(largest)).tolist())


def _columns(
    rows: Sequence[Row], outputs: Sequence[HeadOutput], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """[n] float64 by name of `MEANS`, and [n] int64 lags, of this rank's trained tokens."""
    logp, entropy = (torch.cat([getattr(out, name) for out in outputs]) for name in ("logp", "entropy"))
    behaviour = torch.cat([row.tokens.behaviour for row in rows])
    lag = torch.cat([row.tokens.lag for row in rows if row.tokens.lag is not None]).clamp(min=0)
    ratio, weight = ratio_of(logp, behaviour).double(), _joined(outputs, "weight", device)
    kl_k1 = (behaviour - logp).double()
    columns = {
        "ratio_mean": ratio,
        "kl": ratio - 1 + kl_k1,
        "kl_k1": kl_k1,
        "entropy": entropy.double(),
        "clipped": _joined(outputs, "clipped", device),
        "weight_mean": weight,
        "masked": (weight == 0).double(),
        "lag_mean": lag.double(),
    }
    return columns, lag


def _joined(outputs: Sequence[HeadOutput], name: str, device: torch.device) -> Tensor:
    """[n] a metric of the loss; rows without tokens have none."""
    parts = [out.metrics[name] for out in outputs if name in out.metrics]
    return torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64, device=device)


def _by(bins: Tensor, values: Tensor, count: int) -> Tensor:
    """[count] float64: the sum of the values of each bin."""
    return torch.bincount(bins, values, count).double()


def _named(sums: list[float], largest: list[float]) -> dict[str, float]:
    """Names and divides what was reduced; a step without trained tokens reports only zeros."""
    numbers = iter(sums)
    means = _take(numbers, len(MEANS))
    count, first, second = (_take(numbers, LAGS) for _ in range(3))
    held, *bucketed = (_take(numbers, len(BUCKETS)) for _ in range(1 + len(BUCKETED)))
    n = sum(count)
    metrics = {name: value / max(n, 1) for name, value in zip(MEANS, means, strict=True)}
    metrics["ess"] = sum(first) ** 2 / (n * sum(second)) if n else 0.0
    metrics["chi2"] = sum(second) / n - 1 if n else 0.0
    for name, sign, value in zip(("ratio_max", "ratio_min", "lag_max"), (1, -1, 1), largest, strict=True):
        metrics[name] = sign * value if n else 0.0
    for lag in (lag for lag in range(LAGS) if count[lag]):
        metrics[f"lag_hist/{lag}"] = count[lag]
        metrics[f"ess_lag/{lag}"] = first[lag] ** 2 / (count[lag] * second[lag])
    for name, total in zip(BUCKETED.values(), bucketed, strict=True):
        metrics |= {f"{name}/{low}": t / c for low, c, t in zip(BUCKETS, held, total, strict=True) if c}
    return metrics


def _take(numbers: Iterator[float], count: int) -> list[float]:
    """The next `count` numbers."""
    return [next(numbers) for _ in range(count)]
