"""Notices that a learner has its batch for too long: one on another machine has no supervisor that would tell.

It only says so, once for each step: the learner's own watchdog is who acts. Pure; asked by the hub once a second.
"""

from __future__ import annotations

from asyncrl import records
from asyncrl.records import Record


class StepWatch:
    """What became of the batch that was handed out last.

    Args:
        limit_s: `learner.stall_s`.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._step = 0
        self._since = 0.0
        self._said = 0

    def served(self, step: int, now: float) -> None:
        """A rank gets its share of a step's batch; after a restart of the learner perhaps once more."""
        self._step, self._since = step, now

    def overdue(self, done: int, now: float) -> list[Record]:
        """The event, if the learner should have sent its StepDone by now; `done` is the last step that is."""
        if done >= self._step or self._said >= self._step or now - self._since <= self._limit_s:
            return []
        self._said = self._step
        told = (
            f"the batch of step {self._step} was handed out {now - self._since:.0f} s ago, and there is no "
            "StepDone (limit learner.stall_s); the learner's own watchdog ends it, unless it is stopped or gone"
        )
        return [records.event(now, "learner-0", "stalled", told)]
