"""The engine of deterministic runs: bits, not tolerances."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from asyncrl.generator.engines.base import StagedWeights
from asyncrl.generator.engines.invariant import InvariantEngine, NotInvariant

RNG = random.Random(0)
REQUESTS = [([RNG.randrange(97) for _ in range(RNG.randint(1, 12))], RNG.randint(2, 16)) for _ in range(8)]
"""Prompt and number of tokens to sample; a request's seed is its number."""


def _staged(model: Any, version: int) -> StagedWeights:
    return StagedWeights(version, [(name, p.detach().clone()) for name, p in model.named_parameters()])


def _ask(runs: Any, number: int, rid: str, before: int = 0, sampled: tuple[int, ...] = ()) -> None:
    """Adds request `number`, of which the first tokens are sampled already."""
    prompt, wanted = REQUESTS[number]
    runs.add(rid, [*prompt, *sampled[:before]], max_tokens=wanted - before, seed=number)


def _alone(runs: Any) -> list[tuple[list[int], list[float]]]:
    """What each request gets with nothing beside it."""
    for number in range(len(REQUESTS)):
        _ask(runs, number, f"alone {number}")
        runs.finish()
    return [(runs.tokens(f"alone {n}"), runs.logprobs(f"alone {n}")) for n in range(len(REQUESTS))]


def test_neighbours_slots_prefixes_and_flushes_change_no_bit(runs_of):
    runs = runs_of(kind=InvariantEngine, flush_tokens=3)
    alone = _alone(runs)
    for schedule in range(4):
        draw = random.Random(schedule)
        sampled = {
            n: draw.randrange(wanted) if draw.random() < 0.5 else 0 for n, (_, wanted) in enumerate(REQUESTS)
        }
        for number in draw.sample(range(len(REQUESTS)), len(REQUESTS)):
            _ask(runs, number, str(number), sampled[number], tuple(alone[number][0]))
            for _ in range(draw.randint(0, 8)):
                if draw.random() < 0.3:
                    runs.engine.flush()
                runs.step()
        runs.finish()
        for number, (tokens, logprobs) in enumerate(alone):
            assert runs.tokens(str(number)) == tokens[sampled[number] :]
            assert runs.logprobs(str(number)) == logprobs[sampled[number] :]


def test_the_ordinary_engine_does_not_keep_this_promise(runs_of):
    runs = runs_of()
    alone = _alone(runs)
    for number in range(len(REQUESTS)):
        _ask(runs, number, str(number))
    runs.finish()
    assert any(runs.logprobs(str(number)) != logprobs for number, (_, logprobs) in enumerate(alone))


def test_it_samples_what_the_plain_forward_says(runs_of, model_of):
    model = model_of(num_key_value_heads=1)
    runs = runs_of(model, kind=InvariantEngine)
    for number in range(len(REQUESTS)):
        _ask(runs, number, str(number))
    runs.finish()
    assert max(runs.error(str(number), model) for number in range(len(REQUESTS))) < 1e-4


@pytest.mark.parametrize(("slots", "dtype"), [(1, torch.float32), (3, torch.float32), (5, torch.bfloat16)])
def test_any_number_of_slots_and_either_precision_will_do_here(engine_of, slots, dtype):
    engine = engine_of(kind=InvariantEngine, slots=slots, dtype=dtype, max_model_len=2)
    assert not engine.has_work()
    assert engine.occupancy() == (0, 0)


def test_no_key_of_older_weights_is_read_after_an_update(runs_of, model_of):
    old, new = model_of(), model_of(seed=1)
    prompt, runs = REQUESTS[0][0], runs_of(old, kind=InvariantEngine)
    runs.add("through", prompt, max_tokens=30)
    runs.step(len(prompt) + 10)
    runs.engine.load_weights(_staged(new, 1), "recompute")
    runs.finish()
    sampled = sum(len(delta.token_ids) for delta in runs.deltas["through"] if delta.version == 0)
    assert 0 < sampled < 30
    fresh = runs_of(new, kind=InvariantEngine)
    fresh.add("resumed", prompt + runs.tokens("through")[:sampled], max_tokens=30 - sampled)
    assert fresh.finish().tokens("resumed") == runs.tokens("through")[sampled:]
    assert fresh.logprobs("resumed") == runs.logprobs("through")[sampled:]


def test_an_aborted_request_leaves_its_slot_as_good_as_new(runs_of):
    runs = runs_of(kind=InvariantEngine, slots=1)
    alone = _alone(runs)
    _ask(runs, 1, "aborted")
    runs.step(7)
    runs.engine.abort(["aborted"])
    _ask(runs, 2, "after")
    runs.finish()
    assert runs.reason("aborted") == "abort"
    assert (runs.tokens("after"), runs.logprobs("after")) == alone[2]


def test_a_model_whose_rows_see_each_other_is_refused(engine_of, model_of):
    model = model_of()
    # What a router of experts with a capacity does in effect: a row's output depends a little on the others.
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + 1e-3 * output.mean())
    with pytest.raises(NotInvariant, match=r"Qwen3ForCausalLM gave a request other bits .* --generator\.slots"):
        engine_of(model, kind=InvariantEngine)
