"""The receiver on an event loop, with a real root: late, stale and stuck transfers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from asyncrl.config import Config
from asyncrl.generator.engines.base import EngineDead
from asyncrl.messages import Applied, Go, Prepare, Ready, TransferFailed
from asyncrl.weights import transfer
from asyncrl.weights.buckets import Snapshot
from asyncrl.weights.groups import Group, GroupError, GroupSpec, open_store
from asyncrl.weights.receiver import Receiver

CONFIG = Config.model_validate({"weights": {"timeout_s": 3.0}})
HOST = "127.0.0.1"


class Engine:
    """Keeps what it is given; `gate` holds an update, `dead` fails it."""

    def __init__(self) -> None:
        self.version, self.total = 0, 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False

    async def update(self, weights, kv) -> float:
        await self.gate.wait()
        if self.dead:
            raise EngineDead("poisoned")
        self.version = weights.version
        self.total = sum(float(tensor.sum()) for _, tensor in weights.tensors)
        return 0.25


class Bench:
    """A receiver, what it has sent, and a root that can broadcast to it."""

    def __init__(self) -> None:
        self.engine, self.sent = Engine(), []
        self.receiver = Receiver(CONFIG, self.engine, self.sent.append)
        self.store = open_store(HOST, 3.0)
        self.snapshot = Snapshot(1 << 20, torch.device("cpu"))

    def fill(self, version: int) -> None:
        self.snapshot.fill(version, [("w", torch.full((100,), float(version)))])

    def prepare(self, epoch: int, version: int) -> Prepare:
        return Prepare(epoch, version, HOST, self.store.port, 1, 2, "gloo", self.snapshot.buckets)

    def broadcast(self, epoch: int) -> threading.Thread:
        def run() -> None:
            group = Group(GroupSpec("gloo", HOST, self.store.port, epoch, 0, ("a",), 3.0), self.store)
            transfer.send(group, self.snapshot)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


async def test_a_whole_transfer_reports_its_pause() -> None:
    bench = Bench()
    bench.fill(4)
    await bench.receiver.handle(bench.prepare(9, 4))
    root = bench.broadcast(9)
    await bench.receiver.handle(Go(9, 4, ["a"]))
    assert bench.sent[0] == Ready(9, 4)
    assert (bench.sent[1].epoch, bench.sent[1].version, bench.sent[1].pause_s) == (9, 4, 0.25)
    assert (bench.engine.version, bench.engine.total) == (4, 400.0)
    root.join()


async def test_a_newer_epoch_starts_while_the_older_one_is_still_stuck() -> None:
    bench = Bench()
    bench.fill(1)
    await bench.receiver.handle(bench.prepare(1, 1))
    stuck = asyncio.create_task(bench.receiver.handle(Go(1, 1, ["a"])))  # Nobody builds epoch 1.
    await asyncio.sleep(0.3)
    bench.fill(2)
    await bench.receiver.handle(bench.prepare(2, 2))
    root = bench.broadcast(2)
    await bench.receiver.handle(Go(2, 2, ["a"]))
    await stuck
    assert [type(message) for message in bench.sent] == [Ready, Ready, Applied]
    assert any(thread.name == "weights-1-1" for thread in threading.enumerate()), "epoch 1 was not stuck"
    assert bench.engine.total == 200.0
    root.join()


async def test_stale_and_repeated_messages_are_ignored() -> None:
    bench = Bench()
    bench.fill(3)
    await bench.receiver.handle(Go(5, 3, ["a"]))
    await bench.receiver.handle(bench.prepare(5, 3))
    await bench.receiver.handle(bench.prepare(4, 2))
    await bench.receiver.handle(Go(4, 2, ["a"]))
    root = bench.broadcast(5)
    await bench.receiver.handle(Go(5, 3, ["a"]))
    await bench.receiver.handle(Go(5, 3, ["a"]))
    assert [type(message) for message in bench.sent] == [Ready, Applied]
    root.join()


async def test_a_transfer_that_fails_leaves_the_engine_serving_and_the_next_one_works() -> None:
    bench = Bench()
    bench.fill(1)
    await bench.receiver.handle(bench.prepare(1, 1))
    await bench.receiver.handle(Go(1, 1, ["a"]))
    assert isinstance(bench.sent[1], TransferFailed)
    assert "no sign of life from publisher (rank 0)" in bench.sent[1].reason
    assert bench.engine.version == 0
    await bench.receiver.handle(bench.prepare(2, 1))
    root = bench.broadcast(2)
    await bench.receiver.handle(Go(2, 1, ["a"]))
    assert bench.engine.total == 100.0
    root.join()


async def test_ready_waits_for_the_update_at_work() -> None:
    bench = Bench()
    bench.fill(1)
    bench.engine.gate.clear()
    await bench.receiver.handle(bench.prepare(1, 1))
    root = bench.broadcast(1)
    first = asyncio.create_task(bench.receiver.handle(Go(1, 1, ["a"])))
    await asyncio.to_thread(root.join)
    await asyncio.sleep(0.1)
    second = asyncio.create_task(bench.receiver.handle(bench.prepare(2, 2)))
    await asyncio.sleep(0.1)
    assert bench.sent == [Ready(1, 1)], "the staging buffers are still being read"
    bench.engine.gate.set()
    await asyncio.gather(first, second)
    assert [type(message) for message in bench.sent] == [Ready, Applied, Ready]


async def test_a_poisoned_engine_is_not_reported_as_a_failed_transfer() -> None:
    bench = Bench()
    bench.fill(1)
    bench.engine.dead = True
    await bench.receiver.handle(bench.prepare(1, 1))
    root = bench.broadcast(1)
    with pytest.raises(EngineDead, match="poisoned"):
        await bench.receiver.handle(Go(1, 1, ["a"]))
    assert bench.sent == [Ready(1, 1)]
    root.join()


def test_a_group_that_cannot_be_built_names_who_is_missing_and_its_limit() -> None:
    store = open_store(HOST, 1.0)
    spec = GroupSpec("gloo", HOST, store.port, 7, 0, ("generator-0",), 1.0)
    with pytest.raises(GroupError, match=r"gloo group of epoch 7 .* at most 1 s .*generator-0 \(rank 1\)"):
        Group(spec, store)


def test_a_store_that_is_gone_is_noticed_at_once_and_blamed_on_the_publisher() -> None:
    spec = GroupSpec("gloo", HOST, 1, 7, 1, ("generator-0",), 60.0)
    with pytest.raises(GroupError, match=r"after 0\.. s .*no sign of life from publisher .*refused"):
        Group(spec)


STUCK = """
import asyncio, sys
from asyncrl.config import Config
from asyncrl.messages import Go, Prepare
from asyncrl.weights.receiver import Receiver
import asyncrl.weights.transfer

async def main():
    receiver = Receiver(Config(), None, lambda message: None)
    await receiver.handle(Prepare(1, 1, "127.0.0.1", int(sys.argv[1]), 1, 2, "gloo", []))
    going = asyncio.create_task(receiver.handle(Go(1, 1, ["a"])))
    await asyncio.sleep(1)
    assert not going.done(), going
    receiver.close()
    await going

asyncio.run(main())
"""


def test_a_stuck_transfer_does_not_hold_up_the_exit() -> None:
    store = open_store(HOST, 3.0)  # Its time limit in the process is 60 s, the default.
    done = subprocess.run([sys.executable, "-P", "-c", STUCK, str(store.port)], timeout=40, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
