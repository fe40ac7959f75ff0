"""What environments share whose tasks are drawn by hashing: the hash, the check of an index, tasks that are seeds.

Called by the built-in environments and the adapters; it knows none of them.
"""

from __future__ import annotations

import hashlib

from asyncrl.envs.base import Split
from asyncrl.messages import Task

EVAL_SHARE = 10
"""One problem in this many is held out for evaluation."""


def hashed(*parts: object) -> int:
    """64 bits of a cryptographic hash: the same on every machine, unlike Python's `hash`."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def check_task(split: Split, index: int) -> None:
    """Refuses what is no task of an environment with two splits.

    Raises:
        ValueError: the split is neither `train` nor `eval`, or the index is negative.
    """
    if split not in ("train", "eval") or index < 0:
        raise ValueError(f"no task {index} of split {split!r}: tasks of 'train' and 'eval' are numbered from 0")


def seed_task(name: str, seed: int, split: Split, index: int) -> Task:
    """The `index`-th task of an environment that makes its own problems from a seed; there are always more.

    Its `metadata["seed"]` is a whole number below 2^31, even for `train` and odd for `eval`: none is in both.

    Args:
        name: of the environment; begins the task's id.
        seed: another one gives other seeds.
        split: `train` or `eval`.
        index: from 0.

    Raises:
        ValueError: as `check_task`.
    """
    check_task(split, index)
    drawn = hashed(seed, split, index) % 2**30 * 2 + (split == "eval")
    return Task(id=f"{name}/{split}/{index}", prompt=[], metadata={"seed": drawn})
