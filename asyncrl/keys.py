"""ZeroMQ CURVE keys of a run: made, kept in one file, put on sockets. It does not know what sockets carry.

    server (ROUTER)                                     client (DEALER)
      server_secret                                       server_public   is it really this run's server?
      the gate (ZAP): client_public, and no other  ◀────  client pair     am I one of this run's processes?

CURVE alone lets in whoever knows the server's public key; so every server asks a *gate*, pyzmq's ZAP authenticator
in a thread of its own, which admits the run's client key only. A stranger's connection ends in the handshake: no
message of it reaches the process. Without a gate the server admits nobody (ZAP_ENFORCE_DOMAIN).

The key file never travels on a command line's text, in a message or into run.db: processes get its *path*, by
`--key FILE` or in the environment variable ASYNCRL_KEY. Weights (TCPStore, Gloo, NCCL) and torch's rendezvous are
not ZeroMQ and know no keys: they need a trusted network. Called by `asyncrl.transport` and whoever opens sockets.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.config import Hub
from asyncrl.settings import UsageError

ENVIRONMENT = "ASYNCRL_KEY"
"""The environment variable that holds the path of this process's key file."""
NAME = "run.key"
"""The key file in a run's folder."""
HINT = ". If it runs: with another key, or one where here is none, it does not answer (--key FILE)"
"""Belongs to what is said about a server that does not answer, for it tells a stranger nothing."""

_HEAD = """\
# ZeroMQ CURVE keys of one asyncrl run: whoever can read this file can take part in the run. Where only generators
# and learner ranks run, server_secret is not needed: delete that line from the copy.
"""
_MAKE = "make one with `asyncrl key FILE`"


@dataclass(frozen=True, slots=True)
class Keys:
    """Two key pairs, in ZeroMQ's Z85 text form (40 characters each). Its repr shows none of them."""

    server_public: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(default=None, repr=False)
    """None: sockets of this process only connect."""

    def secure(self, sock: zmq.Socket[Any]) -> None:
        """Puts the keys on a socket, before it binds or connects: a ROUTER serves, anything else is a client.

        Raises:
            UsageError: there is no server_secret, and it serves.
        """
        if sock.type != zmq.ROUTER:
            sock.set(zmq.CURVE_SERVERKEY, self.server_public)
            sock.set(zmq.CURVE_PUBLICKEY, self.client_public)
            sock.set(zmq.CURVE_SECRETKEY, self.client_secret)
            return
        if self.server_secret is None:
            raise UsageError(
                "the key file has no server_secret, and this process serves (hub, scorer, env-worker); copy the "
                "whole file of the run to this machine"
            )
        _admit(sock.context, self)
        sock.set(zmq.CURVE_SERVER, 1)
        sock.set(zmq.CURVE_SECRETKEY, self.server_secret)
        sock.set(zmq.ZAP_DOMAIN, self.server_public)
        sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


# ---- which key a process has -----------------------------------------------------------------------


def of_process() -> Keys | None:
    """The keys that this process was given; None: none.

    Raises:
        UsageError: the file cannot be used.
    """
    path = os.environ.get(ENVIRONMENT)
    return read(Path(path)) if path else None


def use(path: Path | None) -> None:
    """Makes a key file this process's, and that of the processes that it starts; None: it has none."""
    os.environ[ENVIRONMENT] = str(path.expanduser().resolve()) if path is not None else ""


def use_run(run_dir: Path, hub: Hub) -> None:
    """Makes an existing run's keys this process's, if it has any.

    Raises:
        UsageError: they are gone, or cannot be used.
    """
    if of_run(run_dir, hub) is not None:
        use(run_dir / NAME)


def for_hub(endpoint: str) -> Keys | None:
    """The keys for a connection to the hub: this process's, if it has any.

    Raises:
        UsageError: it has none, and the hub is on another machine.
    """
    keys = of_process()
    if keys is None and not is_loopback(endpoint):
        raise UsageError(
            f"the hub at {endpoint} is not on loopback, and there is no key: copy {NAME} from the run's folder to "
            "this machine (mode 600) and give it as --key FILE"
        )
    return keys


