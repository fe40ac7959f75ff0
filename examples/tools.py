"""An environment with tools in one file: two plain functions, rows of data and a reward function.

    asyncrl train --env examples/tools.py:make --sampling.max_tokens 160 --generator.max_model_len 512 \\
        --toy.warm_loss 0.02 --train.groups_per_step 8 --train.group_size 4 --steps 60

The policy is asked what two things cost together, may look both prices up in one message, and may have them added.
A tool is a function with type hints and a docstring; what it raises is an error that the policy sees. An episode
goes on while the policy calls tools; its first message without a call is scored. With `demonstration` the toy
model can be warm-started, further than for sums, because one wrong letter spoils a call. Expect two to three turns
an episode, a small reward at first that rises from step to step, and in the summary `tool_calls`, `tool_errors` (a
thing that is not for sale) and `malformed_calls` (a call that cannot be read).
"""

from __future__ import annotations

from typing import Any

from asyncrl.envs.base import Message
from asyncrl.envs.sources import Rows
from asyncrl.envs.tool_env import ToolEnv
from asyncrl.messages import Task

PRICES = {
    "tea": 12,
    "jam": 30,
    "egg": 7,
    "oil": 45,
    "rye": 21,
    "fig": 18,
    "ham": 53,
    "pea": 9,
    "nut": 26,
    "cod": 64,
}


def price(item: str) -> int:
    """Looks up what a thing costs.

    Args:
        item: one thing, for example tea.
    """
    if item not in PRICES:
        raise ValueError(f"{item!r} is not for sale")
    return PRICES[item]


def add(left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right


def right(final: str, answer: str) -> float:
    """The reward: is the answer right?"""
    return float(final.strip() == answer)


class Shop(ToolEnv):
    """The environment; only demonstrations need a class of their own."""

    def demonstration(self, task: Task) -> list[Message]:
        """All that follows the prompt in an ideal episode."""
        items = task.metadata["items"]
        prices = [PRICES[item] for item in items]
        return [
            _calling(*(("price", {"item": item}) for item in items)),
            *(_answered("price", number, i) for i, number in enumerate(prices)),
            _calling(("add", {"left": prices[0], "right": prices[1]})),
            _answered("add", sum(prices), 0),
            {"role": "assistant", "content": str(task.answer)},
        ]


def _calling(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _answered(name: str, number: int, i: int) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": str(number)}


def make() -> Shop:
    """The environment: all pairs of two things; a tenth of them is held out for evaluation."""
    rows = [
        {"prompt": f"{one}+{other}", "answer": str(PRICES[one] + PRICES[other]), "items": [one, other]}
        for one in PRICES
        for other in PRICES
    ]
    return Shop([price, add], Rows(rows), right)
