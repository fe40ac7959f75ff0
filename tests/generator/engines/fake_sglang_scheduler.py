"""The scheduler of the fake SGLang server (`fake_sglang.py`, which says what is true of it and what is not).

A thread around asyncrl's embedded engine: commands between steps, in order, then a step. Its names and refusals
are those of SGLang 0.5.23 (`srt/managers/scheduler_components/weight_updater.py`, `srt/managers/scheduler.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import queue
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import rendezvous
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from asyncrl.generator.engines.base import SamplingParams, StagedWeights
from asyncrl.generator.engines.transformers import TransformersEngine


class Scheduler:
    """The engine's thread: commands between steps, then a step; tokens go to `emit(rid, delta, spans)`."""

    def __init__(self, args: argparse.Namespace, emit: Any) -> None:
        logging.disable_progress_bar()
        self._args, self._emit = args, emit
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype))
        self.engine = TransformersEngine(
            self.model,
            slots=args.max_running_requests,
            max_model_len=args.context_length - 6,
            dtype=getattr(torch, args.dtype),
            flush_tokens=1,
        )
        self.tags = [args.weight_version]  # by the engine's own number of versions
        self.labels: dict[str, list[int]] = {}
        self.paused: str | None = None
        self.session = False
        self.groups: dict[str, Any] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, work: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def run() -> None:
            try:
                answer = work()
            except Exception as error:
                answer = (False, f"{type(error).__name__}: {error}")
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

        self._commands.put(run)
        return future

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            while self.paused or not self.engine.has_work() or not self._commands.empty():
                self._commands.get()()
            for rid, delta in self.engine.step():
                labels = self.labels[rid]
                labels += [delta.version] * len(delta.token_ids)
                spans = None
                if delta.finish_reason is not None:
                    spans = self._spans(self.labels.pop(rid))
                self._emit(rid, delta, spans)

    def _spans(self, labels: list[int]) -> list[dict[str, Any]]:
        starts = [i for i, label in enumerate(labels) if not i or label != labels[i - 1]] or [0]
        ends = [*starts[1:], len(labels)]
        last = len(self.tags) - 1
        return [
            {"version": self.tags[labels[a] if labels else last], "start": a, "end": b}
            for a, b in zip(starts, ends, strict=True)
        ]

    # ---- commands

    def add(self, rid: str, ids: list[int], params: SamplingParams) -> tuple[bool, str]:
        self.labels[rid] = []
        self.engine.add(rid, ids, params)
        return True, ""

    def abort(self, prefix: str, everything: bool) -> None:
        self.engine.abort([rid for rid in self.labels if everything or rid.startswith(prefix)])

    def pause(self, mode: str | None) -> None:
        self.paused = mode

    def begin(self) -> tuple[bool, str]:
        if self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return True, "Success"

    def end(self) -> tuple[bool, str]:
        if not self.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return True, "Success"

    def init_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        # As SGLang's init_custom_process_group does: torch's rendezvous, then a group beside the default one.
        rank, name = body["rank_offset"], body["group_name"]
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(rendezvous(url, rank, body["world_size"], timeout=c10d.default_pg_timeout))
        store = dist.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(body["backend"]), store, group_name=name, timeout=c10d.default_pg_timeout
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group
        return True, "Succeeded to initialize custom process group."

    def destroy_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            return False, "The group to be destroyed does not exist."
        dist.destroy_process_group(group)
        return True, "Succeeded to destroy custom process group."

    def update(self, body: dict[str, Any]) -> tuple[bool, str]:
        if not self.session:
            return False, "update_weights_from_distributed must run between begin and end_weight_update()"
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [math.prod(s) * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        if body.get("load_format") != "flattened_bucket" or any(
            o % d.itemsize for o, d in zip(offsets, dtypes, strict=True)
        ):
            return False, "Failed to receive weights: not an aligned flattened bucket"
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        own = dict(self.model.named_parameters())
        pieces = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
        for name, piece, dtype, shape in pieces:
            if name not in own or list(own[name].shape) != shape:
                return (
                    False,
                    f"Failed to update parameter online: {name} {shape}. Please discard the whole weights.",
                )
            own[name].data.copy_(piece.view(dtype).view(shape))
        return self._changed(body)

    def load(self, body: dict[str, Any]) -> tuple[bool, str]:
        state = AutoModelForCausalLM.from_pretrained(body["model_path"]).state_dict()
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(state[name])
        return self._changed(body)

    def _changed(self, body: dict[str, Any]) -> tuple[bool, str]:
        tag = body.get("weight_version")
        if tag is not None and tag != self.tags[-1]:
            self.tags.append(tag)
            staged = StagedWeights(len(self.tags) - 1, list(self.model.named_parameters()))
            self.engine.load_weights(staged, "recompute" if self.paused == "retract" else "keep")
        if body.get("flush_cache", True) and self.paused != "retract" and self.engine.has_work():
            return False, "Weights were updated, but the cache was not flushed because requests are still running."
        return True, "Success"
