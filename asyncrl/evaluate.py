"""Evaluation: held-out tasks through the same engine and episode loop as training, without a hub.

It samples once per task at `sampling.temperature` and trains nothing. Called by `asyncrl eval`, and by
`asyncrl train` for the model before and after.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Lease


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    tasks: int
    reward: float
    """Mean over the episodes that have a reward."""
    stderr: float
    """Standard error of that mean."""
    rewarded: int
    statuses: dict[str, int]
    tokens: int
    """Sampled tokens."""


class _Collector:
    """A sink that keeps ends and counts tokens."""

    def __init__(self) -> None:
        self.ends: list[EpisodeEnd] = []
        self.tokens = 0

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens += chunk.n if chunk.sampled else 0

    def end(self, end: EpisodeEnd) -> None:
        self.ends.append(end)


async def evaluate(config: Config, model_path: str, tasks: int) -> Evaluation:
    """Runs the first `tasks` held-out tasks (fewer if the environment has fewer) once each."""
    sink = _Collector()
    engine = await asyncio.to_thread(open_engine, config, model_path, asyncio.get_running_loop())
    try:
        environment = load(config.env.name, config.env.args)
        world = World(config, environment, ChatFormat(model_path), engine, sink)
        room = asyncio.Semaphore(config.capacity)

        async def one(index: int) -> None:
            async with room:
                lease = Lease(index, index, environment.task("eval", index), config.run.seed + index)
                await EpisodeRunner(world, lease, TokenRecord()).run()

        async with asyncio.TaskGroup() as group:
            for index in range(tasks):
                group.create_task(one(index))
    finally:
        await engine.close()
    rewards = [end.reward for end in sink.ends if end.reward is not None]
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return Evaluation(
        len(sink.ends),
        statistics.fmean(rewards) if rewards else float("nan"),
        spread / max(1, len(rewards)) ** 0.5,
        len(rewards),
        dict(Counter(end.status for end in sink.ends)),
        sink.tokens,
    )


def report(config: Config, model_path: str, tasks: int, *, as_json: bool = False) -> str:
    """Evaluates and describes the result, as a sentence or as JSON."""
    result = asyncio.run(evaluate(config, model_path, tasks))
    if as_json:
        return json.dumps(asdict(result))
    others = ", ".join(f"{count} {status}" for status, count in sorted(result.statuses.items()))
    return (
        f"{model_path}: mean reward {result.reward:.3f} ± {result.stderr:.3f} on {result.tasks} held-out tasks "
        f"of {config.env.name} at temperature {config.sampling.temperature:g} ({others}; {result.tokens} tokens)"
    )
