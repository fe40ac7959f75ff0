"""The receiver on an event loop, with a real root: late, stale and stuck transfers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from msgspec import structs
from transformers import Qwen3Config

from asyncrl.config import Config
from asyncrl.generator.engines.base import EngineDead, UpdateTimes
from asyncrl.messages import Applied, Go, Prepare, Ready, TensorMeta, TransferFailed
from asyncrl.weights import groups, transfer
from asyncrl.weights.buckets import Snapshot, size_of, views
from asyncrl.weights.checks import expected
from asyncrl.weights.groups import Group, GroupError, GroupSpec, open_store
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.ring import Ring
from asyncrl.weights.shared import attach

CONFIG = Config.model_validate({"weights": {"timeout_s": 3.0}})
HOST = "127.0.0.1"


class Engine:
    """Keeps what it is given; `gate` holds an update, `dead` fails it."""

    def __init__(self) -> None:
        self.version, self.total = 0, 0.0
        self.weights = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False

    async def update(self, weights, kv) -> UpdateTimes:
        await self.gate.wait()
        if self.dead:
            raise EngineDead("poisoned")
        self.version, self.weights = weights.version, weights
        self.total = sum(float(tensor.sum()) for _, tensor in weights.tensors)
        return UpdateTimes(0.5, 0.125, 0.125)


class Bench:
    """A receiver, what it has sent, and a root that can broadcast to it."""

    def __init__(self, config: Config = CONFIG, limit_bytes: int = 1 << 20) -> None:
        self.engine, self.sent = Engine(), []
        self.receiver = Receiver(config, self.engine, self.sent.append)
        self.store = open_store(HOST, 3.0)
        self.snapshot = Snapshot(limit_bytes)

    def fill(self, version: int) -> None:
        self.snapshot.fill(version, [("w", torch.full((100,), float(version)))])
        self.snapshot.seal()

    def prepare(self, epoch: int, version: int) -> Prepare:
        return Prepare(epoch, version, HOST, self.store.port, 1, 2, "gloo", self.snapshot.buckets)

    def prepare_shared(self, epoch: int, version: int) -> Prepare:
        return Prepare(epoch, version, "", 0, 1, 2, "shm", self.snapshot.buckets, self.snapshot.addresses)

    def broadcaster(self, epoch: int) -> Callable[[], None]:
        """Sends the snapshot, over one group, each time that it is called (from another thread)."""
        held: list[Group] = []

        def run() -> None:
            if not held:
                held.append(Group(GroupSpec("gloo", HOST, self.store.port, epoch, 0, ("a",), 3.0), self.store))
            transfer.send(held[0], self.snapshot)

        return run

    def broadcast(self, epoch: int) -> threading.Thread:
        thread = threading.Thread(target=self.broadcaster(epoch))
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


async def test_what_is_staged_can_be_mapped_by_the_engines_own_processes() -> None:
    bench = Bench(limit_bytes=1000)
    weights = [(f"w{i}", torch.randn(100 + i)) for i in range(5)]
    bench.snapshot.fill(1, weights)
    bench.snapshot.seal()
    await bench.receiver.handle(bench.prepare_shared(1, 1))
    await bench.receiver.handle(Go(1, 1, ["a"]))
    segments = bench.engine.weights.segments
    assert len(segments) == 3
    mapped = [attach(segment.address, size_of(segment.tensors)) for segment in segments]
    for (name, got), (known, want) in zip(views(mapped, [s.tensors for s in segments]), weights, strict=True):
        assert name == known
        assert torch.equal(got, want)


async def test_two_buffers_used_in_turn_carry_all_buckets_of_all_versions(monkeypatch) -> None:
    """What NCCL needs, on a CPU: only the kind of device differs."""
    rings, surveys_under_way = [], []

    def ring_for(backend: str) -> Ring:
        rings.append(Ring(torch.device("cpu")))
        return rings[-1]

    begin, survey, under_way = Group.begin, transfer.survey, []

    def counted(group, tensor):
        wait = begin(group, tensor)
        if group.spec.rank == 0:
            return wait
        under_way.append(tensor)
        return lambda: (wait(), under_way.pop())

    def watched(*arguments):
        surveys_under_way.append(len(under_way))
        return survey(*arguments)

    monkeypatch.setattr(groups, "ring_for", ring_for)
    monkeypatch.setattr(Group, "begin", counted)
    monkeypatch.setattr(transfer, "survey", watched)
    bench = Bench(limit_bytes=3000)
    sizes = [700, 300, 5000, 10, 600, 700, 1, 650]
    for version in (1, 2, 3):
        weights = [(f"w{i}", torch.randn(size)) for i, size in enumerate(sizes)]
        bench.snapshot.fill(version, weights)
        bench.snapshot.seal()
        await bench.receiver.handle(bench.prepare(1, version))
        if version == 1:
            root = bench.broadcaster(1)
        sent = asyncio.create_task(asyncio.to_thread(root))
        await bench.receiver.handle(Go(1, version, ["a"]))
        await sent
        for (_, got), (_, want) in zip(bench.engine.weights.tensors, weights, strict=True):
            assert torch.equal(got, want)
    buckets = len(bench.snapshot.buffers)
    assert buckets > 4
    assert surveys_under_way == [*[1] * buckets, 0] * 3, "every bucket but the last is checked under the next one"
    largest = max(buffer.numel() for buffer in bench.snapshot.buffers)
    assert len(rings) == 2
    for ring in rings:
        assert max(slot.numel() for slot in ring._slots) == largest


async def test_a_snapshot_that_is_overwritten_meanwhile_is_refused_and_the_newer_version_is_served() -> None:
    bench = Bench()
    bench.fill(1)
    await bench.receiver.handle(bench.prepare_shared(1, 1))
    bench.snapshot.fill(2, [("w", torch.full((100,), 2.0))])
    await bench.receiver.handle(Go(1, 1, ["a"]))
    assert bench.sent[-1] == TransferFailed(
        1, 1, "announced was version 1, received version -1; nothing was applied", refused=True
    )
    bench.snapshot.seal()
    await bench.receiver.handle(bench.prepare_shared(2, 2))
    bench.snapshot.buffers[0][17] ^= 1  # A write after the trailer.
    await bench.receiver.handle(Go(2, 2, ["a"]))
    assert "version 2: wrong checksum of bucket 0 of 1" in bench.sent[-1].reason
    assert bench.engine.version == 0
    bench.fill(3)
    await bench.receiver.handle(bench.prepare_shared(3, 3))
    await bench.receiver.handle(Go(3, 3, ["a"]))
    assert bench.engine.total == 300.0


PUBLISHER = """
import json, sys, torch
from asyncrl.weights.buckets import Snapshot
snapshot = Snapshot(1 << 20)
snapshot.fill(1, [("w", torch.full((100,), 1.0))])
snapshot.seal()
print(json.dumps(snapshot.addresses), flush=True)
sys.stdin.read()
"""


async def test_shared_memory_goes_with_its_publisher_and_its_loss_is_named() -> None:
    command = [sys.executable, "-P", "-c", PUBLISHER]
    publisher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - it only starts
    bench = Bench()
    bench.fill(1)  # For its layout only.
    bench.snapshot.addresses = json.loads(publisher.stdout.readline())
    await bench.receiver.handle(bench.prepare_shared(1, 1))
    await bench.receiver.handle(Go(1, 1, ["a"]))
    assert bench.engine.total == 100.0
    await bench.receiver.handle(bench.prepare_shared(2, 2))
    publisher.kill()
    publisher.communicate()
    await bench.receiver.handle(Go(2, 2, ["a"]))
    assert isinstance(bench.sent[-1], TransferFailed)
    assert f"are gone: process {publisher.pid} has ended" in bench.sent[-1].reason
    assert not bench.sent[-1].refused
    assert bench.engine.version == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[3].shape.append(2), r"v_proj.weight is float32 \[8, 32, 2\], expected float32 \[8, 32\]"),
        (
            lambda m: m.__setitem__(3, TensorMeta(m[3].name, "float16", m[3].shape)),
            "is float16 .*expected float32",
        ),
        (
            lambda m: m.append(TensorMeta("lm_head.weight", "float32", [64, 32])),
            "head.weight: .* no such parameter",
        ),
        (lambda m: m.append(m[0]), "model.embed_tokens.weight: it comes twice"),
        (lambda m: m.pop(), "1 tensors are missing, the first is model.norm.weight"),
    ],
)
async def test_what_does_not_fit_the_model_is_refused_before_anything_is_sent(tmp_path, change, reason) -> None:
    Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    metas = list(expected(tmp_path, "float32").values())
    bench = Bench(Config.model_validate({"model": {"path": str(tmp_path)}}))
    fits = Prepare(1, 1, HOST, 1, 1, 2, "gloo", [metas[:2], metas[2:]])
    await bench.receiver.handle(fits)
    assert bench.sent == [Ready(1, 1)]
    changed = [TensorMeta(meta.name, meta.dtype, list(meta.shape)) for meta in metas]
    change(changed)
    await bench.receiver.handle(Prepare(2, 2, HOST, 1, 1, 2, "gloo", [changed]))
    assert isinstance(bench.sent[1], TransferFailed)
    assert bench.sent[1].refused
    assert re.search(reason, bench.sent[1].reason), bench.sent[1].reason
    await bench.receiver.handle(structs.replace(fits, epoch=3, version=3))
    assert bench.sent[2] == Ready(3, 3)


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


class _NoCommunicator:
    """What NCCL's group does when a member is missing: the call itself raises, not the wait."""

    def broadcast(self, tensors, options):
        raise torch.distributed.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected\nmore")

    def abort(self) -> None:
        self.aborted = True


def test_a_broadcast_that_cannot_even_begin_is_a_failed_group_like_any_other() -> None:
    bench = Bench()
    bench.fill(1)
    group = Group(GroupSpec("gloo", HOST, bench.store.port, 1, 0, (), 3.0), bench.store)
    group._pg = broken = _NoCommunicator()
    with pytest.raises(GroupError, match=r"epoch 1 failed in a broadcast .* cause: .*Duplicate GPU detected$"):
        transfer.send(group, bench.snapshot)
    assert broken.aborted
    with pytest.raises(GroupError, match="group of epoch 1 is closed"):
        group.begin(torch.zeros(1))


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
