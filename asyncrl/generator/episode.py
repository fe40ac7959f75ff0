"""Runs one episode under one lease: environment, turns, token record, stream of chunks.

It knows the environment and the engine through their protocols and speaks to the hub only through the
outbox. It is called by `asyncrl.generator.process`, one task per lease, and by `asyncrl.evaluate` with an
outbox of its own.

The environment is a fault boundary, and so are the reward functions: what they raise, or do not answer in time,
fails the episode with the reason and never touches another one. Whatever else raises here is a bug or a dead
engine and propagates.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.base import Env, Environment, Message, Start, Step
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.envs.rewards import RewardFault, Rewards, named, total
from asyncrl.generator.engines.base import Delta, Engine, SamplingParams
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, EpisodeStatus, Lease

T = TypeVar("T")


class Sink(Protocol):
    """Where an episode's chunks and end go; `Outbox` is one."""

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        """Takes a chunk."""

    def end(self, end: EpisodeEnd) -> None:
        """Takes the end."""


@dataclass(frozen=True, slots=True)
class World:
    """What all episodes of a generator share."""

    config: Config
    environment: Environment
    chat: ChatFormat
    engine: Engine
    sink: Sink
    rewards: Rewards


class _EnvironmentFault(Exception):
    def __init__(self, status: EpisodeStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def _raised(what: str, error: Exception) -> _EnvironmentFault:
    detail = f"{what} raised {type(error).__name__}: {error}"
    return _EnvironmentFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)


