"""Hostile input at every bound socket of real processes: do they live, grow, run anything, or serve others worse?

Targets: the hub's two sockets, the scorer's, an environment worker's; without keys, and with CURVE keys, where the
flood comes once from holders of the key and once from strangers. A process of its own floods (`hostile.py`, and
raw TCP), while this one measures how long real messages take: Hello to Welcome, a generator's chunk to its ack, a
score, a worker's answer. Each flood comes in two halves: memory that grows with the messages grows in both.

    python tests/benchmarks/fuzz.py [--json FILE] [--messages 100000] [--targets hub scorer worker] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import random
import secrets
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import zmq
import zmq.asyncio

from asyncrl import keys, launch, settings
from asyncrl.envs import worker_messages
from asyncrl.messages import Ack, Chunk, Chunks, Heartbeat, Hello, Lease, Message, Score, Scored, Welcome
from asyncrl.transport import AsyncSocket, configure, free_port_pair

ROLES = ("stranger", "generator-9", "learner-9", "publisher")
"""Those who flood the hub's control socket; the last three have said Hello."""
MARKER_S = 60.0
"""Longest wait for the target's answer to what follows the flood on the same connection."""
STRANGER_S = 0.05
"""How long a client without the key keeps trying."""
PAUSE_S = 0.01
"""Between two real messages."""

Probe = Callable[[], Awaitable[None]]


# ---- the flood, in a process of its own --------------------------------------------------------------


@dataclass
class Flood:
    """What one flooding process does."""

    kind: str
    """`control`, `data`, `scorer`, `worker`, `raw` or `strangers`."""
    endpoint: str
    count: int
    seed: int
    key: str | None = None


