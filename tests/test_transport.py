"""Real sockets over loopback: framing, malformed messages, restarts of the other side."""

import asyncio
import socket
import subprocess
import sys

import numpy as np
import pytest
import zmq

from asyncrl.messages import Ack, Chunk, Chunks, Message, Rehello, Score, encode
from asyncrl.transport import AsyncSocket, Client, check_port_pair, free_port_pair

Received = list[tuple[bytes, Message, list[memoryview]]]


async def _until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def _router(received: Received) -> tuple[AsyncSocket, str]:
    router = AsyncSocket(zmq.ROUTER, lambda *message: received.append(message))
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    router.bind(endpoint)
    return router, endpoint


async def test_token_arrays_arrive_as_sent_and_answers_find_their_peer() -> None:
    received, answers = [], []
    router, endpoint = _router(received)
    dealer = AsyncSocket(zmq.DEALER, lambda *message: answers.append(message), "generator-0/a")
    dealer.connect(endpoint)
    tokens, logprobs = np.arange(5, dtype=np.int32), np.linspace(-1, 0, 5, dtype=np.float32)
    header = Chunks(7, [Chunk(1, 2, 0, 5, 3, True)])
    dealer.send(header, [tokens.tobytes(), logprobs.tobytes()])
    await _until(lambda: received)
    peer, message, frames = received[0]
    assert (peer, message) == (b"generator-0/a", header)
    assert np.array_equal(np.frombuffer(frames[0], np.int32), tokens)
    assert np.array_equal(np.frombuffer(frames[1], np.float32), logprobs)
    router.send(Ack(7), to=peer)
    await _until(lambda: answers)
    assert answers[0][1] == Ack(7)
    router.close()
    dealer.close()


async def test_a_thousand_messages_each_way_all_arrive_in_order() -> None:
    received, answers = [], []

    def echo(peer: bytes, message: Message, frames: list[memoryview]) -> None:
        received.append(message.message_id)
        router.send(message, to=peer)

    router = AsyncSocket(zmq.ROUTER, echo)
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    router.bind(endpoint)
    dealer = AsyncSocket(zmq.DEALER, lambda _, message, __: answers.append(message.message_id), "g/a")
    dealer.connect(endpoint)
    for i in range(1000):
        dealer.send(Ack(i))
        if i % 100 == 0:
            await asyncio.sleep(0)
    await _until(lambda: len(answers) == 1000)
    assert received == answers == list(range(1000))
    router.close()
    dealer.close()


DEEP = encode(Score(0, [{"x": None}])).replace(b"\xa1x\xc0", b"\xa1x" + b"\x91" * 5000 + b"\xc0")
"""A conversation with a list in a list in a list ..."""


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\xff", b"not msgpack", b"\x81\xa4type\xa6nobody", b"\x93\x01\x02", DEEP]
)
async def test_a_malformed_message_is_counted_and_dropped(junk: bytes) -> None:
    received: Received = []
    router, endpoint = _router(received)
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(endpoint)
    raw.send_multipart([junk])
    await _until(lambda: router.malformed == 1)
    client = Client(endpoint, "learner-0/a", lambda: None)
    client.send(Rehello())
    await _until(lambda: received)
    assert received[0][1] == Rehello()
    raw.close(linger=0)
    client.close()
    router.close()


async def test_sending_to_a_peer_that_is_gone_is_counted_not_raised() -> None:
    router, _ = _router([])
    assert router.send(Ack(1), to=b"nobody") is False
    assert router.unroutable == 1
    router.close()


async def test_a_peer_reaches_a_hub_that_was_started_anew_on_the_same_port() -> None:
    first: Received = []
    router, endpoint = _router(first)
    client = Client(endpoint, "learner-0/a", lambda: None)
    client.send(Ack(1))
    await _until(lambda: first)
    router.close()
    second: Received = []
    again = AsyncSocket(zmq.ROUTER, lambda *message: second.append(message))
    await asyncio.sleep(0.1)
    again.bind(endpoint)
    for i in range(50):
        client.send(Ack(i))
        await asyncio.sleep(0.05)
        if second:
            break
    assert second
    client.close()
    again.close()


async def test_every_connection_is_announced_to_who_has_to_say_things_again() -> None:
    first: Received = []
    router, endpoint = _router(first)
    said: list[str] = []

    def greet() -> None:
        said.append("hello")
        assert dealer.send(Rehello()), "it cannot be sent yet"

    dealer = AsyncSocket(zmq.DEALER, lambda *_: None, "generator-0/a", greet)
    assert not dealer.send(Ack(1)), "nothing is queued before there is a connection"
    dealer.connect(endpoint, queue=False)
    client = Client(endpoint, "learner-0/a", lambda: client.send(Rehello()))
    assert client.receive(0.2) is None
    await _until(lambda: len(first) == 2)
    router.close()
    second: Received = []
    again = AsyncSocket(zmq.ROUTER, lambda *message: second.append(message))
    await asyncio.sleep(0.1)  # ZeroMQ gives the port back in its own time.
    again.bind(endpoint)
    await _until(lambda: client.receive(0.01) is None and len(second) == 2)
    assert {(peer, message) for peer, message, _ in second} == {
        (b"generator-0/a", Rehello()),
        (b"learner-0/a", Rehello()),
    }
    assert len(said) == 2
    for socket_ in (dealer, client, again):
        socket_.close()


def test_a_client_waits_no_longer_than_its_limit() -> None:
    client = Client(f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}", "learner-0/a", lambda: None)
    assert client.receive(0.05) is None
    client.close()


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} on 127.0.0.1 cannot be used.*--hub.port"):
            check_port_pair("127.0.0.1", port)


LEAVES_A_FULL_QUEUE = """
import time, zmq
from asyncrl.transport import configure

router = zmq.Context().socket(zmq.ROUTER)
configure(router)
router.set(zmq.HEARTBEAT_IVL, 200)
port = router.bind_to_random_port("tcp://127.0.0.1")
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.connect(f"tcp://127.0.0.1:{port}")
for _ in range(20_000):
    dealer.send(b"x" * 1000)
context.destroy(linger=0)
time.sleep(1)  # Until heartbeats have come due.
print("alive")
"""


def test_a_peer_that_floods_and_leaves_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", LEAVES_A_FULL_QUEUE], capture_output=True, timeout=60)
    assert done.stdout == b"alive\n", done.stderr