class EpisodeRunner:
    """One episode from its lease to its end. `await run()` once; cancelling it aborts the request."""

    def __init__(self, world: World, lease: Lease, record: TokenRecord) -> None:
        self._world = world
        self._lease = lease
        self._record = record
        self._seq = lease.prefix.next_seq
        self._rewards: dict[str, float] = {}
        self._turns = 0
        self._tools: list[dict[str, Any]] = []
        self._prompt: list[Message] = []
        self._messages: list[Message] = []

    async def run(self) -> None:
        """Runs the episode and sends its end, whatever the environment does."""
        env: Env | None = None
        rewards: dict[str, float] = {}
        try:
            env = self._guard("make", self._world.environment.make)
            status, detail = await self._play(env), ""
            rewards = await self._all_rewards(status)
        except (_EnvironmentFault, RewardFault) as fault:
            status, detail = fault.status, str(fault)
        finally:
            if env is not None:
                await self._close(env)
        reward = total(rewards, self._world.config.reward.weights)
        lease = self._lease
        self._world.sink.end(
            EpisodeEnd(lease.lease_id, lease.episode_id, self._seq, status, reward, self._turns, detail, rewards)
        )

    # ---- turns -----------------------------------------------------------------------------------

    async def _play(self, env: Env) -> EpisodeStatus:
        chat = self._world.chat
        start = await self._ask(lambda: env.reset(self._lease.task), Start, "reset")
        prompt = self._guard(
            "the chat template, given reset's messages,", lambda: chat.prompt_ids(start.messages, start.tools)
        )
        self._prompt, self._messages, self._tools = [*start.messages], [*start.messages], start.tools
        if not self._record.spans:
            self._observe(prompt)
        else:
            await self._replay(env)
        while True:
            finish = await self._sample_turn()
            if finish == "context" and not self._record.ends_sampled:
                # There was no room for a single token of this turn, so there is nothing to give a reward for.
                return EpisodeStatus.TRUNCATED_CONTEXT
            status = await self._answer(env, self._record.turns()[-1], finish)
            if status is not None:
                return status

    async def _replay(self, env: Env) -> None:
        """Brings a fresh environment to where the recorded prefix is, by repeating its finished turns."""
        turns = self._record.turns()
        finished = turns[:-1] if self._record.ends_sampled else turns
        for ids in finished:
            step = await self._step(env, ids)
            self._messages += step.messages

    async def _answer(self, env: Env, ids: list[int], finish: str) -> EpisodeStatus | None:
        """Gives a finished turn to the environment; returns the status if the episode is over."""
        step = await self._step(env, ids)
        if finish == "length":
            return EpisodeStatus.TRUNCATED_LENGTH
        if finish == "context":
            return EpisodeStatus.TRUNCATED_CONTEXT
        if step.done:
            return EpisodeStatus.COMPLETED
        if self._turns >= self._world.config.env.max_turns:
            return EpisodeStatus.TRUNCATED_TURNS
        suffix = self._guard(
            "the chat template, given step's messages,",
            lambda: self._world.chat.suffix_ids(self._messages, finish == "stop", step.messages, self._tools),
        )
        if suffix is None:
            raise _EnvironmentFault(
                EpisodeStatus.FAILED_ENVIRONMENT,
                "the chat template rewrites earlier turns, so this turn cannot be appended to the record",
            )
        self._messages += step.messages
        self._observe(suffix)
        return None

    async def _step(self, env: Env, ids: list[int]) -> Step:
        message = self._world.chat.message(ids)
        step = await self._ask(lambda: env.step(message), Step, "step")
        self._turns += 1
        self._messages.append(message)
        for name, value in named(self._guard("reading step's rewards", lambda: dict(step.rewards))).items():
            self._rewards[name] = self._rewards.get(name, 0.0) + value
        return step

    async def _all_rewards(self, status: EpisodeStatus) -> dict[str, float]:
        """The environment's rewards, and those of the run's functions if there is a turn to reward."""
        if not self._turns:
            return self._rewards
        turns = self._messages[len(self._prompt) :]
        view = EpisodeView(self._lease.task, self._prompt, turns, status, self._world.config.env.name)
        return await self._world.rewards.of(view, self._rewards)

    # ---- tokens ----------------------------------------------------------------------------------

    async def _sample_turn(self) -> str:
        """Samples until the turn ends; returns `stop`, `length` (of the turn) or `context`."""
        config, record = self._world.config, self._record
        stop_ids = self._world.chat.stop_token_ids
        sampled = record.turns()[-1] if record.ends_sampled else []
        if sampled and sampled[-1] in stop_ids:
            return "stop"
        left = config.sampling.max_tokens - len(sampled)
        room = config.generator.max_model_len - len(record.ids)
        if left <= 0:
            return "length"
        if room <= 0:
            return "context"
        temperature = 0.0 if self._lease.greedy else config.sampling.temperature
        params = SamplingParams(min(left, room), tuple(stop_ids), temperature, self._lease.seed)
        finish = "abort"
        async for delta in self._world.engine.generate(str(self._lease.lease_id), list(record.ids), params):
            self._take(delta)
            finish = delta.finish_reason or finish
        if finish == "abort":
            raise asyncio.CancelledError(f"request of lease {self._lease.lease_id} was aborted")
        return "context" if finish == "length" and room < left else finish

    def _take(self, delta: Delta) -> None:
        if delta.token_ids:
            self._record.sample(delta.token_ids, delta.logprobs, delta.version)
            self._send(delta.token_ids, delta.logprobs, delta.version, True)

    def _observe(self, ids: list[int]) -> None:
        self._record.observe(ids)
        self._send(ids, [0.0] * len(ids), -1, False)

    def _send(self, ids: list[int], logprobs: list[float], version: int, sampled: bool) -> None:
        lease = self._lease
        chunk = Chunk(lease.lease_id, lease.episode_id, self._seq, len(ids), version, sampled)
        self._seq += 1
        self._world.sink.chunk(chunk, ids, logprobs)

    # ---- the fault boundary ----------------------------------------------------------------------

    async def _ask(self, question: Callable[[], Awaitable[T]], kind: type[T], what: str) -> T:
        """Calls a method of the environment and awaits its answer, within the time limit."""
        limit = self._world.config.env.timeout_s
        pending = self._guard(what, question)
        if not inspect.isawaitable(pending):
            detail = (
                f"{what} returned {type(pending).__name__} instead of something to await; "
                f"write it as `async def {what}`"
            )
            raise _EnvironmentFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        try:
            async with asyncio.timeout(limit):
                answer = await pending
        except TimeoutError:
            detail = f"{what} did not answer within env.timeout_s = {limit:g} s"
            raise _EnvironmentFault(EpisodeStatus.FAILED_TIME, detail) from None
        except Exception as error:
            raise _raised(what, error) from error
        if not isinstance(answer, kind):
            detail = f"{what} returned {type(answer).__name__}, not {kind.__name__}"
            raise _EnvironmentFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        return answer

    @staticmethod
    def _guard(what: str, call: Callable[[], T]) -> T:
        """Runs what depends on the environment's own code or data and awaits nothing."""
        try:
            return call()
        except Exception as error:
            raise _raised(what, error) from error

    async def _close(self, env: Env) -> None:
        """A failure to close concerns nobody but the environment: the episode's result stands."""
        try:
            async with asyncio.timeout(self._world.config.env.timeout_s):
                await env.close()
        except Exception as error:
            print(f"environment of episode {self._lease.episode_id} failed to close: {error!r}", flush=True)
