"""A link between two network namespaces, with delay, loss and cuts: real IP packets, and no root needed.

    namespace a                   one forwarder process                    namespace b
    10.77.0.1 ── TUN device ──▶ loss? cut? ─▶ waits for `delay_s` ──▶ TUN device ── 10.77.0.2
                            ◀──────────────────────────────────────

This file is both ends of a pipe. As a module, `Link` starts the forwarder and runs commands in the namespaces, and
`Crossing` starts a whole run that way. As a script it *is* the forwarder: it makes two network namespaces with a
TUN device in each, and moves packets until its input ends. All of it ends with the process that started it.

Not a model of a network: no bandwidth, no reordering, no queue but the kernel's. The kernel's netem would do the
same with root, where a kernel has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
"""Of the two ends."""
DIRECTIONS = {"ab": ("a", "b"), "ba": ("b", "a")}
PORT = 5555
"""Of the hub; nobody else is in its namespace."""
START_S = 60.0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500


class LinkUnavailable(Exception):
    """This machine lets nobody make namespaces or TUN devices; the text says what is missing."""


class Link:
    """Two namespaces and what lies between them. A context manager; the namespaces end with their last process.

    Raises:
        LinkUnavailable: no user namespaces, no /dev/net/tun, or no `unshare`, `nsenter`, `ip`.
    """

    def __init__(self, seed: int = 0) -> None:
        command = ["unshare", "--user", "--map-root-user", sys.executable, "-P", __file__, str(seed)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self._forwarder = subprocess.Popen(command, text=True, **pipes)
        except FileNotFoundError as error:
            raise LinkUnavailable(f"{error.filename} is not installed") from error
        self._namespaces: dict[str, str] = {}
        try:
            self._namespaces = self._answer()
        except LinkUnavailable:
            self.close()
            raise

    def set(self, delay_s: float | None = None, loss: float | None = None, cut: str | None = None) -> None:
        """Changes the link from now on.

        Args:
            delay_s: seconds that a packet takes, each way.
            loss: the share of packets that are dropped, each way.
            cut: directions in which everything is dropped: `ab`, `ba`, both (`ab ba`), or none (an empty text).
        """
        wanted = {"delay_s": delay_s, "loss": loss, "cut": cut}
        assert self._forwarder.stdin is not None
        print(
            json.dumps({k: v for k, v in wanted.items() if v is not None}), file=self._forwarder.stdin, flush=True
        )
        self._answer()

    def start(self, side: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command in namespace `a` or `b`; it becomes a child of this process. `options`: Popen's."""
        pid = self._forwarder.pid
        enter = ["nsenter", "--preserve-credentials", f"--user=/proc/{pid}/ns/user"]
        return subprocess.Popen([*enter, f"--net={self._namespaces[side]}", *command], text=True, **options)

    def close(self) -> None:
        """Ends the forwarder. Idempotent."""
        assert self._forwarder.stdin is not None
        self._forwarder.stdin.close()
        self._forwarder.wait(START_S)
        for pipe in (self._forwarder.stdout, self._forwarder.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, str]:
        assert self._forwarder.stdout is not None
        assert self._forwarder.stderr is not None
        if not select.select([self._forwarder.stdout], [], [], START_S)[0]:
            raise TimeoutError(f"the link's forwarder did not answer within {START_S:g} s")
        line = self._forwarder.stdout.readline()
        if not line:
            said = self._forwarder.stderr.read().strip().splitlines() or ["it ended without a word"]
            raise LinkUnavailable(f"no network namespaces or TUN devices here: {said[-1]}")
        answer: dict[str, str] = json.loads(line)
        return answer


