"""Does a slow tool idle the engine? 64 concurrent episodes whose tool sleeps 0 to 2 s, and the same without sleep.

A real embedded engine of 64 slots and the real episode loop; a new episode begins whenever one ends. The model is
trained for a moment to end its turns (`tests/generator/chatter.py`), so that turns are 1 to some 70 tokens long.
After every turn the environment answers, with a tool's result or a user's text, and takes a time for it that is
drawn evenly from 0 to `--sleep`. Measured: the share of the time in which the engine decodes, and its tokens per
second.

    python tests/benchmarks/tools.py [--json FILE] [--seconds 30] [--episodes 64] [--sleep 2.0]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import random
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.rewards import Rewards
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Lease, Turn
from asyncrl.toy import init_model, warm_start

CHATTER = Path(__file__).parents[1] / "generator" / "chatter.py"
SETTLE_S = 5.0
"""Time at the start that is not measured: all episodes begin together, and drift apart only then."""


class Count:
    """A sink that counts."""

    def __init__(self) -> None:
        self.episodes = self.turns = 0

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        """Nothing is kept."""

    def turn(self, turn: Turn) -> None:
        """Nothing goes on elsewhere."""

    def end(self, end: EpisodeEnd) -> None:
        """Counts an episode and its turns."""
        self.episodes += 1
        self.turns += end.turns


def sleeping(sleep_s: float) -> Any:
    """The environment, every answer of which takes 0 to `sleep_s`."""
    spec = importlib.util.spec_from_file_location("chatter", CHATTER)
    assert spec is not None
    assert spec.loader is not None
    chatter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chatter)
    step = chatter.Talk.step

    async def slow_step(env: Any, message: Any) -> Any:
        await asyncio.sleep(random.uniform(0, sleep_s))
        return await step(env, message)

    chatter.Talk.step = slow_step
    return chatter.make()


async def measure(config: Config, model: Path, seconds: float, episodes: int, sleep_s: float) -> dict[str, float]:
    """Keeps so many episodes running for so long."""
    engine: Any = await asyncio.to_thread(open_engine, config, str(model), asyncio.get_running_loop())
    sink, environment = Count(), sleeping(sleep_s)
    world = World(config, environment, ChatFormat(model), engine, sink, Rewards(config.reward))

    async def one_after_the_other(lane: int) -> None:
        index = lane
        while True:
            lease = Lease(index, index, environment.task("train", index), seed=index)
            await EpisodeRunner(world, lease, TokenRecord()).run()
            index += episodes

    lanes = [asyncio.create_task(one_after_the_other(lane)) for lane in range(episodes)]
    await asyncio.sleep(SETTLE_S)
    before, sink.episodes, sink.turns, began = replace(engine.stats), 0, 0, time.perf_counter()
    await asyncio.sleep(seconds)
    wall, after = time.perf_counter() - began, replace(engine.stats)
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    await engine.close()
    return {
        "sleep_s": sleep_s,
        "busy": round((after.busy_s - before.busy_s) / wall, 3),
        "tokens_per_s": round((after.sampled_tokens - before.sampled_tokens) / wall),
        "tokens_per_step": round((after.sampled_tokens - before.sampled_tokens) / (after.steps - before.steps), 1),
        "episodes": sink.episodes,
        "turns_per_episode": round(sink.turns / max(1, sink.episodes), 2),
    }


def main() -> None:
    """Prints both measurements and their ratio; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {
        "env": {"name": f"{CHATTER}:make"},
        "sampling": {"max_tokens": 72, "temperature": 0.8},
        "generator": {"engine": "transformers", "slots": 64, "max_model_len": 320},
        "toy": {"warm_steps": 120, "warm_rows": 24, "warm_loss": 0.0},
    }
    config = Config.model_validate(settings)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        warm_start(config, init_model(Path(folder) / "raw", hidden=128, layers=4), model, print)
        rows = [
            asyncio.run(measure(config, model, options.seconds, options.episodes, sleep))
            for sleep in (0.0, options.sleep)
        ]
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    ratio = round(rows[1]["busy"] / rows[0]["busy"], 3)
    print(f"the engine is {ratio} times as busy with a sleeping tool as without")
    if options.json:
        about = {"date": str(date.today()), "python": platform.python_version(), "torch": torch.__version__}
        about |= {"episodes": options.episodes, "parameters": "hidden 128, 4 layers", "threads": 1}
        options.json.write_text(json.dumps({"about": about, "ratio": ratio, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
