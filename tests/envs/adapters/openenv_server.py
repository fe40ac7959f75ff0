"""A real OpenEnv server for the tests, started by them with an interpreter that has openenv: a game of guessing.

    python openenv_server.py PORT

The number to guess follows the seed. It is no part of the test suite itself.
"""

import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess of the number."""

    number: int


class Hint(Observation):
    """What the game says."""

    message: str = ""
    low: int = 0
    high: int = 100


class Guessing(Environment):
    """Guess a number from 0 to 99: 1 for the number, 0 for others, minus 1 for one that was ruled out."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, refuse: bool = False, **_: Any) -> Hint:
        if refuse:
            raise RuntimeError("no game today")
        self._number = random.Random(seed).randrange(100)
        self._low, self._high = 0, 99
        return Hint(message="Guess a number from 0 to 99.", low=0, high=99)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == 1000:
            time.sleep(5)  # The fault: an action that hangs longer than the client waits.
        if action.number < 0:
            raise ValueError("numbers are not negative")
        if not self._low <= action.number <= self._high:
            return Hint(message="You know better.", low=self._low, high=self._high, reward=-1)
        if action.number == self._number:
            return Hint(message="Right.", reward=True, done=True)
        if action.number < self._number:
            self._low = action.number + 1
        else:
            self._high = action.number - 1
        word = "More" if action.number < self._number else "Less"
        return Hint(message=f"{word} than {action.number}.", low=self._low, high=self._high, reward=0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
