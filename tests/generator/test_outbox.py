"""The outbox: one message per turn of the loop, kept until acked, sent again in order."""

import asyncio

import numpy as np

from asyncrl.generator.outbox import Outbox
from asyncrl.messages import Chunk, Chunks, EpisodeEnd


class Wire:
    """Collects what the outbox sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[Chunks, list[bytes]]] = []

    def __call__(self, header: Chunks, frames: list[bytes]) -> None:
        self.sent.append((header, list(frames)))


async def test_chunks_of_one_turn_of_the_loop_leave_as_one_message() -> None:
    wire = Wire()
    outbox = Outbox(wire)
    outbox.chunk(Chunk(1, 1, 0, 2, -1, False), [5, 6], [0.0, 0.0])
    outbox.chunk(Chunk(2, 2, 3, 1, 4, True), [7], [-0.25])
    outbox.end(EpisodeEnd(2, 2, 4, "completed", 1.0, 1))
    await asyncio.sleep(0)
    (header, frames) = wire.sent[0]
    assert len(wire.sent) == 1
    assert [chunk.episode_id for chunk in header.chunks] == [1, 2]
    assert np.frombuffer(frames[0], np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(frames[1], np.float32).tolist() == [0.0, 0.0, -0.25]
    assert len(header.ends) == 1


async def test_what_is_not_acked_is_sent_again_in_order_and_then_forgotten() -> None:
    wire = Wire()
    outbox = Outbox(wire)
    for seq in range(3):
        outbox.chunk(Chunk(1, 1, seq, 1, 0, True), [seq], [-1.0])
        await asyncio.sleep(0)
    outbox.end(EpisodeEnd(7, 7, 4, "completed", 1.0, 1))
    assert outbox.ending() == [7]
    await asyncio.sleep(0)
    assert outbox.ending() == [7]
    outbox.acked(3)
    assert outbox.ending() == []
    outbox.acked(1)
    wire.sent.clear()
    outbox.resend()
    assert [header.message_id for header, _ in wire.sent] == [0, 2]
    outbox.acked(0)
    outbox.acked(2)
    assert outbox.unacked == 0
    assert await outbox.drained(1.0)
