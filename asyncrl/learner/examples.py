"""From conversations to token ids with a mask, and from a data set to the steps of its epochs.

Ids are put together as an episode's are (`asyncrl.chat`): a prompt, turns, and the suffixes between them, each
encoded by itself, so that training sees the ids that sampling would see. Files are read by `asyncrl.datasets`. No
torch. Called by `asyncrl.learner.sft` and `asyncrl.learner.preferences`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from asyncrl.chat import ChatFormat
from asyncrl.datasets import Conversation
from asyncrl.settings import UsageError

Loss = Literal["all", "assistant", "last"]
"""Which tokens are trained: all, those of the assistant's turns, or those of the last turn."""
Example = tuple[Sequence[int], Sequence[bool]]
"""Token ids of one conversation, and for each whether it is trained on."""
T = TypeVar("T")


def chat_format(model: Path) -> ChatFormat:
    """The chat format of a model folder.

    Raises:
        UsageError: its tokenizer is missing or has no usable chat template.
    """
    try:
        return ChatFormat(model)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error


def encode(chat: ChatFormat, talk: Conversation, loss: Loss = "assistant") -> Example:
    """The ids of a conversation, and which are trained: of a turn, its content and the token that ends it.

    Everything before the first trained turn is one prompt; from there on, a turn is what the template adds to the
    prompt before it, and the suffix after it is what the template adds next. Line breaks that the template puts
    after the last turn are left away: sampling never gets there.

    Raises:
        UsageError: the template refuses the messages, or renders a turn differently once others follow, so that
            its tokens have no place in the whole.
    """
    flags = talk.trained if loss != "last" else [False] * (len(talk.messages) - 1) + [talk.trained[-1]]
    if True not in flags:
        raise UsageError(f'{talk.where}: its last message says "train": false, so nothing is left of it to train')
    ids: list[int] = []
    trained: list[bool] = []
    for part, flag in _rendered(lambda: _parts(chat, talk, flags, loss == "all"), talk):
        if part is None:
            raise UsageError(
                f"{talk.where}: the model's chat template is not prefix-preserving: it renders a turn differently "
                "once other messages follow, so the turn's tokens have no place in the whole. Use --loss last, "
                "with one line for each turn, or a chat_template.jinja that leaves earlier turns as they were"
            )
        ids += part
        trained += [flag] * len(part)
    return ids, trained


def _parts(
    chat: ChatFormat, talk: Conversation, flags: Sequence[bool], context: bool
) -> Iterator[tuple[list[int] | None, bool]]:
    """Prompt, turn, suffix, turn, ...: ids, and whether they are trained; `context`: prompt and suffixes are."""
    first = 0 if context else flags.index(True)
    turns = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant" and i >= first]
    yield chat.prompt_ids(talk.messages[: turns[0]], talk.tools), context
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        until = talk.messages[: turn + 1]
        yield chat.turn_ids(until, talk.tools), flags[turn]
        if following is not None:
            between = talk.messages[turn + 1 : following]
            yield chat.suffix_ids(until, True, between, talk.tools), context


def whole(chat: ChatFormat, talk: Conversation) -> Example:
    """All ids of a conversation as the template renders it, its very end included.

    Raises:
        UsageError: the template refuses the messages.
    """
    (ids,) = _rendered(lambda: iter([chat.conversation_ids(talk.messages, talk.tools)]), talk)
    return ids, [True] * len(ids)


def _rendered(make: Callable[[], Iterator[T]], talk: Conversation) -> list[T]:
    """All that `make` gives; a template's refusal is said with the line."""
    from jinja2 import TemplateError

    try:
        return list(make())
    except (TemplateError, TypeError) as error:  # Templates add texts without looking, which is a TypeError.
        raise UsageError(f"{talk.where}: the model's chat template refuses these messages: {error}") from error


# ---- steps -----------------------------------------------------------------------------------------


def fitting(
    path: Path, items: Sequence[T], lengths: Sequence[int], limit: int, say: Callable[[str], object]
) -> list[T]:
    """The items whose length is at most `limit` tokens; says how many are dropped.

    Raises:
        UsageError: none is left.
    """
    kept = [item for item, length in zip(items, lengths, strict=True) if length <= limit]
    if len(kept) < len(items):
        dropped = (
            f"{len(items) - len(kept)} of {len(items)} lines are longer than learner.token_budget = {limit} tokens"
        )
        if not kept:
            raise UsageError(f"{path}: {dropped} (the longest has {max(lengths)}); raise --learner.token_budget")
        say(f"{path}: {dropped} and are dropped")
    return kept


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Indices of each step's items: every item once per epoch, in a random order; the last step may be smaller."""
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (order[start : start + size] for start in range(0, count, size))


def steps_of(count: int, size: int, epochs: int) -> int:
    """How many steps `batches` makes."""
    return -(-count // size) * epochs


def progress(steps: int, say: Callable[[str], object]) -> Callable[[int, Mapping[str, float]], None]:
    """A function that says a step's metrics, about twenty times in `steps` steps, the last one always."""
    every = max(1, steps // 20)

    def told(step: int, metrics: Mapping[str, float]) -> None:
        if step % every == 0 or step == steps:
            say(f"step {step} of {steps}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    return told
