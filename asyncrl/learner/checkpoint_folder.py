"""The folder of a run's checkpoints: which are complete, sound, to be kept; what a crash leaves behind.

    step_000020.tmp ── all parts there ─▶ manifest ─▶ fsync ─▶ rename ─▶ fsync ─▶ step_000020 ─▶ delete old ones
    step_000020 ── to be deleted ─▶ step_000020.gone ─▶ (nothing)
                └─ not loaded, for a reason that was told ─▶ step_000020.passed_over, for the user to look at

So a folder without a suffix was whole when it was written, and its manifest says whether it still is. `.tmp` and
`.gone` are removed at the next start. Nothing here knows what is in a checkpoint. Called by
`asyncrl.learner.checkpoint`, on rank 0.

Old checkpoints are deleted before the hub is told, and a crash between both loses nothing. The hub's list serves
only to remove tokens of batches up to its oldest checkpoint. A new checkpoint is newer than all others, so the
oldest one there is never older than the oldest of any list before: an outdated list keeps too much, never too
little. (Told first and deleted after, a crash would leave one too many, which the next deletion takes.) What must
not happen is a list that names a checkpoint before it is durable, so it is made after the last fsync; or one that
names what proved damaged, so that is told before training goes on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from asyncrl.config import Checkpoint
from asyncrl.learner import manifest
from asyncrl.learner.manifest import Damaged
from asyncrl.learner.retention import kept

NAME = re.compile(r"step_(\d{6,})")


class CheckpointFolder:
    """The checkpoints of one run, by step."""

    def __init__(self, folder: Path, policy: Checkpoint) -> None:
        """`policy`: which ones are kept."""
        self._folder = Path(folder)
        self._policy = policy

    def path(self, step: int) -> Path:
        """Where a complete checkpoint lies."""
        return self._folder / f"step_{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Where it is written."""
        return self.path(step).with_suffix(".tmp")

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        named = (NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in named if match)

    def finish(self, step: int, reward: float | None) -> list[int]:
        """Makes a checkpoint complete whose parts are written, and deletes those that are not kept beside it.

        `reward`: mean of the batches since the checkpoint before. Returns the steps of those that are there now.

        Raises:
            OSError: it is not complete; the others are as they were.
        """
        final = self.path(step)
        manifest.write(self.unfinished(step), step, reward)
        if final.exists():
            _delete(final)  # Training came here again from an older one.
        self.unfinished(step).rename(final)
        manifest.sync(self._folder)
        manifest.sync(self._folder.parent)  # For the first one, the folder itself is new.
        rewards = {each: self._reward(each) for each in self.complete()}
        for each in rewards.keys() - kept(rewards, self._policy):
            _delete(self.path(each))
        return self.complete()

    def drop(self, step: int) -> None:
        """Removes what there is of an unfinished checkpoint: its room may be all that is missing."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def newest_sound(self, at_most: int | None) -> tuple[int, dict[int, str]]:
        """The step of the newest checkpoint that can be loaded, 0 for none; and why newer ones cannot. Only reads.

        `at_most`: the last step that the journal knows; None: any.
        """
        passed_over: dict[int, str] = {}
        for step in reversed(self.complete()):
            why = self._unusable(step, at_most)
            if not why:
                return step, passed_over
            passed_over[step] = f"checkpoint {self.path(step)} was passed over: {why}"
        return 0, passed_over

    def tidy(self, passed_over: Iterable[int]) -> None:
        """Clears away the halves that a crash left, and sets aside what was passed over."""
        for leftover in (*self._folder.glob("step_*.tmp"), *self._folder.glob("step_*.gone")):
            shutil.rmtree(leftover)
        for step in passed_over:
            _move(self.path(step), ".passed_over")

    def _unusable(self, step: int, at_most: int | None) -> str:
        if at_most is not None and step > at_most:
            return f"run.db ends at step {at_most}"
        try:
            manifest.verify(self.path(step), step)
        except Damaged as error:
            return str(error)
        return ""

    def _reward(self, step: int) -> float | None:
        """What a checkpoint says of its batches; one that is damaged is found out when it is to be loaded."""
        try:
            return manifest.read(self.path(step)).reward
        except Damaged:
            return None


def _move(path: Path, suffix: str) -> Path:
    """Renames a checkpoint, in the place of one that was renamed so before."""
    moved = path.with_suffix(suffix)
    shutil.rmtree(moved, ignore_errors=True)
    path.rename(moved)
    return moved


def _delete(path: Path) -> None:
    """Renamed first, so that half a checkpoint never has the name of a whole one."""
    shutil.rmtree(_move(path, ".gone"))
