"""ZeroMQ sockets as the processes use them: ROUTER in the hub, DEALER everywhere else.

It knows sockets and framing, not what a message means. Two kinds of socket share one framing:

* `AsyncSocket` belongs to an event loop (hub, generator). ZeroMQ's file descriptor is edge-triggered: it
  fires once for any number of waiting messages, so each wake-up reads until nothing is left.

      peer ──tcp──▶ zmq I/O thread ──fd readable──▶ loop ──▶ _drain() ──▶ on_message(peer, message, frames)

* `Client` blocks with a time limit (learner ranks and the publisher, which have no event loop).

Nothing polls and nothing is published: every peer has its own queue, and what a peer may send is bounded by
its leases. Frames are received without a copy (`zmq.Frame` buffers). A message that cannot be decoded is
counted and dropped. Sockets bind to loopback unless `hub.host` says otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from asyncrl.messages import Message, decode, encode

MAX_MESSAGE_BYTES = 256 << 20
"""A larger message closes its connection before it takes memory."""

Buffer = bytes | memoryview
Handler = Callable[[bytes, Message, list[memoryview]], None]


def configure(sock: zmq.Socket[Any], identity: str | None = None) -> None:
    """Sets what all sockets have in common; the environment worker's too (`asyncrl.envs.worker`)."""
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.SNDHWM, 0)
    sock.set(zmq.RCVHWM, 0)
    sock.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # ZeroMQ's own heartbeats find a peer whose machine went away without closing its connection.
    sock.set(zmq.HEARTBEAT_IVL, 5_000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 20_000)
    sock.set(zmq.RECONNECT_IVL, 50)
    sock.set(zmq.RECONNECT_IVL_MAX, 1_000)
    if identity is not None:
        sock.set(zmq.IDENTITY, identity.encode())


def free_port_pair(host: str) -> int:
    """A port such that it and the next one are free now.

    Raises:
        OSError: no pair was found.
    """
    for _ in range(64):
        with socket.socket() as first, socket.socket() as second:
            first.bind((host, 0))
            port: int = first.getsockname()[1]
            try:
                second.bind((host, port + 1))
            except OSError:
                continue
            return port
    raise OSError(f"no two neighbouring free ports on {host}")


def check_port_pair(host: str, port: int) -> None:
    """Checks that `port` and `port + 1` can be bound.

    Raises:
        OSError: one of them is taken; the text says which and what to do.
    """
    for number in (port, port + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, number))
            except OSError as error:
                raise OSError(
                    f"port {number} on {host} cannot be used ({error.strerror}); the hub needs hub.port and "
                    "the next one. Choose another --hub.port, or 0 to let asyncrl find a free pair"
                ) from error


class AsyncSocket:
    """A ROUTER or DEALER on the running event loop; received messages go to `on_message`.

    `on_message(peer, message, frames)` is called on the loop and must not block; `peer` is the sender's
    identity on a ROUTER and empty on a DEALER. `malformed` and `unroutable` count what was dropped.
    """

    def __init__(self, kind: int, on_message: Handler, identity: str | None = None) -> None:
        self.malformed = 0
        self.unroutable = 0
        self._on_message = on_message
        self._is_router = kind == zmq.ROUTER
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        configure(self._socket, identity)
        if self._is_router:
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._socket.get(zmq.FD)
        self._loop.add_reader(self._fd, self._drain)
        self._drain_scheduled = False

    def bind(self, endpoint: str) -> None:
        """Binds; raises zmq.ZMQError if the address is taken."""
        self._socket.bind(endpoint)

    def connect(self, endpoint: str, *, queue: bool = True) -> None:
        """Connects in the background; what is sent while there is no connection waits, or else is not sent."""
        self._socket.set(zmq.IMMEDIATE, not queue)
        self._socket.connect(endpoint)

    def send(self, message: Message, frames: Sequence[Buffer] = (), to: bytes = b"") -> bool:
        """Queues a message; False if the ROUTER has no such peer (any more), or there is no
        connection and `queue` is off."""
        parts: list[Buffer] = [encode(message), *frames]
        if self._is_router:
            parts.insert(0, to)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=len(frames) == 0)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.unroutable += 1
            return False
        finally:
            # Sending may swallow the edge that announced an incoming message, so look again.
            if not self._drain_scheduled:
                self._drain_scheduled = True
                self._loop.call_soon(self._drain)
        return True

    def close(self, linger_s: float = 0.5) -> None:
        """Stops receiving; gives queued messages up to `linger_s` to leave. Idempotent."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=int(linger_s * 1000))

    def _drain(self) -> None:
        self._drain_scheduled = False
        while not self._socket.closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = b""
            if self._is_router:
                peer = parts.pop(0).bytes
            received = _decode(parts)
            if received is None:
                self.malformed += 1
            else:
                self._on_message(peer, *received)


class Client:
    """A blocking DEALER for processes without an event loop; used by one thread."""

    def __init__(self, endpoint: str, identity: str) -> None:
        self.malformed = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        configure(self._socket, identity)
        self._socket.connect(endpoint)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a `zmq.Poller` that waits for more than this client."""
        return self._socket

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Queues a message."""
        self._socket.send_multipart([encode(message), *frames])

    def receive(self, timeout_s: float) -> tuple[Message, list[memoryview]] | None:
        """The next message and its frames, or None when `timeout_s` passed without one."""
        if not self._socket.poll(int(timeout_s * 1000), zmq.POLLIN):
            return None
        received = _decode(self._socket.recv_multipart(copy=False))
        if received is None:
            self.malformed += 1
        return received

    def close(self, linger_s: float = 2.0) -> None:
        """Closes; gives queued messages up to `linger_s` to leave. Idempotent."""
        self._socket.close(linger=int(linger_s * 1000))


def _decode(parts: list[Any]) -> tuple[Message, list[memoryview]] | None:
    try:
        message = decode(parts[0].buffer)
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError):  # The last: nested too deep.
        return None
    return message, [part.buffer for part in parts[1:]]
