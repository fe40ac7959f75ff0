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
    |              | model, engine                     | watchdog.OPEN_S                            |
    | the process  | a hub that is gone                | its return; HUB_GONE_S                     |
    | episode task | tokens, environment, rewards      | engine thread; env. and reward.timeout_s   |
    | engine       | work                              | a lease                                    |
    | outbox       | Ack (keeps, never blocks)         | hub commit; re-sent on a new connection    |
    | receiver     | Go, then the broadcast            | publisher; weights.timeout_s               |

Without the hub nothing stops: episodes go on to their end and wait in the outbox. While there is no connection
nothing is queued; each new one begins with a Hello that names the leases held, and with all that is not acked. A
dead engine (or one poisoned by a failed update) ends the process; its leases go elsewhere with their prefixes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from asyncrl import keys
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
    ProcessEvent,
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
from asyncrl.watchdog import OPEN_S, watchdog
from asyncrl.weights.receiver import Receiver

HAND_IN_S = 5.0
"""Longest wait at the end for the tokens of requests that were ended; the engine needs one step for it."""
DRAIN_S = 10.0
"""Longest wait at the end for the last acknowledgements."""
HUB_GONE_S = 600.0
"""Without a connection to the hub for so long the generator ends: a hub that is supervised is back in seconds."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""A stop that nobody in the run asked for: in order, and the supervisor starts the generator again."""


