"""Texts that come from outside, made safe for a prompt: no control token in them, and not too long.

A tool's answer that says `<|im_end|>` would otherwise end its own message, and go on as whoever it likes. A space
put behind the token's first character makes it plain text that is still readable: `< |im_end|>`. What counts as a
control token is the tokenizer's own view of the text, not a list of patterns. Called by `asyncrl.chat`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

LONGEST_TOKEN = 128
"""Characters. Of a text to cut, no more for each token of the limit are looked at: encoding takes time."""
_BREAKS = 4
"""Rounds of breaking tokens up, before what is left of them is taken out."""


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Tokens that no text from outside may be encoded to."""

    ids: frozenset[int]
    texts: tuple[str, ...] | None
    """A text without any of these is encoded to none of the tokens; None: that cannot be told from the text."""

    @classmethod
    def of(cls, tokens: dict[int, Any]) -> Forbidden:
        """The given added tokens, by id. One that is looked for in normalised text may be spelled otherwise."""
        literal = not any(token.normalized for token in tokens.values())
        return cls(frozenset(tokens), tuple(token.content for token in tokens.values()) if literal else None)

    def absent(self, text: str) -> bool:
        """Whether a text certainly spells none of them; encoding it, to be sure, takes thirty times longer."""
        return self.texts is not None and not any(token in text for token in self.texts)


def control_ids(tokenizer: Any) -> tuple[Forbidden, Forbidden]:
    """A tokenizer's special tokens; and these and all other added tokens that look like markup.

    The second set holds `<tool_call>` or `</think>`, which tokenizers add without calling them special. Added
    tokens that are words or white space mark nothing.
    """
    added = tokenizer.added_tokens_decoder
    special = {i: token for i, token in added.items() if token.special}
    markup = {i: t for i, t in added.items() if t.content.strip() and not t.content.strip()[0].isalnum()}
    return Forbidden.of(special), Forbidden.of(special | markup)


def neutral(tokenizer: Any, message: dict[str, Any], forbidden: Forbidden) -> dict[str, Any]:
    """A message in which no text is encoded to a forbidden id; its own `role` and keys are left alone."""
    return {k: v if k == "role" else _neutral(tokenizer, v, forbidden) for k, v in message.items()}


def cut(tokenizer: Any, text: str, limit: int) -> str:
    """The text, or its beginning and a notice, together at most `limit` tokens.

    A limit too small for the notice leaves only a beginning of the text.
    """
    head = text[: limit * LONGEST_TOKEN]
    ids, spans = _encoded(tokenizer, head)
    if len(head) == len(text) and len(ids) <= limit:
        return text
    size = f"{len(ids)} tokens, the limit is {limit}"
    if len(head) < len(text):
        size = f"{len(text)} characters, the limit is {limit} tokens"
    notice = f"\n[cut: {size}]"
    kept = limit - len(_encoded(tokenizer, notice)[0])
    if kept < 0:
        notice, kept = "", limit
    for last in range(min(kept, len(ids)) - 1, -1, -1):
        shorter = head[: spans[last][1]] + notice
        # The last character may need the tokens behind the cut too, and the seam may be encoded otherwise.
        if len(_encoded(tokenizer, shorter)[0]) <= limit:
            return shorter
    return notice.lstrip()


def _neutral(tokenizer: Any, value: Any, forbidden: Forbidden) -> Any:
    """A part of a message: also its keys, for a call's arguments have those that the model likes."""
    if isinstance(value, str):
        return _neutral_text(tokenizer, value, forbidden)
    if isinstance(value, dict):
        return {_neutral(tokenizer, k, forbidden): _neutral(tokenizer, v, forbidden) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_neutral(tokenizer, item, forbidden) for item in value]
    return value


def _neutral_text(tokenizer: Any, text: str, forbidden: Forbidden) -> str:
    for attempt in count():
        if forbidden.absent(text):
            return text
        ids, spans = _encoded(tokenizer, text)
        found = [span for i, span in zip(ids, spans, strict=True) if i in forbidden.ids]
        if not found:
            return text
        pieces, position = [], 0
        for start, end in found:
            pieces += [text[position:start], _broken(text[start:end]) if attempt < _BREAKS else ""]
            position = end
        text = "".join([*pieces, text[position:]])
    raise AssertionError("count() has no end")


def _broken(token: str) -> str:
    """The token's text with a space behind its first character; a token of one character cannot be broken."""
    # Tokens may take the white space around them along.
    text = token.strip()
    return token.replace(text, f"{text[0]} {text[1:]}", 1) if len(text) > 1 else ""


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a text, and for each the characters that it stands for."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoding["input_ids"], encoding["offset_mapping"]
