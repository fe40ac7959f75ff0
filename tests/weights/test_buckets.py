"""Layout of buckets and snapshots against the definition: every byte where the metas say, nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages import TensorMeta
from asyncrl.weights.buckets import ALIGN, Snapshot, allocate, checksum, meta_of, plan, views

DTYPES = ["float32", "bfloat16", "float16", "float64", "int8", "bool"]
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20)


@settings(deadline=None)
@given(shapes=shapes, limit=st.integers(16, 4000), data=st.data())
def test_any_set_survives_the_buckets_bit_for_bit(shapes, limit, data) -> None:
    weights = []
    for index, shape in enumerate(shapes):
        dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
        weights.append((f"w{index}", (torch.randn(shape) * 3).to(dtype)))
    snapshot = Snapshot(limit)
    snapshot.fill(1, iter(weights))
    found = views(snapshot.buffers, snapshot.buckets)
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (_, got), (_, want) in zip(found, weights, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert torch.equal(got, want)
    for buffer, bucket in zip(snapshot.buffers, snapshot.buckets, strict=True):
        assert buffer.numel() % ALIGN == 0
        assert buffer.numel() <= limit or len(bucket) == 1
    assert snapshot.nbytes < sum(t.numel() * t.element_size() for _, t in weights) + ALIGN * len(weights)


def test_a_bucket_is_filled_up_to_its_limit_and_not_beyond() -> None:
    metas = [TensorMeta(f"w{i}", "float32", [16]) for i in range(5)]  # 64 bytes each
    assert [len(bucket) for bucket in plan(metas, 128)] == [2, 2, 1]
    assert [len(bucket) for bucket in plan(metas, 127)] == [1, 1, 1, 1, 1]
    assert [len(bucket) for bucket in plan(metas, 1)] == [1, 1, 1, 1, 1]


def test_a_snapshot_allocates_only_once() -> None:
    snapshot = Snapshot(64)
    weights = [("a", torch.arange(10.0)), ("b", torch.arange(40.0).bfloat16())]
    snapshot.fill(1, weights)
    before = [buffer.data_ptr() for buffer in snapshot.buffers]
    snapshot.fill(2, [(name, tensor + 1) for name, tensor in weights])
    assert [buffer.data_ptr() for buffer in snapshot.buffers] == before
    assert torch.equal(views(snapshot.buffers, snapshot.buckets)[0][1], torch.arange(10.0) + 1)
    assert snapshot.version == 2


def test_a_copy_does_not_change_with_its_source() -> None:
    source = torch.ones(8)
    snapshot = Snapshot(64)
    snapshot.fill(1, [("a", source)])
    source.zero_()
    assert torch.equal(views(snapshot.buffers, snapshot.buckets)[0][1], torch.ones(8))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ([("a", torch.ones(3)), ("c", torch.ones(2))], "'c'"),
        ([("a", torch.ones(4)), ("b", torch.ones(2))], r"shape=\[4\]"),
        ([("a", torch.ones(3).half()), ("b", torch.ones(2))], "float16"),
        ([("a", torch.ones(3))], "before b"),
        ([("a", torch.ones(3)), ("b", torch.ones(2)), ("c", torch.ones(1))], "the end"),
    ],
)
def test_a_changed_set_is_refused_and_says_where(changed, named) -> None:
    snapshot = Snapshot(64)
    snapshot.fill(1, [("a", torch.ones(3)), ("b", torch.ones(2))])
    with pytest.raises(ValueError, match=named):
        snapshot.fill(2, changed)


def test_any_single_flipped_bit_changes_the_checksum() -> None:
    buffer = allocate([[meta_of("a", torch.zeros(6))]])[0].tensor
    buffer.copy_(torch.randint(0, 256, (32,), dtype=torch.uint8))
    right = int(checksum(buffer))
    for byte in range(32):
        for bit in range(8):
            buffer[byte] ^= 1 << bit
            assert int(checksum(buffer)) != right
            buffer[byte] ^= 1 << bit
    assert int(checksum(buffer)) == right


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="tensor a has dtype 'manual_seed'"):
        allocate([[TensorMeta("a", "manual_seed", [1])]])
