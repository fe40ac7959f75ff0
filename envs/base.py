"""The environment protocol: what a plug-in provides, in messages, never in tokens.

No inheritance is needed: any object with these methods is an environment. An `Environment` is the factory
that a plug-in's entry point returns: it knows the tasks, and makes one single-use `Env` per episode. It
must be importable without torch, because the hub draws tasks from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from asyncrl.messages import Task

Message = dict[str, Any]
"""A chat message: `{"role": "user", "content": "..."}`, with `tool_calls` where there are any."""

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Start:
    """What the policy sees first."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools, as chat templates take them."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one assistant message."""

    done: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Named rewards of this turn; the episode's reward is the sum over turns and names. None: missing."""
    messages: list[Message] = field(default_factory=list)
    """What the policy sees next (tool results, user text); empty when done."""
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode. `reset` once, `step` until done, `close` always. All are given a time limit."""

    async def reset(self, task: Task) -> Start:
        """Starts the episode."""

    async def step(self, message: Message) -> Step:
        """Takes the assistant's message and answers."""

    async def close(self) -> None:
        """Frees what the episode holds."""


@runtime_checkable
class Environment(Protocol):
    """A family of tasks, and the maker of episodes."""

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task (0, 1, ...) of a split: the same for the same arguments, on any machine.

        Raises:
            IndexError: the split has no more tasks.
        """

    def make(self) -> Env:
        """A new, unused episode."""
