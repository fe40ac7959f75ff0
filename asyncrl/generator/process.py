"""The generator process: leases in, chunks out, weights replaced while requests run.

It owns the sockets, the engine, one task per lease and the heartbeat; episodes are `asyncrl.generator.episode`'s
business, and the hub alone decides what runs where. Started by the supervisor, or by hand on any machine with
`asyncrl generator --hub tcp://host:port --name generator-7`.

    hub ──Lease──▶ control socket ─▶ episode task ─▶ engine.generate ─▶ (engine thread decodes)
                                          │                                   ▲
                                          ▼                                   │ one pause per update
    hub ◀─Chunks── data socket ◀── outbox (kept until Ack)      receiver ─────┘
    hub ◀─Heartbeat, Ready, Applied── control socket ◀──────────────┘ ◀──broadcast── publisher

    | part         | waits for                         | unblocked by                               |
    |--------------|-----------------------------------|--------------------------------------------|
    | start        | hub, scorer: a first answer each  | supervise.start_timeout_s                  |
    | episode task | tokens, environment, rewards      | engine thread; env. and reward.timeout_s   |
    | engine       | work                              | a lease                                    |
    | outbox       | Ack (keeps, never blocks)         | hub commit; re-sent after a hub restart    |
    | receiver     | Go, then the broadcast            | publisher; weights.timeout_s               |

Without the hub nothing stops: episodes go on to their end and wait in the outbox. A dead engine (or one
poisoned by a failed update) ends the process; its leases go elsewhere with their prefixes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import replace
from typing import Any

import zmq

from asyncrl.config import Config
from asyncrl.generator.engines.base import EngineDead, EngineStats
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.outbox import Outbox
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import (
    Ack,
    Go,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Prepare,
    Refused,
    Rehello,
    Revoke,
    Stop,
    Welcome,
)
from asyncrl.process import EXIT_USAGE, pin
from asyncrl.scorer_client import ScorerClient
from asyncrl.settings import from_json
from asyncrl.transport import AsyncSocket
from asyncrl.weights.receiver import Receiver

RESEND_AFTER_S = 10.0
"""An unacknowledged message is sent again after this long: its connection may have been replaced."""
DRAIN_S = 10.0
"""Longest wait at the end for the last acknowledgements."""


class GeneratorProcess:
    """One generator. `await run()` returns the exit status."""

    def __init__(self, hub: str, name: str) -> None:
        self._name = name
        self._incarnation = secrets.token_hex(4)
        asyncio.get_running_loop().set_exception_handler(self._broken)
        self._control = AsyncSocket(zmq.DEALER, self._on_control, f"{name}/{self._incarnation}")
        self._control.connect(hub)
        self._data: AsyncSocket | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outbox = Outbox(self._send_chunks)
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._world: World | None = None
        self._scorer: ScorerClient | None = None
        self._receiver: Receiver | None = None
        self._config = Config()
        self._finished = 0
        self._reported = EngineStats()

    async def run(self, start_timeout_s: float) -> int:
        """Runs until the hub says stop or the engine dies; returns the exit status."""
        self._control.send(Hello("generator", self._name, self._incarnation, os.getpid()))
        try:
            async with asyncio.timeout(start_timeout_s):
                first: set[asyncio.Future[Any]] = {self._welcome, self._exit}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            print(f"{self._name}: no answer from the hub within {start_timeout_s:g} s", flush=True)
            return 1
        if not self._welcome.done():
            return self._exit.result()
        try:
            await self._open(self._welcome.result(), start_timeout_s)
        except (ValueError, ImportError) as error:
            # The fault boundary of the configuration: a restart would only find the same again.
            print(f"{self._name}: the engine cannot be opened: {type(error).__name__}: {error}", flush=True)
            return EXIT_USAGE
        if not self._exit.done():
            self._hello()
        heartbeat = asyncio.create_task(self._heartbeats(), name="heartbeat")
        heartbeat.add_done_callback(self._watch)
        status = await self._exit
        heartbeat.cancel()
        await self._shut(status)
        return status

    # ---- phases ----------------------------------------------------------------------------------

    async def _open(self, welcome: Welcome, start_timeout_s: float) -> None:
        config = self._config = from_json(welcome.config)
        pin(config.generator.cores)
        self._data = AsyncSocket(zmq.DEALER, self._on_data, f"{self._name}/{self._incarnation}")
        self._data.connect(welcome.data_endpoint)
        # Loading a model takes seconds; in a thread the control socket stays alive meanwhile.
        index = int(number) if (number := self._name.rsplit("-", 1)[-1]).isdecimal() else 0
        loop = asyncio.get_running_loop()
        if config.reward.endpoint is not None:
            self._scorer = ScorerClient(config.reward.endpoint)
        self._world = await asyncio.to_thread(_build_world, config, self._outbox, loop, index, self._scorer)
        if self._scorer is not None and not await self._answers(self._scorer, start_timeout_s):
            return
        self._receiver = Receiver(config, self._world.engine, self._control.send)
        print(f"{self._name}: ready with version {self._world.engine.version}", flush=True)

    async def _answers(self, scorer: ScorerClient, start_timeout_s: float) -> bool:
        """No episode is asked for before it can be scored: a scorer may load for longer than a reward may take."""
        ready: asyncio.Future[Any] = asyncio.create_task(scorer.ready(), name="scorer")
        await asyncio.wait({ready, self._exit}, timeout=start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() and not self._exit.done():
            print(
                f"{self._name}: no answer from the scorer at reward.endpoint = {self._config.reward.endpoint} "
                f"within {start_timeout_s:g} s; see its log, or start it, or raise supervise.start_timeout_s",
                flush=True,
            )
            self._finish(1)
        ready.cancel()
        return not self._exit.done()

    async def _shut(self, status: int) -> None:
        """On an orderly stop what has been sampled is made durable; episodes that still run are dropped
        here and continue from their prefixes elsewhere, or in a later run."""
        assert self._world is not None
        for task in list(self._episodes.values()):
            task.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)
        if status == 0 and not await self._outbox.drained(DRAIN_S):
            print(f"{self._name}: {self._outbox.unacked} messages were not acknowledged", flush=True)
        if self._receiver is not None:
            self._receiver.close()
        await self._world.engine.close()
        for socket in (self._control, self._data, self._scorer):
            if socket is not None:
                socket.close()

    def _hello(self) -> None:
        assert self._world is not None
        self._control.send(
            Hello(
                "generator",
                self._name,
                self._incarnation,
                os.getpid(),
                capacity=self._config.capacity,
                version=self._world.engine.version,
                leases=list(self._episodes),
            )
        )

    # ---- sockets ---------------------------------------------------------------------------------

    def _on_control(self, _peer: bytes, message: Message, frames: list[memoryview]) -> None:
        match message:
            case Lease():
                self._start(message, frames)
            case Prepare() | Go():
                if self._receiver is not None:
                    self._keep(asyncio.create_task(self._receiver.handle(message), name="receive"))
            case Revoke(leases, reason):
                for lease in leases:
                    self._cancel(lease, reason)
            case Rehello():
                if self._receiver is not None:
                    self._hello()
                    self._outbox.resend()
                else:
                    self._control.send(Hello("generator", self._name, self._incarnation, os.getpid()))
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Stop(reason, restart):
                print(f"{self._name}: stopping: {reason}", flush=True)
                self._finish(1 if restart else 0)
            case Refused(reason):
                print(f"{self._name}: refused by the hub: {reason}", flush=True)
                self._finish(EXIT_USAGE)
            case _:
                self._control.malformed += 1

    def _on_data(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Ack):
            self._outbox.acked(message.message_id)
            for lease in message.refused:
                self._cancel(lease, "the hub no longer knows it")

    def _send_chunks(self, header: Message, frames: Any) -> None:
        assert self._data is not None
        self._data.send(header, frames)

    # ---- episodes --------------------------------------------------------------------------------

    def _start(self, lease: Lease, frames: list[memoryview]) -> None:
        if lease.lease_id in self._episodes or self._world is None or self._exit.done():
            return
        record = TokenRecord.from_prefix(lease.prefix, frames[0], frames[1])
        runner = EpisodeRunner(self._world, lease, record)
        task = asyncio.create_task(runner.run(), name=f"lease-{lease.lease_id}")
        self._episodes[lease.lease_id] = task
        task.add_done_callback(lambda done: self._episode_over(lease.lease_id, done))

    def _episode_over(self, lease_id: int, task: asyncio.Task[None]) -> None:
        self._episodes.pop(lease_id, None)
        self._finished += 1
        self._watch(task)

    def _cancel(self, lease_id: int, reason: str) -> None:
        task = self._episodes.get(lease_id)
        if task is not None:
            task.cancel(f"lease {lease_id} revoked: {reason}")

    # ---- life ------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        assert self._world is not None
        while True:
            await asyncio.sleep(self._config.hub.heartbeat_s)
            self._control.send(Heartbeat(list(self._episodes), self._stats()))
            self._outbox.resend(older_than=asyncio.get_running_loop().time() - RESEND_AFTER_S)

    def _stats(self) -> dict[str, float]:
        assert self._world is not None
        now, before = replace(self._world.engine.stats), self._reported
        self._reported = now
        stats: dict[str, float] = {
            name: getattr(now, name) - getattr(before, name)
            for name in ("sampled_tokens", "prefill_tokens", "steps", "busy_s", "paused_s", "waiting_s")
        }
        stats |= {"live": now.live, "queued": now.queued, "unacked": self._outbox.unacked}
        stats |= {"episodes": self._finished, "version": self._world.engine.version, "time": time.time()}
        self._finished = 0
        return stats

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(self._watch)

    def _watch(self, task: asyncio.Task[Any]) -> None:
        """A task that failed for another reason than its environment means that this process is broken."""
        if task.cancelled() or task.exception() is None or self._exit.done():
            return  # Once the process is stopping, what it stops is no news.
        error = task.exception()
        kind = "engine died" if isinstance(error, EngineDead) else f"task {task.get_name()} failed"
        print(f"{self._name}: {kind}: {error!r}", flush=True)
        self._finish(1)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug in a callback: better to start anew from the journal than to go on without what it did."""
        loop.default_exception_handler(context)
        self._finish(1)

    def _finish(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)


def _build_world(
    config: Config, outbox: Outbox, loop: asyncio.AbstractEventLoop, index: int, scorer: ScorerClient | None
) -> World:
    """Imports and loads what is heavy: torch, the engine, the tokenizer, the environment, the reward functions."""
    from asyncrl.chat import ChatFormat
    from asyncrl.envs.registry import load
    from asyncrl.envs.rewards import Rewards
    from asyncrl.generator.engines.select import open_engine

    assert config.model.path is not None
    environment = load(config.env.name, config.env.args)
    rewards = Rewards(config.reward, scorer.reward if scorer else None)
    engine = open_engine(config, config.model.path, loop, index=index)
    chat = ChatFormat(config.model.path, config.model.renderer)
    print(f"the chat template: {chat.probe()}", flush=True)
    return World(config, environment, chat, engine, outbox, rewards)
