"""Generator processes without an engine's arithmetic: the real receiver, and an update that keeps a digest.

`python member.py` imports torch once, then forks a process for each line of its standard input:
`HUB NAME TIMEOUT_S [kill|stop VERSION BROADCAST]`, the last three to die or stop in that broadcast.
Each prints one JSON line at its start and one for everything that it sends.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys

import torch
import zmq

from asyncrl.config import Config
from asyncrl.generator.engines.base import UpdateTimes
from asyncrl.messages import Applied, Go, Hello, Message, Prepare, Rehello, TransferFailed
from asyncrl.transport import AsyncSocket
from asyncrl.weights import groups
from asyncrl.weights.receiver import Receiver

torch.set_num_threads(1)


def digest_of(tensors) -> str:
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class DigestEngine:
    def __init__(self) -> None:
        self.version, self.digest = 0, ""

    async def update(self, weights, kv) -> UpdateTimes:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.digest = digest_of(weights.tensors)
        self.version = weights.version
        return UpdateTimes(0.0, loop.time() - started, 0.0)


def misbehave(how: str, version: int, broadcast: int, engine: DigestEngine) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how]
    original, count = groups.Group.begin, 0

    def patched(self, tensor):
        nonlocal count
        if engine.version == version - 1:
            count += 1
            if count == broadcast:
                os.kill(os.getpid(), number)
        return original(self, tensor)

    groups.Group.begin = patched


async def main(hub: str, name: str, timeout_s: str, *trouble: str) -> None:
    engine, tasks = DigestEngine(), set()
    if trouble:
        misbehave(trouble[0], int(trouble[1]), int(trouble[2]), engine)

    def send(message: Message) -> None:
        socket.send(message)
        told = {"name": name, "sent": type(message).__name__, "version": engine.version, "digest": engine.digest}
        if isinstance(message, TransferFailed):
            told["reason"] = message.reason
        if isinstance(message, Applied):
            told |= {"pause_s": message.pause_s, "transfer_s": message.transfer_s}
        tell(told)

    def on_message(_peer: bytes, message: Message, _frames: list) -> None:
        if isinstance(message, Prepare | Go):
            task = asyncio.create_task(receiver.handle(message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        elif isinstance(message, Rehello):
            hello()

    def hello() -> None:
        socket.send(Hello("generator", name, str(os.getpid()), os.getpid(), version=engine.version, capacity=1))

    socket = AsyncSocket(zmq.DEALER, on_message, f"{name}/{os.getpid()}")
    receiver = Receiver(Config.model_validate({"weights": {"timeout_s": timeout_s}}), engine, send)
    socket.connect(hub)
    hello()
    await asyncio.sleep(60)


def tell(told: dict) -> None:
    os.write(1, (json.dumps(told) + "\n").encode())  # One write, so that lines of several processes stay whole.


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        arguments = line.split()
        if os.fork() == 0:
            tell({"name": arguments[1], "pid": os.getpid()})
            asyncio.run(main(*arguments))
            os._exit(0)
