"""Aggregations: the weight of every token, from counts of the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.aggregation import Totals, constant, sequence_mean, sequence_sum, token_mean

counts = st.lists(st.integers(0, 50), min_size=1, max_size=20)


def totals_of(trained, max_tokens=1.0):
    return Totals(max(1.0, sum(trained)), max(1.0, sum(n > 0 for n in trained)), max_tokens)


def batch_loss(weights, losses):
    return sum(w * sum(tokens) for w, tokens in zip(weights.tolist(), losses, strict=True))


@given(trained=counts)
@settings(max_examples=30, deadline=None)
def test_the_weights_of_all_tokens_of_a_mean_sum_to_one(trained):
    lengths, totals = torch.tensor(trained, dtype=torch.float64), totals_of(trained)
    for aggregation in (token_mean, sequence_mean):
        total = (aggregation(lengths, totals) * lengths).sum().item()
        assert total == pytest.approx(1.0 if sum(trained) else 0.0)


@given(trained=counts, length=st.sampled_from([0.0, 7.0, 1000.0]), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_weighted_sums_equal_the_losses_of_the_papers(trained, length, seed):
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(n, generator=generator, dtype=torch.float64).tolist() for n in trained]
    spoken = [tokens for tokens in losses if tokens]
    lengths, totals = torch.tensor(trained, dtype=torch.float64), totals_of(trained, 64.0)
    number = max(len(spoken), 1)
    per_sequence = [sum(tokens) for tokens in spoken]
    expected = {
        token_mean: sum(per_sequence) / max(sum(trained), 1),
        sequence_mean: sum(sum(tokens) / len(tokens) for tokens in spoken) / number,
        sequence_sum: sum(per_sequence) / number,
    }
    for aggregation, loss in expected.items():
        assert batch_loss(aggregation(lengths, totals), losses) == pytest.approx(loss, abs=1e-9)
    found = batch_loss(constant(lengths, totals, length=length), losses)
    assert found == pytest.approx(sum(per_sequence) / number / (length or 64.0), abs=1e-9)


def test_the_sequence_mean_weighs_sequences_and_the_token_mean_tokens():
    lengths, totals = torch.tensor([1.0, 4.0]), Totals(5.0, 2.0)
    assert token_mean(lengths, totals).tolist() == pytest.approx([0.2, 0.2])
    assert sequence_mean(lengths, totals).tolist() == pytest.approx([0.5, 0.125])


def test_a_weight_does_not_depend_on_the_other_sequences_of_a_row():
    lengths, totals = torch.tensor([3.0, 1.0, 9.0]), Totals(40.0, 7.0, 16.0)
    for aggregation in (token_mean, sequence_mean, sequence_sum, lambda n, t: constant(n, t, length=0.0)):
        alone = torch.cat([aggregation(lengths[i : i + 1], totals) for i in range(3)])
        assert torch.equal(aggregation(lengths, totals), alone)
