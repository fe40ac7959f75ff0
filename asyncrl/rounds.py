"""What the roster keeps and what it yields: generators, the round in progress, and effects for the hub.

Only data; `asyncrl.roster` decides. Called by it, and by the hub, which carries the effects out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages import Message, Offer, Sent


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send `message` to the peer called `to`."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: write an event."""

    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Published:
    """Effect: `version` is in use by a live generator and its round is over. Once per version, growing.

    `seconds` and `nbytes` are the publisher's; both 0 when no transfer was needed or its report was lost.
    """

    version: int
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Effect: the generator cannot be brought up to date; it takes part again once it has joined anew."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Effect: nobody can use `version`, so these generators may do its work with the weights that they have.

    Otherwise a synchronous run would wait for ever: the next version needs the work that needs this one.
    """

    version: int
    generators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unusable:
    """Effect: one version after the other is refused by every generator; the run must be stopped."""

    reason: str


Effect = Send | Note | Published | Skipped | Restart | Unusable


@dataclass(slots=True)
class Member:
    """A live generator, as the roster sees it."""

    incarnation: str
    version: int
    heard: float
    """When it gave its last sign of life."""
    failures: int = 0
    given_up: bool = False
    refused: int = -1
    """The last version that it refused."""
    skipped: int = -1
    """The last version that it was said to do without."""


@dataclass(slots=True)
class Round:
    """The transfer of one offer to some generators."""

    epoch: int
    offer: Offer
    members: tuple[str, ...]
    deadline: float
    waiting: set[str]
    """Members that the round waits for: for their Ready, later for their Applied."""
    look: float
    """When to look for members that are away."""
    sending: bool = False
    applied: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons, by member."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons of those to whom the version itself is at fault."""
    gone: dict[str, str] = field(default_factory=dict)
    """Members that died or are away, and which of the two."""
    sent: Sent | None = None
    publisher_failed: str | None = None

    @property
    def publisher_done(self) -> bool:
        """Whether the publisher has said how its part ended."""
        return self.sent is not None or self.publisher_failed is not None
