"""Tool calls in the text of an assistant's turn: pure functions from text to calls and complaints.

Two formats are read here, those that most open models write:

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   Hermes, Qwen 2.5 and 3, the toy
    llama3   {"name": "add", "parameters": {"a": 1}}                         Llama 3: the whole turn, or all that
                                                                             follows <|python_tag|>; several with
                                                                             `;`

Which one a model's template writes is found by reading what it prints for a call that is known (`recognise`), not
from the model's name. Nothing is repaired: what cannot be read is told, and the model learns to write it right.
No tokens, no templates. Called by `asyncrl.chat`; formats of other families are read by `asyncrl.chat_renderers`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
THINK, END_OF_THINK = "<think>", "</think>"
MARKERS = (OPEN, CLOSE, PYTHON_TAG, THINK, END_OF_THINK)
"""What a turn's text must keep to be read, even where a tokenizer declares it a special token."""

Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a turn's text says: the text outside its calls, the calls, and why others cannot be read.

    The raw text of a call that cannot be read stays in `content`, so that nothing said is lost.
    """

    content: str
    calls: list[Call]
    malformed: list[str]


def after_reasoning(text: str, opened: bool) -> int:
    """Where the reasoning ends: calls that a model only thinks about are none.

    Args:
        text: the turn.
        opened: whether the prompt's last words opened the reasoning.

    Returns:
        The position behind `</think>`; 0 if there is no reasoning, or if it is never closed.
    """
    if not opened and not text.lstrip().startswith(THINK):
        return 0
    closed = text.find(END_OF_THINK)
    return 0 if closed < 0 else closed + len(END_OF_THINK)


def hermes(text: str, start: int = 0) -> Reading:
    """Reads blocks of `<tool_call>`; what lies between them, and all before `start`, is content."""
    pieces, calls, malformed = [text[:start]], list[Call](), list[str]()
    while (opening := text.find(OPEN, start)) >= 0:
        pieces[-1] += text[start:opening]
        found, start = _block(text, opening)
        if isinstance(found, str):
            malformed.append(found)
            pieces[-1] += text[opening:start]
        else:
            calls.append(found)
            pieces.append("")
    if not calls and not malformed and CLOSE in text[start:]:
        malformed.append(f"a tool call's {CLOSE} has no {OPEN} before it")
    pieces[-1] += text[start:]
    return Reading(_joined(pieces), calls, malformed)


def llama3(text: str, start: int = 0) -> Reading:
    """Reads calls that are the whole turn, or all that follows `<|python_tag|>`; other texts have none."""
    before, body = "", text[start:]
    if not (body.lstrip().startswith("{") and '"parameters"' in body):
        before, tag, body = body.partition(PYTHON_TAG)
        if not tag:
            return Reading(text, [], [])
    calls, malformed, position = list[Call](), list[str](), 0
    while True:
        value, behind = _json(body, position)
        found: Call | str = str(value) if behind is None else _call(value, "parameters")
        if behind is None or isinstance(found, str):
            malformed.append(str(found))
            break
        calls.append(found)
        position = _blanks(body, behind)
        if not body[position:].startswith(";"):
            break
        position += 1
    return Reading(_joined([text[:start] + before, body[position:]]) if calls else text, calls, malformed)


FORMATS: dict[str, Callable[[str, int], Reading]] = {"hermes": hermes, "llama3": llama3}
PROBE: Call = ("probe_tool", {"text": 'a "b" {c}', "many": [1, True, None], "more": {"x": 0.5}})
"""A call that a template is made to print."""


def recognise(printed: str) -> str | None:
    """The format in which a template has printed the call `PROBE`, or None if it is none of `FORMATS`."""
    for name, read in FORMATS.items():
        reading = read(printed, 0)
        if reading.calls == [PROBE] and not reading.malformed:
            return name
    return None


# ---- one call ----------------------------------------------------------------------------------------


def _block(text: str, opening: int) -> tuple[Call | str, int]:
    """The call of one block, or why there is none; and where the block ends."""
    value, behind = _json(text, opening + len(OPEN))
    closed = text.find(CLOSE, opening if behind is None else behind)
    another = text.find(OPEN, opening + len(OPEN) if behind is None else behind)
    if closed < 0 or 0 <= another < closed:
        return f"a tool call is not closed: {CLOSE} is missing", another if another >= 0 else len(text)
    end = closed + len(CLOSE)
    if behind is None:
        return value, end
    if _blanks(text, behind) != closed:
        return f"a tool call holds more than one JSON object: {text[behind:closed].strip()[:80]!r}", end
    return _call(value, "arguments"), end


def _call(value: Any, key: str) -> Call | str:
    """Checks what a call's JSON holds."""
    if not isinstance(value, dict):
        return f"a tool call must be a JSON object, but is {json.dumps(value)[:80]}"
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        return f'a tool call has no "name" that is a text: {json.dumps(value)[:80]}'
    if not isinstance(arguments, dict):
        shown = json.dumps(arguments)[:80] if key in value else "missing"
        return f'"{key}" of the tool call {name!r} must be a JSON object, but is {shown}'
    return name, arguments


def _json(text: str, position: int) -> tuple[Any, int | None]:
    """The JSON value at a position and where it ends; or why there is none, and None."""
    try:
        value, end = _DECODER.raw_decode(text, _blanks(text, position))
        # Half of a surrogate pair, "\ud800", is a string to Python, but no text that could be sent or tokenised.
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"a tool call is no valid JSON: {error.msg} at character {error.pos - position}", None
    except (ValueError, RecursionError) as error:
        return f"a tool call is no valid JSON: {error}", None
    return value, end


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _whole(text: str) -> int:
    """A whole number that can be sent on, to a tool elsewhere or to a reward model."""
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"the number {text[:20]}... has more than 64 bits")
    return number


def _decimal(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=_whole, parse_float=_decimal)


def _blanks(text: str, position: int) -> int:
    """The position of the next character that is no white space."""
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _joined(pieces: list[str]) -> str:
    """The text outside the calls: the white space that only parts it from a call is left away."""
    if len(pieces) == 1:
        return pieces[0]
    first, *others = pieces
    return "\n".join(piece for piece in (first.rstrip(), *(other.strip() for other in others)) if piece)