class GeneratorProcess:
    """One generator. `await run()` returns the exit status."""

    def __init__(self, hub: str, name: str) -> None:
        self._name, self._hub = name, hub
        self._incarnation = secrets.token_hex(4)
        asyncio.get_running_loop().set_exception_handler(self._broken)
        identity = f"{name}/{self._incarnation}"
        self._keys = keys.for_hub(hub)
        self._control = AsyncSocket(zmq.DEALER, self._on_control, identity, self._hello, self._keys)
        self._control.connect(hub, queue=False)
        self._data: AsyncSocket | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outbox = Outbox(self._send_chunks)
        self._episodes: dict[int, tuple[EpisodeRunner, asyncio.Task[None]]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._world: World | None = None
        self._scorer: ScorerClient | None = None
        self._receiver: Receiver | None = None
        self._config = Config()
        self._finished = 0
        self._reported = EngineStats()

    async def run(self, start_timeout_s: float) -> int:
        """Runs until the hub says stop or the engine dies; returns the exit status."""
        try:
            async with asyncio.timeout(start_timeout_s):
                first: set[asyncio.Future[Any]] = {self._welcome, self._exit}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            print(
                f"{self._name} waited {start_timeout_s:g} s for the first answer of the hub at {self._hub}; is it "
                f"running, and does --hub name its control port? --wait S raises the limit{keys.HINT}",
                flush=True,
            )
            return 1
        if not self._welcome.done():
            return self._exit.result()
        try:
            with watchdog.waiting("its own start: engine, environment, scorer", OPEN_S, "watchdog.OPEN_S"):
                await self._open(self._welcome.result(), start_timeout_s)
        except (ValueError, ImportError) as error:
            # The fault boundary of the configuration: a restart would only find the same again.
            print(f"{self._name}: the engine cannot be opened: {type(error).__name__}: {error}", flush=True)
            return EXIT_USAGE
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        run_dir = Path(self._welcome.result().run_dir)
        with watchdog.serving(self._config.supervise.hang_s, run_dir, loop):
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
        identity = f"{self._name}/{self._incarnation}"
        self._data = AsyncSocket(zmq.DEALER, self._on_data, identity, self._outbox.resend, self._keys)
        self._data.connect(welcome.data_endpoint, queue=False)
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
        """On an orderly stop all that has been sampled is made durable; episodes that still run are dropped
        here and continue from their prefixes elsewhere, or in a later run."""
        assert self._world is not None
        orderly = status in (0, EXIT_TERMINATED)
        await self._end_episodes(orderly)
        if orderly and not await self._outbox.drained(DRAIN_S):
            print(
                f"{self._name} waited {DRAIN_S:g} s for the hub to make {self._outbox.unacked} messages durable; "
                "what is in them is sampled again from the prefixes in run.db",
                flush=True,
            )
        if status == EXIT_TERMINATED:
            # So its leases need not wait for their deadline; without a supervisor nobody else says it.
            self._control.send(ProcessEvent(self._name, "left"))
        if self._receiver is not None:
            self._receiver.close()
        await self._world.engine.close()
        for socket in (self._control, self._data, self._scorer):
            if socket is not None:
                socket.close()

    async def _end_episodes(self, orderly: bool) -> None:
        """Cancels all, in order or not; in order what the engine has sampled for them is sent first."""
        assert self._world is not None
        held = list(self._episodes.values())
        sampling = [task for runner, task in held if orderly and runner.leave()]
        for _, task in held:
            if task not in sampling:
                task.cancel()
        if sampling:
            with contextlib.suppress(EngineDead):  # It has nothing to hand in.
                await self._world.engine.abort(None)
                await asyncio.wait(sampling, timeout=HAND_IN_S)
        for task in sampling:
            task.cancel()
        await asyncio.gather(*(task for _, task in held), return_exceptions=True)

    def _hello(self) -> None:
        """With every connection, when the hub asks, and once there is an engine: only then it takes leases."""
        if self._receiver is None or self._world is None:
            self._control.send(Hello("generator", self._name, self._incarnation, os.getpid()))
            return
        self._control.send(
            Hello(
                "generator",
                self._name,
                self._incarnation,
                os.getpid(),
                capacity=self._config.capacity,
                version=self._world.engine.version,
                leases=self._held(),
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
                self._hello()
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
        self._episodes[lease.lease_id] = runner, task
        task.add_done_callback(lambda done: self._episode_over(lease.lease_id, done))

    def _episode_over(self, lease_id: int, task: asyncio.Task[None]) -> None:
        self._episodes.pop(lease_id, None)
        self._finished += 1
        self._watch(task)

    def _cancel(self, lease_id: int, reason: str) -> None:
        if lease_id in self._episodes:
            _, task = self._episodes[lease_id]
            task.cancel(f"lease {lease_id} revoked: {reason}")

    def _held(self) -> list[int]:
        """The leases that it still needs: a Hello may arrive before what the outbox sends again."""
        return [*self._episodes, *self._outbox.ending()]

    # ---- life ------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        assert self._world is not None
        missed_s = 0.0
        while missed_s <= HUB_GONE_S:
            await asyncio.sleep(self._config.hub.heartbeat_s)
            now = replace(self._world.engine.stats)
            if self._control.send(Heartbeat(self._held(), self._stats(now, self._reported))):
                # What could not be sent is part of the next one.
                self._reported, self._finished = now, 0
                missed_s = 0.0
            else:
                missed_s += self._config.hub.heartbeat_s
        print(
            f"{self._name}: the hub at {self._hub} has been gone for {HUB_GONE_S:g} s; giving up. What was not "
            "sent is sampled again from the prefixes in run.db; start this generator again when the hub is back",
            flush=True,
        )
        self._finish(1)

    def _stats(self, now: EngineStats, before: EngineStats) -> dict[str, float]:
        assert self._world is not None
        stats: dict[str, float] = {
            name: getattr(now, name) - getattr(before, name)
            for name in ("sampled_tokens", "prefill_tokens", "steps", "busy_s", "paused_s", "waiting_s")
        }
        stats |= {"live": now.live, "queued": now.queued, "unacked": self._outbox.unacked}
        stats |= {"episodes": self._finished, "version": self._world.engine.version, "time": time.time()}
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

    def _terminated(self) -> None:
        print(f"{self._name}: stopping: SIGTERM", flush=True)
        self._finish(EXIT_TERMINATED)

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
