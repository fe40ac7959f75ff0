"""Episodes whose every token is known in advance: an engine that recites, an environment that follows a script.

The tokenizer, the chat template, the record and the episode loop are the real ones. `conftest.py` plays them.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.envs.base import Message, Start, Step
from asyncrl.generator.engines.base import Delta, SamplingParams
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Chunk, EpisodeEnd, Prefix, Span, Task, Turn

Play = Callable[..., Any]
VERSION = 5
DELTA = 3
QUESTION: list[Message] = [{"role": "user", "content": "1+1="}]
DONE = Step(done=True, rewards={"right": 1.0})
MORE = Step(done=False, rewards={"polite": 0.25}, messages=[{"role": "user", "content": "and?"}])


class Reciter:
    """An engine that knows what it will say in each turn, and goes on from wherever the prompt breaks off."""

    def __init__(self, turns: Sequence[list[int]], header: int) -> None:
        self.turns, self.header = turns, header
        self.requests: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, rid: str, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        ids = list(prompt_ids)
        self.requests.append((ids, params))
        said = ids[::-1].index(self.header)
        rest = self.turns[ids.count(self.header) - 1][said:][: params.max_tokens]
        finish = "stop" if rest[-1] in params.stop_token_ids else "length"
        assert finish == "stop" or len(rest) == params.max_tokens
        for begin in range(0, len(rest), DELTA):
            await asyncio.sleep(0)
            part = rest[begin : begin + DELTA]
            last = begin + DELTA >= len(rest)
            yield Delta(part, [-0.5] * len(part), VERSION, finish if last else None)  # type: ignore[arg-type]


class Talk:
    """An episode that answers with fixed steps; `wrong` replaces its methods, as in `{"step": function}`."""

    def __init__(self, steps: Iterable[Any], wrong: dict[str, Callable[..., Any]]) -> None:
        self.steps, self.heard, self.closed = list(steps), [], 0
        vars(self).update(wrong)

    async def reset(self, task: Task) -> Start:
        return Start(messages=task.prompt)

    async def step(self, message: Message) -> Step:
        self.heard.append(message["content"])
        return self.steps[len(self.heard) - 1]

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Played:
    """An episode that is over, and all that left it."""

    prompt: list[int]
    record: TokenRecord = field(default_factory=TokenRecord)
    chunks: list[tuple[Chunk, list[int], list[float]]] = field(default_factory=list)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """With the number of chunks that were sent before."""
    ends: list[EpisodeEnd] = field(default_factory=list)
    envs: list[Talk] = field(default_factory=list)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        assert chunk.n == len(tokens) == len(logprobs) > 0
        self.chunks.append((chunk, list(tokens), list(logprobs)))

    def turn(self, turn: Turn) -> None:
        # What cannot be encoded would be the end of the generator.
        self.turns.append((len(self.chunks), msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn)))

    def end(self, end: EpisodeEnd) -> None:
        self.ends.append(msgspec.msgpack.decode(msgspec.msgpack.encode(end), type=EpisodeEnd))

    @property
    def result(self) -> tuple[str, float | None, int]:
        assert len(self.ends) == 1
        return self.ends[0].status, self.ends[0].reward, self.ends[0].turns

    def prefix(self, chunks: int, answered: bool) -> tuple[Prefix, bytes, bytes]:
        """What is durable after so many chunks, with or without a turn that was recorded right after them."""
        known = self.chunks[:chunks]
        spans = [Span(chunk.n, chunk.version, chunk.sampled, chunk.fork) for chunk, _, _ in known]
        turns = [turn for before, turn in self.turns if before < chunks or (answered and before == chunks)]
        turns = [msgspec.structs.replace(turn, snapshot=None) for turn in turns[:-1]] + turns[-1:]
        tokens = array("i", [token for _, some, _ in known for token in some])
        logprobs = array("f", [x for _, _, some in known for x in some])
        return Prefix(spans, chunks, turns), tokens.tobytes(), logprobs.tobytes()

    def check_chunks(self, first: int = 0) -> None:
        """Sequence numbers have no gap, the end has the next one, and the chunks spell the record."""
        count = len(self.chunks)
        assert [chunk.seq for chunk, _, _ in self.chunks] == list(range(first, first + count))
        assert self.ends[0].seq == first + count
        sent = [token for _, tokens, _ in self.chunks for token in tokens]
        assert sent == list(self.record.ids)[len(self.record.ids) - len(sent) :]
