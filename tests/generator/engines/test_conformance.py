"""What every engine promises, asked of every engine that is installed; the reference is a plain forward pass.

Each engine is opened as the generator process opens it, on a tiny random model whose distributions are far from
uniform, with a tied and with an untied head. An engine that cannot run here is skipped with the reason.
SGLang is asked through a fake server (`fake_sglang.py`), for it cannot be installed without a GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from asyncrl.generator.engines.base import Delta, EngineDead, StagedWeights

LONG = 150
"""Tokens of a prompt that fills a block of any engine's prefix cache."""


@pytest.fixture(scope="module")
def shared(engine_case: Any) -> Iterator[Any]:
    opened = engine_case()
    yield opened
    opened.close()


@pytest.fixture
def subject(shared: Any) -> Any:
    """The engine under test, with the weights `a`; one for all tests of this module."""
    if shared.holds != "a":
        shared.run(shared.load("a", "recompute"))
    return shared


@pytest.fixture
def fresh(mortal_case: Any) -> Iterator[Any]:
    """An engine of its own, for a test that kills it."""
    opened = mortal_case()
    yield opened
    opened.close()


def versions(deltas: list[Delta]) -> list[int]:
    return [delta.version for delta in deltas for _ in delta.token_ids]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]


async def rest(stream: AsyncIterator[Delta], first: Delta) -> list[Delta]:
    return [first] + [delta async for delta in stream]


# ---- sampling -----------------------------------------------------------------------------------


def test_deltas_stream_before_the_end_and_only_the_last_carries_a_reason(subject):
    async def scenario():
        return [delta async for delta in subject.ask([1, 2, 3], max_tokens=60)]

    deltas = subject.run(scenario())
    assert len(deltas) > 1
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(tokens(deltas)) == 60
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)
    assert max(len(delta.token_ids) for delta in deltas) <= 2 * subject.config.generator.chunk_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_a_forward_pass_after_the_temperature(subject, temperature):
    asked = prompts(6)
    answers = subject.run(subject.all(asked, max_tokens=40, temperature=temperature))
    assert max(subject.error(p, a, "a", temperature) for p, a in zip(asked, answers, strict=True)) < 1e-4


def test_temperature_zero_takes_the_most_likely_token(subject):
    (answer,) = subject.run(subject.all([[5, 6]], max_tokens=20, temperature=0.0))
    plain = subject.plain("a", [5, 6, *tokens(answer)])
    assert tokens(answer) == plain[1:].argmax(-1).tolist()


def test_a_stop_token_ends_its_request_and_belongs_to_the_output(subject):
    (free,) = subject.run(subject.all([[1, 2]], max_tokens=40, temperature=0.0))
    stop = tokens(free)[12]
    (stopped,) = subject.run(subject.all([[1, 2]], max_tokens=40, temperature=0.0, stop_token_ids=(stop,)))
    assert tokens(stopped) == tokens(free)[: tokens(free).index(stop) + 1]
    assert stopped[-1].finish_reason == "stop"