def for_endpoint(endpoint: str) -> Keys | None:
    """The keys for a scorer's or an environment worker's address, at either end; None on loopback.

    Raises:
        UsageError: it is not on loopback, and this process has none.
    """
    if is_loopback(endpoint):
        return None
    keys = of_process()
    if keys is None:
        raise UsageError(
            f"{endpoint} is not on loopback, and there is no key: {_MAKE}, copy it to the machines that need it, "
            "and give it as --key FILE to the scorer or env-worker and to the run (or as the environment variable "
            f"{ENVIRONMENT})"
        )
    return keys


def of_run(run_dir: Path, hub: Hub) -> Keys | None:
    """The keys of an existing run; None: it has none and needs none.

    Raises:
        UsageError: they are gone, or cannot be used.
    """
    path = run_dir / NAME
    if path.exists():
        return read(path)
    if needed(hub):
        raise UsageError(
            f"{path} is missing, and hub.host = {hub.host} with hub.curve = {hub.curve} needs it; put it back, or "
            f"make another (asyncrl key {path}) and copy it to the other machines"
        )
    return None


def needed(hub: Hub) -> bool:
    """Whether the hub's sockets must have keys."""
    return hub.curve == "on" or not is_loopback(f"tcp://{hub.host}:0")


def is_loopback(endpoint: str) -> bool:
    """Whether `tcp://host:port` cannot be reached from another machine; a name other than localhost may be."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the file --------------------------------------------------------------------------------------


def make() -> Keys:
    """New keys."""
    (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(server_public, client_public, client_secret, server_secret)


def write(keys: Keys, path: Path) -> None:
    """Writes a key file that only its owner can read: whole or not at all, and never over another.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    names = ("server_public", "server_secret", "client_public", "client_secret")
    values = {name: value.decode() for name in names if (value := getattr(keys, name)) is not None}
    text = _HEAD + "".join(f"{name} = '{value}'\n" for name, value in values.items())
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)  # Unlike a rename it fails where there is a file already.
        finally:
            fresh.unlink()
    except FileExistsError:
        raise UsageError(f"key file {path} exists; another key would shut out who has this one") from None
    except OSError as error:
        raise UsageError(f"key file {path} cannot be written: {error}") from None


def read(path: Path) -> Keys:
    """Reads a key file. No error's text holds anything of what is in it.

    Raises:
        UsageError: there is none, others can read it, or it is none.
    """
    try:
        open_to = path.stat().st_mode & 0o077
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"key file {path} cannot be read: {type(error).__name__}; {_MAKE}") from None
    if open_to:
        raise UsageError(f"key file {path} can be read by others on this machine: chmod 600 {path}")
    try:
        found = {name: str(value).encode() for name, value in tomllib.loads(text).items()}
        keys = Keys(**found)
        pairs = [(keys.client_secret, keys.client_public)]
        pairs += [(keys.server_secret, keys.server_public)] if keys.server_secret is not None else []
        if len(keys.server_public) != 40 or any(zmq.curve_public(secret) != public for secret, public in pairs):
            raise ValueError
    except (ValueError, TypeError, zmq.ZMQError):
        text = f"key file {path} holds no whole set of keys of one run; copy it once more, or {_MAKE}"
        raise UsageError(text) from None
    return keys


# ---- the gate --------------------------------------------------------------------------------------


class _Admits:
    """Admits one client key; in the form that pyzmq's authenticator asks for."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, _domain: str, client_public: bytes) -> bool:
        return client_public == self._client_public


_gates: dict[int, ThreadAuthenticator] = {}
"""The gate of each ZeroMQ context: there can be only one in it, for all its servers."""


def _admit(context: zmq.Context[Any], keys: Keys) -> None:
    gate = _gates.get(context.underlying)
    if gate is None:
        gate = _gates[context.underlying] = ThreadAuthenticator(context)
        gate.start()
    # One domain for each run, named by its server's key: a process may serve several (tests do).
    gate.configure_curve_callback(keys.server_public.decode(), _Admits(keys.client_public))
