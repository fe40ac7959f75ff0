"""What the hub does with the chunks, turns and ends that a generator streams: verdicts, journal rows, the ack.

The scheduler judges each header; what it accepts becomes a row of the journal. It opens no socket: the hub hands
it a decoded message with its frames, and sends the ack once the rows are durable. Called by the hub.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncrl import records
from asyncrl.harvest import Harvest
from asyncrl.messages import Ack, Chunk, Chunks, EpisodeEnd, Turn
from asyncrl.records import Record
from asyncrl.scheduler import Scheduler, Verdict
from asyncrl.tasks import Tasks


class Intake:
    """Takes a run's stream of chunks. `chunks` and `tokens` count what was accepted since they were last reset."""

    def __init__(
        self,
        scheduler: Scheduler,
        harvest: Harvest,
        tasks: Tasks,
        record: Callable[..., None],
        now: Callable[[], float],
    ) -> None:
        """Args: `record` adds rows to the next commit."""
        self._scheduler, self._harvest, self._tasks = scheduler, harvest, tasks
        self._record, self._now = record, now
        self.chunks = self.tokens = 0

    def take(self, message: Chunks, frames: list[memoryview]) -> Ack | None:
        """Takes one message whose frames fit (`frames_fit`).

        Returns:
            The ack, to be sent when all rows are durable. None: something before it is missing, and without an ack
            the generator sends it again, after the one that is.
        """
        verdicts = self._chunks(message, frames) + self._turns(message) + [self._end(end) for end in message.ends]
        parts: list[Chunk | Turn | EpisodeEnd] = [*message.chunks, *message.turns, *message.ends]
        if Verdict.EARLY in verdicts:
            return None
        refused = {part.lease_id for part, said in zip(parts, verdicts, strict=True) if said is Verdict.REFUSED}
        return Ack(message.message_id, sorted(refused))

    def _chunks(self, message: Chunks, frames: list[memoryview]) -> list[Verdict]:
        verdicts, at = [], 0
        for chunk in message.chunks:
            stop = at + 4 * chunk.n
            verdicts.append(self._scheduler.chunk(chunk))
            if verdicts[-1] is Verdict.ACCEPTED:
                self._record(records.chunk(chunk, frames[0][at:stop], frames[1][at:stop]))
                self.tokens += chunk.n
            at = stop
        self.chunks += len(message.chunks)
        return verdicts

    def _turns(self, message: Chunks) -> list[Verdict]:
        verdicts = []
        for turn in message.turns:
            rows = _rows(turn)
            verdicts.append(self._scheduler.turn(turn) if rows else Verdict.REFUSED)
            if verdicts[-1] is Verdict.ACCEPTED:
                self._record(*rows)
        return verdicts

    def _end(self, end: EpisodeEnd) -> Verdict:
        episode = self._scheduler.episodes.get(end.episode_id)  # Its end may be the last of its group.
        verdict = self._scheduler.end(end, self._now())
        if verdict is Verdict.ACCEPTED and episode is not None:
            self._harvest.ended(end, episode)
            self._tasks.ended(episode)
        return verdict


def _rows(turn: Turn) -> list[Record]:
    """A turn's rows; none if the journal could not give it back: it has no JSON, or a number that is none."""
    try:
        rows = records.turn(turn)
        msgspec.json.decode(rows[0].values[2], type=Turn)
    except (TypeError, ValueError, RecursionError):
        return []
    return rows


def frames_fit(message: Chunks, frames: list[memoryview]) -> bool:
    """Whether the frames hold exactly the tokens and log-probs that the header announces."""
    if len(frames) != 2 or any(chunk.n < 1 for chunk in message.chunks):
        return False
    nbytes = 4 * sum(chunk.n for chunk in message.chunks)
    return len(frames[0]) == nbytes == len(frames[1])
