"""The part that runs in vLLM's worker processes: loads staged weights into the model, shard by shard.

vLLM imports this module in every worker, because `worker_extension_cls` names it (reference: vLLM,
v1/worker/worker_base.py), before the model is loaded. It registers a `WeightTransferEngine`, the interface that
vLLM keeps stable from 0.29 to 0.33. Nothing is received here: the generator process has received and checked the
whole version, and the workers map the very same bytes (`asyncrl.weights.shared`), so that each copies no more
than its own shard and the pause holds no network. Within one process the tensors are handed over as they are.

Two things that vLLM 0.32 does on a CPU are repaired here, both measured:

* Linear layers keep their weights packed for the kernel and drop the originals, so `model.load_weights` alone
  raises; vLLM's layer-wise reload brings them back, loads and packs again.
* A head that is tied to the embedding is packed once, at the start, and layer-wise reload leaves that copy
  stale, silently. It is packed anew after each update.

Also here: a worker whose generator has been killed ends, together with the engine process between them, which
vLLM would leave running. (With data parallelism vLLM has one more process, its coordinator, which is not reached.)
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.generator.engines.vllm_settings import BACKEND
from asyncrl.messages import TensorMeta
from asyncrl.weights.buckets import size_of, views
from asyncrl.weights.shared import Mappings


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing has to be agreed beforehand."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """One whole version: tensors of this process, or where to map them."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    segments: list[tuple[str, list[tuple[str, str, list[int]]]]] = field(default_factory=list)
    """Address, and name, dtype and shape of each tensor in it."""


class StagedWeightTransfer(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Loads a staged version between `start_weight_update` and `finish_weight_update`."""

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._mappings = Mappings()

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Makes the model ready to be loaded layer by layer."""
        # What is there before and after: quantisation adds scales of its own, and a tied head that the reload
        # takes apart is no parameter that somebody sends.
        before = _names(self.model)
        initialize_layerwise_reload(self.model)
        self._expected = before & _names(self.model)

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Loads all tensors; the model's own loaders cut out this worker's shard.

        Raises:
            FileNotFoundError: the generator process, which holds the bytes, is gone.
            ValueError: a parameter got no value, or one that does not fit.
        """
        tensors = list(update_info.tensors)
        for address, metas in update_info.segments:
            bucket = [TensorMeta(*meta) for meta in metas]
            tensors += views([self._mappings.attach(address, size_of(bucket))], [bucket])
        loaded = self.model.load_weights(iter(tensors))
        if loaded is not None and (missing := sorted(self._expected - loaded)):
            raise ValueError(
                f"the new weights have no value for {', '.join(missing[:3])} ({len(missing)} parameters in all); "
                "the engine's model and the learner's are not the same"
            )

    def finish_weight_update(self) -> None:
        """Ends the reload; afterwards the model computes with the new weights only."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model, self.model_config.hf_text_config)

    def shutdown(self) -> None:
        """Lets go of the generator's staging buffers, which stay mapped from one update to the next."""
        self._mappings.clear()


class WorkerExtension:
    """Named by `worker_extension_cls` so that this module is imported; it adds no method to the worker."""


def _names(model: nn.Module) -> set[str]:
    """The model's parameters, as its loader names them."""
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}


def repack_tied_head(model: nn.Module, hf_config: Any) -> None:
    """Packs the LM head from the embedding's new weights, where the two are tied and the head has a copy."""
    head = getattr(model, "lm_head", None)
    if not getattr(hf_config, "tie_word_embeddings", False) or getattr(head, "cpu_linear", None) is None:
        return
    assert head is not None
    head.quant_method.process_weights_after_loading(head)


def end_with(owner: int) -> None:
    """Ends this worker when the process `owner` dies, and before it the engine process that started it."""
    started_by = os.getppid()

    def watch(owner_fd: int) -> None:
        death = select.poll()
        death.register(owner_fd, select.POLLIN)
        death.poll()
        if started_by != owner and os.getppid() == started_by:
            os.kill(started_by, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, args=(os.pidfd_open(owner),), name="owner-watch", daemon=True).start()


def _install() -> None:
    # At each update it warns of rotary tables, which are computed, and of the tied head, which is repaired
    # above; what really lacks a value is an error above.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    WeightTransferEngineFactory.register_engine(BACKEND, StagedWeightTransfer)
    owner = int(os.environ.get("ASYNCRL_ENGINE_OWNER", "0"))
    if owner not in (0, os.getpid()):
        end_with(owner)


_install()
