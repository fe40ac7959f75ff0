"""The generator's side of the scorer: asks for scores, and asks again until there is an answer.

A scorer that died loses what it had not answered, and nothing tells its clients; so a request that waits is sent
again every few seconds, which a living scorer recognises. Nothing is queued for a scorer that is not there: its
successor would begin with what nobody waits for any more. No time limit of its own: `asyncrl.envs.rewards` calls
it like any other reward function. Called by the generators and the evaluation. Free of torch.
"""

from __future__ import annotations

import asyncio
import secrets
from itertools import count
from typing import Any

import zmq

from asyncrl import keys
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.messages import Message, Score, Scored
from asyncrl.transport import AsyncSocket

RESEND_AFTER_S = 5.0
"""A request without an answer is sent again after this long: the scorer may be a new one by now."""
TRY_AGAIN_AFTER_S = 0.1
"""Without a connection it is tried again after this long."""


class NotScored(Exception):
    """The scorer says that a conversation cannot be scored, and why."""


class ScorerClient:
    """A connection to the scorer at `tcp://host:port`, on the running event loop.

    Raises:
        UsageError: the address is not on loopback, and this process has no key.
    """

    def __init__(self, endpoint: str, resend_after_s: float = RESEND_AFTER_S) -> None:
        self._resend_after_s = resend_after_s
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[Scored]] = {}
        # A name of its own lets the answer find this client after its connection was replaced.
        identity = f"scores-{secrets.token_hex(8)}"
        self._socket = AsyncSocket(zmq.DEALER, self._on_message, identity, keys=keys.for_endpoint(endpoint))
        self._socket.connect(endpoint, queue=False)

    async def ready(self) -> None:
        """Returns once the scorer answers, with a loaded model; any answer to an empty conversation will do."""
        await self._ask([])

    async def reward(self, episode: EpisodeView) -> float:
        """The reward model's score of an episode: of all its messages, as the model's chat template renders them.

        Raises:
            NotScored: it cannot be scored.
        """
        scored = await self._ask(episode.messages)
        if scored.score is None:
            raise NotScored(scored.reason)
        return scored.score

    async def _ask(self, conversation: list[dict[str, Any]]) -> Scored:
        request = Score(next(self._numbers), conversation)
        answer = self._pending[request.request] = asyncio.get_running_loop().create_future()
        try:
            while not answer.done():
                sent = self._socket.send(request)
                await asyncio.wait({answer}, timeout=self._resend_after_s if sent else TRY_AGAIN_AFTER_S)
        finally:
            del self._pending[request.request]
        return answer.result()

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _on_message(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if not isinstance(message, Scored):
            self._socket.malformed += 1
        elif (answer := self._pending.get(message.request)) is not None and not answer.done():
            answer.set_result(message)
