"""The digest: 64 bits that tell whether two learners are in the same state, bit for bit.

Rank 0 reports it with each step and the journal keeps it, so that a repeated step, a replay (`asyncrl replay`) or
another run (`asyncrl diff`) can be compared without the tensors. It is no signature: nothing is safe against who
looks for two states with one digest.

    digest = sum over tensors, rows r, words c of  name(tensor) * row(r) * (word * low(c) + high half * high(c))

modulo 2**64, with pseudo-random odd factors. A sum does not care who adds: every rank adds up the rows of its
shards, one reduction joins them, and any number of ranks gives the same digest. The factors of its place make a
number that moved visible; that they are odd, every change of a single one. Two numbers are read as one word, for
that halves the time; of a word's high half, `word * low(c)` alone would keep too little.

Called by `asyncrl.learner.process`, once a step, and by `asyncrl.learner.replaying`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.dist import sum_over_ranks

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""
PIECE = 1 << 15
"""Words that are worked on at a time: what is made of them stays in the cache."""


@torch.no_grad()
def digest(state: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits of the state (`Trainer.state`), the same on every rank. Collective.

    Args:
        state: by name; sharded tensors along their first dimension (FSDP2), all others the same on every rank.

    Raises:
        ValueError: a tensor is sharded in another way.
    """
    rank = dist.get_rank()
    found = {name: _local(name, tensor, rank) for name, tensor in state.items()}
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for name, (rows, start) in found.items():
        # Small tensors of one shape are summed together: a call costs more than their numbers do.
        alone = name if rows.numel() > PIECE else ""
        alike[rows.shape, rows.dtype, rows.device, start, alone].append(name)
    total = torch.zeros((), dtype=torch.int64, device=next(iter(found.values()))[0].device)
    for names in alike.values():
        first, start = found[names[0]]
        if first.numel():
            stacked = first[None] if len(names) == 1 else torch.stack([found[name][0] for name in names])
            total += _sum(stacked, start, _of_names(tuple(names), stacked.device)).to(total.device)
    return f"{int(sum_over_ranks(total)) % 2**64:016x}"


def _local(name: str, tensor: Tensor, rank: int) -> tuple[Tensor, int]:
    """This rank's rows of a tensor, and the index of the first of them; what every rank has is rank 0's."""
    if not isinstance(tensor, DTensor):
        return (tensor if rank == 0 else tensor.new_empty(0)), 0
    if tensor.placements != (Shard(0),):
        raise ValueError(f"{name} is placed as {tensor.placements}; a digest needs shards of the first dimension")
    # As `torch.chunk` cuts: all shards but the last ones have as many rows.
    return tensor.to_local(), rank * -(-tensor.shape[0] // tensor.device_mesh.size())


def _sum(stacked: Tensor, start: int, names: Tensor) -> Tensor:
    """[] int64: the weighted sum of k tensors' words. `stacked`: [k, rows from `start` on, ...]; `names`: [k]."""
    count = stacked.shape[1] if stacked.ndim > 1 else 1
    words = _words(stacked.reshape(len(stacked) * count, -1))
    low, high = (_factors(kind, 0, words.shape[1], words.device) for kind in ("low", "high"))
    pieces = words.split(max(1, PIECE // words.shape[1]))
    sums = torch.cat([_product(piece, low) + _product(piece >> 32, high) for piece in pieces])
    return (_product(sums.view(-1, count), _factors("row", start, count, words.device)) * names).sum()


def _words(rows: Tensor) -> Tensor:
    """[rows, words] int64: the bits. How many numbers make a word depends on the length of a row only."""
    bits = rows.contiguous().view(INTEGER[rows.element_size()])
    return bits.long() if bits.shape[1] * rows.element_size() % 8 else bits.view(torch.int64)


def _product(rows: Tensor, factors: Tensor) -> Tensor:
    """[rows] int64, modulo 2**64. CUDA has no such product of integers."""
    return torch.mv(rows, factors) if rows.device.type == "cpu" else (rows * factors).sum(1)


@lru_cache(maxsize=1024)
def _factors(kind: str, start: int, count: int, device: torch.device) -> Tensor:
    """[count] odd int64 for the places from `start` on, mixed as SplitMix64 does (Steele et al. 2014)."""
    mixed = torch.arange(start, start + count, dtype=torch.int64, device=device) + _of_name(kind)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * _signed(factor)
    return (mixed ^ (mixed >> 31)) | 1


@lru_cache(maxsize=1024)
def _of_names(names: tuple[str, ...], device: torch.device) -> Tensor:
    """[names] odd int64."""
    return torch.tensor([_of_name(name) for name in names], device=device)


def _of_name(name: str) -> int:
    """An odd number of 64 bits."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1)


def _signed(number: int) -> int:
    """The same 64 bits as torch writes them."""
    return number - 2**64 if number >= 2**63 else number
