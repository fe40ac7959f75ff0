"""Real processes over loopback: a hub thread that only drives the roster, member processes, a publisher."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from asyncrl.config import Config
from asyncrl.messages import (
    Applied,
    Hello,
    Message,
    Offer,
    ProcessEvent,
    Ready,
    Refused,
    Rehello,
    Sent,
    Shutdown,
    TransferFailed,
    decode,
    encode,
)
from asyncrl.roster import Roster
from asyncrl.rounds import Send
from asyncrl.weights.publisher import Publisher

MEMBER = Path(__file__).with_name("member.py")
torch.set_num_threads(1)


def _load_member() -> Any:
    spec = importlib.util.spec_from_file_location("weights_member", MEMBER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class HubThread(threading.Thread):
    """The part of the hub that concerns weights: a ROUTER and a roster. `log` gets all that happens."""

    def __init__(self, config: Config, port: int = 0) -> None:
        super().__init__(daemon=True)
        self.roster = Roster(config, 0)
        self.log: queue.Queue[Any] = queue.Queue()
        self.refuse_publisher = False
        self.away: set[str] = set()
        """Members whose heartbeats do not arrive."""
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        for attempt in range(50):
            try:
                self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
                break
            except zmq.ZMQError:
                # ZeroMQ gives the port of a closed socket back in its own time.
                assert attempt < 49
                time.sleep(0.1)
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self._peers: dict[str, bytes] = {}
        self.start()

    def run(self) -> None:
        while True:
            due = self.roster.next_deadline()
            wait_s = 0.5 if due is None else max(0.0, min(0.5, due - time.time()))
            if self._socket.poll(int(1000 * wait_s) + 1):
                peer, header = self._socket.recv_multipart()
                message = decode(header)
                if isinstance(message, Shutdown):
                    break
                self._on_message(peer, message, time.time())
            for name in self._peers.keys() - self.away:
                self.roster.heard(name, time.time())  # Members here have no heartbeat of their own.
            self.roster.expire(time.time())
            for effect in self.roster.take_effects():
                self.log.put(effect)
                if isinstance(effect, Send) and effect.to in self._peers:
                    self._send(effect.to, effect.message)
        self._socket.close(linger=0)

    def _send(self, to: str, message: Message) -> None:
        self._socket.send_multipart([self._peers[to], encode(message)])

    def _on_message(self, peer: bytes, message: Message, now: float) -> None:
        name = peer.decode().split("/")[0]
        self.log.put((name, message))
        match message:
            case Hello():
                self._peers[name] = peer
                if message.role == "publisher":
                    if self.refuse_publisher:
                        self._send(name, Refused("no publishers here"))
                    self.roster.publisher_joined(message.incarnation, now)
                else:
                    self.roster.generator_joined(name, message.incarnation, message.version, now)
            case ProcessEvent():
                self._peers.pop(message.name, None)
                self.roster.generator_left(message.name, now)
            case _ if name not in self._peers:
                self._socket.send_multipart([peer, encode(Rehello())])
            case Offer():
                self.roster.offer(message, now)
            case Ready():
                self.roster.ready(name, message.epoch, now)
            case Applied():
                self.roster.applied(name, message, now)
            case Sent():
                self.roster.sent(message, now)
            case TransferFailed():
                self.roster.failed(name, message, now)


class Site:
    """What a test holds: the hub, processes, and waits with a limit."""

    def __init__(self, nursery: Nursery, **weights: Any) -> None:
        self.nursery = nursery
        self.config = Config.model_validate({"weights": weights})
        self.hub = HubThread(self.config)
        self.told: dict[str, list[dict[str, Any]]] = {}
        self._publisher: Publisher | None = None

    @property
    def publisher(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher(self.config, self.hub.endpoint)
        return self._publisher

    def start(self, *names: str, **trouble: tuple[str, int, int]) -> None:
        """Starts members and waits for their Hello. `b=("kill", 2, 3)`: b kills itself while it has version 1,
        in its third broadcast of version 2."""
        for name in names:
            words = (self.hub.endpoint, name, self.config.weights.timeout_s, *trouble.get(name, ()))
            self.told[name] = []
            self.nursery.start(name, " ".join(map(str, words)), self._hear)
        waiting = set(names)
        while waiting:
            waiting -= {self.wait(lambda e: isinstance(e, tuple) and isinstance(e[1], Hello))[0]}

    def _hear(self, name: str, told: dict[str, Any]) -> None:
        self.told[name].append(told)
        self.hub.log.put(("stdout", name))

    def wait(self, wanted: Callable[[Any], bool], limit_s: float = 20.0) -> Any:
        """The next entry of the log that is wanted; fails after `limit_s`."""
        deadline, seen = time.monotonic() + limit_s, []
        while True:
            try:
                entry = self.hub.log.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"did not happen within {limit_s:g} s; seen: {seen}")
            seen.append(entry)
            if wanted(entry):
                return entry

    def wait_effect(self, kind: type, limit_s: float = 20.0) -> Any:
        return self.wait(lambda entry: isinstance(entry, kind), limit_s)

    def wait_message(self, name: str, kind: type, limit_s: float = 20.0) -> Any:
        def wanted(entry: Any) -> bool:
            return isinstance(entry, tuple) and entry[0] == name and isinstance(entry[1], kind)

        return self.wait(wanted, limit_s)[1]

    def wait_told(self, name: str, count: int, limit_s: float = 10.0) -> list[dict[str, Any]]:
        """What a member has printed, once that is `count` lines."""
        while len(self.told[name]) < count:
            self.wait(lambda entry: entry == ("stdout", name), limit_s)
        return self.told[name]

    def tell_hub(self, message: Message) -> None:
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.set(zmq.IDENTITY, b"supervisor/1")
            socket.connect(self.hub.endpoint)
            socket.send(encode(message))
            socket.close(linger=1000)

    def restart_hub(self) -> None:
        port = int(self.hub.endpoint.rsplit(":", 1)[1])
        log = self.hub.log
        self.tell_hub(Shutdown("test"))
        self.hub.join(5)
        self.hub = HubThread(self.config, port)
        self.hub.log = log

    def close(self) -> None:
        if self._publisher is not None and self._publisher._sender.error is None:
            self._publisher.close(1.0)
        self.nursery.kill_all()
        self.tell_hub(Shutdown("test"))
        self.hub.join(5)


class Nursery:
    """One process that has torch imported and forks members."""

    def __init__(self) -> None:
        command = [sys.executable, str(MEMBER)]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids: dict[str, int] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, name: str, line: str, listener: Callable[[str, dict[str, Any]], None]) -> None:
        assert self._parent.stdin is not None
        self._listeners[name] = listener
        self._parent.stdin.write(line + "\n")
        self._parent.stdin.flush()

    def _read(self) -> None:
        for line in self._parent.stdout or ():
            told = json.loads(line)
            if "pid" in told:
                self.pids[told["name"]] = told["pid"]
            else:
                self._listeners[told["name"]](told["name"], told)

    def kill_all(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()

    def close(self) -> None:
        self.kill_all()
        self._parent.kill()
        self._parent.wait()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def make_site(nursery: Nursery) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(backend: str = "gloo", timeout_s: float = 20.0, bucket_mb: float = 0.002) -> Site:
        sites.append(Site(nursery, backend=backend, timeout_s=timeout_s, bucket_mb=bucket_mb))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


@pytest.fixture(scope="session")
def digest_of() -> Callable[..., str]:
    """The digest that members print: names, dtypes, shapes and bits."""
    return _load_member().digest_of


@pytest.fixture
def make_weights() -> Callable[[int], list[tuple[str, torch.Tensor]]]:
    """Weights of a version: mixed dtypes, odd sizes, a scalar, a transposed view, one larger than a bucket."""

    def make(version: int) -> list[tuple[str, torch.Tensor]]:
        gen = torch.Generator().manual_seed(version)
        special = torch.tensor([3.4e38, -3.4e38, -0.0, 1e-45, float(version)])
        return [
            ("embed", torch.randn(33, 7, generator=gen).to(torch.bfloat16)),
            ("scale", torch.tensor(float(version), dtype=torch.float64)),
            ("layers.0.w", torch.randn(64, 96, generator=gen).to(torch.bfloat16)),
            ("layers.0.b", special),
            ("layers.0.t", torch.randn(5, 11, generator=gen).T),
            ("layers.1.w", torch.randn(13, 17, generator=gen).half()),
            ("layers.1.q", torch.randint(-128, 127, (301,), generator=gen, dtype=torch.int8)),
            ("empty", torch.zeros(0, 4)),
            ("head", torch.randn(40, 30, generator=gen)),
        ]

    return make
