"""The embedded engine against the model's own plain forward."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from asyncrl.generator.engines.base import SamplingParams, StagedWeights
from asyncrl.generator.engines.slots import UnsupportedModel


def staged(model: Any, version: int = 1) -> StagedWeights:
    return StagedWeights(version, [(name, p.detach().clone()) for name, p in model.named_parameters()])


def prompts(n: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logprobs_are_those_of_a_plain_forward_while_slots_are_refilled(runs_of, model_of, family, tied, kv_heads):
    model = model_of(family=family, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    runs = runs_of(model)
    for i, prompt in enumerate(prompts(12)):
        runs.add(str(i), prompt, max_tokens=3 + 7 * (i % 5), seed=i)
    runs.finish()
    for i in range(12):
        assert len(runs.tokens(str(i))) == 3 + 7 * (i % 5)
        assert runs.error(str(i), model) < 1e-4


def test_temperature_zero_takes_the_most_likely_token_at_every_position(runs_of, model_of, plain):
    model = model_of()
    runs = runs_of(model)
    for i, prompt in enumerate(prompts(6)):
        runs.add(str(i), prompt, max_tokens=20, temperature=0.0)
    runs.finish()
    for i, prompt in enumerate(prompts(6)):
        tokens = runs.tokens(str(i))
        best = plain(model, prompt + tokens)[len(prompt) - 1 :].argmax(-1)
        assert tokens == best.tolist()


def test_a_request_s_logprobs_are_taken_after_its_own_temperature_wherever_its_row_moves(runs_of, model_of):
    model = model_of()
    runs = runs_of(model)
    temperatures = [0.5, 1.0, 1.7, 0.8, 1.3, 0.6, 2.0, 0.9]
    for i, temperature in enumerate(temperatures):
        runs.add(str(i), [i, 5], max_tokens=70 - 8 * ((i * 5) % 8), temperature=temperature, seed=i)
    runs.finish()
    for i, temperature in enumerate(temperatures):
        assert runs.error(str(i), model, temperature) < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_tokens_follow_the_softmax(runs_of, model_of, plain, temperature):
    model = model_of(vocab=13, initializer_range=0.08)
    draws = 4000
    runs = runs_of(model, slots=200)
    for i in range(draws):
        runs.add(str(i), [3, 1, 4], max_tokens=1, temperature=temperature, seed=i)
    runs.finish()
    counts = Counter(runs.tokens(str(i))[0] for i in range(draws))
    probabilities = plain(model, [3, 1, 4, 0], temperature)[-1].exp().tolist()
    assert max(probabilities) < 0.6
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in enumerate(probabilities))
    # Mean 12 and standard deviation sqrt(24) under the hypothesis; the seeds are fixed, so this cannot flicker.
    assert chi_square < 12 + 4 * math.sqrt(24)
    for token in counts:
        logprob = next(runs.logprobs(str(i))[0] for i in range(draws) if runs.tokens(str(i))[0] == token)
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-4)


def test_a_request_gives_the_same_tokens_whatever_else_is_in_the_batch(runs_of, model_of):
    model = model_of()
    alone = runs_of(model, slots=1)
    alone.add("x", [5, 6, 7], max_tokens=60, seed=11)
    alone.finish()
    crowd = runs_of(model, slots=6)
    for i, prompt in enumerate(prompts(20)):
        crowd.add(str(i), prompt, max_tokens=1 + 5 * i, seed=i)
    crowd.step(3)
    crowd.add("x", [5, 6, 7], max_tokens=60, seed=11)
    crowd.finish()
    assert crowd.tokens("x") == alone.tokens("x")
    assert crowd.logprobs("x") == pytest.approx(alone.logprobs("x"), abs=1e-4)


@pytest.mark.parametrize("done", [1, 7, 33])
def test_a_request_that_starts_from_a_prefix_continues_as_if_it_had_not_stopped(runs_of, model_of, done):
    model = model_of()
    runs = runs_of(model)
    runs.add("whole", [9, 8, 7], max_tokens=50, seed=3)
    whole = runs.finish().tokens("whole")
    runs.add("rest", [9, 8, 7, *whole[:done]], max_tokens=50 - done, seed=3)
    assert runs.finish().tokens("rest") == whole[done:]
    runs.add("other seed", [9, 8, 7, *whole[:done]], max_tokens=50 - done, seed=4)
    assert runs.finish().tokens("other seed") != whole[done:]


def test_a_stop_token_ends_its_request_and_belongs_to_the_output(runs_of, model_of):
    model = model_of()
    runs = runs_of(model)
    runs.add("free", [1, 2], max_tokens=40, seed=5)
    free = runs.finish().tokens("free")
    stop = free[20]
    runs.add("stopped", [1, 2], max_tokens=40, seed=5, stop_token_ids=(stop, 96_000))
    runs.finish()
    assert runs.tokens("stopped") == free[: free.index(stop) + 1]
    assert runs.reason("stopped") == "stop"
    assert runs.reason("free") == "length"


def test_the_context_ends_a_request_with_length_and_correct_logprobs(runs_of, model_of):
    model = model_of()
    runs = runs_of(model, max_model_len=50)
    runs.add("long", list(range(45)), max_tokens=100)
    runs.add("last", list(range(49)), max_tokens=100)
    runs.finish()
    assert [len(runs.tokens(rid)) for rid in ("long", "last")] == [5, 1]
    assert [runs.reason(rid) for rid in ("long", "last")] == ["length", "length"]
    assert max(runs.error("long", model), runs.error("last", model)) < 1e-4


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {"max_tokens": 1}, "empty prompt"),
        (list(range(64)) * 2, {"max_tokens": 1}, "no room"),
        ([97], {"max_tokens": 1}, r"0\.\.96"),
        ([-1], {"max_tokens": 1}, r"0\.\.96"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"max_tokens": 1, "temperature": -0.5}, "temperature"),
        ([1], {"max_tokens": 1, "temperature": math.nan}, "temperature"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_leaves_nothing_behind(engine_of, prompt, params, text):
    engine = engine_of()
    with pytest.raises(ValueError, match=text):
        engine.add("r", prompt, SamplingParams(**params))
    assert not engine.has_work()


def test_an_id_that_is_running_is_refused_and_free_again_after_the_end(runs_of):
    runs = runs_of()
    runs.add("r", [1], max_tokens=3)
    with pytest.raises(ValueError, match="already running"):
        runs.engine.add("r", [1], SamplingParams(max_tokens=3))
    runs.finish()
    runs.add("r", [1], max_tokens=2)
    assert len(runs.finish().tokens("r")) == 2


def test_deltas_come_at_flush_tokens_at_the_end_and_after_a_flush(runs_of):
    runs = runs_of(flush_tokens=8)
    runs.add("r", [1], max_tokens=21)
    runs.step(10)
    assert [len(d.token_ids) for d in runs.deltas["r"]] == [8]
    runs.engine.flush()
    runs.step(1)
    assert [len(d.token_ids) for d in runs.deltas["r"]] == [8, 3]
    runs.finish()
    assert [len(d.token_ids) for d in runs.deltas["r"]] == [8, 3, 8, 2]


def test_abort_ends_live_and_queued_requests_and_leaves_the_others_alone(runs_of, model_of):
    model = model_of()
    runs = runs_of(model, slots=2)
    for rid, prompt in zip("abcd", prompts(4), strict=True):
        runs.add(rid, prompt, max_tokens=30, seed=ord(rid))
    runs.step(5)
    assert runs.engine.occupancy() == (2, 2)
    runs.engine.abort(["a", "c", "unknown"])
    assert runs.engine.occupancy() == (1, 1)
    runs.finish()
    assert [runs.reason(rid) for rid in "abcd"] == ["abort", "length", "abort", "length"]
    assert [len(runs.tokens(rid)) for rid in "abcd"] == [5, 30, 0, 30]
    assert max(runs.error(rid, model) for rid in "abd") < 1e-4


def test_abort_of_everything_leaves_an_idle_engine(runs_of):
    runs = runs_of(slots=2)
    for i in range(5):
        runs.add(str(i), [1], max_tokens=30)
    runs.step(2)
    runs.engine.abort(None)
    runs.step()
    assert not runs.engine.has_work()
    assert runs.engine.occupancy() == (0, 0)
    assert [runs.reason(str(i)) for i in range(5)] == ["abort"] * 5


def test_more_than_sixty_four_requests_run_at_once(runs_of, model_of):
    model = model_of()
    runs = runs_of(model, slots=80)
    for i, prompt in enumerate(prompts(200, longest=60)):
        runs.add(str(i), prompt, max_tokens=1 + (i * 37) % 60, seed=i)
    runs.step(1)
    assert runs.engine.occupancy()[1] == 120
    runs.finish()
    assert [len(runs.tokens(str(i))) for i in range(200)] == [1 + (i * 37) % 60 for i in range(200)]
    assert max(runs.error(str(i), model) for i in range(200)) < 1e-4


def test_prompts_beyond_the_prefill_budget_wait_for_the_next_step(runs_of, model_of, monkeypatch):
    model = model_of()
    monkeypatch.setattr("asyncrl.generator.engines.transformers._PREFILL_TOKENS", 100)
    runs = runs_of(model)
    for rid in "abc":
        runs.add(rid, [ord(rid) % 97] * 60, max_tokens=10)
    runs.step()
    assert runs.engine.occupancy() == (1, 2)
    runs.finish()
    assert max(runs.error(rid, model) for rid in "abc") < 1e-4


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_change_under_running_requests_and_every_token_carries_its_version(
    runs_of, model_of, plain, tied, kv
):
    before, after = (model_of(seed, tie_word_embeddings=tied) for seed in (0, 1))
    runs = runs_of(before, version=6, max_model_len=200)
    asked = prompts(6)
    for i, prompt in enumerate(asked):
        runs.add(str(i), prompt, max_tokens=60, seed=i)
    runs.step(19)
    runs.engine.load_weights(staged(after, 7), kv)
    assert runs.engine.version == 7
    runs.finish()
    for i, prompt in enumerate(asked):
        rid = str(i)
        old = 19 if i < 4 else 0
        versions = [delta.version for delta in runs.deltas[rid] for _ in delta.token_ids]
        assert versions == [6] * old + [7] * (60 - old)
        tokens = runs.tokens(rid)
        actual = torch.tensor(runs.logprobs(rid))
        errors = []
        for model in (before, after):
            logprobs = plain(model, prompt + tokens)[len(prompt) - 1 :]
            errors.append((logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0] - actual).abs())
        assert old == 0 or errors[0][:old].max() < 1e-4
        if kv == "recompute" or old == 0:
            assert errors[1][old:].max() < 1e-4
        else:
            # The new weights read keys of the old ones: neither model's log-probs, by construction.
            assert errors[1][old:].max() > 1e-2


def test_recompute_with_unchanged_weights_changes_no_token(runs_of, model_of):
    model = model_of()
    outputs = []
    for update in (False, True):
        runs = runs_of(model)
        for i, prompt in enumerate(prompts(7)):
            runs.add(str(i), prompt, max_tokens=30, seed=i)
        runs.step(12)
        if update:
            runs.engine.load_weights(staged(model), "recompute")
        runs.finish()
        outputs.append([runs.tokens(str(i)) for i in range(7)])
    assert outputs[0] == outputs[1]


def test_weights_that_do_not_fit_are_refused_by_name(engine_of, model_of):
    model = model_of()
    engine = engine_of(model)
    good = list(staged(model).tensors)
    renamed = [("model.nonsense", good[0][1]), *good[1:]]
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight; unknown: model\.nonsense"):
        engine.load_weights(StagedWeights(1, renamed), "keep")
    cut = [(good[0][0], good[0][1][:5]), *good[1:]]
    with pytest.raises(
        ValueError, match=r"wrong shape: model\.embed_tokens\.weight \[5, 64\], expected \[97, 64\]"
    ):
        engine.load_weights(StagedWeights(1, cut), "keep")
    with pytest.raises(ValueError, match=r"given twice: model\.embed_tokens\.weight"):
        engine.load_weights(StagedWeights(1, [*good, good[0]]), "keep")
    assert engine.version == 0


def test_weights_that_are_not_finite_stop_the_engine_with_the_version(runs_of, model_of):
    model = model_of()
    runs = runs_of(model)
    runs.add("r", [1, 2], max_tokens=9)
    runs.step(2)
    poison = [(name, tensor * math.nan) for name, tensor in staged(model).tensors]
    runs.engine.load_weights(StagedWeights(41, poison), "keep")
    with pytest.raises(FloatingPointError, match=r"version 41.*request 'r'"):
        runs.step()


# ---- construction -------------------------------------------------------------------------------


def test_a_folder_and_the_model_saved_in_it_give_the_same_tokens(runs_of, model_of, engine_of, tmp_path):
    from asyncrl.generator.engines.transformers import TransformersEngine

    model = model_of()
    model.save_pretrained(tmp_path)
    runs = runs_of(model)
    runs.add("r", [1, 2, 3], max_tokens=20)
    expected = runs.finish().tokens("r")
    runs.engine = TransformersEngine(str(tmp_path), slots=2, max_model_len=64)
    runs.add("r", [1, 2, 3], max_tokens=20)
    assert runs.finish().tokens("r") == expected


def test_half_precision_stays_close_to_the_plain_forward_in_half_precision(runs_of, model_of):
    model = model_of()
    runs = runs_of(model, dtype=torch.bfloat16)
    for i, prompt in enumerate(prompts(6)):
        runs.add(str(i), prompt, max_tokens=20, seed=i)
    runs.finish()
    assert max(runs.error(str(i), model.bfloat16()) for i in range(6)) < 0.3


def test_a_context_beyond_the_model_s_positions_is_refused(engine_of):
    with pytest.raises(ValueError, match=r"max_model_len = 300 .* 256 positions"):
        engine_of(max_model_len=300)


def test_a_sliding_window_is_refused_unless_the_context_fits_into_it(engine_of, model_of):
    model = model_of(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    with pytest.raises(UnsupportedModel, match="sliding window of 64 positions"):
        engine_of(model, max_model_len=128)
    assert engine_of(model, max_model_len=64).version == 0


def test_a_model_whose_attention_does_not_go_through_the_interface_is_refused(engine_of):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM cannot run on slots"):
        engine_of(MambaForCausalLM(config))


def test_a_model_that_changes_its_attention_s_inputs_is_refused(engine_of, model_of):
    model = model_of()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match=r"of its 2 layers only \[0\]"):
        engine_of(model)
