"""The learner's process group, in the torchrun convention, so that torchrun, Slurm or Ray can start the ranks.

Only set-up, tear-down and two reductions; no training logic. Called by the learner process, and by `sft`, which
trains in the caller's own process with a group of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Who this process is."""

    rank: int
    world_size: int
    device: torch.device


def init(device: str, timeout_s: float = 600.0) -> Ranks:
    """Joins the learner's ranks: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Without RANK this process is a group of its own, and no port is opened. CUDA ranks get a Gloo group beside
    NCCL, which asynchronous checkpoints need.

    Raises:
        ValueError: a variable is missing.
        torch.distributed.DistError: the other ranks did not come within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    kind = torch.device(device).type
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" not in os.environ:
        if kind == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return Ranks(0, 1, torch.device(kind))
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK is set but {', '.join(missing)} is not; start the ranks with torchrun, or set them"
        )
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(backend, timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device(kind))


@contextmanager
def alone(device: str = "cpu") -> Iterator[Ranks]:
    """A group of one for the time of a `with` block, whatever the environment says."""
    timeout = timedelta(seconds=600)
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield Ranks(0, 1, torch.device(device))
    finally:
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor) -> Tensor:
    """The element-wise sum over ranks, in place."""
    dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The element-wise maximum over ranks, in place."""
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values
