"""The environment protocol: what a plug-in provides, in messages, never in tokens.

No inheritance is needed: any object with these methods is an environment. An `Environment` is the factory
that a plug-in's entry point returns: it knows the tasks, and makes one single-use `Env` per episode. It
must be importable without torch, because the hub draws tasks from it.

    lease ──▶ reset(task) ──▶ turn 1 ──▶ step(message) ──▶ turn 2 ──▶ … ──▶ done ──▶ close()
    lease of an episode that another generator began:
              restore(task, blob) of the last snapshot, if the environment has snapshots; otherwise
              reset(task), then for each finished turn replay(message, step), or, without it, step(message) again

Messages are in the chat form of Hugging Face's templates. An assistant message that calls tools has
`tool_calls`, a list of `{"id": "call_0", "type": "function", "function": {"name": ..., "arguments": {...}}}`, and
`malformed_calls`, a list of texts, where something that looks like a call cannot be read. A tool answers with
`{"role": "tool", "name": ..., "tool_call_id": ..., "content": "text"}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from asyncrl.messages import Task

Message = dict[str, Any]
"""A chat message: `{"role": "user", "content": "..."}`, with `tool_calls` where there are any."""

Split = Literal["train", "eval"]


class ToolFault(Exception):
    """A tool cannot be used at all (its server or sandbox is gone): fails the episode as `failed_tool`.

    A tool that only fails at what it was asked for is no fault: its error is a message that the model sees.
    """


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
    info: dict[str, float] = field(default_factory=dict)
    """Named counts of this turn, summed over the episode and averaged over episodes in the run's metrics."""


class Env(Protocol):
    """One episode. `reset` once, `step` until done, `close` always. All are given a time limit."""

    async def reset(self, task: Task) -> Start:
        """Starts the episode."""

    async def step(self, message: Message) -> Step:
        """Takes the assistant's message and answers."""

    async def close(self) -> None:
        """Frees what the episode holds."""


@runtime_checkable
class Snapshots(Protocol):
    """An `Env` whose state can be kept: taken after `reset` and after each step, restored in another process."""

    async def snapshot(self) -> bytes:
        """The state of the episode; at most a few kilobytes, and no pickle, for it travels."""

    async def restore(self, task: Task, blob: bytes) -> None:
        """Takes the place of `reset` and all steps since, in an unused `Env`."""


@runtime_checkable
class Replays(Protocol):
    """An `Env` that takes a recorded answer as its own instead of doing a finished turn again."""

    async def replay(self, message: Message, step: Step) -> None:
        """The assistant said `message` and was answered with `step`, in an earlier process."""


@runtime_checkable
class Interruptible(Protocol):
    """An `Env` with side effects, which must not be done twice."""

    async def interrupted(self, message: Message) -> Step:
        """Called instead of `step` where an earlier process may have begun to answer the message, and was lost."""


@runtime_checkable
class Truncates(Protocol):
    """An `Env` that has rewards for an episode that was cut off before it was done."""

    async def truncated(self, status: str) -> dict[str, float | None]:
        """Called after the last step; `status` is `truncated_length`, `truncated_turns` or `truncated_context`.

        An environment without this has no reward in that case but those that its steps gave; an episode without
        any is dropped.
        """


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


@runtime_checkable
class Demonstrates(Protocol):
    """An `Environment` that can show ideal episodes, for a supervised warm start."""

    def demonstration(self, task: Task) -> str | list[Message]:
        """The assistant's ideal answer, or all messages that follow those of `reset`, the assistant's last."""
