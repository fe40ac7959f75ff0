"""Look a number up in the phone book: an environment with a tool, in a package of its own.

user: Ada?   assistant calls lookup(name="Ada")   tool: 4711   assistant: 4711   reward: 1
"""

from __future__ import annotations

import random
from typing import Any

from asyncrl.envs.base import Env, Message, Split, Start, Step
from asyncrl.messages import Task

NAMES = {"train": ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay"), "eval": ("Gus", "Hana")}
LOOKUP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "The phone number of a person.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


class Episode:
    """One question. It knows nothing but its task, so an earlier process's episode needs no snapshot to go on."""

    async def reset(self, task: Task) -> Start:
        """The question, and the tool to answer it with."""
        self.name, self.number = str(task.metadata["name"]), str(task.answer)
        return Start(task.prompt, [LOOKUP])

    async def step(self, message: Message) -> Step:
        """Answers calls; a message without any is the final answer."""
        calls, unread = message.get("tool_calls", []), message.get("malformed_calls", [])
        if not calls and not unread:
            return Step(done=True, rewards={"number": float(message["content"].strip() == self.number)})
        answers = [self._answer(call) for call in calls]
        answers += [{"role": "user", "content": "error: this call cannot be read"} for _ in unread]
        return Step(done=False, messages=answers)

    def _answer(self, call: dict[str, Any]) -> Message:
        """What the model does wrong in calling is a text that it sees, not an exception."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name != "lookup":
            text = f"error: there is no tool {name!r}; there is: lookup"
        elif set(arguments) != {"name"}:
            text = "error: lookup takes one argument, name"
        else:
            text = self.number if arguments["name"] == self.name else "error: nobody has this name"
        return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}

    async def close(self) -> None:
        """Nothing is held."""


class Phonebook:
    """Four-digit numbers of a few people; some people are held out for evaluation."""

    def task(self, split: Split, index: int) -> Task:
        """The same task for the same index, in every process."""
        draw = random.Random(f"{split}-{index}")
        name, number = draw.choice(NAMES[split]), f"{draw.randrange(10_000):04}"
        prompt = [{"role": "user", "content": f"{name}?"}]
        return Task(f"{split}-{index}", prompt, number, {"name": name})

    def demonstration(self, task: Task) -> list[Message]:
        """The ideal episode: a call, its answer, and the number."""
        function = {"name": "lookup", "arguments": {"name": task.metadata["name"]}}
        call = {"id": "call_0", "type": "function", "function": function}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "lookup", "tool_call_id": "call_0", "content": str(task.answer)},
            {"role": "assistant", "content": str(task.answer)},
        ]

    def make(self) -> Env:
        """A new episode."""
        return Episode()


def make() -> Phonebook:
    """The environment; it has no arguments."""
    return Phonebook()
