"""An environment for benchmarks: answers of log-normal length, as reasoning produces them; any letters will do.

Named on the command line as `--env tests/benchmarks/long_tail.py:make`. The demonstrations teach a model to stop
after 8 to 240 letters (median 32, log-normal with sigma 0.9), which makes generation long-tailed.
"""

from __future__ import annotations

import random

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.messages import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reward(text: str) -> float:
    """The share of vowels: dense, so that no group has equal rewards."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


class _Episode:
    async def reset(self, task: Task) -> Start:
        return Start(task.prompt)

    async def step(self, message: Message) -> Step:
        return Step(done=True, rewards={"vowels": reward(message["content"])})

    async def close(self) -> None:
        pass


class LongTail:
    """Tasks are numbers; nothing depends on them."""

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", [{"role": "user", "content": f"{index % 1000}"}])

    def demonstration(self, task: Task) -> str:
        rng = random.Random(task.id)
        length = int(min(240, max(8, rng.lognormvariate(3.466, 0.9))))
        return "".join(rng.choices(LETTERS, k=length))

    def make(self) -> Env:
        return _Episode()


def make() -> LongTail:
    """The environment."""
    return LongTail()
