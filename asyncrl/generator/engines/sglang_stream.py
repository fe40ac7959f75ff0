"""One running request of the SGLang engine: chunks in, deltas out, and the version of every token.

No I/O and no clock. SGLang says which weights sampled which tokens only in a request's last chunk
(`meta_info["weight_versions"]`, counted by its scheduler), and deltas must leave before. So each chunk is
labelled when it comes, by the older of two witnesses:

* what the server called its weights when its front end handled the chunk (`meta_info["weight_version"]`): a
  chunk that says "old" is old, however long it travelled after that;
* what the engine calls them: that changes in the moment before the paused server is told to go on, so whatever
  comes before is old, whatever the server calls itself by then.

A token of the new weights is thus never called old. One of the old weights is called new only if it was on its
way from the server's scheduler to its front end for the whole update, while the answers to three later calls
overtook it. That this did not happen is what the last chunk's own account shows: it is compared with all labels
given, and a contradiction ends the engine. The account itself is exact only without steps in flight
(`sglang_server.check`).

Versions may repeat (a learner that starts again from a checkpoint), so labels are *serials*, counted by the
engine; `Delta.version` is what a serial stands for. Called by `asyncrl.generator.engines.sglang`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from asyncrl.generator.engines.base import Delta, FinishReason
from asyncrl.generator.engines.sglang_client import Chunk, ServerFailed, Span


def tag_of(version: int, serial: int) -> str:
    """What the server calls the weights: the version, and a serial that never repeats in an engine's life."""
    return f"{version}.{serial}"


def serial_of(tag: str) -> int:
    """The serial in a tag.

    Raises:
        ServerFailed: the tag is not one of ours.
    """
    serial = tag.rpartition(".")[2]
    if not serial.isdecimal():
        raise ServerFailed(f"the server calls its weights {tag!r}: somebody else has changed them")
    return int(serial)


class Stream:
    """A request's tokens on their way to its consumer."""

    def __init__(self, flush_tokens: int, versions: Sequence[int]) -> None:
        """Starts empty.

        Args:
            flush_tokens: a delta is due when it holds this many tokens.
            versions: version of each serial; the engine appends to it.
        """
        # Of fixed width, so that none is the prefix of another: SGLang aborts by prefix.
        self.id = secrets.token_hex(16)
        self.deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.total = 0
        """Tokens received."""
        self.ended = False
        """Whether the consumer has been given its last delta or an error."""
        self.complete = False
        """Whether the server has sent the last chunk."""
        self._flush_tokens, self._versions = flush_tokens, versions
        self._runs: list[tuple[int, int]] = []
        """Serial, and the number of the request's tokens up to the end of its run."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def take(self, chunk: Chunk, current: int) -> None:
        """Labels a chunk's tokens and queues the deltas that are due; `current` is the engine's serial.

        Raises:
            ServerFailed: tokens are missing, or the server's account contradicts the labels.
        """
        if self.ended:
            return
        if self.total + len(chunk.token_ids) != chunk.total and chunk.reason != "abort":
            raise ServerFailed(
                f"a request has {chunk.total} tokens at the server, of which {self.total} and then "
                f"{len(chunk.token_ids)} arrived"
            )
        if chunk.spans is not None and chunk.reason != "abort":
            account = runs_of(chunk.spans)
            self._compare(account, chunk.total)
            runs = [(serial, end) for serial, end in account if end > self.total]
        else:
            runs = [(min(serial_of(chunk.tag), current), self.total + len(chunk.token_ids))]
        start = self.total
        for serial, end in runs:
            part = slice(self.total - start, end - start)
            self._label(serial, chunk.token_ids[part], chunk.logprobs[part])
        if chunk.reason is not None:
            self.complete = True
            self.end(chunk.reason)
        elif len(self._tokens) >= self._flush_tokens:
            self.flush()

    def flush(self) -> None:
        """Queues a delta of what has come, if anything has."""
        if self._tokens:
            self._emit(None)

    def end(self, reason: FinishReason) -> None:
        """Queues the last delta; what comes later is ignored."""
        if not self.ended:
            self.ended = True
            self._emit(reason)

    def fail(self, error: Exception) -> None:
        """Hands the consumer an error after what has come before."""
        if not self.ended:
            self.flush()
            self.ended = True
            self.deltas.put_nowait(error)

    def _label(self, serial: int, tokens: list[int], logprobs: list[float]) -> None:
        if not tokens:
            return
        if self._runs and self._runs[-1][0] != serial:
            self.flush()
        self.total += len(tokens)
        if self._runs and self._runs[-1][0] == serial:
            self._runs.pop()
        self._runs.append((serial, self.total))
        self._tokens += tokens
        self._logprobs += logprobs

    def _compare(self, account: list[tuple[int, int]], total: int) -> None:
        """Compares the labels so far with the server's account of the whole request."""
        cut = [(serial, min(end, self.total)) for serial, end in account]
        known = [(serial, end) for i, (serial, end) in enumerate(cut) if not i or end > cut[i - 1][1]]
        if self._runs and known != self._runs:
            raise ServerFailed(
                f"the versions of a request's {total} tokens are in doubt: labelled was "
                f"{self._named(self._runs)}, and the server's own account is {self._named(account)}"
            )

    def _named(self, runs: list[tuple[int, int]]) -> str:
        return ", ".join(f"version {self._versions[serial]} up to token {end}" for serial, end in runs)

    def _emit(self, reason: FinishReason | None) -> None:
        serial = self._runs[-1][0] if self._runs else len(self._versions) - 1
        self.deltas.put_nowait(Delta(self._tokens, self._logprobs, self._versions[serial], reason))
        self._tokens, self._logprobs = [], []


def runs_of(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """A server's spans as runs: serial, and the end of its tokens. Empty ones are left out.

    Raises:
        ServerFailed: the spans do not follow one another.
    """
    runs: list[tuple[int, int]] = []
    for span in spans:
        if span.start != (runs[-1][1] if runs else 0):
            raise ServerFailed(f"the server's account of versions has a gap: {spans}")
        if span.end > span.start:
            runs.append((serial_of(span.version), span.end))
    return runs
