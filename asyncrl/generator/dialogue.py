"""What has been said in one episode: messages, tools, rewards and counts. No tokens, no I/O.

Called by `asyncrl.generator.episode`, whose token record holds the same conversation as ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.envs.base import Message, Start


class Dialogue:
    """Grows turn by turn, in this process or from the turns that an earlier one recorded."""

    def __init__(self) -> None:
        self.prompt: list[Message] = []
        """What the environment began with."""
        self.messages: list[Message] = []
        """The whole conversation."""
        self.tools: list[dict[str, Any]] = []
        self.turns = 0
        """Turns that the environment has answered."""
        self.rewards: dict[str, float] = {}
        """Summed over turns."""
        self.info: Counter[str] = Counter()
        """Counts, summed over turns."""

    def begin(self, start: Start) -> None:
        """The environment has begun."""
        self.prompt, self.messages, self.tools = list(start.messages), list(start.messages), start.tools

    def said(self, message: Message) -> None:
        """The assistant has said something; its calls are counted."""
        self.messages.append(message)
        for name in ("tool_calls", "malformed_calls"):
            if message.get(name):
                self.info[name] += len(message[name])

    def answered(self, messages: list[Message], rewards: dict[str, float], info: dict[str, float]) -> None:
        """The environment has answered it."""
        self.turns += 1
        self.messages += messages
        self.add(rewards)
        self.info.update(info)

    def add(self, rewards: dict[str, float]) -> None:
        """Rewards, by name."""
        for name, value in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value


def plain(messages: list[Message]) -> list[Message]:
    """Messages, or schemas of tools, as JSON has them, so that they can travel.

    Raises:
        TypeError: something in them has no JSON.
        UnicodeEncodeError: a text in them is none.
        OverflowError: a whole number in them has more than 64 bits.
        msgspec.ValidationError: they are no list of messages.
    """
    same = msgspec.json.decode(msgspec.json.encode(messages), type=list[Message])
    msgspec.msgpack.encode(same)  # JSON has whole numbers of any size, what travels does not.
    return same


def counts(info: Mapping[str, float]) -> dict[str, float]:
    """An environment's counts as plain text and floats.

    Raises:
        ValueError: one is no finite number, or its name no text that can travel.
    """
    floats = {str(name): float(n) for name, n in info.items()}
    for name, n in floats.items():
        name.encode()
        if not math.isfinite(n):
            raise ValueError(f"{name!r} = {n} is no finite number")
    return floats
