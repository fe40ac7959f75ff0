"""Evaluation: held-out tasks through the same engine and episode loop as training, without a hub.

It samples once per task at `sampling.temperature` and trains nothing. Called by `asyncrl eval` only.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.base import Environment
from asyncrl.envs.registry import load
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Lease, Task, Turn
from asyncrl.scorer import rewards_here
from asyncrl.settings import UsageError
from asyncrl.tasks import plain


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    tasks: int
    reward: float
    """Mean over the episodes that have a reward; not a number if none has."""
    stderr: float
    """Standard error of that mean."""
    rewarded: int
    statuses: dict[str, int]
    tokens: int
    """Sampled tokens."""
    missing: str
    """The commonest reason why an episode has no reward; empty if all have one."""


class _Collector:
    """A sink that keeps ends and counts tokens."""

    def __init__(self) -> None:
        self.ends: list[EpisodeEnd] = []
        self.tokens = 0

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens += chunk.n if chunk.sampled else 0

    def turn(self, turn: Turn) -> None:
        """Nothing goes on elsewhere."""

    def end(self, end: EpisodeEnd) -> None:
        self.ends.append(end)


async def evaluate(config: Config, model_path: str, tasks: int) -> Evaluation:
    """Runs the first `tasks` held-out tasks (fewer if the environment has fewer) once each.

    Raises:
        UsageError: there is no task to evaluate on.
    """
    sink = _Collector()
    environment = load(config.env.name, config.env.args)
    held_out = _draw(config, environment, tasks)
    engine = await asyncio.to_thread(open_engine, config, model_path, asyncio.get_running_loop())
    try:
        async with rewards_here(config.reward) as rewards:
            chat = ChatFormat(model_path, config.model.renderer)
            await _run(World(config, environment, chat, engine, sink, rewards), held_out)
    finally:
        await engine.close()
    return _summed_up(sink)


async def _run(world: World, held_out: list[Task]) -> None:
    """Runs one episode of each task, as many at once as a generator holds."""
    room = asyncio.Semaphore(world.config.capacity)

    async def one(index: int, task: Task) -> None:
        async with room:
            lease = Lease(index, index, task, world.config.run.seed + index)
            await EpisodeRunner(world, lease, TokenRecord()).run()

    async with asyncio.TaskGroup() as group:
        for index, task in enumerate(held_out):
            group.create_task(one(index, task))


def _summed_up(sink: _Collector) -> Evaluation:
    rewards = [end.reward for end in sink.ends if end.reward is not None]
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    missing = Counter(end.detail or end.status for end in sink.ends if end.reward is None).most_common(1)
    return Evaluation(
        len(sink.ends),
        statistics.fmean(rewards) if rewards else float("nan"),
        spread / max(1, len(rewards)) ** 0.5,
        len(rewards),
        dict(Counter(end.status for end in sink.ends)),
        sink.tokens,
        missing[0][0] if missing else "",
    )


def _draw(config: Config, environment: Environment, tasks: int) -> list[Task]:
    """The first `tasks` tasks of the evaluation split, or all that it has."""
    drawn: list[Task] = []
    for index in range(tasks):
        try:
            drawn.append(plain(environment.task("eval", index)))
        except IndexError:
            break
    if not drawn:
        raise UsageError(
            f"there is nothing to evaluate: the first {tasks} tasks of the eval split were asked for, and "
            f"environment {config.env.name!r} (env.args = {config.env.args!r}) gave none; its task('eval', 0) "
            f"must return a task, and at least 1 must be asked for (--tasks, or eval.tasks)"
        )
    return drawn


def report(config: Config, model_path: str, tasks: int, *, as_json: bool = False) -> tuple[str, int]:
    """Evaluates; returns the result as a sentence or as JSON, and the exit code: 1 if no episode has a reward."""
    result = asyncio.run(evaluate(config, model_path, tasks))
    status = 0 if result.rewarded else 1
    if as_json:
        # JSON has no number that is none.
        reward = result.reward if result.rewarded else None
        return json.dumps(asdict(result) | {"reward": reward}), status
    mean = f"mean reward {result.reward:.3f} ± {result.stderr:.3f}" if result.rewarded else "no reward at all"
    others = ", ".join(f"{count} {kind}" for kind, count in sorted(result.statuses.items()))
    lost = result.tasks - result.rewarded
    why = f". {lost} have no reward, most often because: {result.missing}" if lost else ""
    return (
        f"{model_path}: {mean} on {result.tasks} held-out tasks of {config.env.name} at temperature "
        f"{config.sampling.temperature:g} ({others}; {result.tokens} tokens){why}"
    ), status
