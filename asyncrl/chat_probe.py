"""What a chat template can do, found out by rendering small conversations.

Templates are programs, and refuse in any way they like: whatever they raise on a probe means that they cannot do
it. Called through `asyncrl.chat.ChatFormat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from asyncrl.tool_calls import END_OF_THINK, PROBE, THINK

if TYPE_CHECKING:
    from asyncrl.chat import ChatFormat

Message = dict[str, Any]
Case = Literal["appended", "fork", "refused"]
"""What becomes of the record once messages follow a turn; `refused`: the template raises."""
T = TypeVar("T")

QUESTION: Message = {"role": "user", "content": "probe-question"}
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE[0],
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "many": {"type": "array", "description": "A list."},
                "more": {"type": "object", "description": "An object."},
            },
            "required": ["text"],
        },
    },
}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": PROBE[0], "arguments": PROBE[1]}}],
}
ANSWER: Message = {"role": "tool", "name": PROBE[0], "tool_call_id": "call_0", "content": "probe-result"}
REASONING = f"{THINK}\nprobe-thought\n{END_OF_THINK}\n\nprobe-answer"
SAID: Message = {"role": "assistant", "content": "probe-answer"}
CONVERSATIONS: list[list[Message]] = [[QUESTION], [QUESTION, CALL, ANSWER]]
"""A family of renderers must make the same prompts of these as the template: all that it appends is in them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How episodes of several turns are recorded with a chat template; `str()` says it in a sentence."""

    user_message: Case
    """What a user's message after the assistant's turn does to the record."""
    user_message_reasoned: Case
    """The same, if the turn began with `<think>`."""
    tool_answer: Case | None
    """What a tool's answer does to the record; None: no tools were probed."""
    tool_answer_reasoned: Case | None
    tools_shown: bool
    """Whether the prompt shows the tools."""
    answers_shown: bool
    """Whether the prompt shows what a tool answered."""
    calls: str | None
    """The format of tool calls that is read from the model's turns; None: none."""

    def __str__(self) -> str:
        said = f"chat template: {_cases('user messages', self.user_message, self.user_message_reasoned)}"
        if self.tool_answer is None or self.tool_answer_reasoned is None:
            return said
        if not self.tools_shown or not self.answers_shown:
            return f"{said}; it cannot show {'what tools answer' if self.tools_shown else 'tools'}"
        calls = f"tool calls are read as {self.calls}" if self.calls else "its tool calls cannot be read"
        return f"{said}; {_cases('tool answers', self.tool_answer, self.tool_answer_reasoned)}; {calls}"


def _cases(what: str, plain: Case, reasoned: Case) -> str:
    verbs = {
        "appended": "are appended",
        "fork": "start a new branch of the record",
        "refused": "are refused",
    }
    after = "" if reasoned == plain else f", and after a turn with {THINK} they {verbs[reasoned]}"
    return f"{what} {verbs[plain]}{after}"


def probe(chat: ChatFormat, tools: bool) -> Probe:
    """Renders conversations and says what became of them; `tools`: whether those with tools are of interest."""
    reasoned_call = CALL | {"content": REASONING.removesuffix("\n\nprobe-answer")}
    return Probe(
        user_message=_case(chat, SAID, QUESTION),
        user_message_reasoned=_case(chat, SAID | {"content": REASONING}, QUESTION),
        tool_answer=_case(chat, CALL, ANSWER) if tools else None,
        tool_answer_reasoned=_case(chat, reasoned_call, ANSWER) if tools else None,
        tools_shown=tools and PROBE[0] in (attempt(lambda: chat.render([QUESTION], [TOOL], True)) or ""),
        answers_shown=tools and _answer_shown(chat),
        calls=chat.calls if tools else None,
    )


def check_tools(chat: ChatFormat, where: Path, tools: Sequence[dict[str, Any]]) -> None:
    """Refuses a template that cannot be used with tools.

    Args:
        chat: whose template.
        where: the template's file.
        tools: the environment's tools; nothing is checked if there are none.

    Raises:
        ValueError: the template leaves out or refuses tools or their answers, or its calls cannot be read.
    """
    if not tools:
        return
    advice = (
        f"Use a model whose template has tools, or write one into {where.with_name('chat_template.jinja')}; "
        "`asyncrl init-model` makes a folder with an example"
    )
    try:
        prompt = chat.render([QUESTION], tools, True)
    except Exception as error:
        raise ValueError(
            f"{where}: the chat template refuses the environment's tools: {error}. {advice}"
        ) from error
    missing = [
        name for name in (tool.get("function", tool).get("name") for tool in tools) if str(name) not in prompt
    ]
    if missing:
        raise ValueError(f"{where}: the chat template does not show the tools {', '.join(missing)}. {advice}")
    try:
        shown = _answer_in(chat)
    except Exception as error:
        raise ValueError(f"{where}: the chat template refuses a tool's answer: {error}. {advice}") from error
    if not shown:
        raise ValueError(f"{where}: the chat template leaves a tool's answer out. {advice}")
    if chat.calls is None:
        printed = chat.turn_text([QUESTION, CALL], [TOOL])
        what = f"prints tool calls as {printed!r}" if PROBE[0] in printed else "leaves tool calls out"
        raise ValueError(
            f"{where}: the chat template {what}. Calls in Hermes' and Llama 3's formats can be read; those of "
            "other model families by the library renderers (pip install 'asyncrl[renderers]'), if one of its "
            f"families makes this template's prompts, token for token. {advice}"
        )


def attempt(render: Callable[[], T]) -> T | None:
    """What a template makes of a probe; None if it refuses, whatever it raises."""
    try:
        return render()
    except Exception:  # A template is a program, and may refuse with whatever its author raises.
        return None


def _answer_in(chat: ChatFormat) -> bool:
    return str(ANSWER["content"]) in chat.render([QUESTION, CALL, ANSWER], [TOOL], True)


def _answer_shown(chat: ChatFormat) -> bool:
    return bool(attempt(lambda: _answer_in(chat)))


def _case(chat: ChatFormat, said: Message, new: Message) -> Case:
    tools = [TOOL] if "tool_calls" in said else []
    before = [QUESTION, said]
    try:
        turn = chat.turn_ids(before, tools) or chat.encode(chat.turn_text(before, tools))
        suffix = chat.suffix_ids(before, True, [new], tools, turn=turn)
    except Exception:  # As in `attempt`; and the library's families assert.
        return "refused"
    return "fork" if suffix is None else "appended"
