"""Who has said Hello to the hub, which Hello is one, and which role may say what: before any message counts.

    supervisor ─ started, died, shut down        publisher ─ offers and sends weights, or fails to
    generator ── heartbeats, receives weights    learner ─── asks for batches, reports steps

It sends nothing. The shape of messages is `asyncrl.messages`' business, and whether one fits the state of the run
the scheduler's and the roster's. Called by the hub.
"""

from __future__ import annotations

from asyncrl.messages import (
    Applied,
    Checkpointed,
    CheckpointFault,
    Heartbeat,
    Hello,
    Message,
    NextBatch,
    Offer,
    ProcessEvent,
    Ready,
    Sent,
    Shutdown,
    StepDone,
    StepFailed,
    TransferFailed,
)
from asyncrl.roster import PUBLISHER

MAX_PEERS = 10_000
"""Peers that the hub remembers; beyond that the one whose Hello is oldest has left, and must say it again."""
MAX_IDENTITY = 255
"""Bytes of a peer's identity: ZeroMQ's own limit for whoever sets one."""

Control = (
    Hello | Heartbeat | Ready | Applied | TransferFailed | Offer | Sent | NextBatch | StepDone | StepFailed
    | Checkpointed | CheckpointFault | ProcessEvent | Shutdown
)  # fmt: skip
"""All that anybody says on the hub's control socket; none of it has a part of any shape and size."""
_MAY_SAY: dict[type[Message], tuple[str, ...]] = {
    Heartbeat: ("generator",),
    Ready: ("generator",),
    Applied: ("generator",),
    TransferFailed: ("generator", "publisher"),
    Offer: ("publisher",),
    Sent: ("publisher",),
    NextBatch: ("learner",),
    StepDone: ("learner",),
    StepFailed: ("learner",),
    Checkpointed: ("learner",),
    CheckpointFault: ("learner",),
    ProcessEvent: ("supervisor", "generator"),
    Shutdown: ("supervisor",),
}
_ROLES = ("generator", "learner", "publisher", "supervisor")
_RESERVED = {"publisher": PUBLISHER, "supervisor": "supervisor"}
"""The one name of a role of which there is one."""


def introduces(peer: bytes, hello: Hello) -> bool:
    """Whether a Hello is one: a known role, under the name that the connection itself carries.

    Args:
        peer: the connection's identity, `name/incarnation`.
    """
    if hello.role not in _ROLES or len(peer) > MAX_IDENTITY:
        return False
    if hello.name != _RESERVED.get(hello.role, hello.name) or "/" in hello.name or not hello.name:
        return False
    if hello.role not in _RESERVED and hello.name in _RESERVED.values():
        return False
    if hello.name.startswith("learner") != (hello.role == "learner"):
        return False  # What the hub does when a process has left depends on its name.
    return peer == f"{hello.name}/{hello.incarnation}".encode()


def may_say(role: str, name: str, message: Message) -> bool:
    """Whether a peer that is `name` in this role may send this message, whose values must fit together."""
    if role not in _MAY_SAY.get(type(message), ()):
        return False
    match message:
        case ProcessEvent():
            return role == "supervisor" or (message.name, message.what) == (name, "left")
        case NextBatch(step, rank, ranks):
            return step > 0 and rank < ranks
    return True


class Peers:
    """Those that have said Hello, in the order in which they last did."""

    def __init__(self) -> None:
        self._by_name: dict[str, bytes] = {}
        self._roles: dict[bytes, str] = {}

    def add(self, peer: bytes, hello: Hello) -> str | None:
        """Remembers a peer; returns the name of the one that is forgotten for it, if there are too many."""
        self._by_name[hello.name] = peer
        self._roles.pop(peer, None)
        self._roles[peer] = hello.role
        if len(self._roles) <= MAX_PEERS:
            return None
        oldest = next(iter(self._roles))
        del self._roles[oldest]
        name = name_of(oldest)
        return name if self._by_name.get(name) == oldest else None

    def role(self, peer: bytes) -> str | None:
        """The role of a peer; None: it must say Hello first, for the hub was restarted."""
        return self._roles.get(peer)

    def find(self, name: str) -> bytes | None:
        """The peer of a name."""
        return self._by_name.get(name)

    def forget(self, name: str) -> None:
        """The process is gone."""
        peer = self._by_name.pop(name, None)
        if peer is not None:
            self._roles.pop(peer, None)

    def generators(self) -> list[tuple[str, bytes]]:
        """Names and peers of the generators."""
        return [(name, peer) for name, peer in self._by_name.items() if self._roles.get(peer) == "generator"]


def name_of(peer: bytes) -> str:
    """The name that a connection's identity carries."""
    return peer.decode(errors="replace").split("/")[0]
