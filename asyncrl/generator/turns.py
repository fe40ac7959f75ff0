"""Records what an environment answered, so that its episode can go on in another process (see `resume`).

An episode of one turn needs none of it: its `reset` can be done again, and its first answer is its last. So turn
0, the start, is sent with the first answer after which the episode goes on; at once only where the environment
keeps snapshots, for then its start may be one that no second `reset` gives. Called by `asyncrl.generator.episode`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.envs.base import Env, Message, Snapshots
from asyncrl.generator.boundary import Boundary, EpisodeFault
from asyncrl.generator.dialogue import Dialogue
from asyncrl.messages import EpisodeStatus, Lease, Turn

if TYPE_CHECKING:
    from asyncrl.generator.episode import Sink

SNAPSHOT_BYTES = 1 << 20
"""Largest snapshot of an environment: each turn's is journalled."""


class TurnLog:
    """The turns of one lease. They are sent after the chunks that they follow."""

    def __init__(self, sink: Sink, lease: Lease, boundary: Boundary) -> None:
        self._sink = sink
        self._ids = lease.lease_id, lease.episode_id
        self._boundary = boundary
        self._started = bool(lease.prefix.turns)

    async def begun(self, env: Env, said: Dialogue, seq: int) -> None:
        """The environment was reset."""
        if isinstance(env, Snapshots):
            self._start(said, seq, await self._snapshot(env))

    async def answered(
        self, env: Env, said: Dialogue, seq: int, messages: list[Message], rewards: dict[str, float],
        info: dict[str, float],
    ) -> None:  # fmt: skip
        """The environment has answered a turn, and the episode goes on."""
        if not self._started:
            self._start(said, 0, None)
        snapshot = await self._snapshot(env) if isinstance(env, Snapshots) else None
        self._sink.turn(Turn(*self._ids, said.turns, seq, messages, [], rewards, info, snapshot))

    def _start(self, said: Dialogue, seq: int, snapshot: bytes | None) -> None:
        self._started = True
        self._sink.turn(Turn(*self._ids, 0, seq, said.prompt, said.tools, snapshot=snapshot))

    async def _snapshot(self, env: Snapshots) -> bytes:
        blob = await self._boundary.ask("snapshot", env.snapshot, bytes)
        if len(blob) > SNAPSHOT_BYTES:
            detail = f"snapshot has {len(blob)} bytes; at most {SNAPSHOT_BYTES} are journalled for each turn"
            raise EpisodeFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        return blob
