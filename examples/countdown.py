"""An environment of your own in one file: count down from a number.

    asyncrl train --algo dapo --env examples/countdown.py:make --steps 60

A plug-in needs no inheritance: an object with `task` and `make`, and episodes with `reset`, `step` and `close`.
With `demonstration` the toy model can be warm-started on it. Expect the mean reward to rise from about a
half towards 1 within a minute or two on two cores. To give it a name, publish it as an entry point of the group
`asyncrl.envs` in your own package.
"""

from __future__ import annotations

import random

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.messages import Task


class Episode:
    """One attempt."""

    async def reset(self, task: Task) -> Start:
        """The policy sees a number."""
        self.answer = str(task.answer)
        return Start(task.prompt)

    async def step(self, message: Message) -> Step:
        """The whole countdown earns 1; a wrong one earns the share of it that is right from the left."""
        text = message["content"].strip()
        right = 0
        while right < min(len(text), len(self.answer)) and text[right] == self.answer[right]:
            right += 1
        return Step(done=True, rewards={"countdown": right / max(len(text), len(self.answer))})

    async def close(self) -> None:
        """Nothing is held."""


class Countdown:
    """Numbers from 2 to `largest`; every fourth one is held out."""

    def __init__(self, largest: int) -> None:
        if not 8 <= largest <= 99:
            raise ValueError(f"largest = {largest}: give a number from 8 to 99")
        numbers = range(2, largest + 1)
        self.numbers = {
            "train": [n for n in numbers if n % 4],
            "eval": [n for n in numbers if n % 4 == 0],
        }

    def task(self, split: Split, index: int) -> Task:
        """The same task for the same index, on any machine."""
        number = random.Random(f"{split}-{index}").choice(self.numbers[split])
        answer = " ".join(str(n) for n in range(number, max(-1, number - 5), -1))
        return Task(f"{split}-{index}-{number}", [{"role": "user", "content": str(number)}], answer)

    def demonstration(self, task: Task) -> str:
        """The right answer, for a supervised warm start."""
        return str(task.answer)

    def make(self) -> Env:
        """A new episode."""
        return Episode()


def make(largest: int = 60) -> Countdown:
    """The environment; `--env.args '{"largest": 30}'` sets its argument."""
    return Countdown(largest)
