"""The token record of one episode: append-only ids, log-probs and the spans that say where they come from.

Sampled ids are kept as sampled and are never re-tokenised; a turn is appended as a suffix. Where the chat template
rewrites earlier turns the record forks: a new branch begins with the conversation as the template renders it now,
and what was sampled before stays in the branch that it was sampled in, once. The record holds no text and does no
I/O. The episode loop appends to it and hands the same tokens to the outbox.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from asyncrl.messages import Prefix, Span


class TokenRecord:
    """Everything that is known of one episode's tokens, and which turn they belong to."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.logprobs = array("f")
        self.spans: list[Span] = []
        self.forks = 0
        self._branch = 0
        """Where the last branch begins."""

    @classmethod
    def from_prefix(cls, prefix: Prefix, tokens: bytes | memoryview, logprobs: bytes | memoryview) -> TokenRecord:
        """Rebuilds the record of an episode that another generator began.

        Raises:
            ValueError: the arrays and the spans disagree in length.
        """
        record = cls()
        record.ids.frombytes(bytes(tokens))
        record.logprobs.frombytes(bytes(logprobs))
        record.spans = list(prefix.spans)
        total = 0
        for span in record.spans:
            if span.fork:
                record.forks, record._branch = record.forks + 1, total
            total += span.n
        if not total == len(record.ids) == len(record.logprobs):
            raise ValueError(
                f"a prefix has {len(record.ids)} tokens and {len(record.logprobs)} log-probs, "
                f"but its spans add up to {total}"
            )
        return record

    def observe(self, ids: Sequence[int], fork: bool = False) -> None:
        """Appends tokens that the policy did not sample (prompt, tool results, user text).

        `fork`: they are a whole conversation, with which a new branch begins.
        """
        if fork:
            self.forks, self._branch = self.forks + 1, len(self.ids)
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.spans.append(Span(len(ids), -1, False, fork))

    def sample(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Appends tokens that the policy sampled with the weights of `version`."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.spans.append(Span(len(ids), version, True))

    def turns(self) -> list[list[int]]:
        """The sampled tokens of each assistant turn, in order; neighbouring sampled spans are one turn."""
        turns: list[list[int]] = []
        position, in_turn = 0, False
        for span in self.spans:
            if span.sampled:
                if not in_turn:
                    turns.append([])
                turns[-1].extend(self.ids[position : position + span.n])
            in_turn = span.sampled
            position += span.n
        return turns

    @property
    def turn(self) -> list[int]:
        """The sampled tokens that the record ends with, or, if it ends with observed ones, of the turn before."""
        spans = list(self.spans)
        stop = len(self.ids)
        while spans and not spans[-1].sampled:
            stop -= spans.pop().n
        start = stop
        while spans and spans[-1].sampled:
            start -= spans.pop().n
        return self.ids[start:stop].tolist()

    @property
    def branch_length(self) -> int:
        """Tokens of the last branch."""
        return len(self.ids) - self._branch

    @property
    def branch(self) -> list[int]:
        """The ids of the last branch: all that the policy sees."""
        return self.ids[self._branch :].tolist()

    @property
    def ends_sampled(self) -> bool:
        """Whether the last token was sampled, so that its turn may still be going on."""
        return bool(self.spans) and self.spans[-1].sampled
