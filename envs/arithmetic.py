"""Sums of small numbers: the built-in environment that makes the default run possible on any machine.

One user message (`12+34=`), one assistant message, reward 1 for exactly the right digits. Tasks are drawn
by hashing (split, index, seed), so every process on every machine sees the same ones, and nothing is
stored. A problem belongs to the training or to the evaluation split by a hash of its operands alone: the
splits are disjoint whatever the seed. It is not a benchmark of anything but the training system.

Called through the entry point `arithmetic` (`asyncrl.envs.registry.load`): by the hub for tasks, by the
generators for episodes, and by `asyncrl.toy` for demonstrations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import EVAL_SHARE, check_task, hashed
from asyncrl.messages import Task

OPERATORS = ("+", "-")
MAX_DIGITS = 18


def split_of(left: int, operator: str, right: int) -> Split:
    """The split that a problem belongs to. `a+b` and `b+a` share one, so neither gives the other away."""
    if operator == "+":
        left, right = min(left, right), max(left, right)
    return "eval" if hashed("split", left, operator, right) % EVAL_SHARE == 0 else "train"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The environment: problems `a+b=` (or `a-b=`) with operands of exactly `digits` digits."""

    digits: int
    operators: str
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th problem of a split; there are always more, so none ever raises IndexError.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        check_task(split, index)
        left, operator, right = self._problem(split, index)
        answer = left + right if operator == "+" else left - right
        prompt = [{"role": "user", "content": f"{left}{operator}{right}="}]
        return Task(id=f"arithmetic/{split}/{index}", prompt=prompt, answer=str(answer))

    def _problem(self, split: Split, index: int) -> tuple[int, str, int]:
        """Draws problems until one belongs to the split: 1.1 draws for train and 10 for eval, on average."""
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        size = 10**self.digits - low
        attempt = 0
        while True:
            draw = hashed("draw", self.seed, split, index, attempt)
            draw, which = divmod(draw, len(self.operators))
            left = low + draw % size
            right = low + hashed("right", draw) % size
            operator = self.operators[which]
            if split_of(left, operator, right) == split:
                return left, operator, right
            attempt += 1

    def make(self) -> ArithmeticEnv:
        """A new, unused episode."""
        return ArithmeticEnv()

    def demonstration(self, task: Task) -> str:
        """The assistant's ideal answer, for a supervised warm start."""
        return str(task.answer)


class ArithmeticEnv:
    """One episode: a problem, an answer, done."""

    def __init__(self) -> None:
        self._answer: str | None = None

    async def reset(self, task: Task) -> Start:
        """Shows the problem."""
        self._answer = str(task.answer)
        return Start(messages=list(task.prompt))

    async def step(self, message: Message) -> Step:
        """Scores the answer: 1.0 if the message, stripped of white space, is the number, else 0.0."""
        if self._answer is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        content: Any = message.get("content")
        correct = isinstance(content, str) and content.strip() == self._answer
        return Step(done=True, rewards={"correct": float(correct)})

    async def close(self) -> None:
        """Holds nothing."""


def make(digits: int = 2, operators: str = "+", seed: int = 0) -> Arithmetic:
    """The entry point.

    Args:
        digits: digits of each operand, 1 to 18; the operands are uniform.
        operators: the operators to draw from, `+`, `-` or `+-`.
        seed: another seed draws other problems; the split of each problem stays.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_whole("digits", digits, 1, MAX_DIGITS)
    if not isinstance(operators, str) or not operators or set(operators) - set(OPERATORS):
        raise ValueError(f"env.args.operators = {operators!r}: must be '+', '-' or '+-'")
    check_whole("seed", seed)
    return Arithmetic(digits=digits, operators="".join(dict.fromkeys(operators)), seed=seed)
