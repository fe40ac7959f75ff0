"""An episode is interrupted in the middle and goes on elsewhere, with the real engine: what is sampled twice."""

from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path

import pytest

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.envs.rewards import Rewards
from asyncrl.generator.engines.driver import EngineDriver
from asyncrl.generator.engines.transformers import TransformersEngine
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Lease, Prefix, Span, Turn
from asyncrl.toy import init_model

TOKENS, INTERRUPTED_AT = 400, 255
"""The latter is the worst moment for every size of chunk: one token later one more of them would be full."""


class Journal:
    """A sink that keeps what it got, as the hub's journal does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens, self.logprobs = array("i"), array("f")
        self.sampled = 0
        self.ends: list[EpisodeEnd] = []

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        assert chunk.seq == len(self.spans)
        self.spans.append(Span(chunk.n, chunk.version, chunk.sampled, chunk.fork))
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.sampled += chunk.n if chunk.sampled else 0

    def turn(self, turn: Turn) -> None:
        raise AssertionError("an episode of one turn records none")

    def end(self, end: EpisodeEnd) -> None:
        self.ends.append(end)

    def lease(self, lease_id: int, task) -> tuple[Lease, TokenRecord]:
        prefix = Prefix(next_seq=len(self.spans), spans=self.spans[:])
        record = TokenRecord.from_prefix(prefix, self.tokens.tobytes(), self.logprobs.tobytes())
        return Lease(lease_id, 0, task, seed=5, prefix=prefix), record


class Counting(TransformersEngine):
    """Counts every token when it is sampled, before anybody hears of it, and waits once at a given number."""

    counted = 0

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def _record(self, slots, tokens, logprobs) -> None:
        self.counted += len(tokens)
        super()._record(slots, tokens, logprobs)
        if self.counted == INTERRUPTED_AT:
            self.reached.set()
            assert self.go_on.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1)


@pytest.mark.parametrize("chunk_tokens", [8, 32, 128])
@pytest.mark.parametrize("orderly", [False, True])
async def test_an_interrupted_episode_samples_at_most_one_chunk_again(
    model: Path, chunk_tokens: int, orderly: bool
) -> None:
    config = Config.model_validate({"sampling": {"max_tokens": TOKENS}, "generator": {"max_model_len": 512}})
    chat, environment = ChatFormat(model), load("arithmetic", {})
    chat.stop_token_ids = ()
    engine = Counting(str(model), slots=2, max_model_len=512, flush_tokens=chunk_tokens)
    # Only full chunks: what the clock adds to them would make fewer tokens come again.
    driver, journal = EngineDriver(engine, flush_s=1000.0), Journal()
    world = World(config, environment, chat, driver, journal, Rewards(config.reward))
    try:
        lease, record = journal.lease(0, environment.task("train", 0))
        runner = EpisodeRunner(world, lease, record)
        first = asyncio.create_task(runner.run())
        assert await asyncio.to_thread(engine.reached.wait, 60)
        full = INTERRUPTED_AT // chunk_tokens * chunk_tokens
        async with asyncio.timeout(60):
            while journal.sampled < full:
                await asyncio.sleep(0.001)  # The engine is another thread; it tells the journal, not us.
        if orderly:
            assert runner.leave()
            ended = asyncio.create_task(driver.abort(None))
            await asyncio.sleep(0)  # The request to end is with the engine, which is in the middle of a step.
        else:
            first.cancel()
            await asyncio.wait({first})
            ended = first
        engine.go_on.set()
        await asyncio.wait({first, ended})
        assert first.cancelled()
        assert journal.sampled == (INTERRUPTED_AT if orderly else full)

        lease, record = journal.lease(1, lease.task)
        await EpisodeRunner(world, lease, record).run()
    finally:
        await driver.close()
    assert journal.sampled == TOKENS
    assert [end.status for end in journal.ends] == ["truncated_length"]
    assert engine.counted - TOKENS == (0 if orderly else chunk_tokens - 1)
