"""A generator's start: it asks for episodes once the scorer answers, and not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from asyncrl.config import Config, Hub, Reward
from asyncrl.generator import process
from asyncrl.generator.engines.base import EngineStats
from asyncrl.generator.process import GeneratorProcess
from asyncrl.messages import Hello, Message, Score, Scored, Stop, Welcome
from asyncrl.transport import AsyncSocket, free_port_pair


class Engine:
    version = 0
    stats = EngineStats()
    closed = False

    async def close(self) -> None:
        self.closed = True


class FakeHub:
    """Welcomes whoever says hello, and keeps what it said."""

    def __init__(self, config: Config) -> None:
        self.address = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
        self.hellos: list[Hello] = []
        self._config = config.model_dump_json().encode()
        self.peer = b""
        self.socket = AsyncSocket(zmq.ROUTER, self._on_message)
        self.socket.bind(self.address)

    def _on_message(self, peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Hello):
            self.peer = peer
            self.hellos.append(message)
            if not message.capacity:
                self.socket.send(Welcome(self._config, ".", "tcp://127.0.0.1:9", 0, 0), to=peer)

    @property
    def asked_for_work(self) -> bool:
        return any(hello.capacity for hello in self.hellos)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(process, "_build_world", lambda *_: SimpleNamespace(engine=engine))
    return engine


async def _until(happened: Any) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_generator_asks_for_work_only_once_the_scorer_has_answered(engine: Engine) -> None:
    scorer = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    # The scorer is away for longer than any reward may take: nothing has been leased that could fail of it.
    hub = FakeHub(Config(reward=Reward(endpoint=scorer, timeout_s=0.01)))
    generator = GeneratorProcess(hub.address, "generator-0")
    run = asyncio.create_task(generator.run(300))
    tried = lambda: generator._scorer is not None and generator._scorer._socket.unroutable > 3  # noqa: E731
    await _until(lambda: hub.asked_for_work or tried())
    assert not hub.asked_for_work
    answers = AsyncSocket(zmq.ROUTER, lambda peer, asked, _: answer(peer, asked))

    def answer(peer: bytes, asked: Message) -> None:
        assert isinstance(asked, Score)
        answers.send(Scored(asked.request, None, "it has 0 tokens"), to=peer)

    answers.bind(scorer)
    await _until(lambda: hub.asked_for_work)
    hub.socket.send(Stop("the run is over"), to=hub.peer)
    assert await run == 0
    assert engine.closed
    answers.close()
    hub.socket.close()


async def test_a_scorer_that_never_answers_ends_the_generator_with_the_reason(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    hub = FakeHub(Config(reward=Reward(endpoint=scorer)))
    generator = GeneratorProcess(hub.address, "generator-0")
    generator._control.send(Hello("generator", "generator-0", generator._incarnation))
    await generator._welcome  # So that the limit is the scorer's, however slow this machine is.
    assert await generator.run(0.2) == 1
    said = capsys.readouterr().out
    assert f"generator-0: no answer from the scorer at reward.endpoint = {scorer} within 0.2 s" in said
    assert "raise supervise.start_timeout_s" in said
    assert not hub.asked_for_work
    assert engine.closed
    hub.socket.close()


async def test_a_generator_that_waits_for_the_scorer_can_be_stopped(engine: Engine) -> None:
    scorer = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    hub = FakeHub(Config(reward=Reward(endpoint=scorer)))
    generator = GeneratorProcess(hub.address, "generator-0")
    run = asyncio.create_task(generator.run(300))
    await _until(lambda: generator._world is not None)
    hub.socket.send(Stop("the run is over"), to=hub.peer)
    assert await run == 0
    assert not hub.asked_for_work
    hub.socket.close()


async def test_a_generator_whose_hub_is_gone_for_good_gives_up_and_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "HUB_GONE_S", 0.2)
    hub = FakeHub(Config(hub=Hub(heartbeat_s=0.05)))
    run = asyncio.create_task(GeneratorProcess(hub.address, "generator-0").run(300))
    await _until(lambda: hub.asked_for_work)
    hub.socket.close()
    assert await run == 1
    assert f"the hub at {hub.address} has been gone for 0.2 s; giving up" in capsys.readouterr().out
    assert engine.closed
