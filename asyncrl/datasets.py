"""Conversations and preference pairs from JSON-lines files, checked line by line.

    {"messages": [...], "tools": [...]}                       a conversation; "train": false leaves a message out
    {"chosen": [...], "rejected": [...]}                      a pair: two conversations that begin alike
    {"prompt": ..., "chosen": ..., "rejected": ...}           the same with the beginning apart

Messages are in the usual chat form (`role`, `content`, `tool_calls`). In the last form, a text instead of
messages is one message: the user's as a prompt, the assistant's as an answer. Other keys of a line are ignored.
What is wrong with a line is said with the file and the line's number, before any model is loaded. It knows no
tokenizer: token ids are made by `asyncrl.learner.examples`. Called by `asyncrl.learner.sft` and
`asyncrl.learner.preferences`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.chat import Message
from asyncrl.settings import UsageError


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation; its last message is the assistant's."""

    where: str
    """File and line."""
    messages: list[Message]
    tools: list[dict[str, Any]]
    trained: list[bool]
    """For each message, whether it is a turn of the assistant that is trained on."""


def conversations(path: Path) -> list[Conversation]:
    """The conversations of a file.

    Raises:
        UsageError: the file cannot be read, or a line cannot be used: file, number, and what is allowed.
    """
    found = []
    for where, line in _lines(path):
        messages = _messages(line.get("messages"), "messages", where)
        _ends_with_the_assistant(messages, "messages", where)
        trained = [m["role"] == "assistant" and m.get("train", True) for m in messages]
        if not any(trained):
            raise UsageError(f'{where}: every assistant message says "train": false, so nothing is left to train')
        found.append(Conversation(where, _plain(messages), _tools(line, where), trained))
    return found


def pairs(path: Path) -> list[tuple[Conversation, Conversation]]:
    """The (chosen, rejected) conversations of a file; only what comes after their common beginning is trained.

    The formats are those of TRL's preference data sets, conversational and standard, with and without a prompt of
    its own; a text is made a message, and the chat template is always applied.

    Raises:
        UsageError: as in `conversations`.
    """
    return [_pair(line, where) for where, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is, and its object; blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}; give a file of one JSON object per line") from error
    numbered = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path} is empty; it must hold one JSON object per line")
    for where, line in numbered:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}: not valid JSON ({error}); one object per line is needed") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where}: a {type(value).__name__}; one JSON object per line is needed")
        yield where, value


def _messages(value: Any, key: str, where: str) -> list[Message]:
    """A list of messages, checked one by one."""
    if not isinstance(value, list) or not value:
        raise UsageError(f'{where}: "{key}" must be a list of at least one message, and is {_short(value)}')
    for i, message in enumerate(value):
        wrong = _wrong(message)
        if wrong:
            raise UsageError(f'{where}: "{key}"[{i}]: {wrong}')
    return value


def _wrong(message: Any) -> str | None:
    """What is wrong with a message; None if nothing is."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f'a message is {{"role": ..., "content": ...}}, and this is {_short(message)}'
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return f'"tool_calls" must be a list of objects, and is {_short(calls)}'
    if not isinstance(content, str) and not (content is None and calls):
        return f'"content" must be text (or null beside "tool_calls"), and is {_short(content)}'
    if "train" in message and (message["role"] != "assistant" or not isinstance(message["train"], bool)):
        return (
            '"train" must be true or false, and belongs to assistant messages; only those are trained one by one'
        )
    return None


def _tools(line: dict[str, Any], where: str) -> list[dict[str, Any]]:
    tools = line.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f'{where}: "tools" must be a list of objects, and is {_short(tools)}')
    return tools


def _pair(line: dict[str, Any], where: str) -> tuple[Conversation, Conversation]:
    prompt = _side(line, "prompt", "user", where) if "prompt" in line else []
    sides = []
    for key in ("chosen", "rejected"):
        if isinstance(line.get(key), str) and not prompt:
            raise UsageError(f'{where}: "{key}" is a text, which needs a "prompt" that it answers')
        sides.append([*prompt, *_side(line, key, "assistant", where)])
        _ends_with_the_assistant(sides[-1], key, where)
    chosen, rejected = sides
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if same is None:
        raise UsageError(f'{where}: "chosen" and "rejected" are the same, or one begins with the other')
    if not chosen[same]["role"] == rejected[same]["role"] == "assistant":
        raise UsageError(
            f'{where}: "chosen" and "rejected" first differ in message {same}, which is not the assistant\'s '
            "in both; they must be two answers to the same prompt"
        )
    tools = _tools(line, where)
    made = [
        Conversation(
            where, _plain(side), tools,
            [i >= same and m["role"] == "assistant" and m.get("train", True) for i, m in enumerate(side)],
        )
        for side in sides
    ]  # fmt: skip
    return made[0], made[1]


def _side(line: dict[str, Any], key: str, role: str, where: str) -> list[Message]:
    value = line.get(key)
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value, key, where)


def _ends_with_the_assistant(messages: list[Message], key: str, where: str) -> None:
    if messages[-1]["role"] != "assistant":
        raise UsageError(
            f'{where}: "{key}" ends with a message of role {messages[-1]["role"]!r}; the last one must be '
            "the assistant's, for it is what is learned"
        )


def _plain(messages: list[Message]) -> list[Message]:
    """The messages as the template sees them."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
