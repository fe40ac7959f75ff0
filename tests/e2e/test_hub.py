"""A real hub process: junk on its sockets, a journal that cannot grow, restarts between any two messages."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from asyncrl import launch, settings
from asyncrl.journal import Journal
from asyncrl.messages import Ack, Chunk, Chunks, EpisodeEnd, Hello, Lease, Message, Rehello, Welcome
from asyncrl.process import EXIT_STOP_RUN
from asyncrl.transport import AsyncSocket, free_port_pair

LIMIT_S = 60.0


class HubProcess:
    """`asyncrl hub` on a run folder, started as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        flags = {"run.dir": str(folder), "run.name": "run", "train.groups_per_step": "64", "train.group_size": "4"}
        config = launch.resolved(settings.read([], flags))
        self.run_dir = launch.new_run_dir(config)
        launch.create(config, self.run_dir)
        self.port = free_port_pair("127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, file_limit: int | None = None) -> None:
        def limit() -> None:
            if file_limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        command = [sys.executable, "-P", "-m", "asyncrl", "hub", "--run", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=subprocess.PIPE, text=True, preexec_fn=limit
        )

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stored_tokens(self) -> dict[int, list[int]]:
        journal = Journal.open(self.run_dir / "run.db")
        ids = [row[0] for row in journal.rows("SELECT DISTINCT episode_id FROM chunk")]
        tokens = {i: held.tokens.tolist() for i, held in journal.episode_tokens(ids).items()}
        journal.close()
        return tokens


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path)
    yield process
    process.kill()


class Peer:
    """A generator that does what the test says."""

    def __init__(self, address: str, capacity: int = 8) -> None:
        self.hello = Hello("generator", "generator-0", secrets.token_hex(4), capacity=capacity, version=0)
        self.identity = f"generator-0/{self.hello.incarnation}"
        self.leases: list[Lease] = []
        self.acks: list[Ack] = []
        self.held: set[int] = set()
        self.data: AsyncSocket | None = None
        self.control = AsyncSocket(zmq.DEALER, self._on_control, self.identity)
        self.control.connect(address)
        self.control.send(self.hello)

    def _on_control(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Welcome) and self.data is None:
            self.data = AsyncSocket(zmq.DEALER, self._on_data, self.identity)
            self.data.connect(message.data_endpoint)
        elif isinstance(message, Lease):
            self.leases.append(message)
            self.held.add(message.lease_id)
        elif isinstance(message, Rehello):
            self.control.send(Hello(**{f: getattr(self.hello, f) for f in self.hello.__struct_fields__}))

    def _on_data(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        assert isinstance(message, Ack)
        self.acks.append(message)

    def send(self, message_id: int, lease: Lease, seq: int, tokens: list[int], end: bool = False) -> None:
        assert self.data is not None
        chunk = Chunk(lease.lease_id, lease.episode_id, seq, len(tokens), 0, seq > 0)
        ends = [EpisodeEnd(lease.lease_id, lease.episode_id, seq + 1, "completed", 1.0, 1)] if end else []
        frames = [np.array(tokens, np.int32).tobytes(), np.zeros(len(tokens), np.float32).tobytes()]
        self.data.send(Chunks(message_id, [chunk], ends=ends), frames)

    def close(self) -> None:
        self.control.close()
        if self.data is not None:
            self.data.close()


async def _until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_junk_on_both_sockets_is_dropped_and_the_hub_works_on(hub: HubProcess) -> None:
    hub.start()
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(hub.address)
    raw.connect(f"tcp://127.0.0.1:{hub.port + 1}")
    for junk in (b"", b"\x00" * 1000, b"\x80\x04\x95cos\nsystem\n", os.urandom(5000)):
        for _ in range(4):
            raw.send_multipart([junk, junk])
    peer = Peer(hub.address)
    await _until(lambda: peer.leases)
    assert peer.data is not None
    # A header whose frames are too short, and a chunk without tokens: dropped, not acked.
    peer.data.send(Chunks(1, [Chunk(0, 0, 0, 8, -1, False)]), [b"\x00" * 4, b"\x00" * 4])
    peer.data.send(Chunks(2, [Chunk(0, 0, 0, 0, -1, False)]), [b"", b""])
    peer.send(3, peer.leases[0], 0, [1, 2, 3])
    await _until(lambda: peer.acks)
    assert [ack.message_id for ack in peer.acks] == [3]
    assert hub.process is not None
    assert hub.process.poll() is None
    raw.close(linger=0)
    peer.close()


async def test_what_was_acked_survives_a_killed_hub_and_resent_chunks_are_kept_once(hub: HubProcess) -> None:
    hub.start()
    peer = Peer(hub.address)
    await _until(lambda: len(peer.leases) == 8)
    first, second = peer.leases[:2]
    peer.send(0, first, 0, [1, 2])
    peer.send(1, first, 1, [3, 4])
    peer.send(2, second, 0, [9])
    await _until(lambda: len(peer.acks) == 3)
    hub.kill()
    peer.send(3, first, 2, [5])
    hub.start()
    peer.hello = Hello(
        **{f: getattr(peer.hello, f) for f in peer.hello.__struct_fields__ if f != "leases"},
        leases=[lease.lease_id for lease in peer.leases],
    )
    peer.control.send(peer.hello)
    peer.send(1, first, 1, [3, 4])
    peer.send(3, first, 2, [5])
    await _until(lambda: {ack.message_id for ack in peer.acks[3:]} >= {1, 3})
    assert not any(ack.refused for ack in peer.acks)
    hub.kill()
    assert hub.stored_tokens() == {first.episode_id: [1, 2, 3, 4, 5], second.episode_id: [9]}
    peer.close()


async def test_a_journal_that_cannot_grow_stops_the_run_and_what_was_acked_is_intact(hub: HubProcess) -> None:
    hub.start(file_limit=2 << 20)
    peer = Peer(hub.address)
    await _until(lambda: len(peer.leases) == 8)
    assert hub.process is not None
    sent: dict[int, list[int]] = {}
    lease = peer.leases[0]
    for seq in range(400):
        sent[seq] = list(range(seq, seq + 2000))
        peer.send(seq, lease, seq, sent[seq])
        await asyncio.sleep(0.005)
        if hub.process.poll() is not None:
            break
    await _until(lambda: hub.process is not None and hub.process.poll() is not None)
    assert hub.process.returncode == EXIT_STOP_RUN
    assert hub.process.stdout is not None
    text = hub.process.stdout.read()
    assert "run.db" in text
    assert "resume the run" in text
    assert "Traceback" not in text
    acked = sorted(ack.message_id for ack in peer.acks)
    assert 0 < len(acked) < 400
    stored = hub.stored_tokens()[lease.episode_id]
    expected = [token for seq in acked for token in sent[seq]]
    assert stored[: len(expected)] == expected
    peer.close()
