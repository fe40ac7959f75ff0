"""The hub alone: how many tokens per second it journals and acknowledges on one core, and how fast.

A real hub process, pinned to one core, with its real journal; synthetic generators on another core hold real
leases and stream chunks over loopback. Two phases for each number of connections: as fast as a small window of
unacknowledged messages allows (throughput), then paced at a given rate (latency of acks).

    python tests/benchmarks/hub.py [--json FILE] [--connections 1 8 64] [--seconds 5] [--chunk 128]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import zmq

from asyncrl import launch, settings
from asyncrl.messages import Ack, Chunk, Chunks, EpisodeEnd, Hello, Lease, Message, Welcome
from asyncrl.transport import AsyncSocket, free_port_pair

CHUNKS_PER_EPISODE = 32
CHUNKS_PER_MESSAGE = 8


class SyntheticGenerator:
    """Holds leases and streams random tokens for them."""

    def __init__(self, name: str, hub: str, chunk_tokens: int, capacity: int) -> None:
        self.hello = Hello("generator", name, secrets.token_hex(4), capacity=capacity, version=0)
        identity = f"{name}/{self.hello.incarnation}"
        self.control = AsyncSocket(zmq.DEALER, self._on_control, identity)
        self.control.connect(hub)
        self.control.send(self.hello)
        self.identity = identity
        self.data: AsyncSocket | None = None
        self.progress: dict[int, tuple[int, int]] = {}  # lease -> (episode, next seq)
        self.sent: dict[int, tuple[float, int]] = {}
        self.acked_tokens = 0
        self.latencies: list[float] = []
        self.next_id = 0
        self.moved = asyncio.Event()
        self.chunk_tokens = chunk_tokens
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, 50_000, chunk_tokens * CHUNKS_PER_MESSAGE, np.int32).tobytes()
        self.logprobs = rng.normal(size=chunk_tokens * CHUNKS_PER_MESSAGE).astype(np.float32).tobytes()

    def _on_control(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Welcome) and self.data is None:
            self.data = AsyncSocket(zmq.DEALER, self._on_data, self.identity)
            self.data.connect(message.data_endpoint)
        elif isinstance(message, Lease):
            self.progress[message.lease_id] = (message.episode_id, 0)
        self.moved.set()

    def _on_data(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        assert isinstance(message, Ack), message
        assert not message.refused, message
        sent, tokens = self.sent.pop(message.message_id)
        self.latencies.append(time.perf_counter() - sent)
        self.acked_tokens += tokens
        self.moved.set()

    async def send_one(self, window: int) -> None:
        """Sends one message as soon as the window and the leases allow."""
        while self.data is None or len(self.sent) >= window or not self.progress:
            self.moved.clear()
            await self.moved.wait()
        assert self.data is not None
        chunks, ends = [], []
        for lease, (episode, seq) in list(self.progress.items())[:CHUNKS_PER_MESSAGE]:
            chunks.append(Chunk(lease, episode, seq, self.chunk_tokens, 0, seq > 0))
            self.progress[lease] = (episode, seq + 1)
            if seq + 1 == CHUNKS_PER_EPISODE:
                ends.append(EpisodeEnd(lease, episode, seq + 1, "completed", float(episode % 2), 1))
                del self.progress[lease]
        nbytes = 4 * self.chunk_tokens * len(chunks)
        header = Chunks(self.next_id, chunks, ends=ends)
        self.sent[self.next_id] = (time.perf_counter(), self.chunk_tokens * len(chunks))
        self.next_id += 1
        self.data.send(header, [self.tokens[:nbytes], self.logprobs[:nbytes]])

    async def saturate(self, until: float) -> None:
        """Sends with two messages unacknowledged."""
        while time.perf_counter() < until:
            await self.send_one(window=2)

    async def pace(self, until: float, interval: float, offset: float) -> None:
        """Sends one message every `interval` seconds."""
        due = time.perf_counter() + offset
        while (now := time.perf_counter()) < until:
            await asyncio.sleep(max(0.0, due - now))
            await self.send_one(window=1000)
            due += interval


async def _measure(hub: str, connections: int, seconds: float, chunk_tokens: int, rate: float) -> dict[str, float]:
    capacity = max(CHUNKS_PER_MESSAGE, 256 // connections)
    generators = [SyntheticGenerator(f"generator-{i}", hub, chunk_tokens, capacity) for i in range(connections)]
    await asyncio.gather(*(generator.send_one(2) for generator in generators))

    async def phase(work) -> tuple[float, list[float]]:
        for generator in generators:
            generator.acked_tokens, generator.latencies = 0, []
        started = time.perf_counter()
        await asyncio.gather(*(work(i, generator, started + seconds) for i, generator in enumerate(generators)))
        elapsed = time.perf_counter() - started
        return sum(g.acked_tokens for g in generators) / elapsed, [x for g in generators for x in g.latencies]

    throughput, _ = await phase(lambda i, g, until: g.saturate(until))
    interval = connections * chunk_tokens * CHUNKS_PER_MESSAGE / rate
    paced, latencies = await phase(lambda i, g, until: g.pace(until, interval, interval * i / connections))
    cuts = statistics.quantiles(latencies, n=100)
    for generator in generators:
        generator.control.close()
        if generator.data is not None:
            generator.data.close()
    return {
        "connections": connections,
        "chunk_tokens": chunk_tokens,
        "tokens_per_s": round(throughput),
        "paced_tokens_per_s": round(paced),
        "ack_p50_ms": round(1e3 * cuts[49], 2),
        "ack_p99_ms": round(1e3 * cuts[98], 2),
    }


def bench(connections: int, seconds: float, chunk_tokens: int, rate: float) -> dict[str, float]:
    """One fresh run and hub process, `connections` synthetic generators."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"run.dir": folder, "run.name": "bench", "hub.lease_s": "600"}
        flags |= {"train.groups_per_step": "1024", "train.group_size": "4", "staleness.max_lag": "10000"}
        config = launch.resolved(settings.read([], flags | {"train.steps": "100000"}))
        run_dir = launch.new_run_dir(config)
        launch.create(config, run_dir)
        port = free_port_pair("127.0.0.1")
        command = [sys.executable, "-P", "-m", "asyncrl", "hub", "--run", str(run_dir), "--port", str(port)]
        hub = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {0}), stdout=sys.stderr)
        try:
            result = asyncio.run(_measure(f"tcp://127.0.0.1:{port}", connections, seconds, chunk_tokens, rate))
        finally:
            hub.kill()
            hub.wait()
        journal = sqlite3.connect(run_dir / "run.db")
        result["journalled_tokens"] = journal.execute("SELECT sum(n) FROM chunk").fetchone()[0]
        return result


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e6, help="tokens/s of the paced phase")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    rows = [bench(n, options.seconds, options.chunk, options.rate) for n in options.connections]
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if options.json:
        about = {"date": str(date.today()), "python": platform.python_version(), "zmq": zmq.__version__}
        about["sqlite"] = sqlite3.sqlite_version
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
