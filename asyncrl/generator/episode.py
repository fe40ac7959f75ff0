"""Runs one episode under one lease: environment, turns, token record, stream of chunks.

    reset ─▶ prompt ids ─▶ sample a turn ─▶ parse the ids into a message ─▶ step ─▶ suffix ids ─▶ sample …
                                │ chunks                                     │ turn record, chunk
                                └──────────────────▶ outbox ◀────────────────┘

It knows the environment and the engine through their protocols and speaks to the hub only through the
outbox. It is called by `asyncrl.generator.process`, one task per lease, and by `asyncrl.evaluate` with an
outbox of its own. An episode that another generator began goes on mid-turn or between turns (`resume`).

The environment is a fault boundary (`boundary`), and so are the reward functions: what they raise, or do not
answer in time, fails the episode with the reason and never touches another one. Whatever else raises here is a
bug or a dead engine and propagates.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.base import Env, Environment, Interruptible, Message, Start, Step, Truncates
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.envs.rewards import RewardFault, Rewards, named, total
from asyncrl.generator.boundary import Boundary, EpisodeFault
from asyncrl.generator.dialogue import Dialogue, counts, plain
from asyncrl.generator.engines.base import Delta, Engine, SamplingParams
from asyncrl.generator.record import TokenRecord
from asyncrl.generator.resume import bring_back
from asyncrl.generator.turns import TurnLog
from asyncrl.messages import Chunk, EpisodeEnd, EpisodeStatus, Lease, Turn

CUTS = {"length": EpisodeStatus.TRUNCATED_LENGTH, "context": EpisodeStatus.TRUNCATED_CONTEXT}
"""What an episode becomes whose turn was cut off so."""


class Sink(Protocol):
    """Where an episode's chunks, turns and end go; `Outbox` is one."""

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        """Takes a chunk."""

    def turn(self, turn: Turn) -> None:
        """Takes what the environment answered."""

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


