"""A Hugging Face causal language model on a slot cache: loading, the forward, weight updates, a start-up check.

It knows no requests and samples nothing: `TransformersEngine` does, and is the only caller. The model's own
forward runs unchanged, so scaled or capped logits, mixtures of experts and the like come out as they are;
only its attention goes elsewhere (`slots.py`). The check compares both ways on a few tokens, because an
attention that is not the standard causal one would otherwise give wrong log-probs silently.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from asyncrl.generator.engines.base import StagedWeights
from asyncrl.generator.engines.slots import SLOT_ATTENTION, Plan, SlotCache, UnsupportedModel

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest accepted difference of logits in the check, in units of their standard deviation."""


class SlotModel:
    """The model and its cache."""

    def __init__(self, model: Any, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Takes over `model` (or loads the folder it names) and checks it; see `TransformersEngine`."""
        self._model = _take_over(model, dtype, device)
        self.name = type(self._model).__name__
        config = self._model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", max_len)
        if max_len > positions:
            raise ValueError(
                f"max_model_len = {max_len} is beyond the model's {positions} positions "
                "(max_position_embeddings in its config.json); lower generator.max_model_len"
            )
        self.vocab = int(config.vocab_size)
        try:
            self.cache = SlotCache(config, slots, max_len, dtype, device)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{self.name} cannot run on slots: its configuration describes no attention "
                f"({error}); use another engine"
            ) from error
        self._check(dtype, torch.arange(7, 7 + min(6, max_len), device=device) % self.vocab)

    def logits(self, ids: Tensor, plan: Plan) -> Tensor:
        """One forward of a flat row; fills the cache.

        Args:
            ids: [tokens], int64, in the order of `plan.position`.
            plan: from `SlotCache.begin` or `begin_whole`, just made.

        Returns:
            [rows, vocab], float32: logits after each row's last token.
        """
        out = self._model(
            input_ids=ids[None],
            position_ids=plan.position[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=plan.last,
            slot_cache=self.cache,
        )
        logits: Tensor = out.logits[0]
        return logits.float()

    @torch.no_grad()
    def load(self, weights: StagedWeights) -> None:
        """Copies the tensors into the parameters, in place.

        Raises:
            ValueError: names or shapes are not those of `named_parameters()`; nothing was changed.
        """
        parameters = dict(self._model.named_parameters())
        _check_names(parameters, weights)
        for name, tensor in weights.tensors:
            parameters[name].copy_(tensor)

    @torch.inference_mode()
    def _check(self, dtype: torch.dtype, ids: Tensor) -> None:
        """Compares a short prefill and one decoded token with the model's plain forward; else raises."""
        name = self.name
        steps = torch.arange(len(ids), device=ids.device)
        cut = len(ids) - 1
        try:
            prefill = self.logits(ids[:cut], self.cache.begin([], [cut], steps[:cut]))
            layers = self.cache.running.layers
            decode = self.logits(ids[cut:], self.cache.begin([len(ids)], [], steps[cut:]))
        # Whatever a foreign forward raises on slots means that it does not run on them.
        except (UnsupportedModel, TypeError, AttributeError, RuntimeError) as error:
            raise UnsupportedModel(f"{name} cannot run on slots: {error}; use another engine") from error
        if layers != set(range(self.cache.layers)):
            raise UnsupportedModel(
                f"{name} cannot run on slots: of its {self.cache.layers} layers only {sorted(layers)} attend "
                "through transformers' AttentionInterface (others may be recurrent); use another engine"
            )
        self._model.set_attn_implementation("eager")
        plain = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        self._model.set_attn_implementation(SLOT_ATTENTION)
        difference = float((torch.cat((prefill, decode)) - plain[-2:]).abs().max() / plain.std())
        if not difference <= _TOLERANCE[dtype]:
            raise UnsupportedModel(
                f"{name} cannot run on slots: its logits differ from the plain forward's by {difference:.2g} "
                "standard deviations, so its attention is not the standard causal one; use another engine"
            )


def _take_over(model: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on `device`, in evaluation mode, with parameters in `dtype` and attention on slots."""
    if isinstance(model, (str, os.PathLike)):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # It would end up in a log file.
        model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    # Only parameters are cast: rotary frequencies are buffers, and would lose positions in half precision.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to(device).eval().requires_grad_(False)
    try:
        model.set_attn_implementation(SLOT_ATTENTION)
    except ValueError as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot run on slots: {error}") from error
    return model


def _check_names(parameters: dict[str, Any], weights: StagedWeights) -> None:
    """Raises ValueError unless `weights` holds each parameter once, in its shape."""
    names = [name for name, _ in weights.tensors]
    wrong = {
        "missing": sorted(parameters.keys() - set(names)),
        "unknown": sorted(set(names) - parameters.keys()),
        "given twice": sorted({name for name in names if names.count(name) > 1}),
        "of the wrong shape": [
            f"{name} {list(tensor.shape)}, expected {list(parameters[name].shape)}"
            for name, tensor in weights.tensors
            if name in parameters and parameters[name].shape != tensor.shape
        ],
    }
    if any(wrong.values()):
        found = "; ".join(f"{what}: {', '.join(which)}" for what, which in wrong.items() if which)
        raise ValueError(
            f"weights of version {weights.version} do not fit the engine's model ({found}); names must be "
            "those of the model's named_parameters(), a tied weight once under its first name"
        )