class Crossing:
    """A run over a link, started by hand: hub and learner in namespace a, generators in b. A context manager.

    Args:
        folder: gets the run's folder `run`, and the logs.
        settings: flags of `asyncrl hub`.
        environment: variables of the generators, besides this process's.
    """

    def __init__(
        self, link: Link, folder: Path, *settings: str, environment: dict[str, str] | None = None
    ) -> None:
        self.dir = folder / "run"
        self._link, self._folder, self._environment = link, folder, environment or {}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        hub = ["--run.dir", str(folder), "--run.name", "run", "--hub.host", ADDRESS["a"], "--hub.port", str(PORT)]
        self._start("a", "hub", "hub", *hub, "--weights.backend", "gloo", *settings)

    def start(self, *generators: str) -> None:
        """Starts the learner and the generators, once the hub has made the run and its key."""
        deadline = time.monotonic() + START_S
        while not (self.dir / "run.key").exists():
            assert self.processes["hub"].poll() is None, self.output()
            assert time.monotonic() < deadline, "the hub makes no key"
            time.sleep(0.05)  # Another process makes it; there is no event to wait for.
        common = ["--hub", f"tcp://{ADDRESS['a']}:{PORT}", "--key", str(self.dir / "run.key")]
        torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        self._start("a", "learner", "learner", *common, environment=torchrun)
        for name in generators:
            self._start("b", name, "generator", *common, "--name", name, environment=self._environment)

    def wait(self, limit_s: float) -> dict[str, int]:
        """Waits until all but the hub have ended by themselves, then ends the hub; returns exit codes."""
        deadline = time.monotonic() + limit_s
        others = {name: process for name, process in self.processes.items() if name != "hub"}
        codes = {name: process.wait(deadline - time.monotonic()) for name, process in others.items()}
        self.close()
        return codes

    def output(self) -> str:
        """The ends of the logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.out"))
        )

    def close(self) -> None:
        """Kills what still runs. Idempotent."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def __enter__(self) -> Crossing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, side: str, name: str, command: str, *words: str, environment: dict[str, str] | None = None
    ) -> None:
        arguments = [sys.executable, "-P", "-m", "asyncrl", command, *words, "--parent", str(os.getpid())]
        with (self._folder / f"{name}.out").open("a") as out:
            self.processes[name] = self._link.start(
                side, arguments, stdout=out, stderr=out, env=os.environ | (environment or {})
            )


# ---- the forwarder -------------------------------------------------------------------------------


def _namespace(side: str, peer: str) -> tuple[int, int]:
    """Moves this process into a new network namespace with a TUN device; returns descriptors of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    words = (
        f"addr add {ADDRESS[side]} peer {ADDRESS[peer]} dev wire",
        f"link set dev wire up mtu {_MTU}",
        "link set lo up",
    )
    for arguments in words:
        subprocess.run(["ip", *arguments.split()], check=True, stdin=subprocess.DEVNULL)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


class _Forwarder:
    def __init__(self, tuns: dict[str, int], seed: int) -> None:
        self.settings: dict[str, Any] = {"delay_s": 0.0, "loss": 0.0, "cut": ""}
        self._tuns = tuns
        self._random = {direction: random.Random(f"{seed} {direction}") for direction in DIRECTIONS}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Moves packets until the input ends."""
        sources = {self._tuns[source]: name for name, (source, _) in DIRECTIONS.items()}
        while True:
            wait_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready, _, _ = select.select([sys.stdin, *sources], [], [], wait_s)
            for descriptor in ready:
                if descriptor in sources:
                    self._take(descriptor, sources[descriptor])
                elif line := sys.stdin.readline():
                    self.settings |= json.loads(line)
                    print("{}", flush=True)
                else:
                    return
            self._deliver()

    def _take(self, tun: int, direction: str) -> None:
        target = self._tuns[DIRECTIONS[direction][1]]
        while True:
            try:
                packet = os.read(tun, 65536)
            except BlockingIOError:
                return
            if (
                direction in self.settings["cut"].split()
                or self._random[direction].random() < self.settings["loss"]
            ):
                continue
            self._count += 1
            due = time.monotonic() + self.settings["delay_s"]
            heapq.heappush(self._under_way, (due, self._count, target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._under_way)
            os.write(target, packet)


def main() -> None:
    """The forwarder: `unshare --user --map-root-user python links.py SEED`; settings come as JSON lines."""
    held = {side: _namespace(side, peer) for side, peer in DIRECTIONS.values()}
    print(json.dumps({side: f"/proc/{os.getpid()}/fd/{held[side][0]}" for side in held}), flush=True)
    _Forwarder({side: held[side][1] for side in held}, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