class EpisodeRunner:
    """One episode from its lease to its end. `await run()` once; cancelling it aborts the request."""

    def __init__(self, world: World, lease: Lease, record: TokenRecord) -> None:
        self._world = world
        self._lease = lease
        self._record = record
        self._seq = lease.prefix.next_seq
        self._boundary = Boundary(world.config.env.timeout_s)
        self._dialogue = Dialogue()
        self._turns = TurnLog(world.sink, lease, self._boundary)
        self._interrupted = False
        """Whether an earlier process may have begun to answer the turn that comes next."""
        self._sampling = self._leaving = False

    async def run(self) -> None:
        """Runs the episode and sends its end, whatever the environment does."""
        env: Env | None = None
        rewards: dict[str, float] = {}
        try:
            env = self._boundary.guard("make", self._world.environment.make)
            status, detail = await self._play(env), ""
            rewards = await self._all_rewards(status)
        except (EpisodeFault, RewardFault) as fault:
            # An error may name a file whose bytes are no text; that must not keep the end from leaving.
            status, detail = fault.status, str(fault).encode(errors="backslashreplace").decode()
        finally:
            if env is not None:
                await self._close(env)
        reward = total(rewards, self._world.config.reward.weights)
        lease, said = self._lease, self._dialogue
        ids = (lease.lease_id, lease.episode_id, self._seq)
        info: dict[str, float] = {**said.info, **({"forks": self._record.forks} if self._record.forks else {})}
        self._world.sink.end(EpisodeEnd(*ids, status, reward, said.turns, detail, rewards, info))

    def leave(self) -> bool:
        """Ends the episode here as soon as its request has ended, so that nothing sampled is lost.

        False: no request runs; it holds nothing that it has not sent, and can be cancelled.
        """
        self._leaving = True
        return self._sampling

    async def _play(self, env: Env) -> EpisodeStatus:
        if not self._record.spans:
            await self._begin(env)
        elif not await self._go_on(env):
            return await self._cut_off(env, EpisodeStatus.TRUNCATED_CONTEXT)
        while True:
            finish = await self._sample_turn()
            if finish == "context" and not self._record.ends_sampled:
                # The prompt leaves no room for a single token.
                return await self._cut_off(env, EpisodeStatus.TRUNCATED_CONTEXT)
            status = await self._answer(env, finish)
            if status is not None:
                return status

    # ---- beginning, and going on elsewhere -------------------------------------------------------

    async def _begin(self, env: Env) -> None:
        self._dialogue.begin(await self._reset(env))
        prompt = self._prompt_ids(self._dialogue)
        await self._turns.begun(env, self._dialogue, self._seq)
        self._observe(prompt)

    async def _reset(self, env: Env) -> Start:
        start = await self._boundary.ask("reset", lambda: env.reset(self._lease.task), Start)
        chat, guard = self._world.chat, self._boundary.guard
        tools = guard("reading reset's tools", lambda: [chat.neutral(tool) for tool in plain(start.tools)])
        if tools:
            guard("the chat template", lambda: chat.check_tools(tools), EpisodeStatus.FAILED_PARSE)
        return Start(guard("reset", lambda: self._seen(start.messages)), tools)

    def _prompt_ids(self, said: Dialogue) -> list[int]:
        """The ids of the whole conversation, as the template renders it now."""
        return self._boundary.guard(
            "the chat template",
            lambda: self._world.chat.prompt_ids(self._safe(said.messages), said.tools),
            EpisodeStatus.FAILED_PARSE,
        )

    async def _go_on(self, env: Env) -> bool:
        """Brings environment and dialogue to where the tokens are. False: the recorded answer does not fit."""
        turns, record, fits = self._lease.prefix.turns, self._record, True
        if not turns:
            self._dialogue.begin(await self._reset(env))
            if self._prompt_ids(self._dialogue) != record.ids[: record.spans[0].n].tolist():
                detail = (
                    "cannot go on elsewhere: reset gave another prompt; make it deterministic or keep snapshots"
                )
                raise EpisodeFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        else:
            self._dialogue.begin(Start(turns[0].messages, turns[0].tools))
            said = [self._parsed(ids) for ids in record.turns()]
            answered = said[: len(turns) - 1]
            await bring_back(env, self._lease.task, answered, turns, self._boundary, self._seen)
            for message, turn in zip(answered, turns[1:], strict=True):
                self._dialogue.said(message)
                self._dialogue.answered(turn.messages, turn.rewards, turn.info)
            if record.ends_sampled and len(said) == len(answered):
                fits = self._append(turns[-1].messages)  # The answer was durable, its tokens were not.
        self._interrupted = record.ends_sampled and self._over() is not None
        return fits

    # ---- turns -----------------------------------------------------------------------------------

    async def _answer(self, env: Env, finish: str) -> EpisodeStatus | None:
        """Gives a finished turn to the environment; returns the status if the episode is over."""
        message = self._parsed(self._record.turn)
        self._dialogue.said(message)
        step = await self._step(env, message)
        guard = self._boundary.guard
        rewards = guard("reading step's rewards", lambda: named(step.rewards))
        info = guard("reading step's info", lambda: counts(step.info))
        seen = guard("reading step's messages", lambda: self._seen(step.messages))
        self._dialogue.answered(seen, rewards, info)
        cut = CUTS.get(finish)
        if step.done:
            return cut or EpisodeStatus.COMPLETED
        if cut is None and self._dialogue.turns >= self._world.config.env.max_turns:
            cut = EpisodeStatus.TRUNCATED_TURNS
        if cut is not None:
            return await self._cut_off(env, cut)
        await self._turns.answered(env, self._dialogue, self._seq, seen, rewards, info)
        return None if self._append(seen) else await self._cut_off(env, EpisodeStatus.TRUNCATED_CONTEXT)

    async def _step(self, env: Env, message: Message) -> Step:
        interrupted, self._interrupted = self._interrupted, False
        if interrupted and isinstance(env, Interruptible):
            halted: Interruptible = env
            return await self._boundary.ask("interrupted", lambda: halted.interrupted(message), Step)
        return await self._boundary.ask("step", lambda: env.step(message), Step)

    async def _cut_off(self, env: Env, status: EpisodeStatus) -> EpisodeStatus:
        if isinstance(env, Truncates):
            ends: Truncates = env
            rewards = await self._boundary.ask("truncated", lambda: ends.truncated(status), dict)
            self._dialogue.add(self._boundary.guard("reading truncated's rewards", lambda: named(rewards)))
        return status

    async def _all_rewards(self, status: EpisodeStatus) -> dict[str, float]:
        """The environment's rewards, and those of the run's functions if there is a turn to reward."""
        said = self._dialogue
        if not said.turns:
            return said.rewards
        turns = said.messages[len(said.prompt) :]
        view = EpisodeView(self._lease.task, said.prompt, turns, status, self._world.config.env.name)
        return await self._world.rewards.of(view, said.rewards)

    # ---- messages and tokens ---------------------------------------------------------------------

    def _parsed(self, ids: list[int]) -> Message:
        chat, tools = self._world.chat, self._dialogue.tools
        return self._boundary.guard("parsing a turn", lambda: chat.message(ids, tools), EpisodeStatus.FAILED_PARSE)

    def _seen(self, messages: list[Message]) -> list[Message]:
        """The environment's messages as the policy sees them: no control tokens, no endless tool answer."""
        return [self._shown(message) for message in plain(messages)]

    def _shown(self, message: Message) -> Message:
        """Cut before, for a long text takes long to break up its control tokens, and after, for that adds some."""
        chat, limit = self._world.chat, self._world.config.env.tool_tokens
        if message.get("role") != "tool":
            return chat.neutral(message)
        shown = chat.neutral(message | {"content": chat.cut(message["content"], limit)})
        return shown | {"content": chat.cut(shown["content"], limit)}

    def _safe(self, messages: list[Message]) -> list[Message]:
        """For the template: what the assistant spelled out in plain tokens must not become a control token."""
        neutral = self._world.chat.neutral
        return [neutral(message) if message.get("role") == "assistant" else message for message in messages]

    def _append(self, new: list[Message]) -> bool:
        """Appends what the environment said, or forks if that is no suffix. False: it leaves no room to sample."""
        said, chat = self._dialogue, self._world.chat
        before = said.messages[: len(said.messages) - len(new)]
        suffix = self._boundary.guard(
            "the chat template",
            lambda: chat.suffix_ids(self._safe(before), True, new, said.tools, self._record.turn),
            EpisodeStatus.FAILED_PARSE,
        )
        ids = self._prompt_ids(said) if suffix is None else suffix
        if len(ids) >= self._room(0 if suffix is None else self._record.branch_length):
            return False  # With it the episode might be too long to train.
        self._observe(ids, fork=suffix is None)
        return True

    def _room(self, branch: int) -> int:
        """Tokens that fit behind those of a branch, and into the row that all branches are trained in."""
        config = self._world.config
        return min(config.generator.max_model_len - branch, config.learner.token_budget - len(self._record.ids))

    def _limits(self) -> tuple[int, int]:
        """Tokens that the turn, and the context, have left."""
        sampled = len(self._record.turn) if self._record.ends_sampled else 0
        return self._world.config.sampling.max_tokens - sampled, self._room(self._record.branch_length)

    def _over(self) -> str | None:
        """How the turn has ended, if nothing more of it is to be sampled."""
        if self._record.ends_sampled and self._record.ids[-1] in self._world.chat.stop_token_ids:
            return "stop"
        left, room = self._limits()
        return "length" if left <= 0 else "context" if room <= 0 else None

    async def _sample_turn(self) -> str:
        """Samples until the turn ends; returns `stop`, `length` (of the turn) or `context`."""
        over = self._over()
        if over is not None:
            return over
        left, room = self._limits()
        temperature = 0.0 if self._lease.greedy else self._world.config.sampling.temperature
        stops = tuple(self._world.chat.stop_token_ids)
        # A draw is fixed by seed and position; two branches have the same positions and must not draw alike.
        params = SamplingParams(min(left, room), stops, temperature, self._lease.seed + self._record.forks)
        finish, self._sampling = "abort", True
        async for delta in self._world.engine.generate(str(self._lease.lease_id), self._record.branch, params):
            self._take(delta)
            finish = delta.finish_reason or finish
        self._sampling = False
        if finish == "abort" or self._leaving:
            raise asyncio.CancelledError(f"request of lease {self._lease.lease_id} was aborted")
        return "context" if finish == "length" and room < left else finish

    def _take(self, delta: Delta) -> None:
        if delta.token_ids:
            self._record.sample(delta.token_ids, delta.logprobs, delta.version)
            self._send(delta.token_ids, delta.logprobs, delta.version, True, False)

    def _observe(self, ids: list[int], fork: bool = False) -> None:
        if not ids:
            # The hub takes no chunk without tokens, and two turns with none between them would count as one.
            raise EpisodeFault(EpisodeStatus.FAILED_PARSE, "the chat template printed nothing for its messages")
        self._record.observe(ids, fork)
        self._send(ids, [0.0] * len(ids), -1, False, fork)

    def _send(self, ids: list[int], logprobs: list[float], version: int, sampled: bool, fork: bool) -> None:
        chunk = Chunk(self._lease.lease_id, self._lease.episode_id, self._seq, len(ids), version, sampled, fork)
        self._seq += 1
        self._world.sink.chunk(chunk, ids, logprobs)

    async def _close(self, env: Env) -> None:
        """A failure to close concerns nobody but the environment: the episode's result stands."""
        try:
            await self._boundary.ask("close", lambda: env.close(), object)
        except (EpisodeFault, RewardFault) as fault:
            print(f"environment of episode {self._lease.episode_id} failed to close: {fault}", flush=True)
