"""ZeroMQ sockets as the processes use them: ROUTER in the hub, DEALER everywhere else.

It knows sockets and framing, not what a message means. Two kinds of socket share one framing:

* `AsyncSocket` belongs to an event loop (hub, generator). ZeroMQ's file descriptor is edge-triggered: it
  fires once for any number of waiting messages, so a wake-up reads until nothing is left, `AT_ONCE` messages at
  a time: between them the loop does everything else, its other sockets included.

      peer ──tcp──▶ zmq I/O thread ──fd readable──▶ loop ──▶ _drain() ──▶ on_message(peer, message, frames)

* `Client` blocks with a time limit (learner ranks and the publisher, which have no event loop).

Nothing polls and nothing is published: every peer has its own queue, and what a peer may send is bounded by
its leases. A ROUTER takes its peers' messages in turn, so that one that floods it costs the others little time;
what arrives faster than it is read takes memory. Frames are received without a copy (`zmq.Frame` buffers). A
message that cannot be decoded is counted and dropped. Sockets bind to loopback unless `hub.host` says otherwise;
beyond it they have keys (`asyncrl.keys`). Without keys any process of this machine can be any peer, and take over
a live one's place by its identity (ROUTER_HANDOVER, which reconnecting peers need); with keys their holders can.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from asyncrl.keys import Keys
from asyncrl.messages import Message, decode, encode

MAX_MESSAGE_BYTES = 256 << 20
"""A larger frame closes its connection before it takes memory."""
MAX_CONTROL_BYTES = 16 << 20
"""The same where nothing but headers arrives."""
MAX_FRAMES = 3
"""Frames of a message: its header, and two of tokens and log-probs."""
AT_ONCE = 64
"""Messages that a socket may handle before the loop's other work has its turn."""
PEER_BACKLOG = 10_000
"""Messages to one peer that wait in a ROUTER; further ones are dropped, as for a peer that is gone."""

Buffer = bytes | memoryview
Handler = Callable[[bytes, Message, list[memoryview]], None]


def configure(
    sock: zmq.Socket[Any],
    identity: str | None = None,
    keys: Keys | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> None:
    """Sets what all sockets have in common; the environment worker's too (`asyncrl.envs.worker`).

    Args:
        keys: CURVE keys; None: the socket is on loopback.
        max_bytes: largest frame that it takes.

    Raises:
        UsageError: the keys are not enough for a socket that serves.
    """
    if keys is not None:
        keys.secure(sock)
    sock.set(zmq.LINGER, 0)
    sock.set(zmq.SNDHWM, PEER_BACKLOG if sock.type == zmq.ROUTER else 0)
    # No limit here: libzmq 4.3.5 aborts the process (`!_io_error` in stream_engine_base.cpp) when a peer has left
    # while its queue was full, and a heartbeat comes due.
    sock.set(zmq.RCVHWM, 0)
    sock.set(zmq.MAXMSGSIZE, max_bytes)
    # A connection over which nothing comes any more ends within 6 s. TCP alone waits twice as long after each
    # loss: when a link returns after half a minute, it may take as long again. It is ZeroMQ's own thread that
    # answers, so a peer that is only busy keeps its connection, unless one frame takes longer than the time-out.
    # TCP_MAXRT is for a full send buffer, behind which heartbeats wait as well.
    sock.set(zmq.HEARTBEAT_IVL, 2_000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 4_000)
    sock.set(zmq.TCP_MAXRT, 6_000)
    # A new one is tried about every second for as long as it takes; left alone, TCP tries ever more rarely.
    sock.set(zmq.CONNECT_TIMEOUT, 1_500)
    sock.set(zmq.HANDSHAKE_IVL, 5_000)
    sock.set(zmq.RECONNECT_IVL, 50)
    sock.set(zmq.RECONNECT_IVL_MAX, 500)
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

    `on_connected()` is called on the loop whenever a connection is made, the first as well as later ones: what was
    under way on the one before is lost, in both directions, and must be said again. For `keys` and `max_bytes` see
    `configure`; of messages, those of the type (or union) `takes` are decoded, and others malformed.
    """

    def __init__(
        self,
        kind: int,
        on_message: Handler,
        identity: str | None = None,
        on_connected: Callable[[], None] | None = None,
        keys: Keys | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        takes: Any = Message,
    ) -> None:
        self.malformed = 0
        self.unroutable = 0
        self._on_message = on_message
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(takes)
        self._is_router = kind == zmq.ROUTER
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        configure(self._socket, identity, keys, max_bytes)
        if self._is_router:
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._socket.get(zmq.FD)
        self._loop.add_reader(self._fd, self._drain)
        self._drain_scheduled = False
        self._monitor: zmq.Socket[bytes] | None = None
        if on_connected is not None:
            self._on_connected = on_connected
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._monitor_fd: int = self._monitor.get(zmq.FD)
            self._loop.add_reader(self._monitor_fd, self._drain_monitor)
            self._monitor.get(zmq.EVENTS)  # Its descriptor fires for what comes after it was last looked at.

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
            self._look_again()  # Sending may swallow the edge that announced an incoming message.
        return True

    def close(self, linger_s: float = 0.5) -> None:
        """Stops receiving; gives queued messages up to `linger_s` to leave. Idempotent."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _drain_monitor(self) -> None:
        while self._monitor is not None and not self._socket.closed and _took_event(self._monitor):
            self._socket.get(zmq.EVENTS)  # Takes note of the connection, without which nothing can be sent yet.
            self._on_connected()

    def _look_again(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        for _ in range(AT_ONCE):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = b""
            if self._is_router:
                peer = parts.pop(0).bytes
            received = _decode(parts, self._decoder.decode)
            if received is None:
                self.malformed += 1
            else:
                self._on_message(peer, *received)
        self._look_again()


class Client:
    """A blocking DEALER for processes without an event loop; used by one thread.

    `on_connected()` is called within `receive` after a connection was made: see `AsyncSocket`.
    """

    def __init__(
        self, endpoint: str, identity: str, on_connected: Callable[[], None], keys: Keys | None = None
    ) -> None:
        self.malformed = 0
        self._on_connected = on_connected
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        configure(self._socket, identity, keys)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        for source in self.sources:
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(endpoint)

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """For a `zmq.Poller` that waits for more than this client: when one is readable, `receive` has work."""
        return self._socket, self._monitor

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Queues a message."""
        self._socket.send_multipart([encode(message), *frames])

    def receive(self, timeout_s: float) -> tuple[Message, list[memoryview]] | None:
        """The next message and its frames, or None when `timeout_s` passed without one."""
        deadline = time.monotonic() + timeout_s
        while ready := dict(self._poller.poll(max(0, int(1000 * (deadline - time.monotonic()))))):
            if self._monitor in ready and _took_event(self._monitor):
                self._on_connected()
            if self._socket in ready:
                received = _decode(self._socket.recv_multipart(copy=False), decode)
                if received is None:
                    self.malformed += 1
                return received
        return None

    def close(self, linger_s: float = 2.0) -> None:
        """Closes; gives queued messages up to `linger_s` to leave. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))


def _took_event(monitor: zmq.Socket[bytes]) -> bool:
    try:
        monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _decode(parts: list[Any], decode: Callable[[memoryview], Message]) -> tuple[Message, list[memoryview]] | None:
    if len(parts) > MAX_FRAMES:
        return None
    try:
        message = decode(parts[0].buffer)
    except (msgspec.DecodeError, IndexError, UnicodeDecodeError, RecursionError):  # The last: nested too deep.
        return None
    return message, [part.buffer for part in parts[1:]]
