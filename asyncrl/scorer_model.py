"""The reward model: conversations in, one score each out. What the scorer computes, without its sockets.

A conversation is rendered by the model's own chat template, so the policy's tokenizer does not matter. Several are
computed as one batch, padded on the right. Called by `asyncrl.scorer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from asyncrl.chat import ChatFormat
from asyncrl.messages import Score, Scored

Conversation = list[dict[str, Any]]


class Unscorable(ValueError):
    """A conversation has no score; the text says why."""


class RewardModel:
    """A sequence classifier with one output, in the precision it was saved in.

    Args:
        path: its Hugging Face folder, with tokenizer and chat template.
        device: torch device.

    Raises:
        ValueError: it is no such model, or its tokenizer has no chat template.
        OSError: the folder cannot be read.
    """

    def __init__(self, path: str, device: str) -> None:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype="auto", output_loading_info=True
        )
        if model.config.num_labels != 1 or loading["missing_keys"]:
            lacks = f" and lacks {', '.join(sorted(loading['missing_keys']))}" if loading["missing_keys"] else ""
            raise ValueError(
                f"{path} has {model.config.num_labels} outputs{lacks}; a reward model is a trained sequence "
                "classifier with one output"
            )
        self._model = model.to(device).eval()
        self._chat = ChatFormat(path)
        text = model.config.get_text_config()
        self._pad_id: int | None = text.pad_token_id
        self._most = _positions(model)
        self._ids: int = model.get_input_embeddings().num_embeddings

    def tokens(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation, as the chat template renders it.

        Raises:
            Unscorable: the template cannot render it, it is longer than the model has positions for, or the
                tokenizer knows more tokens than the model.
        """
        try:
            ids = self._chat.conversation_ids(conversation)
        except Exception as error:  # Templates are programs and raise what they like, about messages of any shape.
            raise Unscorable(f"the chat template raised {type(error).__name__}: {error}") from error
        if not ids or (self._most is not None and len(ids) > self._most):
            raise Unscorable(f"it has {len(ids)} tokens, and the reward model takes 1 to {self._most}")
        if max(ids) >= self._ids:  # On a GPU this would end the process, and every one that tries it again.
            raise Unscorable(f"it has the token {max(ids)}, and the reward model has embeddings of {self._ids}")
        return ids

    def answers(self, requests: Sequence[Score]) -> list[Scored]:
        """Scores a batch; whatever is wrong with one conversation concerns its own answer only."""
        found: dict[int, float | Unscorable] = {}
        rows: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            try:
                rows[i] = self.tokens(request.conversation)
            except Unscorable as error:
                found[i] = error
        if rows:
            found |= zip(rows, self._scores(list(rows.values())), strict=True)
        return [_answer(request.request, found[i]) for i, request in enumerate(requests)]

    def _scores(self, rows: Sequence[list[int]]) -> Sequence[float | Unscorable]:
        """The model's output for each row of ids; rows that cannot be computed together are halved.

        Raises:
            RuntimeError: the device failed, after which it computes nothing any more.
        """
        try:
            return self._forward(rows)
        except torch.OutOfMemoryError as error:
            reason = f"its {len(rows[0])} tokens do not fit into the scorer's memory: {error}"
        except Exception as error:  # A model is a program too; which row it fails on, only the rows can tell.
            if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
                raise
            reason = f"the reward model raised {type(error).__name__}: {error}"
        # Out here, for within `except` the error would keep the memory of the failed attempt.
        if len(rows) == 1:
            return [Unscorable(reason)]
        half = len(rows) // 2
        return [*self._scores(rows[:half]), *self._scores(rows[half:])]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        ids = torch.full((len(rows), max(map(len, rows))), self._padding(rows))
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        device = self._model.device
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return [float(score) for score in logits[:, 0].float().cpu()]

    def _padding(self, rows: Sequence[list[int]]) -> int:
        """The id that fills up short rows: the model's own, else one that ends no row.

        transformers reads the output at the last token that differs from the model's padding id. A model without
        one reads it at the last token of all, which a filler that ends no row leaves as it is.
        """
        if self._pad_id is not None:
            return self._pad_id
        ends = {row[-1] for row in rows}
        filler = next(i for i in count() if i not in ends)
        self._model.config.get_text_config().pad_token_id = filler
        return filler


def _positions(model: Any) -> int | None:
    """Most tokens that a model takes; None: it does not say.

    Models of RoBERTa's kind count positions from the one after `padding_idx`, so they have fewer than rows.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _answer(request: int, found: float | Unscorable) -> Scored:
    if isinstance(found, Unscorable):
        return Scored(request, None, str(found))
    if not math.isfinite(found):
        return Scored(request, None, f"the reward model's output is {found}")
    return Scored(request, found)
