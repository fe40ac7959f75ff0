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

TIMEOUT_S = 600.0
"""Longest wait for the other ranks: to come, and in each collective."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is."""

    rank: int
    world_size: int
    device: torch.device


def init(device: str, threads: int = 1, timeout_s: float = TIMEOUT_S, deterministic: bool = False) -> Ranks:
    """Joins the learner's ranks: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Without RANK this process is a group of its own, and no port is opened. `deterministic`: PyTorch refuses
    operations whose result may differ between two calls. Gloo adds the ranks' parts in an order that only their
    number decides.

    Raises:
        ValueError: a variable is missing.
        torch.distributed.DistError: the other ranks did not come within `timeout_s`.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if "RANK" not in os.environ:
        return _alone(device, timeout_s)
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK is set but {', '.join(missing)} is not; start the ranks with torchrun, or set them"
        )
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    return current(device)


def current(device: str) -> Ranks:
    """This process, after `init`."""
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device(torch.device(device).type))


def shutdown() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone(device: str = "cpu", threads: int = 1) -> Iterator[Ranks]:
    """A group of one for the time of a `with` block, whatever the environment says."""
    torch.set_num_threads(threads)
    try:
        yield _alone(device, TIMEOUT_S)
    finally:
        shutdown()


def sum_over_ranks(values: Tensor) -> Tensor:
    """The element-wise sum over ranks, in place."""
    dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The element-wise maximum over ranks, in place."""
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def _backend(device: str) -> str:
    """CUDA ranks get Gloo beside NCCL: asynchronous checkpoints need it."""
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def _alone(device: str, timeout_s: float) -> Ranks:
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return current(device)
