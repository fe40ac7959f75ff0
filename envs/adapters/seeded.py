"""Tasks that are nothing but seeds.

For environments that make their own problems from a seed (a Gymnasium environment, a server of OpenEnv). Called
by their adapters; it knows no environment itself.
"""

from __future__ import annotations

from asyncrl.envs.arithmetic import hashed
from asyncrl.envs.base import Split
from asyncrl.messages import Task


def seed_task(name: str, seed: int, split: Split, index: int) -> Task:
    """The `index`-th task of a split; there are always more, so none ever raises IndexError.

    Its `metadata["seed"]` is a whole number below 2^31, even for `train` and odd for `eval`: none is in both.

    Args:
        name: of the environment; begins the task's id.
        seed: another one gives other seeds.
        split: `train` or `eval`.
        index: from 0.

    Raises:
        ValueError: the split is neither `train` nor `eval`, or the index is negative.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"the environment {name!r} has no split {split!r}; it has 'train' and 'eval'")
    if index < 0:
        raise ValueError(f"task index {index} is negative; tasks are numbered from 0")
    drawn = hashed(seed, split, index) % 2**30 * 2 + (split == "eval")
    return Task(id=f"{name}/{split}/{index}", prompt=[], metadata={"seed": drawn})
