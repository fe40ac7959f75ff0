"""An environment that does, on demand, whatever an environment may do: `tests/envs/test_worker.py` serves it."""

import asyncio
import itertools
import os
import sys
import time
from pathlib import Path

from asyncrl.envs.base import Start, Step, ToolFault
from asyncrl.envs.rewards import RewardFault
from asyncrl.messages import EpisodeStatus, Task

NUMBERS = itertools.count()


class Scalar:
    def item(self):
        return 0.5


class Lost(ToolFault):
    pass


class Env:
    def __init__(self, folder):
        self.folder, self.number, self.said = folder, next(NUMBERS), []

    def mark(self, name):
        (self.folder / f"{name}-{os.getpid()}-{self.number}").touch()

    async def reset(self, task):
        self.mark("open")
        return Start([{"role": "user", "content": task.id}], [{"type": "function", "function": {"name": "f"}}])

    async def step(self, message):
        self.said.append(message["content"])
        match message["content"]:
            case "fault":
                raise Lost("the sandbox is gone")
            case "custom":
                raise ZeroDivisionError("by zero")
            case "exit":
                sys.exit("bye")
            case "late":
                raise TimeoutError("its own")
            case "reward":
                raise RewardFault(EpisodeStatus.FAILED_REWARD, "nan")
            case "shape":
                return Step(False, messages=["no message"])
            case "object":
                return Step(False, {"it": object()})
            case "nothing":
                return None
            case "scalar":
                return Step(True, {"half": Scalar(), "none": None}, info={"n": Scalar()})
            case "block":
                time.sleep(1.5)  # noqa: ASYNC251  What it does on demand is to block the event loop.
            case "hang":
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    self.mark("cancelled")
                    raise
        return Step(False, {"turn": 1.0}, [{"role": "tool", "content": "|".join(self.said)}])

    async def close(self):
        self.mark("closed")

    async def snapshot(self):
        return "|".join(self.said).encode()

    async def restore(self, task, blob):
        self.said = blob.decode().split("|")

    async def replay(self, message, step):
        self.said.append(message["content"] + "=" + step.messages[0]["content"])

    async def interrupted(self, message):
        return Step(True, {"once": 1.0})

    async def truncated(self, status):
        return {status: 0.25}


class Sample:
    def __init__(self, folder):
        self.folder = Path(folder)

    def task(self, split, index):
        if index == 7:
            raise IndexError("seven tasks")
        time.sleep(index / 10)
        return Task(f"{split}-{index}", [], metadata={"deep": [1, {"x": None}]})

    def make(self):
        return Env(self.folder)

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.id}]


def make(folder):
    return Sample(folder)
