"""Sums of powers and products of several numbers, with Python at hand: code of the policy is run in a sandbox.

    user: 123^2+456^2=     assistant: calls python(code="123**2+456**2")     tool: 223065     assistant: 223065

The reward is 1 for exactly the right digits as the last message. The tool answers with what the code printed and,
as an interactive Python does, with the value of its last line; an error of the code is text that the model sees.
Nothing of a call is kept, so a lost episode may run its code again. Tasks are drawn by hashing as in `calculator`;
a problem belongs to a split by its numbers, in any order. Called through the entry point `python-tool`.
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass
from typing import Any

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split
from asyncrl.envs.drawn import EVAL_SHARE, check_task, hashed
from asyncrl.envs.sandbox.base import KINDS, Limits, Result, Sandbox, open_sandbox
from asyncrl.envs.tool_env import ToolEnv
from asyncrl.messages import Task

OPERATIONS = ("squares", "cubes", "product")
OUTPUT_BYTES = 10_000
MAX_DIGITS = 9
ROOM_S = 10.0
"""Seconds that a call may wait for its turn, beside those that its code has."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Sums of squares (`12^2+34^2=`) or cubes, and products (`12*34*56=`)."""

    numbers: int
    digits: int
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th problem of a split; there are always more.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        check_task(split, index)
        operation, terms = self._draw(split, index)
        if operation == "product":
            text, answer = "*".join(map(str, terms)), math.prod(terms)
        else:
            power = 2 if operation == "squares" else 3
            text, answer = "+".join(f"{term}^{power}" for term in terms), sum(term**power for term in terms)
        prompt = [{"role": "user", "content": f"{text}="}]
        return Task(f"python-tool/{split}/{index}", prompt, str(answer), {"code": text.replace("^", "**")})

    def _draw(self, split: Split, index: int) -> tuple[str, list[int]]:
        """Draws until a problem belongs to the split."""
        low, attempt = 10 ** (self.digits - 1), 0
        while True:
            draw = (self.seed, split, index, attempt)
            terms = [low + hashed("term", *draw, place) % (9 * low) for place in range(self.numbers)]
            if split == ("eval" if hashed("split", *sorted(terms)) % EVAL_SHARE == 0 else "train"):
                return OPERATIONS[hashed("operation", *draw) % len(OPERATIONS)], terms
            attempt += 1


class Interpreter:
    """The tool: runs code in a sandbox, which is opened at the first call, a few calls at a time."""

    def __init__(self, kind: Any, limits: Limits, at_once: int) -> None:
        self._kind, self._limits = kind, limits
        self._room = asyncio.Semaphore(at_once)
        self._opening = asyncio.Lock()
        self._sandbox: Sandbox | None = None

    async def python(self, code: str) -> str:
        """Runs Python code, each time in a fresh interpreter.

        Args:
            code: What it prints is shown, and the value of its last line.
        """
        async with self._opening:
            if self._sandbox is None:
                self._sandbox = await asyncio.to_thread(open_sandbox, self._kind, self._limits)
        async with self._room:
            result = await self._sandbox.run(code)
        return shown(result, self._limits)


def shown(result: Result, limits: Limits) -> str:
    """What the policy sees of a call."""
    ends = {
        "timeout": f"error: stopped after {limits.seconds:g} s",
        "memory": f"error: it needs more than {limits.memory_mb} MB of memory",
        "output": f"error: stopped after {limits.output_bytes} bytes of output",
        "killed": "error: the interpreter crashed",
    }
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), ends.get(result.how, "")]
    return "\n".join(part for part in parts if part) or "(nothing was printed)"


def right(final: str, answer: str) -> float:
    """1 for exactly the right digits."""
    return float(final.strip() == answer)


class PythonTool(ToolEnv):
    """The environment, with demonstrations."""

    def __init__(self, tasks: Problems, tool: Interpreter, seconds: float) -> None:
        super().__init__(
            [tool.python], tasks, right, max_turns=4, tool_timeout_s=seconds + ROOM_S, name="python-tool"
        )

    def demonstration(self, task: Task) -> list[Message]:
        """Code that computes the answer, what the tool says, and the answer."""
        function = {"name": "python", "arguments": {"code": task.metadata["code"]}}
        call = {"id": "call_0", "type": "function", "function": function}
        told = {"role": "tool", "name": "python", "tool_call_id": "call_0", "content": str(task.answer)}
        answer = {"role": "assistant", "content": str(task.answer)}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, told, answer]


def make(
    numbers: int = 3,
    digits: int = 3,
    sandbox: str = "auto",
    seconds: float = 5.0,
    memory_mb: int = 512,
    at_once: int | None = None,
    seed: int = 0,
) -> PythonTool:
    """The entry point.

    Args:
        numbers: how many numbers a problem has, 2 to 9.
        digits: digits of each, 1 to 9.
        sandbox: `auto` (the strongest that works), `namespaces`, `bwrap`, `process` or `monty`; what each of them
            stops is `asyncrl.envs.sandbox.base.STOPS`.
        seconds: time limit of each call's code; keep it more than 10 s below `env.timeout_s`.
        memory_mb: limit of memory of each process of a call.
        at_once: most calls at a time, for each generator. Default: two for each core.
        seed: another seed draws other problems; the split of each problem stays.

    Raises:
        ValueError: an argument is out of its range.
    """
    for name, value, most in (("numbers", numbers, 9), ("digits", digits, MAX_DIGITS)):
        check_whole(name, value, 2 if name == "numbers" else 1, most)
    if sandbox not in ("auto", *KINDS):
        raise ValueError(f"env.args.sandbox = {sandbox!r}: must be 'auto', {', '.join(map(repr, KINDS))}")
    if at_once is not None:
        check_whole("at_once", at_once, 1)
    check_whole("seed", seed)
    try:
        limits = Limits(seconds=seconds, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES)
    except ValueError as error:
        raise ValueError(f"env.args.seconds or env.args.memory_mb: {error}") from None
    tool = Interpreter(sandbox, limits, at_once or 2 * (os.cpu_count() or 1))
    return PythonTool(Problems(numbers, digits, seed), tool, seconds)
