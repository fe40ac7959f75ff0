"""Off-policy masks against loops over sequences, and what they promise at their bounds."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers import rejections
from asyncrl.trainers.parts import REJECTIONS
from asyncrl.trainers.tokens import Tokens

sixteenths = st.integers(-48, 48).map(lambda i: i / 16)
"""Their sums have no rounding, so that the order of summation decides nothing at a bound."""
sequences_strategy = st.lists(st.lists(st.tuples(sixteenths, sixteenths), max_size=6), max_size=6)
"""(log-weight, advantage) of each token, sequence by sequence; some have no tokens."""
DEFAULTS = {name: {key: p.default for key, p in part.parameters.items()} for name, part in REJECTIONS.items()}
WIDE = {"geometric_low": 0.5, "geometric_high": 1.5, "sequence_k2_max": 0.3, "sequence_k3_max": 0.3}
WIDE |= {"veto_floor": 0.2, "opsm_delta": 0.1, "m2po_tau": 0.3, "token_k1_high": 1.4, "token_k1_low": 0.6}
"""Bounds at which random data are sometimes kept and sometimes dropped."""


def arguments(name, changes):
    return DEFAULTS[name] | {key: value for key, value in changes.items() if key in DEFAULTS[name]}


def apply(name, sequences, dtype=torch.float64, **changes):
    """A rejection's mask, sequence by sequence; a token is (log-weight, advantage), or a log-weight alone."""
    tokens = [t if isinstance(t, tuple) else (t, 1.0) for sequence in sequences for t in sequence]
    log_weight, advantage = (torch.tensor([t[i] for t in tokens], dtype=dtype) for i in (0, 1))
    zeros, lengths = torch.zeros_like(log_weight), [len(sequence) for sequence in sequences]
    data = Tokens(zeros, advantage, zeros, lengths)
    mask = getattr(rejections, name)(log_weight, data, **arguments(name, changes))
    assert mask.shape == log_weight.shape
    assert mask.dtype == dtype
    assert set(mask.tolist()) <= {0.0, 1.0}
    return [part.tolist() for part in mask.split(lengths)] if lengths else []


def k3(value):
    return math.exp(value) - 1 - value


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def slow(name, sequence, p):
    """Mask of one sequence by the definition, for all but m2po."""
    logs = [log for log, _ in sequence]
    match name:
        case "token_k1":
            return [float(p["token_k1_low"] <= math.exp(v) <= p["token_k1_high"]) for v in logs]
        case "token_k2":
            return [float(v * v / 2 <= p["token_k2_max"]) for v in logs]
        case "token_k3":
            return [float(k3(v) <= p["token_k3_max"]) for v in logs]
        case "geometric":
            keep = p["geometric_low"] <= math.exp(mean(logs)) <= p["geometric_high"]
        case "product":
            keep = p["product_low"] <= math.exp(math.fsum(logs)) <= p["product_high"]
        case "sequence_k2":
            keep = mean(v * v / 2 for v in logs) <= p["sequence_k2_max"]
        case "sequence_k3":
            keep = mean(map(k3, logs)) <= p["sequence_k3_max"]
        case "veto":
            keep = all(math.exp(v) >= p["veto_floor"] for v in logs)
        case "opsm":
            keep = not (mean(a for _, a in sequence) < 0 and mean(-v for v in logs) > p["opsm_delta"])
    return [float(keep)] * len(sequence)


def slow_m2po(sequences, tau):
    """Drops the token of the largest square, the last of equal ones, until the mean is within the bound."""
    kept = [(log * log, i) for i, (log, _) in enumerate(t for s in sequences for t in s)]
    while kept and mean(square for square, _ in kept) > tau:
        kept.remove(max(kept))
    return {i for _, i in kept}


@pytest.mark.parametrize("name", REJECTIONS)
def test_the_table_names_a_function_and_its_exact_parameters(name):
    function = REJECTIONS[name].function()
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in keywords] == list(REJECTIONS[name].parameters)
    assert all(p.default is p.empty for p in keywords)
    assert function is getattr(rejections, name)


def test_no_two_rejections_share_a_parameter_because_they_share_a_table_of_settings():
    names = [key for parameters in DEFAULTS.values() for key in parameters]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(set(REJECTIONS) - {"m2po"}))
