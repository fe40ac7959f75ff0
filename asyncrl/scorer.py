"""The scorer: one process that serves a reward model, a sequence classifier with one output, to all generators.

    generator ──Score──▶ ROUTER ──▶ waiting ──up to `batch`──▶ tokens ──▶ model (in a thread)
    generator ◀─Scored── ROUTER ◀──────────────────────────────────────────┘

It keeps nothing: what it had not answered when it died, the generators send again (`asyncrl.scorer_client`) to the
same address. Requests are answered in the order of their arrival, as many at once as wait; one that has waited
longer than its sender does is dropped. What cannot be scored is answered with the reason and harms no other.
Started by the supervisor where `reward.model` is set, by hand as `asyncrl scorer`, and by the evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from itertools import islice
from typing import Any

import torch
import zmq

from asyncrl import keys
from asyncrl.config import Reward
from asyncrl.envs.rewards import Rewards
from asyncrl.envs.threads import in_thread
from asyncrl.messages import Message, Score
from asyncrl.process import EXIT_USAGE
from asyncrl.scorer_client import ScorerClient
from asyncrl.scorer_model import RewardModel
from asyncrl.settings import UsageError
from asyncrl.transport import MAX_CONTROL_BYTES, AsyncSocket, free_port_pair
from asyncrl.watchdog import watchdog

Sender = tuple[bytes, int]
"""A peer and its number of a request."""
MOST_WAITING = 8192
"""Requests of one peer that may wait; one beyond that is dropped, and its sender asks again."""


class Scorer:
    """Serves a reward model at an address. `await run()` ends only with an exception, or when it is cancelled.

    Args:
        model: the reward model.
        endpoint: `tcp://host:port` to listen at.
        batch: most conversations that are computed at once.
        timeout_s: longest wait of a request, and longest time of a batch.

    Raises:
        zmq.ZMQError: the address is taken, or none of this machine's.
        UsageError: it is not on loopback, and this process has no key.
    """

    def __init__(self, model: RewardModel, endpoint: str, batch: int, timeout_s: float) -> None:
        self._model = model
        self._batch = batch
        self._timeout_s = timeout_s
        self._waiting: dict[Sender, tuple[float, Score]] = {}
        """Each with the time of its arrival, until it is answered: so a resend is not computed again."""
        self._held: Counter[bytes] = Counter()
        """How many of each peer."""
        self._arrived = asyncio.Event()
        self._room = asyncio.Semaphore(1)
        self._loop = asyncio.get_running_loop()
        held = keys.for_endpoint(endpoint)
        self._socket = AsyncSocket(
            zmq.ROUTER, self._on_message, keys=held, max_bytes=MAX_CONTROL_BYTES, takes=Score
        )
        self._socket.bind(endpoint)

    async def run(self) -> None:
        """Answers requests.

        Raises:
            TimeoutError: a batch took longer than `timeout_s`.
            RuntimeError: the device failed.
        """
        while True:
            await self._arrived.wait()
            self._drop_lapsed()
            batch = dict(islice(self._waiting.items(), self._batch))
            if not batch:
                self._arrived.clear()
                continue
            requests = [request for _, request in batch.values()]
            async with asyncio.timeout(self._timeout_s):
                answers, error = await in_thread(partial(self._model.answers, requests), self._room)
            if error is not None:
                raise error
            for sender, answer in zip(batch, answers, strict=True):
                self._over(sender)
                self._socket.send(answer, to=sender[0])

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    @property
    def malformed(self) -> int:
        """Messages that were no requests, and were dropped."""
        return self._socket.malformed

    def _on_message(self, peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if not isinstance(message, Score) or self._held[peer] >= MOST_WAITING:
            self._socket.malformed += 1
        elif (peer, message.request) not in self._waiting:
            self._waiting[peer, message.request] = (self._loop.time(), message)
            self._held[peer] += 1
            self._arrived.set()

    def _drop_lapsed(self) -> None:
        """Nobody waits for them any more, and computing them would make later ones late too."""
        since = self._loop.time() - self._timeout_s
        for sender in [sender for sender, (arrived, _) in self._waiting.items() if arrived < since]:
            self._over(sender)

    def _over(self, sender: Sender) -> None:
        """Nothing is owed to the sender of a request any more."""
        del self._waiting[sender]
        self._held[sender[0]] -= 1
        if not self._held[sender[0]]:
            del self._held[sender[0]]


async def serve(path: str, endpoint: str, device: str, batch: int, timeout_s: float, hang_s: float) -> int:
    """Serves a reward model until the process is ended; returns the exit status."""
    try:
        model = await asyncio.to_thread(RewardModel, path, device)
        scorer = Scorer(model, endpoint, batch, timeout_s)
    except _UNUSABLE as error:
        print(f"scorer: {path} cannot be served on {device} at {endpoint}: {error}", flush=True)
        return 1 if _passes(error) else EXIT_USAGE
    print(f"scorer: {path} on {device} at {endpoint}", flush=True)
    try:
        with watchdog.serving(hang_s, loop=asyncio.get_running_loop()):
            await scorer.run()
    except TimeoutError:
        print(f"scorer: {_too_slow(batch, timeout_s)}", flush=True)
    return 1


_UNUSABLE = (ValueError, OSError, RuntimeError, AssertionError, zmq.ZMQError)
"""What opening a model raises: the folder or the address is wrong, or (the middle two, from torch) the device."""


def _passes(error: Exception) -> bool:
    """Whether another start may succeed: a predecessor that was killed gives address and memory back in time."""
    return isinstance(error, torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.EADDRINUSE


def _too_slow(batch: int, timeout_s: float) -> str:
    return (
        f"a batch of up to {batch} conversations took longer than reward.timeout_s = {timeout_s:g} s; lower "
        "reward.model_batch, or raise reward.timeout_s"
    )


@contextlib.asynccontextmanager
async def rewards_here(settings: Reward) -> AsyncIterator[Rewards]:
    """All rewards, for a process without a supervisor: a model of the run's own is served here meanwhile.

    Raises:
        UsageError: the model cannot be served.
    """
    async with contextlib.AsyncExitStack() as stack:
        if settings.model is not None:
            settings = await stack.enter_async_context(_served_here(settings, settings.model))
        model = None
        if settings.endpoint is not None:
            client = ScorerClient(settings.endpoint)
            stack.callback(client.close)
            model = client.reward
        yield Rewards(settings, model)


@contextlib.asynccontextmanager
async def _served_here(settings: Reward, path: str) -> AsyncIterator[Reward]:
    """Yields the settings with another address: the run's own may be in use by the run."""
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    try:
        model = await asyncio.to_thread(RewardModel, path, settings.model_device)
        scorer = Scorer(model, endpoint, settings.model_batch, settings.timeout_s)
    except _UNUSABLE as error:
        raise UsageError(f"reward.model = {path} on {settings.model_device} cannot be served: {error}") from error

    async def run() -> None:
        try:
            await scorer.run()
        except TimeoutError as error:
            raise UsageError(_too_slow(settings.model_batch, settings.timeout_s)) from error

    try:
        async with _ended_by(run()):
            yield settings.model_copy(update={"endpoint": endpoint})
    finally:
        scorer.close()


@contextlib.asynccontextmanager
async def _ended_by(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` beside the body, which is cancelled if it fails; then its error is raised."""
    body, task, inside = asyncio.current_task(), asyncio.create_task(work), True
    assert body is not None

    def failed(done: asyncio.Task[None]) -> None:
        if inside and not done.cancelled():
            body.cancel()

    task.add_done_callback(failed)
    try:
        yield
    except asyncio.CancelledError:
        if not task.done() or body.uncancel():
            raise
        task.result()
    finally:
        inside = False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
