"""Guess a hidden number within a few guesses, told each time whether it is higher or lower: turns without a tool.

    user: 0-31        assistant: 16        user: lower        assistant: 8        user: higher        …

The reward is 1 for a guess that is right, and 0 when the guesses are used up or one is no number of the range.
Halving always wins within the default number of guesses. Numbers are drawn by hashing (split, index, seed), and a
number belongs to a split by its own hash. An episode keeps snapshots. Called through the entry point
`guess-number`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import check_task, hashed
from asyncrl.messages import Task

LARGEST = 10**6


@dataclass(frozen=True, slots=True)
class GuessNumber:
    """The environment: numbers from 0 to `largest`, found within `guesses`."""

    largest: int
    guesses: int
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th number; there are always more tasks.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        check_task(split, index)
        attempt = 0
        while _split_of(number := hashed(self.seed, split, index, attempt) % (self.largest + 1)) != split:
            attempt += 1
        prompt = [{"role": "user", "content": f"0-{self.largest}"}]
        return Task(id=f"guess-number/{split}/{index}", prompt=prompt, answer=number)

    def make(self) -> GuessNumberEnv:
        """A new, unused episode."""
        return GuessNumberEnv(self.largest, self.guesses)

    def demonstration(self, task: Task) -> list[Message]:
        """Halving, as messages: guesses and answers up to the right one."""
        low, high, said = 0, self.largest, []
        while True:
            guess = (low + high + 1) // 2
            said.append({"role": "assistant", "content": str(guess)})
            if guess == task.answer:
                return said
            low, high = (guess + 1, high) if guess < task.answer else (low, guess - 1)
            said.append({"role": "user", "content": _hint(guess, task.answer)})


class GuessNumberEnv:
    """One episode; its state is the number and how often it was guessed at."""

    def __init__(self, largest: int, guesses: int) -> None:
        self._largest, self._guesses = largest, guesses
        self._number = -1
        self._used = 0

    async def reset(self, task: Task) -> Start:
        """Shows the range."""
        self._number = int(task.answer)
        return Start(messages=list(task.prompt))

    async def step(self, message: Message) -> Step:
        """Judges a guess."""
        text = str(message.get("content")).strip()
        guess = int(text) if text.isdecimal() and len(text) <= len(str(LARGEST)) else None
        self._used += 1
        if guess is None or guess > self._largest or guess == self._number or self._used == self._guesses:
            return Step(done=True, rewards={"found": float(guess == self._number)}, info={"guesses": self._used})
        return Step(done=False, messages=[{"role": "user", "content": _hint(guess, self._number)}])

    async def truncated(self, status: str) -> dict[str, float | None]:
        """It was not found."""
        return {"found": 0.0}

    async def snapshot(self) -> bytes:
        """The number and the guesses used."""
        return json.dumps([self._number, self._used]).encode()

    async def restore(self, task: Task, blob: bytes) -> None:
        """Goes on where the snapshot was taken."""
        self._number, self._used = json.loads(blob)

    async def close(self) -> None:
        """Holds nothing."""


def _split_of(number: int) -> Split:
    """One number in four is for evaluation; 0 and 1 are one of each, however small the range is."""
    return "eval" if number == 0 or (number > 1 and hashed("split", number) % 4 == 0) else "train"


def _hint(guess: int, number: int) -> str:
    return "higher" if number > guess else "lower"


def make(largest: int = 31, guesses: int | None = None, seed: int = 0) -> GuessNumber:
    """The entry point.

    Args:
        largest: the largest number, 1 to a million.
        guesses: guesses of an episode; default: as many as halving needs. `env.max_turns` must allow them.
        seed: another seed draws other numbers.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_whole("largest", largest, 1, LARGEST)
    guesses = (largest + 1).bit_length() if guesses is None else guesses
    check_whole("guesses", guesses, 1)
    check_whole("seed", seed)
    return GuessNumber(largest, guesses, seed)
