"""What is found wrong with a version, and that nothing else is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl.messages import TensorMeta
from asyncrl.weights import checks
from asyncrl.weights.buckets import Snapshot, checksum, meta_of
from asyncrl.weights.checks import DamagedWeights, check_announced, check_trailer, expected

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_expected_parameters_are_those_of_the_real_model(tmp_path, tied: bool, dtype: str) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    metas = [meta_of(name, parameter) for name, parameter in model.named_parameters()]
    found = expected(tmp_path, dtype)
    assert list(found.values()) == metas
    assert ("lm_head.weight" in found) == (not tied)
    check_announced(1, [metas[:3], metas[3:]], found)


def look(weights: list[tuple[str, torch.Tensor]], limit_bytes: int) -> list[bool]:
    """Surveys a snapshot as if it arrived, then checks the buckets of which the survey is not sure."""
    snapshot = Snapshot(limit_bytes)
    snapshot.fill(7, weights)
    sure = []
    for buffer, bucket in zip(snapshot.buffers, snapshot.buckets, strict=True):
        host = torch.full_like(buffer, 255)
        total, finite = checks.survey(host, bucket, buffer)
        assert (total, torch.equal(host, buffer)) == (int(checksum(buffer)), True)
        assert checks.survey(buffer, bucket, buffer) == (total, finite)
        if not finite:
            checks.check_finite(7, [host], [bucket])
        sure.append(finite)
    return sure


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 1234, 4999])
@pytest.mark.parametrize("neighbour", [torch.float32, torch.int64])
def test_a_single_value_that_is_not_finite_is_found(dtype, bad: float, where: int, neighbour, monkeypatch) -> None:
    tensor = torch.randn(5000).to(dtype)
    tensor[where] = bad
    weights = [("a", torch.ones(3)), ("b", tensor.view(50, 100)), ("c", torch.ones(5, dtype=neighbour))]
    monkeypatch.setattr(checks, "PIECE_BYTES", 512)
    for limit_bytes in (100, 1 << 20):
        with pytest.raises(DamagedWeights, match="version 7: 1 of 5000 values of tensor b are not finite"):
            look(weights, limit_bytes)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_empty_and_integer_tensors_are_fine(dtype) -> None:
    limits = torch.finfo(dtype)
    extreme = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype).repeat(100)[:-3]
    weights = [("a", extreme), ("b", torch.zeros(0, 4, dtype=dtype)), ("d", extreme)]
    assert look(weights, 1 << 20) == [True]
    # Bits that would be NaNs in another dtype.
    assert look([*weights, ("c", torch.full((64,), -1))], 1 << 20) == [False], "dtypes are mixed"
    assert all(look([("c", torch.full((64,), -1)), *weights], 1))


@settings(deadline=None, max_examples=40)
@given(words=st.integers(0, 40), piece=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_sum_of_all_pieces_is_the_sum_of_the_whole_modulo_two_to_the_64(words, piece, seed) -> None:
    gen = torch.Generator().manual_seed(seed)
    arrived = torch.randint(-(2**63), 2**63 - 1, (2 * words,), generator=gen).view(torch.uint8)
    host = torch.zeros_like(arrived)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "PIECE_BYTES", 16 * piece)
        total, _ = checks.survey(host, [TensorMeta("w", "int64", [2 * words])], arrived)
    exact = sum(arrived.view(torch.int64).tolist())
    assert total == int(checksum(arrived))
    assert (total - exact) % 2**64 == 0
    assert torch.equal(host, arrived)


def test_the_trailer_tells_another_version_from_a_damaged_bucket() -> None:
    check_trailer([4, 10, 20, 30], [4, 10, 20, 30])
    with pytest.raises(DamagedWeights, match="announced was version 4, received version 5"):
        check_trailer([5, 10, 20, 30], [4, 10, 20, 30])
    with pytest.raises(DamagedWeights, match="version 4: wrong checksum of bucket 0, 2 of 3"):
        check_trailer([4, 10, 20, 30], [4, 11, 20, 31])
