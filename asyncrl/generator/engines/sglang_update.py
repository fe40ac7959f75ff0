"""A weight update of an SGLang server: pause, session, buckets, resume. Measures it; decides nothing.

    this process, event loop                   ┊ daemon thread     ┊ SGLang: front end ── schedulers
    /pause_generation ───────────────────────▶ ┊                   ┊ answers at once      stop after their step
    /begin_weight_update ────────────────────▶ ┊                   ┊                      answer: they stand still
    for each bucket: the call ───────────────▶ ┊ broadcast ══Gloo══════════════════════▶  receive, load
    /end_weight_update ──────────────────────▶ ┊                   ┊
    landed(), /continue_generation ──────────▶ ┊                   ┊                      go on

* The pause's answer says nothing; that of the next call, which the schedulers give in order, says that they
  stand. Without a pause the server would wait for all requests to end.
* `in_place` (`kv = keep`) freezes requests and their KV cache. The cache cannot be flushed then, and a call that
  asks for it fails although the weights have changed. `retract` (`recompute`) queues the requests again, to be
  computed anew, and the last bucket's call flushes the cache.
* After the first bucket there is no way back: whatever fails then leaves weights of two versions.
* `/update_weights_from_tensor` would spare a copy on one machine, but takes pickles; this project sends none.

Every wait has a limit (`weights.timeout_s` for each call and each bucket). Called by
`asyncrl.generator.engines.sglang`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import torch

from asyncrl.config import Config
from asyncrl.generator.engines.base import KvMode, StagedWeights, UpdateTimes
from asyncrl.generator.engines.sglang_client import Client, ServerFailed
from asyncrl.generator.engines.sglang_group import Bucket, UpdateGroup, cut, describe, flatten, in_thread
from asyncrl.weights.groups import local_address


class Updater:
    """The group with one server, and updates through it, one at a time. `await Updater.join(...)` makes one."""

    def __init__(self, client: Client, group: UpdateGroup, limit_s: float, bucket_bytes: int) -> None:
        self._client, self._group = client, group
        self._limit_s, self._bucket_bytes = limit_s, bucket_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @classmethod
    async def join(cls, client: Client, ranks: int, config: Config) -> Updater:
        """Builds the group with the server's `ranks` processes.

        Raises:
            ServerFailed: the server refused, or a rank did not come within `weights.timeout_s`.
        """
        url, limit_s = urlsplit(client.url), config.weights.timeout_s
        assert url.hostname is not None
        group = UpdateGroup(local_address(url.hostname, url.port or 80), 1 + ranks, limit_s)
        call = client.call("/init_weights_update_group", group.invitation, limit_s=2 * limit_s)
        await _together(call, in_thread(group.join), "building the group for weights")
        return cls(client, group, limit_s, int(config.weights.bucket_mb * 2**20))

    async def apply(self, weights: StagedWeights, tag: str, kv: KvMode, landed: Callable[[], None]) -> UpdateTimes:
        """Has the server load `weights` and call them `tag`.

        `landed` is called when they are loaded and nothing has been sampled by them yet.

        Raises:
            ServerFailed: something went wrong; which weights the server has is unknown.
        """
        asked = time.perf_counter()
        await self._call("/pause_generation", {"mode": "in_place" if kv == "keep" else "retract"})
        # Decoding stops at most one step after this answer; the pause is counted from here.
        paused = time.perf_counter()
        await self._call("/begin_weight_update", {})
        buckets = list(cut(weights.tensors, self._bucket_bytes))
        for bucket in buckets[:-1]:
            await self._send(bucket, {"flush_cache": False})
        await self._send(buckets[-1], {"flush_cache": kv == "recompute", "weight_version": tag})
        await self._call("/end_weight_update", {})
        loaded = time.perf_counter()
        landed()
        await self._call("/continue_generation", {"torch_empty_cache": False})
        return UpdateTimes(paused - asked, loaded - paused, time.perf_counter() - loaded)

    async def leave(self) -> None:
        """Takes a server that goes on without us out of the group; whether it answers is its business."""
        try:
            name = {"group_name": self._group.name}
            await self._client.call("/abort_request", {"abort_all": True}, limit_s=5.0)
            await self._client.call("/destroy_weights_update_group", name, limit_s=5.0, tolerant=True)
        except ServerFailed:
            return

    def close(self) -> None:
        """Closes the group's connections. Idempotent."""
        self._group.close()

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        await self._client.call(path, body, limit_s=self._limit_s)

    async def _send(self, bucket: Bucket, options: dict[str, Any]) -> None:
        """Has the server receive and load a bucket, and broadcasts it meanwhile."""
        group, buffer = self._group, self._buffer
        body = describe(bucket) | options | {"group_name": group.name, "torch_empty_cache": False}
        sent = in_thread(lambda: group.broadcast(flatten(bucket, buffer)))
        call = self._client.call("/update_weights_from_distributed", body, limit_s=2 * self._limit_s)
        await _together(call, sent, "the broadcast of weights")


async def _together(call: Coroutine[Any, Any, Any], collective: asyncio.Future[None], what: str) -> None:
    """Awaits a call and this end of the collective that it starts at the server; the first failure counts."""
    answer = asyncio.ensure_future(call)
    try:
        await asyncio.wait({answer, collective}, return_when=asyncio.FIRST_EXCEPTION)
        # If both have failed, the server knows better why. A collective that waits is left to its own limit.
        if answer.done():
            answer.result()
        collective.result()
    except ServerFailed:
        raise
    except RuntimeError as error:
        raise ServerFailed(f"{what} failed on this side: {error}") from error
    finally:
        answer.cancel()
