"""Sums of several numbers with a calculator at hand: the environment in which a policy learns to use a tool.

    user: 12+34+56=     assistant: calls calculator(expression="12+34+56")     tool: 102     assistant: 102

The reward is 1 for exactly the right digits as the last message, with or without the tool. A toy cannot add three
numbers in its head, so it is worth its while to find out about the tool, which only a share of the demonstrations
uses. Tasks are drawn by hashing (split, index, seed); a problem belongs to a split by its numbers, in any order.
Called through the entry point `calculator`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split
from asyncrl.envs.drawn import EVAL_SHARE, check_task, hashed
from asyncrl.envs.tool_env import ToolEnv
from asyncrl.messages import Task

MAX_DIGITS = 9
LONGEST = 200
"""Most characters of an expression."""
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LONGEST} are computed")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else repr(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic; use numbers, + - * / and parentheses")


@dataclass(frozen=True, slots=True)
class Sums:
    """Problems `a+b+c=`."""

    numbers: int
    digits: int
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th problem of a split; there are always more.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        check_task(split, index)
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        size, attempt = 10**self.digits - low, 0
        while True:
            draw = (self.seed, split, index, attempt)
            terms = [low + hashed("term", *draw, place) % size for place in range(self.numbers)]
            if split == ("eval" if hashed("split", *sorted(terms)) % EVAL_SHARE == 0 else "train"):
                break
            attempt += 1
        text = "+".join(map(str, terms))
        prompt = [{"role": "user", "content": f"{text}="}]
        return Task(f"calculator/{split}/{index}", prompt, str(sum(terms)), {"expression": text})


def right(final: str, answer: str) -> float:
    """1 for exactly the right digits."""
    return float(final.strip() == answer)


class Calculator(ToolEnv):
    """The environment, with demonstrations."""

    def __init__(self, tasks: Sums, tool_share: float) -> None:
        super().__init__([calculator], tasks, right, max_turns=4, name="calculator")
        self._tool_share = tool_share

    def demonstration(self, task: Task) -> list[Message]:
        """The right answer, for a share of the tasks with the tool's help."""
        answer = {"role": "assistant", "content": str(task.answer)}
        if hashed("demonstration", task.id) / 2**64 >= self._tool_share:
            return [answer]
        function = {"name": "calculator", "arguments": {"expression": task.metadata["expression"]}}
        call = {"id": "call_0", "type": "function", "function": function}
        told = {"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": str(task.answer)}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, told, answer]


def make(numbers: int = 3, digits: int = 2, tool_share: float = 0.2, seed: int = 0) -> Calculator:
    """The entry point.

    Args:
        numbers: how many are to be added, 2 to 9.
        digits: digits of each, 1 to 9.
        tool_share: share of the demonstrations that use the tool, 0 to 1; the others answer at once.
        seed: another seed draws other problems; the split of each problem stays.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_whole("numbers", numbers, 2, 9)
    check_whole("digits", digits, 1, MAX_DIGITS)
    if not isinstance(tool_share, int | float) or not 0 <= tool_share <= 1:
        raise ValueError(f"env.args.tool_share = {tool_share!r}: must be a number from 0 to 1")
    check_whole("seed", seed)
    return Calculator(Sums(numbers, digits, seed), tool_share)
