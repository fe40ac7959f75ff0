"""The environment `worker`: whatever an `asyncrl env-worker` serves, as if it were here.

    asyncrl env-worker --env verifiers --env.args '{...}' --endpoint tcp://127.0.0.1:7000     (in its own Python)
    asyncrl train --env worker --env.args '{"endpoint": "tcp://127.0.0.1:7000"}'

Tasks are drawn with a call that blocks, as the hub does it; episodes run over one connection for each event loop.
An optional method (`asyncrl.envs.base`) is there if the served environment has it: the worker is asked once, at
the start. An episode whose worker is gone fails as `failed_tool`; later ones find the worker that took its place.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import count
from typing import Any

from asyncrl import keys
from asyncrl.envs.arguments import check_seconds
from asyncrl.envs.base import Env, Environment, Message, Split, Start, Step, ToolFault
from asyncrl.envs.worker_episode import step_of, wire_of
from asyncrl.envs.worker_link import DISCONNECTED_S, Blocking, Link
from asyncrl.envs.worker_messages import PROTOCOL, Call, Demonstrate, Describe, Description, Done, Draw, StepWire
from asyncrl.messages import Task


class WorkerEnv:
    """One episode, which the worker holds."""

    def __init__(self, link: Callable[[], Link], number: int, timeout_s: float) -> None:
        self._find_link, self._number, self._timeout_s = link, number, timeout_s
        self._link: Link | None = None

    async def reset(self, task: Task) -> Start:
        """Starts the episode."""
        done = await self._ask("reset", task=task)
        return Start(done.messages, done.tools)

    async def step(self, message: Message) -> Step:
        """Takes the assistant's message and answers."""
        return _step(await self._ask("step", message=message))

    async def close(self) -> None:
        """Frees what the episode holds. Of one whose worker is gone, nothing is left."""
        if self._link is None:
            return
        self._link.episodes.discard(self._number)
        try:
            await self._link.ask(Call(0, self._number, "close"), patience_s=0.0)
        except ToolFault:
            return

    async def _ask(self, method: str, **arguments: Any) -> Done:
        opens = self._link is None
        if self._link is None:
            self._link = self._find_link()
            self._link.episodes.add(self._number)
        call = Call(0, self._number, method, opens, **arguments)
        # An episode that is open has nothing to expect from a worker that comes later.
        return await self._link.ask(call, self._timeout_s if opens else DISCONNECTED_S)


class _Snapshots(WorkerEnv):
    async def snapshot(self) -> bytes:
        """The state of the episode."""
        return (await self._ask("snapshot")).blob

    async def restore(self, task: Task, blob: bytes) -> None:
        """Takes the place of `reset` and all steps since."""
        await self._ask("restore", task=task, blob=blob)


class _Replays(WorkerEnv):
    async def replay(self, message: Message, step: Step) -> None:
        """Takes a recorded answer as its own."""
        await self._ask("replay", message=message, step=wire_of(step))


class _Interruptible(WorkerEnv):
    async def interrupted(self, message: Message) -> Step:
        """Called instead of `step` where an earlier process may have begun to answer the message."""
        return _step(await self._ask("interrupted", message=message))


class _Truncates(WorkerEnv):
    async def truncated(self, status: str) -> dict[str, float | None]:
        """Rewards of an episode that was cut off."""
        return (await self._ask("truncated", status=str(status))).rewards


_OPTIONAL = {
    "Snapshots": _Snapshots,
    "Replays": _Replays,
    "Interruptible": _Interruptible,
    "Truncates": _Truncates,
}


class WorkerEnvironment:
    """The environment that the worker at `endpoint` serves."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._blocking = Blocking(endpoint, timeout_s)
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._numbers = count(1)
        self._kind: type[WorkerEnv] = WorkerEnv

    def served(self) -> Description:
        """What the worker serves; `make` gives the same optional methods from now on.

        Raises:
            ConnectionError: there is no worker.
            ValueError: it is of another version of asyncrl.
        """
        found = self._blocking.ask(Describe(0))
        assert isinstance(found, Description)
        if found.protocol != PROTOCOL:
            raise ValueError(
                f"env.args.endpoint = {self._endpoint}: the environment worker there speaks protocol "
                f"{found.protocol}, and this asyncrl {PROTOCOL}; install the same asyncrl in both"
            )
        kinds = tuple(kind for name, kind in _OPTIONAL.items() if name in found.optional)
        self._kind = type("WorkerEnv", kinds, {}) if kinds else WorkerEnv
        return found

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: the split has no more tasks.
            ConnectionError: the worker did not answer within the time limit.
        """
        done = self._blocking.ask(Draw(0, split, index))
        assert isinstance(done, Done)
        assert done.task is not None
        return done.task

    def make(self) -> Env:
        """A new, unused episode."""
        return self._kind(self._link, next(self._numbers), self._timeout_s)

    def _link(self) -> Link:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            self._links = {loop: link for loop, link in self._links.items() if not loop.is_closed()}
            self._links[loop] = Link(self._endpoint, self._timeout_s)
        return self._links[loop]


class _Demonstrating(WorkerEnvironment):
    def demonstration(self, task: Task) -> str | list[Message]:
        """The assistant's ideal answer, or all messages that follow those of `reset`."""
        done = self._blocking.ask(Demonstrate(0, task))
        assert isinstance(done, Done)
        return done.messages if done.text is None else done.text


def _step(done: Done) -> Step:
    return step_of(done.step or StepWire(False))


def make(endpoint: str, timeout_s: float = 30.0) -> Environment:
    """The entry point. Asks the worker what it serves.

    Args:
        endpoint: where it listens, `tcp://host:port`.
        timeout_s: longest wait for a task, and for a worker that is not there or gives no sign of life.

    Raises:
        ValueError: an argument is out of its range.
        ConnectionError: no worker answered.
        UsageError: it is not on loopback, and this process has no key.
    """
    if not isinstance(endpoint, str) or not re.fullmatch(r"tcp://[^/:\s]+:\d+", endpoint):
        raise ValueError(f"env.args.endpoint = {endpoint!r}: must be tcp://host:port, as of asyncrl env-worker")
    check_seconds("timeout_s", timeout_s)
    keys.for_endpoint(endpoint)
    environment = WorkerEnvironment(endpoint, timeout_s)
    if "Demonstrates" in environment.served().optional:
        environment = _Demonstrating(endpoint, timeout_s)
        environment.served()
    return environment
