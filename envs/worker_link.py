"""Connections to an environment worker: one for an event loop, whose episodes share it, and one that blocks.

A request is answered once. Nothing is queued for a worker that is not there, for its successor would begin with
what nobody waits for any more. Every second, while there are episodes, a heartbeat names the requests that wait;
from what comes back, or does not, follows which of them were lost with a worker. Called by
`asyncrl.envs.worker_client`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from asyncrl import keys
from asyncrl.envs import worker_messages
from asyncrl.envs.base import ToolFault
from asyncrl.envs.worker_messages import (
    Alive,
    Answer,
    Call,
    Cancel,
    Demonstrate,
    Describe,
    Done,
    Draw,
    Failed,
    Heartbeat,
    Request,
)
from asyncrl.transport import configure

BEAT_S = 1.0
"""A heartbeat is sent this often."""
DISCONNECTED_S = 3.0
"""A connection that is missing for so long is not coming back to the same worker."""
TRY_AGAIN_S = 0.05
"""Without a connection it is tried again after this long."""
RESEND_S = 2.0
"""A question that blocks is sent again after this long; a worker that works on it recognises it."""


class Link:
    """A connection of the running event loop, for as long as the loop runs.

    Args:
        endpoint: the worker's.
        timeout_s: longest wait for a worker that is not there, and for one that does not answer heartbeats.
    """

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self.episodes: set[int] = set()
        """Those that are open: while there are some, the worker is told that this client lives."""
        self.malformed = 0
        """Messages that were no answers, and were dropped."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Done | Failed]] = {}
        """Requests that were sent."""
        self._apart = 0
        """Heartbeats since the last one that could be sent."""
        self._unheard = 0
        """Heartbeats since the last one that was answered."""
        self._socket: zmq.asyncio.Socket = _dealer(zmq.asyncio.Context.instance(), endpoint)
        self._work = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        self._work[0].add_done_callback(lambda _: self._socket.close())

    async def ask(self, call: Call, patience_s: float) -> Done:
        """Sends a request and waits for its answer.

        Args:
            call: the request; its number is set here.
            patience_s: longest wait for a connection.

        Raises:
            ToolFault: the worker is gone.
            Exception: what the environment raised (`worker_messages.raised`).
        """
        number = next(self._numbers)
        await self._send(msgspec.structs.replace(call, request=number), patience_s)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            done = await answer
        except asyncio.CancelledError:
            self._post(Cancel(number))
            raise
        finally:
            del self._waiting[number]
        if isinstance(done, Failed):
            raise worker_messages.raised(done)
        return done

    async def _send(self, call: Call, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while not self._post(call):
            if time.monotonic() >= until:
                raise ToolFault(f"there is no connection to the environment worker at {self._endpoint}")
            await asyncio.sleep(TRY_AGAIN_S)

    def _post(self, request: Request) -> bool:
        """Sends what can be sent at once; False if there is no connection."""
        sent: Any = self._socket.send_multipart([worker_messages.encode(request)], zmq.NOBLOCK)
        return sent.exception() is None

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            match worker_messages.answer_of(frames[0]):
                case Alive(unknown):
                    self._unheard = 0
                    self._lose(unknown, "does not know this request; it was started anew")
                case Done() | Failed() as done:
                    answer = self._waiting.get(done.request)
                    if answer is not None and not answer.done():
                        answer.set_result(done)
                case _:
                    self.malformed += 1

    async def _beat(self) -> None:
        # Beats are counted, not seconds: while this process did not run, no answer could be read.
        while True:
            await asyncio.sleep(BEAT_S)
            if not self._waiting and not self.episodes:
                self._apart = self._unheard = 0
                continue
            sent = self._post(Heartbeat(list(self._waiting)))
            self._apart = 0 if sent else self._apart + 1
            self._unheard = self._unheard + 1 if sent else 0
            if self._apart * BEAT_S > DISCONNECTED_S:
                self._lose(self._waiting, "is gone: there is no connection")
            elif self._unheard * BEAT_S > self._timeout_s:
                self._lose(self._waiting, f"did not answer heartbeats for {self._timeout_s:g} s")

    def _lose(self, numbers: Sequence[int] | dict[int, asyncio.Future[Done | Failed]], why: str) -> None:
        fault = f"the environment worker at {self._endpoint} {why}"
        for number in numbers:
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(Failed(number, ToolFault.__name__, fault))


class Blocking:
    """Questions that block with a time limit, for callers without an event loop; may be asked from any thread."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None

    def ask(self, request: Describe | Draw | Demonstrate) -> Answer:
        """Asks, and asks again until there is an answer.

        Args:
            request: the request; its number is set here.

        Raises:
            ConnectionError: there was none within the time limit.
            Exception: what the environment raised (`worker_messages.raised`).
        """
        with self._lock:
            number = next(self._numbers)
            answer = self._asked(msgspec.structs.replace(request, request=number), number)
        if isinstance(answer, Failed):
            raise worker_messages.raised(answer)
        return answer

    def _asked(self, request: Request, number: int) -> Answer:
        if self._socket is None:
            self._socket = _dealer(zmq.Context.instance(), self._endpoint)
        until, resend = time.monotonic() + self._timeout_s, 0.0
        while (now := time.monotonic()) < until:
            if now >= resend and self._socket.poll(int(TRY_AGAIN_S * 1000), zmq.POLLOUT):
                self._socket.send_multipart([worker_messages.encode(request)], zmq.NOBLOCK)
                resend = now + RESEND_S
            if self._socket.poll(int(TRY_AGAIN_S * 1000), zmq.POLLIN):
                answer = worker_messages.answer_of(self._socket.recv_multipart()[0])
                if answer is not None and getattr(answer, "request", None) == number:
                    return answer
        self._socket.close()
        self._socket = None
        raise ConnectionError(
            f"no environment worker answered at {self._endpoint} within env.args.timeout_s = {self._timeout_s:g}. "
            f"Start one in the environment's own Python: asyncrl env-worker --env NAME --endpoint {self._endpoint}"
            f"{keys.HINT}"
        )


def _dealer(context: Any, endpoint: str) -> Any:
    held = keys.for_endpoint(endpoint)
    sock = context.socket(zmq.DEALER)
    # A name of its own lets an answer find this client after its connection was replaced.
    configure(sock, f"env-{secrets.token_hex(8)}", held)
    sock.set(zmq.IMMEDIATE, 1)
    sock.connect(endpoint)
    return sock
