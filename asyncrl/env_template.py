"""The files of a new environment package, as `asyncrl envs new` writes them. `NAME` and `MODULE` are filled in.

Only texts and where they go; `asyncrl.envs_command` writes them. The package is complete: it installs, its test
runs the conformance test, and a tiny model can be warm-started on its demonstrations.
"""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
description = "An environment for asyncrl"
requires-python = ">=3.11"
dependencies = ["asyncrl"]

[project.optional-dependencies]
test = ["pytest>=8"]

# How `asyncrl train --env NAME` finds it: the name, and the function that makes the environment.
[project.entry-points."asyncrl.envs"]
NAME = "MODULE:make"

[tool.setuptools.packages.find]
where = ["src"]
"""

README = """\
# NAME

An environment for asyncrl: spell a word backwards, with a second attempt after a mistake. All of it is in
`src/MODULE/__init__.py`; edit it there.

    pip install -e '.[test]'
    asyncrl envs check NAME         # does it keep every promise of an environment?
    pytest                          # the same as a test
    asyncrl train --env NAME        # makes a tiny model, warm-starts it on the demonstrations, trains it
"""

ENVIRONMENT = '''\
"""Spell a word backwards: the user says a word, and the assistant has two attempts.

user: abc   assistant: cab   user: no, try again   assistant: cba   reward: 0.5
"""

from __future__ import annotations

import json
import random

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.messages import Task

ATTEMPTS = 2


class Episode:
    """One episode: a fresh object for each, used once."""

    async def reset(self, task: Task) -> Start:
        """What the assistant sees first."""
        self.answer, self.attempt = str(task.answer), 0
        return Start(task.prompt)

    async def step(self, message: Message) -> Step:
        """Takes what the assistant said. It can be anything: whatever it is, answer, and do not raise."""
        self.attempt += 1
        if message["content"].strip() == self.answer:
            return Step(done=True, rewards={"reversed": 1 / self.attempt})
        if self.attempt == ATTEMPTS:
            return Step(done=True, rewards={"reversed": 0.0})
        return Step(done=False, messages=[{"role": "user", "content": "no, try again"}])

    async def close(self) -> None:
        """Frees what the episode holds: nothing here."""

    # With these two, an episode whose process was lost goes on where it was. They are optional: without them,
    # finished turns are stepped through again.

    async def snapshot(self) -> bytes:
        """All that the episode knows and the task does not."""
        return json.dumps(self.attempt).encode()

    async def restore(self, task: Task, blob: bytes) -> None:
        """Takes the place of `reset` and the steps since."""
        self.answer, self.attempt = str(task.answer), json.loads(blob)


class Environment:
    """Knows the tasks, and makes the episodes."""

    def __init__(self, length: int) -> None:
        if not 2 <= length <= 12:
            raise ValueError(f"env.args.length = {length}: give a number from 2 to 12")
        self.length = length

    def task(self, split: Split, index: int) -> Task:
        """The same task for the same split and index in every process: draw it from nothing else."""
        draw = random.Random(f"{split}-{index}")
        letters = "abcdefghij"
        # Words that begin with one of the last two letters are held out for evaluation.
        first = draw.choice(letters[:8] if split == "train" else letters[8:])
        word = first + "".join(draw.choices(letters, k=self.length - 1))
        return Task(f"{split}-{index}", [{"role": "user", "content": word}], answer=word[::-1])

    def demonstration(self, task: Task) -> str:
        """The ideal answer, on which a tiny model is trained before its first run. Optional."""
        return str(task.answer)

    def make(self) -> Env:
        """A new episode."""
        return Episode()


def make(length: int = 3) -> Environment:
    """Spell words of some letters backwards. `--env.args \'{"length": 5}\'` sets the argument."""
    return Environment(length)
'''

TEST = '''\
"""The environment keeps every promise that asyncrl relies on, and rewards what it should."""

import asyncio

from asyncrl.envs.check import check_env

import MODULE


def test_it_keeps_the_promises_of_an_environment() -> None:
    report = check_env("NAME")
    assert not report.problems, report.text()


def test_a_second_attempt_earns_half() -> None:
    async def play() -> float | None:
        environment = MODULE.make()
        task, episode = environment.task("train", 0), environment.make()
        await episode.reset(task)
        await episode.step({"role": "assistant", "content": "?"})
        step = await episode.step({"role": "assistant", "content": environment.demonstration(task)})
        return step.rewards["reversed"]

    assert asyncio.run(play()) == 0.5
'''

FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    "src/MODULE/__init__.py": ENVIRONMENT,
    "tests/test_MODULE.py": TEST,
}


def files(name: str) -> dict[str, str]:
    """Path and text of each file of the package `name`, a lower-case name with dashes."""
    module = name.replace("-", "_")
    return {
        path.replace("MODULE", module): text.replace("MODULE", module).replace("NAME", name)
        for path, text in FILES.items()
    }
