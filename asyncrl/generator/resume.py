"""Brings an environment back to where an episode's recorded prefix is, which a generator began that is gone.

    snapshots?  ─▶ restore(task, the last snapshot)
    otherwise   ─▶ reset(task), must begin as recorded; then each finished turn, in order:
                     replay(message, recorded step)      where the environment has it
                     step(message)                       otherwise; must answer as recorded

What the policy saw in the meantime is in its token record, so an environment that gives other answers this time
would contradict it: such an episode fails, with that reason. Called by `asyncrl.generator.episode`.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.envs.base import Env, Message, Replays, Snapshots, Start, Step
from asyncrl.generator.boundary import Boundary, EpisodeFault
from asyncrl.messages import EpisodeStatus, Task, Turn

Seen = Callable[[list[Message]], list[Message]]
"""From an environment's messages to those that the policy sees."""


async def bring_back(
    env: Env, task: Task, said: list[Message], turns: list[Turn], boundary: Boundary, seen: Seen
) -> None:
    """Restores an unused environment.

    Args:
        env: as the environment's factory made it.
        task: the episode's.
        said: the assistant's messages that were answered, in order.
        turns: what the environment answered, its start first; at least that.
        boundary: how the environment is asked.
        seen: see `Seen`.

    Raises:
        EpisodeFault: the environment cannot be brought back.
    """
    snapshot = turns[-1].snapshot
    if isinstance(env, Snapshots) and snapshot is not None:
        keeps: Snapshots = env
        await boundary.ask("restore", lambda: keeps.restore(task, snapshot), type(None))
        return
    start = await boundary.ask("reset", lambda: env.reset(task), Start)
    _same("reset", boundary.guard("reset", lambda: seen(start.messages)), turns[0].messages)
    for message, turn in zip(said, turns[1:], strict=True):
        await _again(env, message, turn, boundary, seen)


async def _again(env: Env, message: Message, turn: Turn, boundary: Boundary, seen: Seen) -> None:
    if isinstance(env, Replays):
        replays: Replays = env
        recorded = Step(False, dict(turn.rewards), turn.messages, turn.info)
        await boundary.ask("replay", lambda: replays.replay(message, recorded), type(None))
        return
    step = await boundary.ask("step", lambda: env.step(message), Step)
    answer = boundary.guard("step", lambda: seen(step.messages))
    _same(f"step of turn {turn.turn}", None if step.done else answer, turn.messages)


def _same(what: str, now: list[Message] | None, before: list[Message]) -> None:
    if now != before:
        raise EpisodeFault(
            EpisodeStatus.FAILED_ENVIRONMENT,
            f"cannot go on elsewhere: {what} did not give the recorded answer again. Make the environment "
            "deterministic, or give it snapshot and restore, or replay",
        )
