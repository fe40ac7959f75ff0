"""A tokenizer's chat template, and what may be concluded from its renderings.

Ids of a later turn are the difference between two renderings (reference: "Agentic RL: token-in token-out done
right", Hugging Face, 2025). A difference of texts is one of ids only behind a special token, for nothing merges
with that: it begins right at the token that ends the assistant's turn, or there is none. No torch. Called by
`asyncrl.chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.tool_calls import END_OF_THINK

Message = dict[str, Any]
_END_PROBE = "probe-of-the-end-of-turn"


class ChatTemplate:
    """The tokenizer and template of a Hugging Face folder; arguments and errors are those of `ChatFormat`."""

    def __init__(self, path: str | Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self.folder = Path(path).expanduser()
        self.text_arguments = False
        """Whether calls' arguments are given to the template as the text of their JSON, as some want them."""
        if not (self.folder / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"model.path = {str(path)!r}: no tokenizer.json there; it must be a Hugging Face folder "
                f"with a fast tokenizer. `asyncrl init-model {path}` makes a tiny one."
            )
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"model.path = {str(path)!r}: its tokenizer has no chat template. Use the model's "
                f"instruction-tuned version, or put a chat_template.jinja into the folder."
            )
        self.end = self._end_of_turn()
        self.end_id: int = int(self.tokenizer.convert_tokens_to_ids(self.end))
        self.stop_ids = self._stop_ids()
        self._ends = re.compile(
            "|".join(re.escape(t) for t in self.tokenizer.convert_ids_to_tokens(self.stop_ids))
        )

    @property
    def file(self) -> Path:
        """Where the template is written."""
        jinja = self.folder / "chat_template.jinja"
        return jinja if jinja.is_file() else self.folder / "tokenizer_config.json"

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        """The template's text; `prompt`: with the header of the assistant's next turn."""
        said = [_with_text_arguments(m) for m in messages] if self.text_arguments else list(messages)
        return str(
            self.tokenizer.apply_chat_template(
                said, tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False
            )
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special token is added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def suffix_ids(
        self, before: Sequence[Message], ended: bool, new: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """The ids that follow the last message before, a turn that ended or not; see `ChatFormat.suffix_ids`."""
        earlier = self.render(before, tools, False)
        later = self.render([*before, *new], tools, True)
        end = self._last_end(earlier)
        position = self._end_in_history(before, tools, earlier, later, end) if end else None
        if end is None or position is None:
            return None
        ids = self.encode(later[position:])
        if ids[:1] != self.encode(end[0]):
            return None
        return ids[1:] if ended else ids

    def turn_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int] | None:
        """The ids of the last message as if they had been sampled; see `ChatFormat.turn_ids`."""
        before = self.render(messages[:-1], tools, True)
        after = self.render(messages, tools, False)
        end = self._last_end(after)
        if not after.startswith(before) or end is None or end.start() < len(before):
            return None
        # Behind a special token, as it is in the whole: some tokenizers begin a text with a space of their own.
        return self.encode(self.end + after[len(before) : end.end()])[1:]

    def turn_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """What the template prints for the last message, roughly: without its header, and without its end."""
        after = self.render(messages, tools, False)
        turn = after[_shared(self.render(messages[:-1], tools, True), after) :]
        end = self._last_end(turn)
        return turn[: end.start()] if end else turn

    # ---- machinery -------------------------------------------------------------------------------

    def _end_in_history(
        self,
        before: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        earlier: str,
        later: str,
        end: re.Match[str],
    ) -> int | None:
        """Where the turn ends in the rendering with new messages; None if more than its end has changed."""
        turn = before[-1]
        if later.startswith(earlier) and not _may_lose(turn):
            return end.start()
        prompt = self.render(before[:-1], tools, True)
        shared = _shared(prompt, earlier)
        said = earlier[shared : end.start()]
        if later.startswith(earlier):
            return end.start() if _says(said, turn) else None
        # A template may put something before the last turn (an empty `<think></think>`) that it leaves out once
        # others follow. The record does not have it either, for it was not sampled: only the turn itself must be
        # the same.
        position = later.find(end[0], len(prompt))
        if shared < len(prompt) or not later.startswith(prompt) or position < 0:
            return None
        kept = later[len(prompt) : position]
        return position if said.endswith(kept) and _says(kept, turn) else None

    def _last_end(self, text: str) -> re.Match[str] | None:
        """The token that ends the text's last turn, if nothing follows it but white space and an end of text."""
        last, behind = None, len(text)
        for match in reversed([*self._ends.finditer(text)]):
            if text[match.end() : behind].strip():
                break
            last, behind = match, match.start()
        return last

    def _end_of_turn(self) -> str:
        """The text of the special token that the template puts after an assistant message."""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _END_PROBE}]
        tail = self.encode(self.render(probe, (), False).rpartition(_END_PROBE)[2])
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        ends = [i for i in tail if i in special]
        if ends:
            return str(self.tokenizer.convert_ids_to_tokens(ends[0]))
        if self.tokenizer.eos_token is None:
            raise ValueError(
                f"model.path = {str(self.folder)!r}: neither its chat template nor its tokenizer has a token "
                f"that ends an assistant turn, so sampling would never stop. "
                f"Set eos_token in tokenizer_config.json."
            )
        return str(self.tokenizer.eos_token)

    def _stop_ids(self) -> list[int]:
        stops: set[int | None] = {self.end_id, self.tokenizer.eos_token_id}
        generation = self.folder / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            stops.update(eos if isinstance(eos, list) else [eos])
        return sorted(stop for stop in stops if stop is not None)


def _with_text_arguments(message: Message) -> Message:
    """The message with its calls' arguments as text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [
        call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        for call in calls
    ]
    return message | {
        "tool_calls": [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    }


def _may_lose(turn: Message) -> bool:
    """Whether a template is known to leave out parts of such a turn: reasoning, or the text beside calls."""
    return END_OF_THINK in str(turn.get("content")) or "reasoning_content" in turn or "tool_calls" in turn


def _says(text: str, turn: Message) -> bool:
    """Whether the template's text has all that the turn says outside its calls; white space does not count."""
    said = (turn[key] for key in ("reasoning_content", "content") if isinstance(turn.get(key), str))
    return all(_squeezed(part) in _squeezed(text) for part in said)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _squeezed(text: str) -> str:
    return "".join(text.split())
