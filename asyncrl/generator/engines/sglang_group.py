"""The local process group through which an SGLang server gets weights: rank 0, this process, to its TP ranks.

SGLang builds its end with torch's own rendezvous (`init_custom_process_group` in `srt/utils/common.py`, SGLang
0.5.23): a TCPStore that rank 0 hosts, a prefix of its own, and the two that torch's `_new_process_group_helper`
adds. This end is a raw `ProcessGroupGloo` under the same prefixes, outside torch's default group. A bucket's
bytes lie as SGLang's `flattened_bucket` format wants them: tensors one after another, without gaps.

Gloo and not NCCL: this process need not have a GPU of its own; SGLang copies each broadcast to its GPU. Both
ends must come from versions of torch whose Gloo understand each other, which torch does not promise; a mismatch
shows when the group is built. Everything here blocks, except `in_thread`, and has a time limit. Called by
`asyncrl.generator.engines.sglang_update`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncrl.weights.groups import open_store

T = TypeVar("T")
Bucket = Sequence[tuple[str, torch.Tensor]]


class UpdateGroup:
    """Rank 0 of a group with one server. `join` is collective; then `broadcast`, from one thread at a time."""

    def __init__(self, address: str, size: int, timeout_s: float) -> None:
        """Opens the store at `address`, which the server must reach, for `size` ranks."""
        self.address, self.size = address, size
        # Never a name that the server has seen: it keeps a group whose other end died.
        self.name = f"asyncrl-{secrets.token_hex(8)}"
        self._limit = timedelta(seconds=timeout_s)
        self._store = open_store(address, timeout_s)
        self._pg: Any = None  # torch's stubs do not know the methods of raw groups.

    @property
    def invitation(self) -> dict[str, Any]:
        """What the server is told to join with (`/init_weights_update_group`)."""
        return {
            "master_address": self.address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": self.size,
            "group_name": self.name,
            "backend": "gloo",
        }

    def join(self) -> None:
        """Waits until all ranks are connected.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = self._limit
        store: dist.Store = self._store
        for prefix in (self.name, f"{self.name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._pg = dist.ProcessGroupGloo(store, 0, self.size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends a tensor to the server's ranks.

        Raises:
            RuntimeError: a rank is gone, or did not take it in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._limit
        self._pg.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Closes the connections; the server's pending collective fails. Idempotent."""
        self._pg = None  # Dropping the reference is what closes Gloo's connections.


def cut(tensors: Bucket, limit_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `limit_bytes` (or one tensor), in order; every tensor is aligned to its dtype."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > limit_bytes or size % tensor.itemsize):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def flatten(bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
    """The bucket's bytes, uint8 [bytes], on the host.

    They are in `buffer` (uint8, any size), which is made larger if it must be. Its memory is used again and again,
    because the first touch of fresh memory takes longer than the copy.
    """
    pieces = [tensor.detach().cpu().flatten().view(torch.uint8) for _, tensor in bucket]
    size = sum(piece.numel() for piece in pieces)
    if buffer.numel() < size:
        buffer.resize_(size)
    return torch.cat(pieces, out=buffer[:size])


def describe(bucket: Bucket) -> dict[str, Any]:
    """What the server must know of a bucket to cut its bytes up again."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "load_format": "flattened_bucket",
    }


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread.

    Nothing wakes a thread that waits in Gloo. Whoever gives up waiting abandons it, and it ends at Gloo's own time
    limit; being a daemon it never holds up the end of the process, which a thread of a pool would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # Asking marks the exception as seen: who gave up waiting will not come for it.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="sglang-weights", daemon=True).start()
    return future
