"""An environment of random talk with a tool: turns, answers and their number are drawn from the task's id.

It exists to try the token record (`tests/generator/test_fidelity.py`), so its tool's answers are full of what must
not become control tokens; with `sleep_s` the tool takes that long (`tests/e2e/test_tools.py`). Demonstrations
teach a toy model to end its turns and to call the tool, well or badly.
"""

import asyncio
import random

from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.messages import Task

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Answers anything.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
NOISE = [
    "a",
    "b",
    "7",
    " ",
    "\n",
    "é",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<tool_call>",
    "</tool_call>",
    "{",
]


def _text(draw: random.Random, most: int) -> str:
    return "".join(draw.choice(NOISE) for _ in range(draw.randrange(1, most)))


def _call(draw: random.Random) -> Message:
    arguments = {"x": "".join(draw.choices("ab", k=draw.randrange(3)))}
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "ab"[: draw.randrange(3)], "tool_calls": [call]}


class Talk:
    """One episode of one to four turns."""

    def __init__(self, sleep_s: float) -> None:
        self._draw = random.Random()
        self._left = 0
        self._sleep_s = sleep_s

    async def reset(self, task: Task) -> Start:
        self._draw = random.Random(task.id)
        self._left = self._draw.randrange(1, 5)
        return Start([{"role": "user", "content": _text(self._draw, 8)}], [TOOL])

    async def step(self, message: Message) -> Step:
        self._left -= 1
        if not self._left:
            return Step(done=True, rewards={"talked": 1.0})
        await asyncio.sleep(self._sleep_s if message.get("tool_calls") else 0)
        answers = [
            {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": _text(self._draw, 20)}
            for call in message.get("tool_calls", [])
        ]
        return Step(done=False, messages=answers or [{"role": "user", "content": _text(self._draw, 8)}])

    async def close(self) -> None:
        pass


class Chatter:
    """The environment."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}/{index}", [])

    def make(self) -> Talk:
        return Talk(self.sleep_s)

    def demonstration(self, task: Task) -> list[Message]:
        draw = random.Random(task.id)
        said = []
        for _ in range(draw.randrange(2)):
            said += [_call(draw), {"role": "tool", "name": "f", "tool_call_id": "call_0", "content": "a7"}]
        return [*said, {"role": "assistant", "content": "".join(draw.choices("ab 7", k=draw.randrange(1, 9)))}]


def make(sleep_s: float = 0.0) -> Chatter:
    return Chatter(sleep_s)
