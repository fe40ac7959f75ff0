"""Which tasks are worth an attempt: those that the policy neither always solves nor never does, as far as known.

A group of episodes whose rewards are all alike teaches nothing, and its tokens are spent. So each task's last pass
rate is kept, and a task is skipped while that is out of bounds; a share of the skipped ones is tried again, for
the policy changes. It stores nothing: the hub records every group that ends, and after a restart those that its
journal has. It draws nothing at random, so the same records give the same answers. Called by the hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class Curriculum:
    """Pass rates by task.

    Args:
        low, high: a task is wanted while its last pass rate is from `low` to `high`, both included. A pass rate is
            the mean reward of a group, so the bounds are on the scale of the rewards.
        revisit: share of the visits to the other tasks that are made all the same. Above 0, so that the hub always
            finds a task in the end, and none is given up for ever; at most 1.

    Raises:
        ValueError: a bound is out of its range.
    """

    def __init__(self, low: float, high: float, revisit: float) -> None:
        if not low <= high:
            raise ValueError(f"low = {low!r}, high = {high!r}: low must be at most high")
        if not 0 < revisit <= 1:
            raise ValueError(f"revisit = {revisit!r}: must be above 0 and at most 1")
        self._low, self._high, self._revisit = low, high, revisit
        self._rates: dict[str, float] = {}

    def record(self, task_id: str, rewards: Sequence[float | None]) -> None:
        """Keeps the pass rate of a group that has ended.

        Args:
            task_id: the group's task; the id is that of `asyncrl.messages.Task`, the same in each epoch.
            rewards: of its episodes; None, a missing reward, does not count. Without any, nothing changes.
        """
        given = [reward for reward in rewards if reward is not None]
        if given:
            self._rates[task_id] = sum(given) / len(given)

    def wants(self, task_id: str, index: int) -> bool:
        """Whether the task that is drawn as number `index` should be attempted."""
        rate = self._rates.get(task_id)
        if rate is None or self._low <= rate <= self._high:
            return True
        digest = hashlib.blake2b(f"{index}\x1f{task_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._revisit * 2**64