@pytest.mark.parametrize("changes", [{}, WIDE])
@given(sequences=sequences_strategy)
@settings(max_examples=30, deadline=None)
def test_masks_equal_the_definition_sequence_by_sequence(name, changes, sequences):
    expected = [slow(name, sequence, arguments(name, changes)) for sequence in sequences]
    assert apply(name, sequences, **changes) == expected


@pytest.mark.parametrize("tau", [0.04, 0.3])
@given(sequences=sequences_strategy)
@settings(max_examples=30, deadline=None)
def test_m2po_drops_the_largest_until_the_second_moment_is_within_the_bound(tau, sequences):
    flat = [value for mask in apply("m2po", sequences, m2po_tau=tau) for value in mask]
    assert {i for i, value in enumerate(flat) if value} == slow_m2po(sequences, tau)


@pytest.mark.parametrize("name", REJECTIONS)
def test_on_policy_data_are_kept(name):
    sequences = [[(0.0, -1.0), (0.0, -1.0)], [], [(0.0, 1.0)]]
    assert apply(name, sequences) == [[1.0, 1.0], [], [1.0]]


@pytest.mark.parametrize("name", REJECTIONS)
@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [[0.1], [], [0.2, 0.3], []]])
def test_empty_batches_and_empty_sequences_are_no_special_case(name, sequences):
    assert [len(mask) for mask in apply(name, sequences, torch.float32)] == [len(s) for s in sequences]


@pytest.mark.parametrize("name", REJECTIONS)
def test_tokens_of_infinite_distance_are_dropped_and_give_no_nan(name):
    far = [(-1e30, -1.0), (-1e30, -1.0)]
    assert apply(name, [far, far], torch.float32) == [[0.0, 0.0]] * 2


def test_bounds_are_bounds_of_the_ratio_itself():
    """A bound of the negated log-ratio would keep 0.714 to 1.667 in place of 0.6 to 1.4."""
    ratios = [math.log(r) for r in (0.59, 0.61, 0.72, 1.39, 1.41, 1.6)]
    expected = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert apply("token_k1", [ratios], token_k1_low=0.6, token_k1_high=1.4) == [expected]
    for name in ("geometric", "product"):
        bounds = {f"{name}_low": 0.6, f"{name}_high": 1.4}
        assert apply(name, [[value] for value in ratios], **bounds) == [[keep] for keep in expected]


def test_the_geometric_mean_ignores_length_and_the_product_does_not():
    drift = [[0.05] * 2, [0.05] * 20]
    assert apply("geometric", drift, geometric_low=0.9, geometric_high=1.1) == [[1.0] * 2, [1.0] * 20]
    assert apply("product", drift) == [[1.0] * 2, [0.0] * 20]


def test_one_impossible_token_vetoes_its_whole_sequence_and_no_other():
    mask = apply("veto", [[0.0, 0.0], [0.0, math.log(0.9e-4), 0.0], [math.log(1.1e-4)]])
    assert mask == [[1.0, 1.0], [0.0, 0.0, 0.0], [1.0]]


def test_opsm_spares_successes_and_failures_that_became_likelier():
    away, towards = -0.5, 0.5
    sequences = [[(away, -1.0)], [(away, 1.0)], [(towards, -1.0)], [(away, 0.0)]]
    assert apply("opsm", sequences) == [[0.0], [1.0], [1.0], [1.0]]


def test_opsm_judges_a_sequence_of_token_advantages_by_their_mean():
    assert apply("opsm", [[(-0.5, -1.0), (-0.5, 3.0)], [(-0.5, 1.0), (-0.5, -3.0)]]) == [[1.0, 1.0], [0.0, 0.0]]


def test_of_equal_squares_m2po_keeps_the_earlier_tokens():
    assert apply("m2po", [[0.0, 0.5, -0.5], [0.5]], m2po_tau=0.125) == [[1.0, 1.0, 0.0], [0.0]]


def test_m2po_keeps_everything_while_the_batch_as_a_whole_is_close():
    assert apply("m2po", [[0.0] * 30, [1.0]]) == [[1.0] * 30, [1.0]]


def test_m2po_pools_the_tokens_of_all_sequences():
    together = apply("m2po", [[0.0] * 10, [0.5]])
    assert (together, apply("m2po", [[0.5]])) == ([[1.0] * 10, [1.0]], [[0.0]])
