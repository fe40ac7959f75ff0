"""What travels between an environment worker and its clients: msgspec structs as msgpack, and nothing else.

    client (DEALER) ──request──▶ worker (ROUTER)          each request is answered once, when it is done, by a
    client ◀──answer with the request's number── worker   message that carries the request's number

Nothing here opens a socket. `asyncrl.envs.worker` serves, `asyncrl.envs.worker_client` and
`asyncrl.envs.worker_link` ask. Both ends check `PROTOCOL` once, when a client introduces itself by `Describe`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.envs.base import Message, ToolFault
from asyncrl.envs.rewards import RewardFault
from asyncrl.messages import EpisodeStatus, Task

PROTOCOL = 1
"""Raised whenever a struct below changes its meaning."""


# ---- requests: client to worker ---------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """What do you serve?"""

    request: int


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """`Environment.task`."""

    request: int
    split: str
    index: int


class Demonstrate(msgspec.Struct, frozen=True, tag="demonstrate"):
    """`Demonstrates.demonstration`."""

    request: int
    task: Task


class StepWire(msgspec.Struct, frozen=True):
    """An `asyncrl.envs.base.Step`."""

    done: bool
    rewards: dict[str, Any] = {}
    messages: list[Message] = []
    info: dict[str, Any] = {}


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A method of one episode's `Env`, with the arguments that this method has."""

    request: int
    episode: int
    """The client's number of the episode."""
    method: str
    """A name of `METHODS`."""
    opens: bool = False
    """The episode's first request: the worker makes its `Env`."""
    task: Task | None = None
    """reset, restore"""
    message: Message = {}
    """step, replay, interrupted"""
    step: StepWire | None = None
    """replay"""
    blob: bytes = b""
    """restore"""
    status: str = ""
    """truncated"""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this request any more: stop it. Has no answer."""

    request: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The client lives, and still waits for these requests; answered by `Alive`."""

    waiting: list[int] = []


# ---- answers: worker to client ----------------------------------------------------------------------


class Description(msgspec.Struct, frozen=True, tag="description"):
    """Answers `Describe`."""

    request: int
    environment: str
    optional: list[str]
    """Names of the optional protocols (`asyncrl.envs.base`) that the environment and its episodes have."""
    protocol: int = PROTOCOL


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request is done; of the fields, the one that the method returns is filled."""

    request: int
    task: Task | None = None
    messages: list[Message] = []
    """reset, demonstration where it is no text"""
    tools: list[dict[str, Any]] = []
    """reset"""
    step: StepWire | None = None
    """step, interrupted"""
    rewards: dict[str, Any] = {}
    """truncated"""
    blob: bytes = b""
    """snapshot"""
    text: str | None = None
    """demonstration where it is a text"""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request raised."""

    request: int
    kind: str
    """Name of the exception's class."""
    text: str
    status: str = ""
    """Of a `RewardFault`."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Answers `Heartbeat`."""

    unknown: list[int] = []
    """Requests that the worker neither works on nor has an answer for: it was started anew, or they were lost."""


Request = Describe | Draw | Demonstrate | Call | Cancel | Heartbeat
Answer = Description | Done | Failed | Alive

METHODS = ("reset", "step", "snapshot", "restore", "replay", "interrupted", "truncated", "close")
_CLASSES = (ToolFault, IndexError, TimeoutError)
"""What the callers of an environment tell apart, subclasses included."""
# NotImplementedError: what a client gets that asks for a demonstration where there are none.
_PLAIN = (*_CLASSES, NotImplementedError, RuntimeError, TypeError, ValueError)


class WorkerError(Exception):
    """The environment raised in its worker; the text begins with the class of what it raised."""


def failure(request: int, error: BaseException) -> Failed:
    """What an environment raised, as it travels: as text and class."""
    kind = next((kind for kind in _CLASSES if isinstance(error, kind)), type(error))
    status = str(error.status) if isinstance(error, RewardFault) else ""
    return Failed(request, kind.__name__, str(error), status)


def raised(failed: Failed) -> Exception:
    """The exception that a failed request raised: of its own class if it is a plain one, else a `WorkerError`."""
    if failed.kind == RewardFault.__name__:
        return RewardFault(EpisodeStatus(failed.status), failed.text)
    for kind in _PLAIN:
        if kind.__name__ == failed.kind:
            return kind(failed.text)
    return WorkerError(f"{failed.kind}: {failed.text}")


# ---- bytes ------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """NumPy's and torch's scalars travel as the numbers that they are; nothing else without JSON does."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot travel; environments answer in what JSON can express")


_encoder = msgspec.msgpack.Encoder(enc_hook=_number)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Encodes a message.

    Raises:
        TypeError: something in it has no JSON.
    """
    return _encoder.encode(message)


def request_of(frame: bytes) -> Request | None:
    """Decodes a request; None if it is none."""
    return _decoded(_requests, frame)


def answer_of(frame: bytes) -> Answer | None:
    """Decodes an answer; None if it is none."""
    return _decoded(_answers, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
