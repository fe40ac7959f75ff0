"""Any agent that speaks the OpenAI chat-completions API, as an environment.

    reset  ─▶ starts the agent with a base URL and an API key; its first request is what the policy sees
    step   ─▶ the policy's message is the response; the agent's next request is what it sees next
    done   ─▶ the agent has ended; what it returned are the rewards

An agent is a coroutine function `agent(task, base_url, api_key)` that returns a reward, rewards by name, or an
`Outcome`; `process_agent` makes one of a command. It may use any client and any tools of its own. An agent that is
cut off is told that the context is full; if it ends in order all the same, its rewards count.

`AgentEnvironment` is for the `make` of plug-ins, as in the verifiers adapter; `make` here is an entry point.
The HTTP side, and what an agent must not do, is `asyncrl.envs.agent_endpoint`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from asyncrl.envs.agent_endpoint import AgentEndpoint, Asked, CutOff, Exchange
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.registry import load_plugin
from asyncrl.envs.threads import result_of
from asyncrl.messages import Task

STOP_S = 5.0
"""Longest wait for an agent that was told to stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent's episode was worth."""

    rewards: Mapping[str, float | None]
    info: Mapping[str, float] = field(default_factory=dict)


Agent = Callable[[Task, str, str], Awaitable[Outcome | Mapping[str, float | None] | float]]
"""Called with the task, the base URL and the API key; cancelled when the episode ends early."""


class AgentEnvironment:
    """Tasks, and an agent that works on them.

    Args:
        task: the environment's `task(split, index)`.
        agent: the agent.
        host: address of this machine at which agents reach their endpoint.
    """

    def __init__(self, task: Callable[[Split, int], Task], agent: Agent, host: str = "127.0.0.1") -> None:
        self.task = task
        self._agent, self._host = agent, host

    def make(self) -> AgentEnv:
        """A new, unused episode."""
        return AgentEnv(self._agent, self._host)


class AgentEnv:
    """One episode: an agent at work. It has no snapshots: an agent's state is its own."""

    def __init__(self, agent: Agent, host: str) -> None:
        self._agent, self._host = agent, host
        self._endpoint: AgentEndpoint | None = None
        self._exchange: Exchange | None = None
        self._work: asyncio.Task[Outcome] | None = None

    async def reset(self, task: Task) -> Start:
        """Starts the agent and waits for its first request."""
        self._endpoint = await AgentEndpoint.here(self._host)
        self._exchange = self._endpoint.open()
        self._work = asyncio.create_task(self._run(task, self._endpoint.base_url, self._exchange.key))
        asked = await self._next(self._exchange)
        if asked is None:
            raise RuntimeError("the agent ended before it asked for a completion")
        return Start(asked.messages, asked.tools)

    async def step(self, message: Message) -> Step:
        """Answers the agent's request and waits for the next one, or for its end."""
        if self._exchange is None or self._work is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        self._exchange.answer(message)
        asked = await self._next(self._exchange)
        if asked is not None:
            return Step(done=False, messages=asked.messages)
        outcome = self._work.result()
        return Step(done=True, rewards=dict(outcome.rewards), info=dict(outcome.info))

    async def truncated(self, status: str) -> dict[str, float | None]:
        """Tells the agent that the context is full; the rewards of one that ends in order."""
        assert self._exchange is not None
        assert self._work is not None
        self._exchange.refuse(CutOff(f"the policy's context is full: the episode was cut off ({status})"))
        try:
            return dict((await asyncio.shield(self._work)).rewards)
        except Exception:  # An agent need not know what to do now.
            return {}

    async def close(self) -> None:
        """Stops the agent."""
        if self._endpoint is not None and self._exchange is not None:
            self._endpoint.close(self._exchange)
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=STOP_S)
            if self._work.done() and not self._work.cancelled():
                self._work.exception()  # What it raised was told already, or concerns nobody any more.

    async def _run(self, task: Task, base_url: str, key: str) -> Outcome:
        return _outcome(await result_of(partial(self._agent, task, base_url, key), awaits=True))

    async def _next(self, exchange: Exchange) -> Asked | None:
        """The agent's next request; None if it has ended.

        Raises:
            Refused: it asked for what cannot be answered.
            Exception: what the agent raised.
        """
        assert self._work is not None
        changed = asyncio.create_task(exchange.changed.wait())
        try:
            await asyncio.wait({changed, self._work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if exchange.refused is not None:
            raise exchange.refused
        if self._work.done():
            self._work.result()
            return None
        return exchange.take()


def process_agent(command: Sequence[str]) -> Agent:
    """An agent that is a command.

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the task as JSON on its standard input. The
    last line that it prints is a reward, or an object of rewards by name, as JSON. It is killed, with all that it
    started in its process group, when the episode ends early.

    Raises (when it runs):
        RuntimeError: it exits with another status than 0, or prints no reward last.
    """

    async def run(task: Task, base_url: str, api_key: str) -> Any:
        env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True
        )
        try:
            out, err = await process.communicate(msgspec.json.encode(task))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            said = err.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"the agent {command[0]} exited with status {process.returncode}: {said}")
        return _last_line(command[0], out.decode(errors="replace"))

    return run


def _last_line(name: str, out: str) -> Any:
    line = (out.strip().splitlines() or [""])[-1]
    try:
        return json.loads(line)
    except ValueError:
        raise RuntimeError(
            f"the last line that the agent {name} printed is no reward in JSON: {line!r:.200}"
        ) from None


def _outcome(returned: object) -> Outcome:
    if isinstance(returned, Outcome):
        return returned
    if isinstance(returned, Mapping):
        return Outcome(returned)
    if isinstance(returned, Real):
        return Outcome({"reward": float(returned)})
    raise TypeError(f"the agent returned {returned!r:.100}, not a reward, rewards by name, or an Outcome")


def make(
    tasks: str, agent: str | None = None, command: Sequence[str] = (), host: str = "127.0.0.1"
) -> AgentEnvironment:
    """The entry point.

    Args:
        tasks: `pkg.mod:function` or `file.py:function`, called as `function(split, index)`, returns a task.
        agent: a coroutine function in the same form; or else
        command: a program and its arguments.
        host: address of this machine at which agents reach their endpoint.

    Raises:
        ValueError: an argument is out of its range.
    """
    if (agent is None) == (not command):
        raise ValueError("env.args.agent and env.args.command: give one of them")
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise ValueError(f'env.args.command = {command!r}: must be a list of words, like ["python", "agent.py"]')
    task = load_plugin("asyncrl.agents", tasks, "function of tasks")
    run = process_agent(command) if agent is None else load_plugin("asyncrl.agents", agent, "agent")
    return AgentEnvironment(task, run, host)