def flood(plan: Flood) -> None:
    """Sends everything, and returns when the target has answered what came after it."""
    held = keys.read(Path(plan.key)) if plan.key else None
    rng = random.Random(plan.seed)
    if plan.kind == "raw":
        _raw(plan, rng)
    elif plan.kind == "strangers":
        _strangers(plan, held)
    elif plan.kind == "control":
        for role in ROLES:
            _as(role, plan, plan.count // len(ROLES), rng, held)
    else:
        _as(plan.kind, plan, plan.count, rng, held)


def _as(role: str, plan: Flood, count: int, rng: random.Random, held: keys.Keys | None) -> None:
    examples = hostile.WORKER if plan.kind == "worker" else hostile.HUB
    spared = hostile.ENDS_A_RUN if role == "learner-9" else frozenset[str]()
    sock = zmq.Context.instance().socket(zmq.DEALER)
    configure(sock, f"{role}/a", held)
    sock.set(zmq.SNDHWM, 1000)  # So that the flood is as fast as the target takes it.
    sock.set(zmq.SNDTIMEO, int(1000 * MARKER_S))
    sock.connect(plan.endpoint)
    before, after, expected = _markers(role, plan.kind)
    if before:
        sock.send_multipart(before)
    for frames in hostile.messages(rng, examples, count, spared):
        sock.send_multipart(frames)
    until = time.monotonic() + MARKER_S
    while time.monotonic() < until:
        # Said again: an oversized frame may have cost the connection, and what was queued behind it.
        sock.send_multipart(after)
        again = time.monotonic() + 2
        while (left := again - time.monotonic()) > 0 and sock.poll(int(1000 * left) + 1):
            if expected in sock.recv_multipart()[0]:
                sock.close(linger=0)
                return
    raise TimeoutError(f"{plan.kind} at {plan.endpoint} did not answer {role} after the flood")


def _markers(role: str, kind: str) -> tuple[list[bytes], list[bytes], bytes]:
    """What is said before and after the flood, and what the answer to the latter holds."""
    import msgspec

    encode = msgspec.msgpack.encode
    if kind == "data":
        return [], [encode(Chunks(4711)), b"", b""], encode(Ack(4711))
    if kind == "scorer":
        return [], [encode(Score(4711, []))], encode("scored")
    if kind == "worker":
        return [], [encode(worker_messages.Describe(4711))], encode("description")
    if role == "stranger":
        return [], [encode(Heartbeat())], encode("rehello")
    hello = [encode(Hello(role.split("-")[0], role, "a"))]
    return hello, hello, encode("welcome")


def _raw(plan: Flood, rng: random.Random) -> None:
    """Connections that are no peer's: some write and go, a hundred stay, half-open."""
    host, _, port = plan.endpoint.removeprefix("tcp://").rpartition(":")
    staying: list[socket.socket] = []
    for _ in range(plan.count):
        with contextlib.suppress(OSError):  # The target may close it at any time, which is its right.
            connection = socket.create_connection((host, int(port)), timeout=5)
            connection.sendall(hostile.raw(rng))
            staying.append(connection)
        if len(staying) > 100:
            staying.pop(rng.randrange(len(staying))).close()
    for connection in staying:
        connection.close()


def _strangers(plan: Flood, held: keys.Keys | None) -> None:
    """Clients with no key, another run's, and the right server's public key without the client's pair."""
    assert held is not None
    public, secret = zmq.curve_keypair()
    tries = [None, keys.make(), keys.Keys(held.server_public, public, secret)]
    for number in range(plan.count):
        sock = zmq.Context.instance().socket(zmq.DEALER)
        configure(sock, f"learner-{number}/a", tries[number % 3])
        sock.connect(plan.endpoint)
        sock.send_multipart([b"x" * 1000])
        if sock.poll(int(1000 * STRANGER_S)):
            raise AssertionError(f"a client without the key was answered: {sock.recv_multipart()!r:.200}")
        sock.close(linger=0)


# ---- targets -----------------------------------------------------------------------------------------


@dataclass
class Target:
    """A process, the floods that it gets, and real messages to it."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    floods: list[Flood]
    probes: dict[str, Probe]
    close: Callable[[], None]
    malformed: Callable[[], int | None] = field(default=lambda: None)


def _asyncrl(arguments: list[str], folder: Path, key: Path | None) -> subprocess.Popen[bytes]:
    environment = os.environ | {keys.ENVIRONMENT: str(key) if key else "", "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("ab")
    command = [sys.executable, "-P", "-m", "asyncrl", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)


def _key(folder: Path, keyed: bool) -> Path | None:
    path = folder / "key"
    if keyed:
        keys.write(keys.make(), path)
    return path if keyed else None


class _Friend:
    """A real client over `AsyncSocket`: `ask` sends and waits for one answer of a kind."""

    def __init__(self, endpoint: str, identity: str, held: keys.Keys | None) -> None:
        self._waiting: tuple[type[Any], asyncio.Future[Any]] | None = None
        self.leases: list[Lease] = []
        self.socket = AsyncSocket(zmq.DEALER, self._on_message, identity, keys=held)
        self.socket.connect(endpoint)

    def _on_message(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Lease):
            self.leases.append(message)
        if self._waiting is not None and isinstance(message, self._waiting[0]) and not self._waiting[1].done():
            self._waiting[1].set_result(message)

    async def ask(self, message: Message, kind: type[Any], frames: tuple[bytes, ...] = ()) -> Any:
        """Sends a message; returns the answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting = kind, answer
        self.socket.send(message, frames)
        return await asyncio.wait_for(answer, 60)


_MALFORMED = "SELECT json_extract(metrics_json, '$.malformed') FROM metric WHERE source = 'hub' ORDER BY id DESC"


async def hub(folder: Path, count: int, keyed: bool) -> Target:
    """A hub with a generator that streams and a learner that says Hello."""
    key = _key(folder, keyed)
    flags = {"run.dir": str(folder), "run.name": "run", "hub.lease_s": "600", "train.groups_per_step": "64"}
    keys.use(key)
    config = launch.resolved(settings.read([], flags))
    launch.create(config, launch.new_run_dir(config))
    keys.use(None)
    port, held = free_port_pair("127.0.0.1"), keys.read(key) if key else None
    control, data = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    process = _asyncrl(["hub", "--run", str(folder / "run"), "--port", str(port)], folder, key)
    hello = Hello("generator", "generator-0", secrets.token_hex(4), capacity=8, version=0)
    generator = _Friend(control, f"generator-0/{hello.incarnation}", held)
    learner = _Friend(control, "learner-0/a", held)
    await generator.ask(hello, Lease)
    stream = _Friend(data, f"generator-0/{hello.incarnation}", held)
    sent = 0

    async def chunk() -> None:
        nonlocal sent
        lease = generator.leases[0]
        header = Chunk(lease.lease_id, lease.episode_id, sent, 8, 0, sent > 0)
        tokens = np.zeros(8, np.int32).tobytes()
        ack = await stream.ask(Chunks(sent, [header]), Ack, (tokens, tokens))
        assert (ack.message_id, ack.refused) == (sent, []), ack
        sent += 1

    async def welcome() -> None:
        await learner.ask(Hello("learner", "learner-0", "a"), Welcome)

    def malformed() -> int | None:
        with contextlib.closing(sqlite3.connect(folder / "run" / "run.db")) as journal:
            found = journal.execute(_MALFORMED).fetchone()
        return int(found[0]) if found else None

    def close() -> None:
        for friend in (generator, learner, stream):
            friend.socket.close()

    path = str(key) if key else None
    floods = [Flood("control", control, count, 1, path), Flood("data", data, count, 2, path)]
    probes: dict[str, Probe] = {"chunk_to_ack": chunk, "hello_to_welcome": welcome}
    return Target("hub", process, folder, floods, probes, close, malformed)


async def scorer(folder: Path, count: int, keyed: bool) -> Target:
    """A scorer with a tiny reward model."""
    path = Path(__file__).parents[1] / "test_scorer.py"
    spec = importlib.util.spec_from_file_location("test_scorer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    key, model = _key(folder, keyed), module.make_reward_model(folder / "model")
    port, held = free_port_pair("127.0.0.1"), keys.read(key) if key else None
    endpoint = f"tcp://127.0.0.1:{port}"
    # An address on loopback has no key: with one it listens on all.
    listen = f"tcp://0.0.0.0:{port}" if key else endpoint
    process = _asyncrl(["scorer", "--model", str(model), "--endpoint", listen], folder, key)
    friend = _Friend(endpoint, "scores-0", held)
    conversation = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    number = 0

    async def score() -> None:
        nonlocal number
        number += 1
        answer = await friend.ask(Score(number, conversation), Scored)
        assert answer.request == number, answer

    floods = [Flood("scorer", endpoint, count, 3, str(key) if key else None)]
    return Target("scorer", process, folder, floods, {"score": score}, friend.socket.close)


async def worker(folder: Path, count: int, keyed: bool) -> Target:
    """An environment worker."""
    key = _key(folder, keyed)
    port, held = free_port_pair("127.0.0.1"), keys.read(key) if key else None
    endpoint = f"tcp://127.0.0.1:{port}"
    listen = f"tcp://0.0.0.0:{port}" if key else endpoint
    process = _asyncrl(["env-worker", "--env", "arithmetic", "--endpoint", listen], folder, key)
    sock = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    configure(sock, "env-0", held)
    sock.connect(endpoint)

    async def draw() -> None:
        sock.send_multipart([worker_messages.encode(worker_messages.Draw(1, "train", 0))])
        frames = await asyncio.wait_for(sock.recv_multipart(), 60)
        assert isinstance(worker_messages.answer_of(frames[0]), worker_messages.Done), frames

    floods = [Flood("worker", endpoint, count, 4, str(key) if key else None)]
    return Target("worker", process, folder, floods, {"draw": draw}, lambda: sock.close(linger=0))


TARGETS = {"hub": hub, "scorer": scorer, "worker": worker}


# ---- measuring ---------------------------------------------------------------------------------------


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def traces(target: Target) -> set[str]:
    """Child processes of the target, and files in its folder: what nobody should be able to add from outside."""
    found = {str(path) for path in target.folder.rglob("*") if "run.db" not in path.name}
    for children in Path(f"/proc/{target.process.pid}/task").glob("*/children"):
        found |= set(children.read_text().split())
    return found


async def _probed(probes: dict[str, Probe], stop: Callable[[], bool]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in probes}

    async def one(name: str) -> None:
        while not stop() or len(taken[name]) < 20:
            began = time.perf_counter()
            await probes[name]()
            taken[name].append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)  # Real messages are few.

    await asyncio.gather(*map(one, probes))
    found: dict[str, float] = {}
    for name, seconds in taken.items():
        cuts = statistics.quantiles(seconds, n=100)
        found |= {f"{name}_p50_ms": round(1e3 * cuts[49], 2), f"{name}_p99_ms": round(1e3 * cuts[98], 2)}
        found[f"{name}_n"] = len(seconds)
    return found


def _flooder(spec: str) -> subprocess.Popen[bytes]:
    """Starts a flooding process; returns once it is about to begin."""
    flooder = subprocess.Popen([sys.executable, __file__, "--flood", spec], stdout=subprocess.PIPE)
    assert flooder.stdout is not None
    flooder.stdout.readline()
    return flooder


def _over(flooder: subprocess.Popen[bytes]) -> bool:
    return flooder.poll() is not None


async def under(target: Target, plan: Flood, quiet: dict[str, float]) -> dict[str, Any]:
    """One flood in two halves, with real messages all the while."""
    row: dict[str, Any] = {"target": target.name, "socket": plan.kind, "keys": "curve" if plan.key else "none"}
    before, rss = traces(target), [rss_mib(target.process.pid)]
    began, busy = time.perf_counter(), {}
    for half in range(2):
        spec = json.dumps(vars(plan) | {"count": plan.count // 2, "seed": plan.seed + 1000 * half})
        with _flooder(spec) as flooder:
            busy = await _probed(target.probes, partial(_over, flooder))
            assert flooder.returncode == 0, f"the flood of {plan.kind} failed"
        rss.append(rss_mib(target.process.pid))
    assert target.process.poll() is None, f"{target.name} died: {(target.folder / 'log').read_text()[-2000:]}"
    row |= {"messages": plan.count, "seconds": round(time.perf_counter() - began, 1)}
    row |= {"rss_mib": [round(mib, 1) for mib in rss], "alive": True, "traces": sorted(traces(target) - before)}
    return row | {"quiet": quiet, "flooded": busy}


async def bench(name: str, count: int, seconds: float, keyed: bool) -> list[dict[str, Any]]:
    """All floods of one target, started anew."""
    with tempfile.TemporaryDirectory() as folder:
        target = await TARGETS[name](Path(folder), count, keyed)
        try:
            for probe in target.probes.values():
                await probe()
            until = time.perf_counter() + seconds
            quiet = await _probed(target.probes, lambda: time.perf_counter() > until)
            endpoint, key = target.floods[0].endpoint, target.floods[0].key
            floods = [*target.floods, Flood("raw", endpoint, max(2, count // 50), 5, key)]
            if keyed:
                floods.append(Flood("strangers", endpoint, max(2, count // 500), 6, key))
            rows = [await under(target, plan, quiet) for plan in floods]
            await asyncio.sleep(1.5)  # The hub reports its counters once a second.
            rows[-1]["malformed"] = target.malformed()
            return rows
        except Exception as error:  # Whatever it was, the log of the target says more.
            log = (target.folder / "log").read_text()[-2000:]
            raise RuntimeError(f"{name} (exit status {target.process.poll()}) stopped serving: {log}") from error
        finally:
            target.close()
            target.process.kill()
            target.process.wait()


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--messages", type=int, default=100_000, help="at each socket")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=4.0, help="without a flood")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        print("ready", flush=True)
        flood(Flood(**json.loads(options.flood)))
        return
    rows = []
    for name in options.targets:
        for keyed in (False, True):
            for row in asyncio.run(bench(name, options.messages, options.seconds, keyed)):
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                rows.append(row)
    if options.json:
        about = {"date": str(date.today()), "python": platform.python_version(), "pyzmq": zmq.__version__}
        about |= {"zmq": zmq.zmq_version(), "cores": str(os.cpu_count())}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
