"""What journalling and acknowledging cost a generator: tokens per second with a real hub, and with none.

One process holds the engine and runs the same episodes again and again, alternating between two ways:

    hub   a real `GeneratorProcess`: leases over ZeroMQ, chunks to a hub process on another core, which journals
          and acknowledges them; timed until the last acknowledgement
    none  the same episode loop with a sink that drops everything, as `asyncrl eval` has

Engine and hub are pinned to a core each. The model never ends a turn by itself, so both ways decode the same
number of tokens. Two models: one of a few million parameters, and the toy, whose steps are so cheap that it is
the worst case. Medians, in wall-clock time and in the generator's CPU time, which other load disturbs less.

    python tests/benchmarks/journal.py [--json tests/benchmarks/results/journal.json] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import zmq

from asyncrl import launch, settings
from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.envs.rewards import Rewards
from asyncrl.generator import process
from asyncrl.generator.engines.base import Engine
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import EpisodeRunner, Sink, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Lease, Turn
from asyncrl.toy import init_model
from asyncrl.transport import free_port_pair

MODELS = {"toy": (64, 2), "million": (256, 4)}
"""Width and layers."""
SLOTS, TOKENS = 32, 200
EPISODES = {"toy": 192, "million": 64}
LIMIT = 0.03
"""Most of the throughput that journal and acks may cost."""


class Dropped:
    """A sink that keeps nothing."""

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        """Forgets it."""

    def turn(self, turn: Turn) -> None:
        """Forgets it."""

    def end(self, end: EpisodeEnd) -> None:
        """Forgets it."""


class Shared:
    """The engine, which outlives the generators that use it."""

    def __init__(self, engine: Engine) -> None:
        self.generate, self.abort, self.update = engine.generate, engine.abort, engine.update
        self.stats, self.version = engine.stats, engine.version

    async def close(self) -> None:
        """Stays open."""


class Generator(process.GeneratorProcess):
    """Tells when it has run and handed in a number of episodes."""

    def __init__(self, hub: str, episodes: int) -> None:
        super().__init__(hub, "generator-0")
        self._left = episodes
        self.began = 0.0
        self.over = asyncio.Event()

    def _start(self, lease: Lease, frames: list[memoryview]) -> None:
        self.began = self.began or time.perf_counter()
        super()._start(lease, frames)

    def _episode_over(self, lease_id: int, task: asyncio.Task[None]) -> None:
        super()._episode_over(lease_id, task)
        self._left -= 1
        if not self._left:
            self.over.set()


def world_of(config: Config, engine: Engine, sink: Sink) -> World:
    """What an episode needs, around the engine that is there."""
    assert config.model.path is not None
    chat = ChatFormat(config.model.path, config.model.renderer)
    chat.stop_token_ids = ()
    environment = load(config.env.name, config.env.args)
    return World(config, environment, chat, Shared(engine), sink, Rewards(config.reward))


def config_of(folder: Path, model: Path, kind: str, chunk_tokens: int) -> Config:
    """A run that admits as many episodes as one measurement takes, and no more."""
    flags: dict[str, str | None] = {
        "run.dir": str(folder), "run.name": "run", "model.path": str(model), "algo.filter": "none",
        "train.groups_per_step": str(EPISODES[kind] // 4), "train.group_size": "4", "staleness.max_lag": "0",
        "generator.slots": str(SLOTS), "generator.ahead": str(SLOTS // 2), "generator.max_model_len": "256",
        "sampling.max_tokens": str(TOKENS), "generator.chunk_tokens": str(chunk_tokens),
        "generator.engine": "transformers",
    }  # fmt: skip
    return launch.resolved(settings.read([], flags))


def _on_core_0(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {0}), stdout=subprocess.DEVNULL)


async def with_hub(config: Config, engine: Engine, episodes: int) -> tuple[float, float]:
    """Seconds of wall-clock and CPU time from the first lease to the last acknowledgement."""
    run_dir, port = launch.new_run_dir(config), free_port_pair("127.0.0.1")
    launch.create(config, run_dir)
    command = [sys.executable, "-P", "-m", "asyncrl", "hub", "--run", str(run_dir), "--port", str(port)]
    hub = await asyncio.to_thread(_on_core_0, command)
    try:
        generator = Generator(f"tcp://127.0.0.1:{port}", episodes)
        # It would load another engine; everything else of the process is as it is.
        process._build_world = lambda config, outbox, *_: world_of(config, engine, outbox)
        ended = asyncio.create_task(generator.run(60.0))
        while not generator.began:
            await asyncio.sleep(0.001)  # The generator is as it is: it tells nobody when it begins.
        cpu = time.process_time()
        await generator.over.wait()
        assert await generator._outbox.drained(60.0)
        wall = time.perf_counter() - generator.began
        cpu = time.process_time() - cpu
        generator._finish(0)
        await ended
    finally:
        hub.kill()
        hub.wait()
    return wall, cpu


async def without(config: Config, engine: Engine, episodes: int) -> tuple[float, float]:
    """The same without a hub; as many episodes at once as leases are held with one."""
    world, room = world_of(config, engine, Dropped()), asyncio.Semaphore(config.capacity)

    async def one(index: int) -> None:
        async with room:
            lease = Lease(index, index, world.environment.task("train", index // 4), index)
            await EpisodeRunner(world, lease, TokenRecord()).run()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(index) for index in range(episodes)))
    return time.perf_counter() - wall, time.process_time() - cpu


async def measure(kind: str, chunk_tokens: int, repeats: int) -> dict[str, Any]:
    """Alternates between the two ways with one engine."""
    times: dict[str, list[tuple[float, float]]] = {"hub": [], "none": []}
    with tempfile.TemporaryDirectory() as place:
        hidden, layers = MODELS[kind]
        model = init_model(Path(place) / "model", hidden=hidden, layers=layers)
        config = config_of(Path(place), model, kind, chunk_tokens)
        engine = await asyncio.to_thread(open_engine, config, str(model), asyncio.get_running_loop())
        try:
            await without(config, engine, SLOTS)  # Caches and allocations of a first time.
            for turn in range(2 * repeats):
                # A B B A: what changes slowly meets both ways alike.
                name = "hub" if turn % 4 in (0, 3) else "none"
                run = config.run.model_copy(update={"name": f"run-{turn}"})
                way = with_hub if name == "hub" else without
                times[name].append(await way(config.model_copy(update={"run": run}), engine, EPISODES[kind]))
        finally:
            await engine.close()
    tokens = EPISODES[kind] * TOKENS
    return {"model": kind, "chunk_tokens": chunk_tokens} | _row(times, tokens)


def _row(times: dict[str, list[tuple[float, float]]], tokens: int) -> dict[str, Any]:
    wall = {name: statistics.median(wall for wall, _ in found) for name, found in times.items()}
    cpu = {name: statistics.median(cpu for _, cpu in found) for name, found in times.items()}
    return {
        "tokens_per_s": {name: round(tokens / seconds) for name, seconds in wall.items()},
        "cost_wall": round(1 - wall["none"] / wall["hub"], 4),
        "cost_cpu": round(1 - cpu["none"] / cpu["hub"], 4),
        "wall_s": {name: [round(wall, 3) for wall, _ in found] for name, found in times.items()},
        "cpu_s": {name: [round(cpu, 3) for _, cpu in found] for name, found in times.items()},
    }


def main() -> None:
    """Measures both models with both sizes of chunks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each way")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = []
    for kind in options.models:
        for chunk_tokens in options.chunks:
            with asyncio.Runner(loop_factory=_uvloop()) as runner:
                rows.append(runner.run(measure(kind, chunk_tokens, options.repeats)))
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    worst = max(row["cost_cpu"] for row in rows if row["model"] == options.models[-1])
    print(
        f"journal and acks cost at most {100 * worst:.1f} % of a generator's CPU time, model: {options.models[-1]}"
    )
    if options.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"transformers": transformers.__version__, "zmq": zmq.__version__}
        about = {"benchmark": "journal", "date": date.today().isoformat(), "versions": versions}
        options.json.write_text(json.dumps(about | {"limit": LIMIT, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if worst > LIMIT else 0)


def _uvloop() -> Any:
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
