"""What a step reports about its tokens: importance ratios, effective sample size, lags, entropy, KL.

Each rank sums over its own tokens; one sum and one maximum over the ranks make the step's metrics. Nothing here
influences training. Called by `asyncrl.learner.update`.

Names: `ratio_*` is pi / mu of the trained tokens; `ess` is (sum r)^2 / (n sum r^2), in (0, 1]; `kl` estimates
KL(mu || pi) by r - 1 - log r, which is never negative (Schulman 2020, "Approximating KL divergence");
`lag_hist/k` counts trained tokens of lag k, `ess_lag/k` is their effective sample size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.learner.dist import max_over_ranks, sum_over_ranks
from asyncrl.learner.rows import Row
from asyncrl.trainers.losses import ratio_of
from asyncrl.triton_kernels.rl_head import HeadOutput

LAGS = 64
"""Lags are counted one by one below this; the last bin holds the rest."""
MEANS = ("ratio_mean", "kl", "entropy", "clipped", "weight_mean", "lag_mean")


def token_metrics(rows: Sequence[Row], outputs: Sequence[HeadOutput], device: torch.device) -> dict[str, float]:
    """Metrics of all trained tokens of all ranks. Collective."""
    logp, entropy = (torch.cat([getattr(out, name) for out in outputs]) for name in ("logp", "entropy"))
    extra = {name: _joined(outputs, name, device) for name in ("clipped", "weight")}
    behaviour = torch.cat([row.tokens.behaviour for row in rows])
    lag = torch.cat([row.lag for row in rows]).clamp(min=0)
    ratio = ratio_of(logp, behaviour).double()
    kl = ratio - 1 - (logp - behaviour).double()
    columns = [ratio, kl, entropy.double(), extra["clipped"], extra["weight"], lag.double()]
    bins = lag.clamp(max=LAGS - 1)
    by_lag = [torch.bincount(bins, w, LAGS).double() for w in (torch.ones_like(ratio), ratio, ratio.square())]
    means = torch.stack([column.double().sum() for column in columns])
    sums = sum_over_ranks(torch.cat([means, *by_lag]))
    edge = torch.full((1,), -torch.inf, dtype=torch.float64, device=device)
    largest = [torch.cat([values, edge]).max() for values in (ratio, -ratio, lag.double())]
    return _named(sums, max_over_ranks(torch.stack(largest)))


def _joined(outputs: Sequence[HeadOutput], name: str, device: torch.device) -> Tensor:
    parts = [out.metrics[name] for out in outputs if name in out.metrics]
    return torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64, device=device)


def _named(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """Names and divides what was reduced; a step without trained tokens reports only zeros."""
    means = sums[: len(MEANS)].tolist()
    count, first, second = (part.tolist() for part in sums[len(MEANS) :].split(LAGS))
    n = sum(count)
    metrics = {name: value / max(n, 1) for name, value in zip(MEANS, means, strict=True)}
    metrics["ess"] = sum(first) ** 2 / (n * sum(second)) if n else 0.0
    for name, sign, value in zip(("ratio_max", "ratio_min", "lag_max"), (1, -1, 1), largest.tolist(), strict=True):
        metrics[name] = sign * value if n else 0.0
    for lag, tokens in enumerate(count):
        if tokens:
            metrics[f"lag_hist/{lag}"] = tokens
            metrics[f"ess_lag/{lag}"] = first[lag] ** 2 / (tokens * second[lag])
    return metrics
