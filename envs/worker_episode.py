"""Episodes in an environment worker, and the threads that they live on: requests in, encoded answers out.

Called by `asyncrl.envs.worker`. What the environment raises is an answer too, whatever it is: a `SystemExit` of
one episode must not end the others' thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from asyncrl.envs import worker_messages
from asyncrl.envs.base import Environment, Start, Step
from asyncrl.envs.worker_messages import Call, Done, StepWire
from asyncrl.messages import Task

STOP_S = 5.0
"""Longest wait for a method that was cancelled, before the episode is closed all the same."""


class Thread:
    """A daemon thread with an event loop, on which episodes live, or tasks are drawn one after the other."""

    def __init__(self, name: str) -> None:
        self.episodes = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, bytes]) -> Future[bytes]:
        """Runs a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def stop(self) -> bytes:
        """Cancels everything that runs there, servers that the environment keeps included; to be submitted."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return b""


class Episode:
    """An `Env`, which is made at its first request. Its requests are answered one after the other."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._env: Any = None
        self._turn = asyncio.Lock()
        self._working: set[asyncio.Task[Any]] = set()

    async def answer(self, call: Call) -> bytes:
        """The encoded answer to a request."""
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            async with self._turn:
                if self._env is None:
                    self._env = self._environment.make()
                return checked(await _done(self._env, call))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return failed(call.request, error)
        finally:
            self._working.discard(task)

    async def end(self, request: int) -> bytes:
        """Stops what is under way and closes the `Env`; returns the encoded answer to `request`."""
        for task in self._working:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._turn.acquire()
        try:
            if self._env is not None:
                await self._env.close()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return failed(request, error)
        return worker_messages.encode(Done(request))


def checked(done: Done) -> bytes:
    """Encodes an answer.

    Raises:
        TypeError: the environment returned what cannot travel, or has another shape than its client reads.
    """
    frame = worker_messages.encode(done)
    if worker_messages.answer_of(frame) is None:
        raise TypeError(f"the environment's answer has not the form that asyncrl.envs.base says: {done!r:.300}")
    return frame


def failed(request: int, error: BaseException) -> bytes:
    """Encodes what an environment raised."""
    return worker_messages.encode(worker_messages.failure(request, error))


async def _done(env: Any, call: Call) -> Done:
    number = call.request
    match call.method:
        case "reset":
            start = _of(Start, await env.reset(_task(call)), "reset")
            return Done(number, messages=start.messages, tools=start.tools)
        case "step":
            return Done(number, step=_wire(await env.step(call.message), "step"))
        case "interrupted":
            return Done(number, step=_wire(await env.interrupted(call.message), "interrupted"))
        case "snapshot":
            return Done(number, blob=_of(bytes, await env.snapshot(), "snapshot"))
        case "restore":
            await env.restore(_task(call), call.blob)
            return Done(number)
        case "replay":
            assert call.step is not None
            await env.replay(call.message, step_of(call.step))
            return Done(number)
        case "truncated":
            return Done(number, rewards=_of(dict, await env.truncated(call.status), "truncated"))
    raise ValueError(f"an episode has no method {call.method!r}")


def step_of(wire: StepWire) -> Step:
    """The `Step` that travelled."""
    return Step(wire.done, wire.rewards, wire.messages, wire.info)


def wire_of(step: Step) -> StepWire:
    """A `Step` as it travels."""
    rewards = {str(name): value for name, value in step.rewards.items()}
    return StepWire(
        bool(step.done), rewards, step.messages, {str(name): value for name, value in step.info.items()}
    )


def _wire(step: object, method: str) -> StepWire:
    return wire_of(_of(Step, step, method))


def _of(kind: type[Any], value: object, method: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{method} returned {type(value).__name__}, not {kind.__name__}")
    return value


def _task(call: Call) -> Task:
    if call.task is None:
        raise ValueError(f"{call.method} was asked without a task")
    return call.task
