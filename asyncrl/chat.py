"""Messages to token ids and back, by the model's own chat template.

The one place that knows a tokenizer. Sampled ids are never re-tokenised: a later turn is appended as a
suffix, the difference between two renderings of the template (reference: "Agentic RL: token-in token-out
done right", Hugging Face, 2025). It does not parse tool calls or reasoning, and does not import torch.
Called by the generators' episode loop, `asyncrl.toy` and the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]
PROMPTS_KEPT = 1024
"""Rendered prompts that are remembered."""
_PROBE = "probe-of-the-end-of-turn"


class ChatFormat:
    """A tokenizer with its chat template.

    Args:
        path: Hugging Face folder with `tokenizer.json`, and a chat template.

    Raises:
        FileNotFoundError: the folder holds no `tokenizer.json`.
        ValueError: the tokenizer has no chat template, or no token that ends a turn.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._path = Path(path).expanduser()
        self._prompts: dict[str, list[int]] = {}
        if not (self._path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"model.path = {str(path)!r}: no tokenizer.json there; it must be a Hugging Face folder "
                f"with a fast tokenizer. `asyncrl init-model {path}` makes a tiny one."
            )
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(self._path)
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"model.path = {str(path)!r}: its tokenizer has no chat template. Use the model's "
                f"instruction-tuned version, or put a chat_template.jinja into the folder."
            )
        self._end = self._end_of_turn()
        self.end_id: int = int(self._tokenizer.convert_tokens_to_ids(self._end))
        """The token that the template puts after an assistant message."""
        self.stop_token_ids: tuple[int, ...] = self._stop_ids()
        """Sampling any of these ends an assistant turn: end of turn, and end of text. Sorted."""

    # ---- messages to ids -------------------------------------------------------------------------

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a conversation, up to and including the header of the assistant's next turn."""
        # The episodes of a group begin with one prompt, and rendering it costs as much as a turn of a tiny model.
        key = json.dumps([messages, tools], default=str)
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = self._encode(self._render(messages, tools, True))
        return list(self._prompts[key])

    def suffix_ids(
        self,
        messages_before: Sequence[Message],
        assistant_ended: bool,
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int] | None:
        """What follows a sampled assistant turn: its closing, the new messages, the next turn's header.

        Args:
            messages_before: the conversation, whose last message is the sampled turn.
            assistant_ended: whether the turn's last sampled id ended it; otherwise the suffix closes it.
            new_messages: the environment's answer.
            tools: the tools that the conversation began with.

        Returns:
            The ids to append to the record, or None if the template is not prefix-preserving: if it
            renders the earlier turns differently once new messages follow.
        """
        before = self._render(messages_before, tools, False)
        after = self._render([*messages_before, *new_messages], tools, True)
        sampled, end, closing = before.rpartition(self._end)
        if not after.startswith(before) or not end or closing.strip():
            return None
        return self._encode(after[len(sampled) + (len(end) if assistant_ended else 0) :])

    def turn_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int] | None:
        """The ids of the last message, the assistant's, as if they had been sampled: its content and its end.

        None if the template renders the conversation before it differently, or does not end the turn.
        """
        before = self._render(messages[:-1], tools, True)
        after = self._render(messages, tools, False)
        content, end, closing = after.removeprefix(before).rpartition(self._end)
        if not after.startswith(before) or not end or closing.strip():
            return None
        return self._encode(content + end)

    def conversation_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a whole conversation, as the template renders it; no turn follows."""
        return self._encode(self._render(messages, tools, False))

    # ---- ids to messages -------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens dropped."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def message(self, ids: Sequence[int]) -> Message:
        """The assistant message that the sampled ids of one turn spell."""
        return {"role": "assistant", "content": self.decode(ids)}

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: no special token is added."""
        return self._encode(text)

    # ---- the template ----------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special_ids(self) -> set[int]:
        return {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def _end_of_turn(self) -> str:
        """The text of the special token that the template puts after an assistant message."""
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        tail = self._encode(self._render(probe, (), False).rpartition(_PROBE)[2])
        ends = [i for i in tail if i in self._special_ids()]
        if ends:
            return str(self._tokenizer.convert_ids_to_tokens(ends[0]))
        if self._tokenizer.eos_token is None:
            raise ValueError(
                f"model.path = {str(self._path)!r}: neither its chat template nor its tokenizer has a token "
                f"that ends an assistant turn, so sampling would never stop. "
                f"Set eos_token in tokenizer_config.json."
            )
        return str(self._tokenizer.eos_token)

    def _stop_ids(self) -> tuple[int, ...]:
        stops = {self.end_id, self._tokenizer.eos_token_id}
        generation = self._path / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            stops.update(eos if isinstance(eos, list) else [eos])
        return tuple(sorted(stop for stop in stops if stop is not None))
