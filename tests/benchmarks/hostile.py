"""Malformed and misplaced messages, seeded: what `fuzz.py` and `tests/test_fuzz.py` send to bound sockets.

Four sources: random bytes; real messages with bytes changed, cut or added; real messages with one value, at any
depth, replaced by a hostile one; sound messages that the sender's role must not send. It opens no socket.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from asyncrl.envs import worker_messages as worker
from asyncrl.messages import (
    Ack,
    Applied,
    Batch,
    Checkpointed,
    CheckpointFault,
    Chunk,
    Chunks,
    EpisodeEnd,
    EpisodeMeta,
    Go,
    Heartbeat,
    Hello,
    Lease,
    NextBatch,
    Offer,
    Prepare,
    ProcessEvent,
    Ready,
    Refused,
    Rehello,
    Resync,
    Revoke,
    Score,
    Scored,
    Sent,
    Shutdown,
    Span,
    StepDone,
    StepFailed,
    Stop,
    Task,
    TensorMeta,
    TransferFailed,
    Turn,
    Welcome,
)

Frames = list[bytes]

_TASK = Task("task 1", [{"role": "user", "content": "1+1"}], "2")
_TURN = Turn(3, 5, 1, 2, [{"role": "tool", "content": "x"}], [], {"r": 0.5}, {"n": 1.0}, b"state")
_TENSORS = [[TensorMeta("w", "float32", [4, 4])]]
HUB: list[Any] = [
    Hello("generator", "generator-9", "a", 1, capacity=0),
    Heartbeat([1, 2, 3], {"steps": 4.0}),
    Ready(1, 1),
    Applied(1, 1, 0.1, 0.2),
    TransferFailed(1, 1, "no"),
    Offer(1, "127.0.0.1", 5, _TENSORS),
    Sent(1, 1, 0.1, 64),
    NextBatch(1, 0, 1),
    StepDone(1, 1, {"reward": 0.5}),
    StepFailed(1, 1, "not finite"),
    Checkpointed(1, "/nowhere", [1]),
    CheckpointFault("checkpoint_failed", "why", [1]),
    ProcessEvent("generator-0", "died", "why"),
    Shutdown("please", "failed"),
    Chunks(1, [Chunk(1, 1, 0, 2, 0, True)], [_TURN], [EpisodeEnd(1, 1, 1, "completed", 1.0, 1)]),
    Welcome(b"{}", "/nowhere", "tcp://127.0.0.1:1", 1, 1),
    Rehello(),
    Lease(1, 1, _TASK, 1),
    Revoke([1], "why"),
    Stop("why"),
    Refused("why"),
    Ack(1, [1]),
    Batch(1, 1, [EpisodeMeta(1, 1, 0.5, "completed", 4, 2)], [[0]], [[Span(4, 0, True)]]),
    Prepare(1, 1, "127.0.0.1", 5, 1, 2, "gloo", _TENSORS),
    Go(1, 1, ["generator-0"]),
    Resync("why"),
    Score(1, [{"role": "user", "content": "x"}]),
    Scored(1, 0.5),
]
"""One of each message."""
ENDS_A_RUN = frozenset({"step_failed", "shutdown"})
"""What, from the role that may say it, is no attack but an order."""
WORKER: list[Any] = [
    worker.Describe(1),
    worker.Draw(2, "train", 0),
    worker.Demonstrate(3, _TASK),
    worker.Call(4, 1, "reset", True, _TASK),
    worker.Call(5, 1, "step", message={"role": "assistant", "content": "2"}),
    worker.Call(6, 1, "replay", step=worker.StepWire(False)),
    worker.Call(7, 1, "close"),
    worker.Cancel(4),
    worker.Heartbeat([1, 2]),
]


def nested(depth: int, dicts: bool = False) -> bytes:
    """A list in a list in a list, or a table in a table, as msgpack, which no encoder would write."""
    return (b"\x81\xa1x" if dicts else b"\x91") * depth + b"\xc0"


_VALUES: list[Callable[[random.Random], Any]] = [
    lambda r: r.choice([-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**9]),
    lambda r: r.choice([math.nan, math.inf, -math.inf, -0.0, 1e308, -1.5]),
    lambda r: r.choice([None, True, False, [], {}, "", b"", b"\x00\xff" * 8]),
    lambda r: r.choice(["x" * 300, "\x00", "'; DROP TABLE run; --", "../../etc/passwd", "\U0001f600" * 50, "a/b"]),
    lambda r: [r.randrange(-5, 2**40) for _ in range(r.randrange(50))],
    lambda r: {r.choice(["x", "__class__", "reward"]): r.choice([1, "y", None, [1], math.nan]) for _ in range(3)},
    lambda r: {1: 2, b"k": 3, None: 4},
    lambda r: msgspec.msgpack.Ext(r.randrange(-128, 128), b"\x80\x04\x95cos\nsystem\n."),
    lambda r: [[[[[]]]]] * 3,
]
_HEAVY: list[Callable[[random.Random], Any]] = [
    lambda r: "x" * r.randrange(1 << 20, 4 << 20),
    lambda r: list(range(1_000_000)),
    lambda r: {str(i): 1.0 for i in range(100_000)},
]


def _tree(message: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


def replaced(rng: random.Random, message: Any, heavy: bool = False) -> bytes:
    """A message with one value replaced, dropped or added."""
    tree = _tree(message)
    places = list(_places(tree)) or [()]
    *path, last = rng.choice(places) if places != [()] else ("type",)
    at = tree
    for key in path:
        at = at[key]
    if rng.random() < 0.1:
        del at[last]
    elif rng.random() < 0.1 and isinstance(at, dict):
        at[rng.choice(["more", "__reduce__", ""])] = 1
    else:
        at[last] = rng.choice(_HEAVY if heavy else _VALUES)(rng)
    return msgspec.msgpack.encode(tree)


def mutated(rng: random.Random, message: Any) -> bytes:
    """A message with bytes changed, cut off or added."""
    data = bytearray(msgspec.msgpack.encode(message))
    for _ in range(rng.randrange(1, 6)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    match rng.randrange(3):
        case 0:
            del data[rng.randrange(len(data) + 1) :]
        case 1:
            data += rng.randbytes(rng.randrange(64))
    return bytes(data)


def messages(
    rng: random.Random, examples: list[Any], count: int, spared: frozenset[str] = frozenset()
) -> Iterator[Frames]:
    """`count` hostile multipart messages, by source in proportion; none begins as a `spared` kind."""
    sound = [each for each in examples if _tree(each)["type"] not in spared]
    for _ in range(count):
        dice = rng.random()
        example = rng.choice(sound)
        if dice < 0.25:
            frames = [rng.randbytes(rng.randrange(2000)) for _ in range(rng.randrange(1, 4))]
        elif dice < 0.5:
            frames = [mutated(rng, example)]
        elif dice < 0.8:
            frames = [replaced(rng, example)]
        elif dice < 0.9:
            frames = [msgspec.msgpack.encode(example)]
        elif dice < 0.97:
            frames = [b""] * rng.randrange(1, 5) + [msgspec.msgpack.encode(example)] * rng.randrange(3)
        elif dice < 0.999:
            frames = [nested(rng.randrange(900, 20_000), rng.random() < 0.5)]
        elif dice < 0.9995:
            frames = [b"x"] * 10_000
        else:
            frames = [replaced(rng, example, heavy=True)]
        if rng.random() < 0.3 and len(frames) < 3:
            frames += [rng.randbytes(rng.choice([0, 4, 8, 64])) for _ in range(2)]
        yield frames


def raw(rng: random.Random) -> bytes:
    """What somebody writes into the TCP connection who is no ZeroMQ peer, or only half of one."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
    curve = greeting.replace(b"NULL" + bytes(16), b"CURVE".ljust(20, b"\x00"))
    ready = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    return rng.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            rng.randbytes(rng.randrange(1, 4000)),
            greeting[: rng.randrange(1, 64)],
            greeting + rng.randbytes(500),
            greeting + ready + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff" + rng.randbytes(100),
            greeting + ready + b"\x01\x00" * 2000,
            greeting + ready + rng.randbytes(800),
            curve + rng.randbytes(300),
            b"",
        ]
    )
