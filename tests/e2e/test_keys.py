"""A real run with CURVE keys: it finishes as any other, and a client without the key gets nothing from it."""

from __future__ import annotations

import os
import subprocess

import pytest
import zmq

from asyncrl import keys
from asyncrl.messages import Hello, Shutdown, encode
from asyncrl.transport import configure

pytestmark = pytest.mark.slow


def test_a_run_with_keys_finishes_while_strangers_knock_and_shows_its_key_nowhere(start, account) -> None:
    run = start("--hub.curve", "on", "--steps", "6")
    run.wait_for_step(1)
    held = keys.read(run.dir / keys.NAME)
    with run.reader() as reader:
        port = next(int(e.detail.split()[-1]) for e in reader.events() if e.source == "hub" and "port" in e.detail)
    public, secret = zmq.curve_keypair()
    strangers = []
    for key in (None, keys.make(), keys.Keys(held.server_public, public, secret)):
        strangers.append(zmq.Context.instance().socket(zmq.DEALER))
        configure(strangers[-1], "supervisor/evil", key)
        strangers[-1].connect(f"tcp://127.0.0.1:{port}")
        # With the key it would end the run.
        strangers[-1].send_multipart([encode(Hello("supervisor", "supervisor", "evil"))])
        strangers[-1].send_multipart([encode(Shutdown("because I say so", "failed"))])
    with open(f"/proc/{run.pid('generator-0')}/environ", "rb") as environment:
        assert f"{keys.ENVIRONMENT}={run.dir / keys.NAME}".encode() in environment.read().split(b"\0")
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert run.wait() == 0, run.output()
    assert not any(stranger.poll(0) for stranger in strangers), "a stranger was answered"
    for stranger in strangers:
        stranger.close(linger=0)
    with run.reader() as reader:
        account(reader, 6, 16)
    assert held.server_secret is not None
    secrets = (held.server_secret, held.client_secret, held.client_public, held.server_public)
    everything = [lines.encode()]
    for path in run.dir.parent.rglob("*"):
        if path.is_file() and path.name != keys.NAME:
            everything.append(path.read_bytes())
    assert not any(secret in text for secret in secrets for text in everything)
    assert os.stat(run.dir / keys.NAME).st_mode & 0o077 == 0