def test_the_length_limit_is_exact_and_the_context_ends_a_request(subject):
    room = subject.config.generator.max_model_len
    short, filled, last = subject.run(
        subject.gather(
            subject.whole([7], max_tokens=33),
            subject.whole([3] * (room - 5), max_tokens=100),
            subject.whole([3] * (room - 1), max_tokens=100),
        )
    )
    assert [len(tokens(answer)) for answer in (short, filled, last)] == [33, 5, 1]
    assert {answer[-1].finish_reason for answer in (short, filled, last)} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "empty prompt"),
        ([97_000], {}, "token ids"),
        ([1] * 4096, {}, "no room"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_hurts_nobody(subject, prompt, params, text):
    with pytest.raises(ValueError, match=text):
        subject.run(subject.whole(prompt, **({"max_tokens": 1} | params)))
    (answer,) = subject.run(subject.all([[1, 2]], max_tokens=3))
    assert len(tokens(answer)) == 3


def test_a_seed_repeats_its_tokens_and_another_one_does_not(subject):
    first, again, other = (
        tokens(subject.run(subject.whole([4, 5, 6], max_tokens=30, seed=seed))) for seed in (11, 11, 12)
    )
    assert first == again
    assert first != other


def test_a_request_that_starts_from_a_prefix_continues_with_the_right_logprobs(subject):
    (whole,) = subject.run(subject.all([[9, 8]], max_tokens=30))
    prefix = [9, 8, *tokens(whole)[:17]]
    (answer,) = subject.run(subject.all([prefix], max_tokens=30))
    assert subject.error(prefix, answer, "a") < 1e-4
    (other,) = subject.run(subject.all([prefix], max_tokens=30, seed=99))
    assert tokens(other) != tokens(answer)


def test_sixty_four_requests_run_at_once(subject):
    asked = prompts(64)
    answers = subject.run(subject.all(asked, max_tokens=24))
    assert [len(tokens(answer)) for answer in answers] == [24] * 64
    assert max(subject.error(p, a, "a") for p, a in zip(asked, answers, strict=True)) < 1e-4


# ---- ending early -------------------------------------------------------------------------------


def test_abort_ends_the_named_request_and_leaves_the_others(subject):
    async def scenario():
        streams = [subject.ask([i + 1], max_tokens=150, rid=f"r{i}") for i in range(3)]
        first = [await anext(stream) for stream in streams]
        await subject.engine.abort(["r1"])
        return await asyncio.gather(*(rest(s, f) for s, f in zip(streams, first, strict=True)))

    kept, aborted, also = subject.run(scenario())
    assert aborted[-1].finish_reason == "abort"
    assert len(tokens(aborted)) < 150
    assert [len(tokens(answer)) for answer in (kept, also)] == [150, 150]
    assert max(subject.error([1], kept, "a"), subject.error([2], aborted, "a")) < 1e-4


def test_abort_of_everything_ends_everything(subject):
    async def scenario():
        streams = [subject.ask([i + 1], max_tokens=150) for i in range(3)]
        first = [await anext(stream) for stream in streams]
        await subject.engine.abort(None)
        return await asyncio.gather(*(rest(s, f) for s, f in zip(streams, first, strict=True)))

    answers = subject.run(scenario())
    assert [answer[-1].finish_reason for answer in answers] == ["abort"] * 3


def test_a_consumer_that_leaves_frees_the_id_of_its_request(subject):
    async def scenario():
        stream = subject.ask([1], max_tokens=150, rid="mine")
        await anext(stream)
        with pytest.raises(ValueError, match="already running"):
            await anext(subject.ask([1], max_tokens=5, rid="mine"))
        await stream.aclose()
        return await subject.whole([1], max_tokens=5, rid="mine")

    assert len(tokens(subject.run(scenario()))) == 5


# ---- new weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_change_in_flight_and_every_token_carries_its_version(subject, kv):
    asked = prompts(6)
    before = subject.engine.version

    async def scenario():
        streams = [subject.ask(prompt, max_tokens=150, seed=i) for i, prompt in enumerate(asked)]
        first = [await anext(stream) for stream in streams]
        times = await subject.load("b", kv)
        return times, await asyncio.gather(*(rest(s, f) for s, f in zip(streams, first, strict=True)))

    times, answers = subject.run(scenario())
    assert times.pause_s > 0
    assert times.wait_s >= 0
    assert subject.engine.version == before + 1
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer[-1].finish_reason == "length"
        assert len(tokens(answer)) == 150
        labels = versions(answer)
        old = labels.count(before)
        assert labels == [before] * old + [before + 1] * (150 - old)
        assert 0 < old < 150
        errors = {key: subject.errors(prompt, answer, key) for key in "ab"}
        assert errors["a"][:old].max() < 1e-4
        if kv == "recompute":
            assert errors["b"][old:].max() < 1e-4
        else:
            # The new weights read keys of the old ones: neither model's log-probs, by construction. The
            # importance ratio of such a token is exp(learner - behaviour), and the learner corrects by it.
            assert errors["b"][old:].max() > 1e-2
    if kv == "keep":
        log_ratios = torch.cat(
            [
                subject.log_ratios(p, a, "b")[versions(a).count(before) :]
                for p, a in zip(asked, answers, strict=True)
            ]
        )
        assert torch.isfinite(log_ratios).all()


def test_several_updates_in_one_request_leave_its_versions_in_order(subject):
    start = subject.engine.version

    async def scenario():
        stream = subject.ask([1, 2], max_tokens=200)
        got = [await anext(stream)]
        for key in ("b", "a", "b"):
            await subject.load(key, "recompute")
            while got[-1].version < subject.engine.version and got[-1].finish_reason is None:
                got.append(await anext(stream))
        return got + [delta async for delta in stream]

    answer = subject.run(scenario())
    labels = versions(answer)
    assert labels == sorted(labels)
    assert set(labels) == {start, start + 1, start + 2, start + 3}
    for version, key in enumerate("abab", start=start):
        errors = subject.errors([1, 2], answer, key)
        assert max(e for e, label in zip(errors.tolist(), labels, strict=True) if label == version) < 1e-4


def test_a_request_after_an_update_is_not_served_keys_of_the_old_weights(subject):
    prompt = [(7 * i) % 97 for i in range(LONG)]

    async def scenario():
        old = await subject.whole(prompt, max_tokens=10)
        again = await subject.whole(prompt, max_tokens=10)
        running = subject.ask([1], max_tokens=90)
        first = await anext(running)  # while requests run, no engine may simply empty its cache
        await subject.load("b", "keep")
        new = await subject.whole(prompt, max_tokens=10)
        await rest(running, first)
        return old, again, new

    old, again, new = subject.run(scenario())
    assert max(subject.error(prompt, old, "a"), subject.error(prompt, again, "a")) < 1e-4
    assert subject.error(prompt, new, "b") < 1e-4


def test_requests_that_come_during_an_update_are_served_by_the_new_weights(subject):
    async def scenario():
        running = subject.ask([1], max_tokens=60)
        first = await anext(running)
        update = asyncio.create_task(subject.load("b", "keep"))
        await asyncio.sleep(0)
        late = await asyncio.gather(*(subject.whole([i, 3], max_tokens=10) for i in range(8)))
        await update
        await rest(running, first)
        return late

    before = subject.engine.version
    for i, answer in enumerate(subject.run(scenario())):
        labels = versions(answer)
        assert set(labels) == {before + 1}
        assert subject.error([i, 3], answer, "b") < 1e-4


# ---- death --------------------------------------------------------------------------------------


def test_a_failed_update_poisons_the_engine_and_another_one_continues_its_requests(fresh, mortal_case):
    async def scenario():
        stream = fresh.ask([1, 2], max_tokens=200)
        got = [await anext(stream)]
        with pytest.raises(EngineDead):
            await fresh.engine.update(fresh.wrong_shape(), "keep")
        with pytest.raises(EngineDead):
            [got.append(delta) async for delta in stream]
        with pytest.raises(EngineDead):
            await fresh.whole([1], max_tokens=2)
        return got

    got = fresh.run(scenario())
    assert all(delta.finish_reason is None for delta in got)
    fresh.close()
    restarted = mortal_case()
    prefix = [1, 2, *tokens(got)]
    (answer,) = restarted.run(restarted.all([prefix], max_tokens=200 - len(tokens(got))))
    error = restarted.error(prefix, answer, "a")
    restarted.close()
    assert len(tokens(answer)) == 200 - len(tokens(got))
    assert error < 1e-4


def test_a_process_that_dies_within_an_update_ends_it_at_once(fresh):
    if not fresh.processes():
        pytest.skip("this engine has no process of its own")

    async def scenario():
        await fresh.whole([1], max_tokens=2)
        for pid in fresh.processes():
            os.kill(pid, signal.SIGSTOP)
        update = asyncio.create_task(fresh.load("b", "keep"))
        await asyncio.sleep(1)
        assert not update.done()
        await fresh.kill()
        with pytest.raises(EngineDead):
            async with asyncio.timeout(30):  # The call's own limit, `generator.stall_s`, is ten times that.
                await update

    fresh.run(scenario())


def test_an_engine_that_dies_says_so_to_everyone_who_waits(fresh):
    async def scenario():
        # The first thing that the engine sees is many requests at once.
        first = await fresh.all(prompts(20), max_tokens=12)
        assert [len(tokens(answer)) for answer in first] == [12] * 20
        streams = [fresh.ask([i], max_tokens=400) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await fresh.kill()
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDead):
            await fresh.whole([1], max_tokens=2)
        with pytest.raises(EngineDead):
            await fresh.engine.update(StagedWeights(99, ()), "keep")
        await fresh.engine.close()
        await fresh.engine.close()

    fresh.run(scenario())
