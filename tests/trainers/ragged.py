"""Random ragged batches as plain Python episodes, for slow references, and the same batches as `Outcomes`."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st

from asyncrl.trainers.catalogue import find, own
from asyncrl.trainers.outcomes import Outcomes

COLUMNS = ("behaviour", "logp", "squares", "reference", "value", "process", "penalty")
NAMES = ("right", "short")


@dataclass
class Episode:
    """One episode. `valid` False and not `greedy`: it failed or was rejected."""

    group: int
    reward: float
    n: int
    valid: bool = True
    greedy: bool = False
    truncated: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def token_rewards(self):
        rewards = [-x for x in self.tokens.get("penalty", [0.0] * self.n)]
        if self.n:
            rewards[-1] += self.reward
        return rewards


def outcomes_of(batch, max_tokens=0):
    def column(values, dtype=torch.float64):
        return torch.tensor(list(values), dtype=dtype)

    present = [c for c in COLUMNS if any(c in e.tokens for e in batch)]
    return Outcomes(
        reward=column(e.reward for e in batch),
        valid=column((e.valid for e in batch), torch.bool),
        group=column((e.group for e in batch), torch.int64),
        lengths=column((e.n for e in batch), torch.int64),
        rewards={
            k: column(e.rewards.get(k, np.nan) for e in batch)
            for k in sorted({name for e in batch for name in e.rewards})
        },
        greedy=column((e.greedy for e in batch), torch.bool),
        truncated=column((e.truncated for e in batch), torch.bool),
        max_tokens=max_tokens,
        columns={c: column(x for e in batch for x in e.tokens.get(c, [0.0] * e.n)) for c in present},
    )


@st.composite
def batches(draw, named=False, penalty=None):
    """Up to 14 episodes of up to 4 groups: valid, failed, rejected, and at most one greedy one for each group."""
    kinds = st.sampled_from(["valid"] * 5 + ["failed", "rejected"])
    eighths = st.integers(-16, 16).map(lambda x: x / 8)
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 3), kinds, eighths, st.integers(1, 6), st.booleans()),
            min_size=1, max_size=14,
        )
    )  # fmt: skip
    batch = [
        Episode(
            group, 0.0 if kind == "failed" else reward, 0 if kind == "failed" else n, kind == "valid", False, cut
        )
        for group, kind, reward, n, cut in rows
    ]
    for group in draw(st.sets(st.integers(0, 3), max_size=2)):
        batch.insert(draw(st.integers(0, len(batch))), Episode(group, draw(eighths), 0, False, True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with_penalty = draw(st.booleans()) if penalty is None else penalty
    for e in batch:
        e.tokens = _tokens(rng, e.n, with_penalty)
        if named:
            e.rewards = {k: float(rng.integers(-8, 8)) / 4 for k in NAMES if rng.random() < 0.7}
    return batch


def _tokens(rng, n, penalty):
    logp = -3 * rng.random(n) - 0.01
    pi = np.exp(logp)
    tokens = {
        "logp": logp,
        "behaviour": logp + 0.5 * rng.standard_normal(n),
        "reference": logp + 0.5 * rng.standard_normal(n),
        "squares": pi**2 + (1 - pi) ** 2 * rng.random(n),
        "value": rng.standard_normal(n),
        "process": rng.standard_normal(n),
    } | ({"penalty": 0.1 * rng.standard_normal(n)} if penalty else {})
    return {name: values.tolist() for name, values in tokens.items()}


def estimate(name, batch, **given):
    """The estimator's answer as one list of numbers for each episode: one number, or one for each token."""
    part = find("advantage", name)
    arguments = {key: parameter.default for key, parameter in part.parameters.items()} | given
    outcomes = outcomes_of(batch)
    found = part.function()(outcomes, **own(part, arguments))
    assert found.dtype == torch.float64
    sizes = [e.n for e in batch] if part.level == "token" else [1] * len(batch)
    assert len(found) == sum(sizes)
    return [part.tolist() for part in found.split(sizes)]


def shaped(function, batch, max_tokens=0, **arguments):
    """The batch after a shaping."""
    found = function(outcomes_of(batch, max_tokens), **arguments)
    rows = zip(batch, found.reward.tolist(), found.valid.tolist(), found.greedy.tolist(), strict=True)
    return [replace(e, reward=reward, valid=valid, greedy=greedy) for e, reward, valid, greedy in rows]


def members(batch, group):
    return [e for e in batch if e.group == group and e.valid]


def slow_whitened(values):
    """Mean 0 and standard deviation 1 (n - 1); equal values are centred only."""
    if not values:
        return []
    mean = sum(values) / len(values)
    variance = sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1)
    std = variance**0.5
    return [(x - mean) / (std if std > 1e-8 else 1.0) for x in values]
