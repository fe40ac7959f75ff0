"""Messages to token ids and back, by the model's own chat template.

The one place that the rest of the system asks. Sampled ids are never re-tokenised: a later turn is appended as a
suffix (`asyncrl.chat_template`), or, where the template renders earlier turns anew, begins a new branch of the
record. Tool calls are read by `asyncrl.tool_calls`; for model families that it does not know, turns are read and
continued by `asyncrl.chat_renderers`. No torch. Called by the generators' episode loop, `asyncrl.toy`, supervised
training and the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl import chat_probe, chat_renderers, neutral, tool_calls
from asyncrl.chat_probe import CALL, CONVERSATIONS, QUESTION, TOOL, Probe, attempt
from asyncrl.chat_renderers import Family
from asyncrl.chat_template import ChatTemplate

Message = dict[str, Any]
PROMPTS_KEPT = 1024
"""Rendered prompts that are remembered."""


class ChatFormat:
    """A tokenizer with its chat template.

    Args:
        path: Hugging Face folder with `tokenizer.json`, and a chat template.
        renderer: who reads turns and appends to them. "auto": this project's own code if it can read the calls
            that the template prints, so that a run does not depend on what else is installed; otherwise a family
            of the library `renderers`, if that is installed and makes the same ids as the template. "template":
            never the library. Otherwise the name of one of its families, such as "qwen3", which parts reasoning
            from content.

    Raises:
        FileNotFoundError: the folder holds no `tokenizer.json`.
        ValueError: the tokenizer has no chat template, or no token that ends a turn; or the renderer cannot be
            used.
    """

    def __init__(self, path: str | Path, renderer: str = "auto") -> None:
        self._template = ChatTemplate(path)
        self._tokenizer = self._template.tokenizer
        self._prompts: dict[str, list[int]] = {}
        self._checked: set[str] = set()
        self._special, self._markup = neutral.control_ids(self._tokenizer)
        self._reader, printed = self._find_reader()
        self._family: Family | None = None
        if renderer not in ("auto", "template") or (renderer == "auto" and printed and self._reader is None):
            self._family, self._reader = self._find_family(renderer), None
        family_stops = self._family.stop_ids if self._family else []
        self.end_id: int = self._template.end_id
        """The token that the template puts after an assistant message."""
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*self._template.stop_ids, *family_stops}))
        """Sampling any of these ends an assistant turn: end of turn, and end of text. Sorted."""
        added = self._tokenizer.added_tokens_decoder.items()
        kept = {i for i, token in added if token.content in tool_calls.MARKERS}
        self._dropped = (self._special.ids | {*self.stop_token_ids}) - kept
        prompt = attempt(lambda: self.render([QUESTION], (), True)) or ""
        self._opens_reasoning = prompt.rstrip().endswith(tool_calls.THINK)

    # ---- messages to ids -------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a conversation, up to and including the header of the assistant's next turn."""
        if any(message.get("role") == "assistant" for message in messages):
            return self.encode(self.render(messages, tools, True))
        # The episodes of a group begin with one prompt, and rendering it costs as much as a turn of a tiny model.
        key = json.dumps([messages, tools], default=str)
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = self.encode(self.render(messages, tools, True))
        return list(self._prompts[key])

    def suffix_ids(
        self,
        messages_before: Sequence[Message],
        assistant_ended: bool,
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        turn: Sequence[int] | None = None,
    ) -> list[int] | None:
        """What follows a sampled assistant turn: its closing, the new messages, the next turn's header.

        Args:
            messages_before: the conversation, whose last message is the sampled turn.
            assistant_ended: whether the turn's last sampled id ended it; otherwise the suffix closes it.
            new_messages: the environment's answer.
            tools: the tools that the conversation began with.
            turn: the sampled ids. Only the library's families look at them, and append nothing without: in some,
                the token that ends a turn is the first of the next message.

        Returns:
            The ids to append to the record, or None if the template is not prefix-preserving here: if it renders
            the earlier turns differently once new messages follow, or leaves out what the turn said. The caller
            then begins a new branch of the record with the prompt of all messages.
        """
        if self._family is not None and turn is not None:
            prompt = self.prompt_ids(messages_before[:-1], tools)
            return self._family.suffix(prompt, turn, new_messages, tools)
        return self._template.suffix_ids(messages_before, assistant_ended, new_messages, tools)

    def turn_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int] | None:
        """The ids of the last message, the assistant's, as if they had been sampled: content, calls, and end.

        None if the template renders the conversation before it differently, or does not end the turn.
        """
        return self._template.turn_ids(messages, tools)

    def conversation_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a whole conversation, as the template renders it; no turn follows."""
        return self.encode(self.render(messages, tools, False))

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        """The template's text; `prompt`: with the header of the assistant's next turn."""
        return self._template.render(messages, tools, prompt)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: no special token is added."""
        return self._template.encode(text)

    # ---- ids to messages -------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens dropped."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def message(self, ids: Sequence[int], tools: Sequence[dict[str, Any]] | None = None) -> Message:
        """The assistant message that the sampled ids of one turn spell.

        Args:
            ids: the turn, its end included or not.
            tools: the conversation's tools. If there are none, nothing is taken for a call; None: not known.

        Returns:
            `content`; `tool_calls` if there are calls, content then being the text outside them;
            `malformed_calls`, texts that say what is wrong, if there are calls that cannot be read. Their raw
            text stays in content, and well-formed calls beside them stay calls. Reasoning stays in content,
            `<think>` and all, and calls in it are none; only a family of the library parts it from content, into
            `reasoning_content`.
        """
        if self._family is not None:
            return self._family.message(ids, tools or ())
        text = str(self._tokenizer.decode([i for i in ids if i not in self._dropped], skip_special_tokens=False))
        message: Message = {"role": "assistant", "content": text}
        if self._reader is None or (tools is not None and not tools):
            return message
        start = tool_calls.after_reasoning(text, self._opens_reasoning)
        reading = tool_calls.FORMATS[self._reader](text, start)
        message["content"] = reading.content
        if reading.calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(reading.calls)
            ]
        if reading.malformed:
            message["malformed_calls"] = reading.malformed
        return message

    # ---- what comes from outside -----------------------------------------------------------------

    def neutral(self, message: Message) -> Message:
        """A message whose texts spell no control token: each is broken up by a space, and stays readable.

        In a tool's message those are all tokens that the tokenizer has added and that look like markup
        (`<tool_call>`, `</think>`); in others, and in a tool's schema, only the special ones.
        """
        forbidden = self._markup if message.get("role") == "tool" else self._special
        return neutral.neutral(self._tokenizer, message, forbidden)

    def cut(self, text: str, limit: int) -> str:
        """The text if it has at most `limit` tokens; otherwise a beginning and a notice, so many together."""
        return neutral.cut(self._tokenizer, text, limit)

    # ---- what the template can do ----------------------------------------------------------------

    @property
    def calls(self) -> str | None:
        """The format of tool calls that `message` reads: hermes, llama3, or the library's family; None: none."""
        return self._reader or (f"{self._family.name} (renderers)" if self._family else None)

    def probe(self, tools: bool = True) -> Probe:
        """What the template can do, for the first lines of a run; `tools`: whether the run has any."""
        return chat_probe.probe(self, tools)

    def check_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Refuses to work with tools that the template cannot show, or whose calls cannot be read.

        Raises:
            ValueError: which of these it is, in which file, and what to do.
        """
        key = json.dumps(tools)
        if key not in self._checked:
            chat_probe.check_tools(self, self._template.file, tools)
            self._checked.add(key)  # Every episode asks, mostly about the same tools.

    def turn_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """What the template prints for the last message, roughly: without its header, and without its end."""
        return self._template.turn_text(messages, tools)

    def _find_reader(self) -> tuple[str | None, bool]:
        """The format in which the template prints a call, if it can be read here; and whether it prints any.

        Finds out on the way how the template wants arguments: as objects, or as the text of their JSON.
        """
        printed: dict[bool, str] = {}
        for as_text in (False, True):
            self._template.text_arguments = as_text
            printed[as_text] = attempt(lambda: self.turn_text([QUESTION, CALL], [TOOL])) or ""
            reader = tool_calls.recognise(printed[as_text])
            if reader is not None:
                return reader, True
        self._template.text_arguments = not printed[False] and bool(printed[True])
        return None, tool_calls.PROBE[0] in printed[False] + printed[True]

    def _find_family(self, renderer: str) -> Family | None:
        """A family of the library that fits the template, or the one that is asked for."""
        probes = []
        for talk in CONVERSATIONS:
            ids = attempt(lambda talk=talk: self.prompt_ids(talk, [TOOL]))  # type: ignore[misc]
            if ids is not None:
                probes.append((talk, [TOOL], ids))
        if renderer != "auto":
            return chat_renderers.named(renderer, self._tokenizer, probes)
        try:
            return chat_renderers.find(self._tokenizer, probes)
        except ModuleNotFoundError:  # The library is optional; where it is needed, `check_tools` says so.
            return None
