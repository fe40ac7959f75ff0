"""Model families whose turns need more than a template: read and continued by the library `renderers`.

A chat template only prints. It cannot say where the calls of GLM's or Qwen 3.5's XML are in what a model has
said, and where a family ends its turns with the next speaker's token (GLM) the difference of two renderings is no
suffix. The library (Prime Intellect, Apache 2.0, `pip install 'asyncrl[renderers]'`) has that knowledge by hand,
per family.

It knows a family only by the exact name of its model on the hub, which a local folder does not have. So its
families are tried here: one is used only if it gives exactly the token ids of the folder's own template for
conversations with tools, a call, and its answer. The template stays the truth for prompts; the
library reads turns and appends to them. It is loaded only where the template's calls cannot be read without it.
Called by `asyncrl.chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Rendered = tuple[list[Message], list[dict[str, Any]], list[int]]
"""Messages, tools, and the ids of the prompt that the template makes of them."""

UNTRIED = {"gpt-oss"}
"""Families that fetch files when they are made, so they are used only where they are asked for by name."""
COMPLAINTS = {
    "invalid_json": "is no valid JSON",
    "unclosed_block": "is not closed",
    "missing_name": "names no tool",
    "malformed_structure": "is not in the model's format",
}


class Family:
    """One of the library's renderers, made for a tokenizer."""

    def __init__(self, name: str, renderer: Any, prompt: list[int]) -> None:
        self.name = name
        self.stop_ids: list[int] = [int(i) for i in renderer.get_stop_token_ids()]
        self._renderer = renderer
        self._prompt = prompt

    def message(self, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> Message:
        """The message that a turn spells; reasoning is parted from it into `reasoning_content`.

        Args:
            ids: the turn, as sampled.
            tools: the conversation's tools; XML formats do not say what is a number and what a text, schemas do.
        """
        # Whether the prompt has opened the reasoning decides how a turn is read; the end of any prompt tells it.
        said = self._renderer.parse_response(list(ids), tools=list(tools) or None, prompt_ids=self._prompt)
        message: Message = {"role": "assistant", "content": said.content}
        if said.reasoning_content:
            message["reasoning_content"] = said.reasoning_content
        calls: list[dict[str, Any]] = []
        malformed: list[str] = []
        for call in said.tool_calls:
            if call.status in ("ok", "unknown_tool") and call.name and isinstance(call.arguments, dict):
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": call.id or f"call_{len(calls)}", "type": "function", "function": function})
            else:
                complaint = COMPLAINTS.get(str(call.status), "has arguments that are no object")
                malformed.append(f"a tool call {complaint}: {call.raw.strip()[:80]!r}")
                message["content"] += call.raw
        return (
            message
            | ({"tool_calls": calls} if calls else {})
            | ({"malformed_calls": malformed} if malformed else {})
        )

    def suffix(
        self, prompt: list[int], turn: Sequence[int], new: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """The ids that follow a turn, or None where the family renders earlier turns anew."""
        bridge = self._renderer.bridge_to_next_turn(prompt, list(turn), list(new), tools=list(tools) or None)
        if bridge is None:
            return None
        before = [*prompt, *turn]
        ids = [int(i) for i in bridge.token_ids]
        return ids[len(before) :] if ids[: len(before)] == before else None


def find(tokenizer: Any, probes: Sequence[Rendered]) -> Family | None:
    """The first of the library's families that makes the template's ids of all probes; None if there is none.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    return next(
        (f for name in families() if name not in UNTRIED and (f := _matching(name, tokenizer, probes))), None
    )


def named(name: str, tokenizer: Any, probes: Sequence[Rendered]) -> Family:
    """The family of this name.

    Raises:
        ValueError: the library is not installed, has no such family, or its ids are not the template's.
    """
    try:
        known = families()
    except ModuleNotFoundError as error:
        raise ValueError(f"renderer = {name!r}: {error}; pip install 'asyncrl[renderers]'") from error
    if name not in known:
        raise ValueError(f"renderer = {name!r}: must be auto, template, or one of {', '.join(known)}")
    family = _matching(name, tokenizer, probes)
    if family is None:
        raise ValueError(
            f"renderer = {name!r}: this family makes other token ids than the model's own chat template; "
            "use renderer = 'auto', which takes a family only if it fits"
        )
    return family


def families() -> list[str]:
    """The names of all families.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    from renderers.base import MODEL_RENDERER_MAP

    return sorted(set(MODEL_RENDERER_MAP.values()))


def _matching(name: str, tokenizer: Any, probes: Sequence[Rendered]) -> Family | None:
    from renderers import config_from_name, create_renderer

    config = config_from_name(name)
    # Models of one family differ in whether they think by default, which the library knows only by their names.
    ways = [{}, {"enable_thinking": False}] if hasattr(config, "enable_thinking") else [{}]
    for way in ways:
        # A family asserts, each in its own way, that the tokenizer has its tokens; a refusal means: it is another
        # one.
        try:
            renderer = create_renderer(tokenizer, type(config)(**way))
            fits = all(
                list(renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)) == ids
                for messages, tools, ids in probes
            )
        except Exception:  # The refusal: see above.
            continue
        if fits and probes:
            return Family(name, renderer, probes[0][2])
    return None
