"""Off-policy corrections against loops over sequences, and what they promise at their bounds."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers import corrections
from asyncrl.trainers.parts import CORRECTIONS
from asyncrl.trainers.tokens import Tokens

sequences_strategy = st.lists(st.lists(st.floats(-30, 30), max_size=6), max_size=6)
"""Log-weights, sequence by sequence; some have no tokens."""
DEFAULTS = {name: {key: p.default for key, p in part.parameters.items()} for name, part in CORRECTIONS.items()}


def apply(name, sequences, dtype=torch.float64, **changes):
    """A correction's weights, sequence by sequence."""
    flat = torch.tensor([value for sequence in sequences for value in sequence], dtype=dtype)
    lengths = [len(sequence) for sequence in sequences]
    zeros = torch.zeros_like(flat)
    weights = getattr(corrections, name)(flat, Tokens(zeros, zeros, zeros, lengths), **DEFAULTS[name] | changes)
    assert weights.shape == flat.shape
    assert weights.dtype == dtype
    return [part.tolist() for part in weights.split(lengths)] if lengths else []


def exp(value):
    return math.exp(min(max(value, -20.0), 20.0))


def slow(name, sequence):
    """Weights of one sequence by the definition, with the default parameters."""
    each, whole = [exp(value) for value in sequence], exp(math.fsum(sequence))
    match name:
        case "none":
            return [1.0] * len(sequence)
        case "token_tis":
            return [min(w, 2.0) for w in each]
        case "icepop":
            return [w if 0.5 <= w <= 5.0 else 0.0 for w in each]
        case "sequence_tis":
            return [min(whole, 5.0)] * len(sequence)
        case "mis":
            return [whole if 0.5 <= whole <= 2.0 else 0.0] * len(sequence)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_table_names_a_function_and_its_exact_parameters(name):
    function = CORRECTIONS[name].function()
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in keywords] == list(CORRECTIONS[name].parameters)
    assert all(p.default is p.empty for p in keywords)
    assert function is getattr(corrections, name)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(sequences=sequences_strategy)
@settings(max_examples=30, deadline=None)
def test_weights_equal_the_definition_sequence_by_sequence(name, sequences):
    for actual, sequence in zip(apply(name, sequences), sequences, strict=True):
        assert actual == pytest.approx(slow(name, sequence), rel=1e-9)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_data_are_left_as_they_are(name):
    assert apply(name, [[0.0, 0.0], [], [0.0]]) == [[1.0, 1.0], [], [1.0]]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [[0.1], [], [0.2, 0.3], []]])
def test_empty_batches_and_empty_sequences_are_no_special_case(name, sequences):
    assert [len(weights) for weights in apply(name, sequences, torch.float32)] == [len(s) for s in sequences]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_stay_finite_whatever_the_log_weights(name):
    huge = apply(name, [[1e30, -1e30], [500.0] * 40, [-500.0] * 40], torch.float32)
    assert all(math.isfinite(weight) for sequence in huge for weight in sequence)


def test_a_whole_sequences_weight_does_not_see_its_neighbours():
    alone = apply("mis", [[0.2, 0.3]])[0]
    beside = apply("mis", [[9.0], [0.2, 0.3], [-9.0]])
    assert beside[1] == alone
    assert beside[0] == beside[2] == [0.0]


def test_bounds_are_bounds_of_the_ratio_itself():
    weights = apply("icepop", [[math.log(r) for r in (0.59, 0.61, 0.72, 1.39, 1.41)]], low=0.6, high=1.4)[0]
    assert weights == pytest.approx([0.0, 0.61, 0.72, 1.39, 0.0])
    whole = apply("mis", [[math.log(0.5), math.log(1.3)], [math.log(1.5)]], low=0.6, high=1.4)
    assert whole[0] == pytest.approx([0.65, 0.65])
    assert whole[1] == [0.0]


def test_a_ratio_at_its_bound_is_kept():
    assert apply("icepop", [[0.0]], low=1.0, high=1.0) == [[1.0]]
    assert apply("mis", [[0.25, -0.25]], low=1.0, high=1.0) == [[1.0, 1.0]]


def test_the_smaller_the_cap_the_smaller_the_sum_of_weights():
    values = [[0.4, 1.0, -2.0], [3.0, 0.1]]
    for name in ("token_tis", "sequence_tis"):
        sums = [sum(map(sum, apply(name, values, cap=cap))) for cap in (0.5, 1.0, 2.0, 1e9)]
        assert sums == sorted(sums)
        assert sums[0] < sums[-1]
