"""The order of rows in slots, the cache's moves, and the counter-based randomness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.engines.sampling import sample, seed_key, uniform
from asyncrl.generator.engines.slots import SlotCache, UnsupportedModel, arrange, size_class, slot_attention


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=40))
def test_arranging_keeps_every_row_once_in_descending_class_and_moves_no_row_that_stands_right(classes):
    order = arrange(classes)
    assert sorted(order) == [i for i, c in enumerate(classes) if c is not None]
    arranged = [classes[i] for i in order]
    assert arranged == sorted(arranged, reverse=True)
    assert all(order[i] == i for i in range(len(order)) if classes[i] == arranged[i])


@given(st.integers(1, 100_000))
def test_a_size_class_spans_at_most_a_factor_of_two(length):
    size = size_class(length)
    longest = 32 << size
    assert length <= longest
    assert size == 0 or length > longest // 2


def test_moves_that_form_a_cycle_keep_both_rows(model_of):
    cache = SlotCache(model_of().config, slots=3, max_len=8, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(8)
    cache.kv.copy_(torch.randn_like(cache.kv))
    before = cache.kv.clone()
    cache.move([1, 0], [0, 1], length=5)
    torch.testing.assert_close(cache.kv[:, :, 0, :, :5], before[:, :, 1, :, :5])
    torch.testing.assert_close(cache.kv[:, :, 1, :, :5], before[:, :, 0, :, :5])
    torch.testing.assert_close(cache.kv[:, :, 2], before[:, :, 2])


def test_attention_without_a_cache_in_the_forward_s_keywords_is_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModel, match="does not hand the forward's keywords"):
        slot_attention(torch.nn.Identity(), q, q, q, None)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_options_that_would_change_the_scores_are_refused(model_of, option):
    cache = SlotCache(model_of().config, slots=1, max_len=8, dtype=torch.float32, device=torch.device("cpu"))
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModel, match=option):
        slot_attention(torch.nn.Identity(), q, q, q, None, slot_cache=cache, **{option: 30.0})


# ---- sampling -----------------------------------------------------------------------------------


def splitmix64(key: int, n: int) -> int:
    """The published function, on Python integers: output n of the stream whose state starts at `key`."""
    mask = (1 << 64) - 1
    z = (key + n * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_known_first_outputs_of_splitmix64_come_out():
    assert [splitmix64(1234567, n) for n in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40))
def test_the_tensor_hash_equals_the_integer_one(key, position):
    actual = uniform(torch.tensor([key]), torch.tensor([position])).item()
    assert actual == (splitmix64(key, position) >> 11) * 2.0**-53


def test_draws_are_uniform_and_uncorrelated_over_seeds_and_over_positions():
    keys = torch.tensor([seed_key(seed) for seed in range(400)])
    draws = torch.stack([uniform(keys, torch.full_like(keys, position)) for position in range(400)])
    n = draws.numel()
    assert abs(draws.mean().item() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(draws.var().item() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    centred = draws - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean().item() * 12) < 4 / a.numel() ** 0.5


def test_any_64_bit_integer_is_a_seed_and_seeds_do_not_collide():
    seeds = [0, 1, -1, 2**63, 2**63 - 1, 2**64 - 2, *range(2, 1000)]
    assert len({seed_key(seed) for seed in seeds}) == len(seeds)


def test_a_token_of_probability_zero_is_never_picked():
    logits = torch.full((5000, 6), -torch.inf)
    logits[:, [1, 3]] = 0.0
    keys = torch.arange(5000)
    tokens, logprobs = sample(logits, torch.ones(5000), keys, keys)
    assert set(tokens.tolist()) == {1, 3}
    torch.testing.assert_close(logprobs, torch.full((5000,), 0.5).log())
