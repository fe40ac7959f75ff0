"""Losses of whole sequences against their formulas in Python floats; gradients by central differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Algo
from asyncrl.trainers.algorithm import build
from asyncrl.trainers.parts import LOSSES
from asyncrl.trainers.tokens import Tokens

STEP = 1e-6


# Each formula as `(log-probs of a sequence, old ones, A, parameters) -> loss of the sequence`.


def gspo(x, old, a, p):
    s = math.exp(sum(u - v for u, v in zip(x, old, strict=True)) / len(x))
    return -min(s * a, min(max(s, 1 - p["clip_low"]), 1 + p["clip_high"]) * a)


def gmpo(x, old, a, p):
    changes = [u - v for u, v in zip(x, old, strict=True)]
    cut = [min(c, p["clip_high"]) if a > 0 else max(c, -p["clip_low"]) for c in changes]
    return -(math.prod(math.exp(c) for c in cut) ** (1 / len(cut))) * a


def sppo(x, old, a, p):
    return (sum(u - v for u, v in zip(x, old, strict=True)) - p["eta"] * a) ** 2


REFERENCES = {f.__name__: f for f in (gspo, gmpo, sppo)}
VARIANTS = [
    ("gspo", {}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("sppo", {}),
    ("sppo", {"eta": 2.5}),
]
LENGTHS = [4, 1, 7, 2, 11]


def algorithm_of(name, changed=None):
    return build(
        Algo(
            name="grpo", loss=name, loss_args=changed or {}, aggregation="sequence_mean", proximal="behaviour",
            correction="none",
        )
    )  # fmt: skip


def sequences(seed, lengths):
    """Lists of each sequence's log-probs and old ones, and its advantage."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        x = -3 * rng.random(length)
        found.append((x, x + 0.3 * rng.standard_normal(length), float(rng.standard_normal())))
    return found


def value_and_gradients(algorithm, batch, counted):
    """Mean over `counted` sequences of those in one call, and the gradient of each sequence's tokens."""
    lengths = [len(x) for x, _, _ in batch]
    logp = torch.tensor(np.concatenate([x for x, _, _ in batch]), requires_grad=True)
    old = torch.tensor(np.concatenate([old for _, old, _ in batch]))
    sizes = torch.tensor(lengths)
    advantage = torch.tensor([a for _, _, a in batch], dtype=torch.float64).repeat_interleave(sizes)
    weight = (1 / (counted * sizes.double())).repeat_interleave(sizes)
    loss, metrics = algorithm.token_loss(logp, torch.zeros_like(old), Tokens(old, advantage, weight, lengths))
    loss.sum().backward()
    return loss.sum().item(), list(logp.grad.split(lengths)), metrics["clipped"].split(lengths)


@pytest.mark.parametrize(("name", "changed"), VARIANTS)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_are_those_of_the_formula(name, changed, lengths, seed):
    batch = sequences(seed, lengths)
    value, gradients, _ = value_and_gradients(algorithm_of(name, changed), batch, len(batch))
    reference = REFERENCES[name]
    parameters = {key: p.default for key, p in LOSSES[name].parameters.items()} | changed
    expected = np.mean([reference(x, old, a, parameters) for x, old, a in batch])
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for (x, old, a), gradient in zip(batch, gradients, strict=True):
        for t in range(len(x)):
            up, down = x.copy(), x.copy()
            up[t] += STEP
            down[t] -= STEP
            slope = (reference(up, old, a, parameters) - reference(down, old, a, parameters)) / (2 * STEP)
            assert gradient[t].item() * len(batch) == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
@given(order=st.permutations(range(len(LENGTHS))), cut=st.integers(0, len(LENGTHS)))
@settings(max_examples=20, deadline=None)
def test_neither_order_nor_micro_batches_matter(name, order, cut):
    batch, algorithm = sequences(7, LENGTHS), algorithm_of(name)
    value, gradients, clipped = value_and_gradients(algorithm, batch, len(batch))
    total = 0.0
    for part in (order[:cut], order[cut:]):
        if not part:
            continue
        some, parts, cuts = value_and_gradients(algorithm, [batch[i] for i in part], len(batch))
        total += some
        for i, gradient, flags in zip(part, parts, cuts, strict=True):
            torch.testing.assert_close(gradient, gradients[i], rtol=1e-12, atol=1e-15)
            assert torch.equal(flags, clipped[i])
    assert total == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_sequence_without_tokens_changes_nothing(name):
    batch, algorithm = sequences(8, [3, 2]), algorithm_of(name)
    empty = (np.zeros(0), np.zeros(0), 1.0)
    value, gradients, _ = value_and_gradients(algorithm, batch, 2)
    same, with_empty, _ = value_and_gradients(algorithm, [batch[0], empty, batch[1]], 2)
    assert same == value
    assert torch.equal(torch.cat(with_empty), torch.cat(gradients))


@pytest.mark.parametrize(("name", "scale"), [("gspo", 1.0), ("gmpo", 1.0), ("sppo", None)])
def test_at_a_ratio_of_one_the_gradient_is_that_of_reinforce(name, scale):
    """Of the sequence's mean log-prob; of its sum, times 2 eta, for SPPO."""
    batch = [(x, x, a) for x, _, a in sequences(9, LENGTHS)]
    _, gradients, clipped = value_and_gradients(algorithm_of(name), batch, 1)
    for (x, _, a), gradient in zip(batch, gradients, strict=True):
        expected = -a / len(x) if scale else -2 * a
        torch.testing.assert_close(gradient, torch.full_like(gradient, expected))
    assert not torch.cat(clipped).any()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_sequence_of_weight_zero_has_no_gradient(name):
    batch = sequences(10, [3, 5])
    logp = torch.tensor(np.concatenate([x for x, _, _ in batch]), requires_grad=True)
    old = torch.tensor(np.concatenate([old for _, old, _ in batch]))
    weight = torch.tensor([0.0] * 3 + [0.2] * 5, dtype=torch.float64)
    tokens = Tokens(old, torch.full_like(old, 0.5), weight, [3, 5])
    algorithm_of(name, {} if name == "sppo" else {"clip_low": 0.9, "clip_high": 0.9}).token_loss(
        logp, torch.zeros_like(old), tokens
    )[0].sum().backward()
    assert (logp.grad[:3] == 0).all()
    assert (logp.grad[3:] != 0).any()


def test_gspo_clips_all_tokens_of_a_sequence_or_none():
    batch = [(np.full(3, -1.0), np.full(3, -1.5), 1.0), (np.full(2, -1.0), np.full(2, -1.5), -1.0)]
    _, gradients, clipped = value_and_gradients(algorithm_of("gspo"), batch, 1)
    assert [flags.tolist() for flags in clipped] == [[1, 1, 1], [0, 0]]
    assert (gradients[0] == 0).all()
    assert (gradients[1] != 0).all()


def test_gmpo_drops_the_gradient_of_its_clipped_tokens_only():
    x = np.array([-1.0, -1.0, -1.0])
    _, [gradient], [clipped] = value_and_gradients(
        algorithm_of("gmpo"), [(x, np.array([-1.5, -1.0, -0.2]), 1.0)], 1
    )
    assert clipped.tolist() == [1, 0, 0]
    ratio = math.exp((0.4 + 0.0 - 0.8) / 3)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -ratio / 3, -ratio / 3], dtype=torch.float64))
