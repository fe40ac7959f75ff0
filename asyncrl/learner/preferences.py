"""Preference pairs as token ids: loaded from a file, those that are too long dropped, some held out.

What is trained on them is another file's affair: `asyncrl.learner.dpo` compares the log-probs of the two answers,
`asyncrl.learner.reward_model` the scores of the two conversations; both call this one. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.chat import ChatFormat
from asyncrl.datasets import Conversation, pairs
from asyncrl.learner.examples import Example, fitting


class Pair(NamedTuple):
    """Two conversations that begin alike, as token ids; the first is the better one."""

    chosen: Example
    rejected: Example

    @property
    def longest(self) -> int:
        """Tokens of the longer one."""
        return max(len(ids) for ids, _ in self)


def load(
    path: Path,
    chat: ChatFormat,
    encode: Callable[[ChatFormat, Conversation], Example],
    token_budget: int,
    say: Callable[[str], object],
) -> list[Pair]:
    """The pairs of a file.

    Args:
        path: JSON lines, see `asyncrl.datasets`.
        chat: the model's tokenizer and template.
        encode: `examples.encode` for what is trained token by token, `examples.whole` for what is scored.
        token_budget: pairs with a longer conversation are dropped.
        say: told how many those are.

    Raises:
        UsageError: the file, one of its lines, or every one of them cannot be used.
    """
    found = [Pair(encode(chat, chosen), encode(chat, rejected)) for chosen, rejected in pairs(path)]
    return fitting(path, found, [pair.longest for pair in found], token_budget, say)


def hold_out(found: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs to test on: a random `share`, at least one pair of each if there are two."""
    order = list(range(len(found)))
    random.Random(f"{seed}/held-out").shuffle(order)
    count = min(len(order) - 1, max(1, round(share * len(order)))) if share else 0
    return [found[i] for i in sorted(order[count:])], [found[i] for i in sorted(order[:count])]
