"""The asynchronous driver over the real embedded engine: streaming, cancelling, updates, death."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asyncrl.generator.engines.base import Delta, EngineDead, SamplingParams, StagedWeights
from asyncrl.generator.engines.driver import EngineDriver


def drive(step_engine: Any, use: Callable[[EngineDriver], Awaitable[None]], **options: Any) -> None:
    """Runs `use` with a driver, within a time limit; closes the driver and checks that its thread is gone."""

    async def main() -> None:
        driver = EngineDriver(step_engine, **options)
        try:
            async with asyncio.timeout(60):
                await use(driver)
        finally:
            await driver.close()
        assert not driver._thread.is_alive()

    asyncio.run(main())


async def collect(driver: EngineDriver, rid: str, prompt: list[int], **params: Any) -> list[Delta]:
    return [delta async for delta in driver.generate(rid, prompt, SamplingParams(**params))]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until `condition` holds; the caller's time limit bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


def staged(model: Any, version: int, factor: float = 1.0) -> StagedWeights:
    return StagedWeights(version, [(name, p.detach() * factor) for name, p in model.named_parameters()])


def test_many_concurrent_requests_give_what_the_step_engine_gives(engine_of, runs_of, model_of):
    model = model_of()
    runs = runs_of(model, slots=16)
    for i in range(80):
        runs.add(str(i), [i, 3], max_tokens=1 + i % 30, seed=i)
    runs.finish()

    async def use(driver: EngineDriver) -> None:
        jobs = [collect(driver, str(i), [i, 3], max_tokens=1 + i % 30, seed=i) for i in range(80)]
        for i, deltas in enumerate(await asyncio.gather(*jobs)):
            assert tokens(deltas) == runs.tokens(str(i))
            assert deltas[-1].finish_reason == "length"
        assert driver.stats.sampled_tokens == sum(1 + i % 30 for i in range(80))
        assert driver.stats.prefill_tokens == 160
        assert driver.stats.steps > 0
        assert driver.stats.busy_s > 0
        await until(lambda: driver.stats.live == driver.stats.queued == 0)

    drive(engine_of(model, slots=16), use)


def test_tokens_arrive_before_the_request_ends(engine_of):
    async def use(driver: EngineDriver) -> None:
        stream = driver.generate("r", [1], SamplingParams(max_tokens=120))
        first = await anext(stream)
        assert first.finish_reason is None
        assert 1 <= len(first.token_ids) < 120
        rest = [delta async for delta in stream]
        assert len(first.token_ids) + len(tokens(rest)) == 120

    drive(engine_of(flush_tokens=1000), use, flush_s=0.0)


def test_closing_or_cancelling_a_consumer_frees_its_slot(engine_of):
    async def use(driver: EngineDriver) -> None:
        stream = driver.generate("closed", [1], SamplingParams(max_tokens=120))
        await anext(stream)
        task = asyncio.create_task(collect(driver, "cancelled", [1], max_tokens=120))
        await until(lambda: driver.stats.live == 2)
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: driver.stats.live == 0)
        assert driver.stats.sampled_tokens < 200

    drive(engine_of(flush_tokens=4), use)


def test_a_new_request_of_an_aborted_one_s_name_gets_only_its_own_tokens(engine_of):
    async def use(driver: EngineDriver) -> None:
        stream = driver.generate("r", [1], SamplingParams(max_tokens=100))
        await anext(stream)
        await stream.aclose()
        deltas = await collect(driver, "r", [2], max_tokens=5)
        assert len(tokens(deltas)) == 5
        assert deltas[-1].finish_reason == "length"

    drive(engine_of(flush_tokens=2), use)


@pytest.mark.parametrize("rids", [["a", "b", "unknown"], None])
def test_abort_ends_live_and_queued_requests_with_a_last_delta(engine_of, rids):
    async def use(driver: EngineDriver) -> None:
        jobs = [asyncio.create_task(collect(driver, rid, [1], max_tokens=120)) for rid in "ab"]
        await until(lambda: driver.stats.live + driver.stats.queued == 2)
        await driver.abort(rids)
        for deltas in await asyncio.gather(*jobs):
            assert deltas[-1].finish_reason == "abort"

    drive(engine_of(slots=1), use)


def test_a_refused_request_raises_in_its_consumer_and_the_engine_lives_on(engine_of):
    async def use(driver: EngineDriver) -> None:
        with pytest.raises(ValueError, match="empty prompt"):
            await collect(driver, "r", [], max_tokens=3)
        other = driver.generate("same", [1], SamplingParams(max_tokens=100))
        await anext(other)
        with pytest.raises(ValueError, match="already running"):
            await collect(driver, "same", [1], max_tokens=3)
        await other.aclose()
        assert len(tokens(await collect(driver, "r", [1], max_tokens=3))) == 3

    drive(engine_of(flush_tokens=1), use)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_update_under_running_requests_pauses_and_marks_the_later_tokens(engine_of, model_of, kv):
    model = model_of()

    async def use(driver: EngineDriver) -> None:
        streams = [driver.generate(str(i), [i], SamplingParams(max_tokens=120, seed=i)) for i in range(4)]
        first = [await anext(stream) for stream in streams]
        times = await driver.update(staged(model_of(1), 5), kv)
        assert 0 < times.pause_s == times.load_s == driver.stats.paused_s
        assert times.wait_s >= 0
        assert driver.version == 5
        for delta, stream in zip(first, streams, strict=True):
            deltas = [delta] + [d async for d in stream]
            assert len(tokens(deltas)) == 120
            assert {d.version for d in deltas} == {0, 5}
            assert [d.version for d in deltas] == sorted(d.version for d in deltas)

    drive(engine_of(model, flush_tokens=1), use)


def test_a_failed_update_kills_the_engine_for_every_consumer_with_the_first_cause(engine_of, model_of):
    model = model_of()

    async def use(driver: EngineDriver) -> None:
        jobs = [asyncio.create_task(collect(driver, str(i), [1], max_tokens=120)) for i in range(6)]
        await until(lambda: driver.stats.live == 4)
        wrong = StagedWeights(1, [("model.nonsense", torch.zeros(1))])
        later = StagedWeights(2, [("model.later", torch.zeros(1))])
        results = await asyncio.gather(
            driver.update(wrong, "keep"), driver.update(later, "keep"), *jobs, return_exceptions=True
        )
        results += await asyncio.gather(
            collect(driver, "new", [1], max_tokens=1),
            driver.update(staged(model, 3), "keep"),
            driver.abort(None),
            return_exceptions=True,
        )
        assert len(results) == 11
        for error in results:
            assert isinstance(error, EngineDead)
            assert "model.nonsense" in str(error)
            assert isinstance(error.__cause__, ValueError)

    drive(engine_of(model), use)


def test_a_step_that_fails_reaches_live_and_queued_consumers(engine_of, model_of):
    model = model_of()

    async def use(driver: EngineDriver) -> None:
        jobs = [asyncio.create_task(collect(driver, str(i), [1], max_tokens=120)) for i in range(6)]
        await until(lambda: driver.stats.live == 4)
        await driver.update(staged(model, 9, math.nan), "keep")
        for error in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(error, EngineDead)
            assert "version 9" in str(error)
            assert isinstance(error.__cause__, FloatingPointError)

    drive(engine_of(model), use)


def test_close_ends_open_requests_and_may_be_repeated(engine_of):
    async def main() -> None:
        driver = EngineDriver(engine_of())
        job = asyncio.create_task(collect(driver, "r", [1], max_tokens=120))
        await until(lambda: driver.stats.live == 1)
        await driver.close()
        with pytest.raises(EngineDead, match="closed"):
            await job
        await driver.close()
        with pytest.raises(EngineDead, match="closed"):
            await collect(driver, "r", [1], max_tokens=1)
        assert "engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


class Hanging:
    """A step engine whose step does not come back until it is told to."""

    version = 0

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.added = False

    def add(self, rid: str, prompt_ids: Any, params: Any) -> None:
        self.added = True

    def abort(self, rids: Any) -> None:
        self.added = False

    def has_work(self) -> bool:
        return self.added

    def step(self) -> list[Any]:
        self.go_on.wait(timeout=60)
        self.added = False
        return []

    def flush(self) -> None: ...

    def load_weights(self, weights: Any, kv: Any) -> None: ...

    def occupancy(self) -> tuple[int, int]:
        return 1, 0

    def close(self) -> None: ...


def test_a_step_that_hangs_is_reported_after_the_stall_limit_and_by_close():
    async def main() -> None:
        engine = Hanging()
        driver = EngineDriver(engine, stall_s=0.2)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match=r"silent for 0\.2 s"):
                await collect(driver, "r", [1], max_tokens=1)
            with pytest.raises(TimeoutError, match="did not end"):
                await driver.close(timeout_s=0.1)
            engine.go_on.set()
            await driver.close()

    asyncio.run(main())
