"""Labels of streamed tokens against a slow reference, and the bytes of buckets. No server, no process."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp, which the SGLang engine needs, is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.engines.base import Delta
from asyncrl.generator.engines.sglang_client import Chunk, ServerFailed, Span
from asyncrl.generator.engines.sglang_group import cut, describe, flatten
from asyncrl.generator.engines.sglang_stream import Stream, serial_of, tag_of

VERSIONS = [4, 5, 5, 3]
"""By serial: a version that was sent twice, and an older one."""


def chunk(tokens: list[int], total: int, serial: int, **end: Any) -> Chunk:
    return Chunk(tokens, [-float(t) for t in tokens], total, tag_of(VERSIONS[serial], serial), **end)


def spans(serials: list[int]) -> list[Span]:
    found, start = [], 0
    for serial, run in groupby(serials):
        end = start + len(list(run))
        found.append(Span(tag_of(VERSIONS[serial], serial), start, end))
        start = end
    return found or [Span(tag_of(VERSIONS[-1], 3), 0, 0)]


def drain(stream: Stream) -> list[Delta]:
    found = []
    while not stream.deltas.empty():
        delta = stream.deltas.get_nowait()
        assert isinstance(delta, Delta)
        found.append(delta)
    return found


@given(st.data())
def test_labels_are_exact_whenever_no_old_token_passes_for_new(data):
    """Chunks of one version each, which the server or the engine still calls old; the last may be of several."""
    serials = sorted(data.draw(st.lists(st.integers(0, 3), max_size=40)))
    streamed = data.draw(st.integers(0, len(serials)))
    stream = Stream(flush_tokens=data.draw(st.integers(1, 9)), versions=VERSIONS)
    sent = 0
    for serial, run in groupby(serials[:streamed]):
        count = len(list(run))
        while count:
            size = data.draw(st.integers(1, count))
            late, early = data.draw(st.integers(serial, 3)), data.draw(st.booleans())
            # Either witness may know of newer weights already, but not both.
            tag, current = (late, serial) if early else (serial, late)
            stream.take(chunk(list(range(sent, sent + size)), sent + size, tag), current)
            sent, count = sent + size, count - size
        if data.draw(st.booleans()):
            stream.flush()
    last = chunk(list(range(sent, len(serials))), len(serials), 3, reason="length", spans=spans(serials))
    stream.take(last, 3)
    deltas = drain(stream)
    tokens = [t for d in deltas for t in d.token_ids]
    assert tokens == list(range(len(serials)))
    assert [lp for d in deltas for lp in d.logprobs] == [-float(t) for t in tokens]
    assert [d.version for d in deltas for _ in d.token_ids] == [VERSIONS[s] for s in serials]
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=30).map(sorted),
    st.lists(st.integers(0, 2), min_size=2, max_size=30).map(sorted),
)
def test_any_difference_from_the_servers_account_is_found(labelled, account):
    account = (account * len(labelled))[: len(labelled)]
    account.sort()
    stream = Stream(flush_tokens=4, versions=VERSIONS)
    for i, serial in enumerate(labelled):
        stream.take(chunk([i], i + 1, serial), 3)
    end = chunk([], len(labelled), 3, reason="stop", spans=spans(account))
    if account == labelled:
        stream.take(end, 3)
        assert drain(stream)[-1].finish_reason == "stop"
    else:
        with pytest.raises(ServerFailed, match="in doubt"):
            stream.take(end, 3)


def test_a_lost_chunk_is_found():
    stream = Stream(flush_tokens=4, versions=VERSIONS)
    stream.take(chunk([0, 1], 2, 0), 0)
    with pytest.raises(ServerFailed, match="has 4 tokens at the server, of which 2 and then 1 arrived"):
        stream.take(chunk([3], 4, 0), 0)


def test_weights_that_somebody_else_has_changed_are_found():
    with pytest.raises(ServerFailed, match="'default': somebody else"):
        serial_of("default")


def test_after_an_abort_nothing_more_comes():
    stream = Stream(flush_tokens=4, versions=VERSIONS)
    stream.take(chunk([0, 1], 2, 0), 0)
    stream.end("abort")
    stream.take(chunk([2], 3, 0), 0)
    stream.fail(RuntimeError("late"))
    (delta,) = drain(stream)
    assert (delta.token_ids, delta.finish_reason) == ([0, 1], "abort")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.lists(st.integers(1, 4), max_size=3)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
def test_buckets_keep_every_byte_aligned_and_within_the_limit(kinds, limit):
    tensors = [(f"t{i}", (torch.randn(shape) * 9).to(dtype)) for i, (dtype, shape) in enumerate(kinds)]
    back, buffer = [], torch.empty(0, dtype=torch.uint8)
    for bucket in cut(tensors, limit):
        flat, about = flatten(bucket, buffer), describe(bucket)
        assert len(flat) <= limit or len(bucket) == 1
        offset = 0
        for name, dtype_name, shape in zip(about["names"], about["dtypes"], about["shapes"], strict=True):
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            assert offset % dtype.itemsize == 0
            back.append((name, flat[offset : offset + size].clone().view(dtype).view(shape)))
            offset += size
        assert offset == len(flat)
    assert [name for name, _ in back] == [name for name, _ in tensors]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(back, tensors, strict=True))
