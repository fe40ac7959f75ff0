"""Texts that come from outside, made safe for a prompt: no control token in them, and not too long.

A tool's answer that says `<|im_end|>` would otherwise end its own message, and go on as whoever it likes. A space
put behind the token's first character makes it plain text that is still readable: `< |im_end|>`. What counts as a
control token is the tokenizer's own view of the text, not a list of patterns. Called by `asyncrl.chat`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any

LONGEST_TOKEN = 128
"""Characters. Of a text to cut, no more for each token of the limit are looked at: encoding takes time."""
_BREAKS = 4
"""Rounds of breaking tokens up, before what is left of them is taken out."""


def control_ids(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The ids of a tokenizer's special tokens; and of these and all other added tokens that look like markup.

    The second set holds `<tool_call>` or `</think>`, which tokenizers add without calling them special. Added
    tokens that are words or white space mark nothing.
    """
    added = tokenizer.added_tokens_decoder
    special = frozenset(i for i, token in added.items() if token.special)
    markup = {i for i, token in added.items() if token.content.strip() and not token.content.strip()[0].isalnum()}
    return special, special | markup


def neutral(tokenizer: Any, value: Any, forbidden: Collection[int]) -> Any:
    """A message, or a part of one, in which no text is encoded to a forbidden id; its `role` is left alone."""
    if isinstance(value, str):
        return _neutral_text(tokenizer, value, forbidden)
    if isinstance(value, dict):
        return {k: v if k == "role" else neutral(tokenizer, v, forbidden) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [neutral(tokenizer, item, forbidden) for item in value]
    return value


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


def _neutral_text(tokenizer: Any, text: str, forbidden: Collection[int]) -> str:
    for attempt in count():
        ids, spans = _encoded(tokenizer, text)
        found = [span for i, span in zip(ids, spans, strict=True) if i in forbidden]
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
