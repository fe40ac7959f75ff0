"""What the generator has streamed and the hub has not yet acknowledged.

Chunks, turns and ends of many episodes that become due in one turn of the event loop leave as one message. A
message is kept until the hub says that it is durable; when a connection is made (the hub was restarted, the link
was away) everything that is kept is sent again in order (the hub ignores what it already has): nothing but the end
of a connection loses a message or its ack. The outbox is bounded by the leases: without acks no new ones come.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from asyncrl.messages import Chunk, Chunks, EpisodeEnd, Turn

Send = Callable[[Chunks, Sequence[bytes]], object]


class Outbox:
    """Collects, sends, keeps and re-sends. Used on the generator's event loop only."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._chunks: list[Chunk] = []
        self._turns: list[Turn] = []
        self._ends: list[EpisodeEnd] = []
        self._tokens = array("i")
        self._logprobs = array("f")
        self._unacked: dict[int, tuple[Chunks, list[bytes]]] = {}
        self._next_id = 0
        self._scheduled = False
        self._empty = asyncio.Event()
        self._empty.set()

    def chunk(self, chunk: Chunk, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds a chunk; `logprobs` is as long as `tokens` (zeros for observed tokens)."""
        self._chunks.append(chunk)
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._schedule()

    def turn(self, turn: Turn) -> None:
        """Adds what an environment answered, after the chunks of its turn."""
        self._turns.append(turn)
        self._schedule()

    def end(self, end: EpisodeEnd) -> None:
        """Adds the end of an episode, after all its chunks."""
        self._ends.append(end)
        self._schedule()

    def acked(self, message_id: int) -> None:
        """The hub has made a message durable."""
        self._unacked.pop(message_id, None)
        if not self._unacked and not self._scheduled:
            self._empty.set()

    def resend(self) -> None:
        """Sends everything again that is kept."""
        for header, frames in self._unacked.values():
            self._send(header, frames)

    def ending(self) -> list[int]:
        """Leases whose episodes are over here, and not yet at the hub."""
        ends = [*self._ends, *(end for header, _ in self._unacked.values() for end in header.ends)]
        return [end.lease_id for end in ends]

    @property
    def unacked(self) -> int:
        """Messages that are not yet durable."""
        return len(self._unacked)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until everything is durable; False when the time ran out first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _schedule(self) -> None:
        self._empty.clear()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        header = Chunks(self._next_id, self._chunks, self._turns, self._ends)
        frames = [self._tokens.tobytes(), self._logprobs.tobytes()]
        self._next_id += 1
        self._chunks, self._turns, self._ends = [], [], []
        self._tokens, self._logprobs = array("i"), array("f")
        self._unacked[header.message_id] = (header, frames)
        self._send(header, frames)
