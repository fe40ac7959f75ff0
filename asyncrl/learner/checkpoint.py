"""The learner's checkpoints: written while training goes on, complete or not there, for any number of ranks.

`torch.distributed.checkpoint` writes what `Trainer.state` holds (shards of parameters and moments), with the step
and the random state, into `step_000020.tmp`; rank 0 renames the folder when every rank's part and the metadata are
on disk. A folder whose name has no `.tmp` is therefore complete. Only tensors are stored.

    every rank:  copy the state ─▶ train on          rank 0: rename, delete old ones, report
                      └─▶ writer thread ─▶ disk ─────────────▲  (in `poll`, once per step, or in `wait`)

Called by the learner process. `asyncrl.learner.export` writes Hugging Face folders; this does not.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.config import Checkpoint
from asyncrl.learner.update import Trainer

NAME = re.compile(r"step_(\d{6,})")


class Done(NamedTuple):
    """A checkpoint that is complete on disk."""

    step: int
    path: Path


class CheckpointBroken(RuntimeError):
    """A checkpoint cannot be read into this model, or could not be written."""


class Checkpointer:
    """Writes and reads the checkpoints of one folder. `poll` and `wait` are not collective: rank 0's
    writer ends only when the parts of all ranks are on disk. Every other method is."""

    def __init__(self, folder: Path, settings: Checkpoint) -> None:
        """Makes a process group of its own, so that the writer's collectives never meet the training's."""
        self._folder = Path(folder)
        self._settings = settings
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
        self._pending: tuple[int, Future[object]] | None = None
        self.last_step = -1
        """Step of the newest checkpoint that was begun or loaded; -1 for none."""

    def save(self, trainer: Trainer, step: int) -> None:
        """Begins to write the state after `step`, and returns when it is copied. Waits for the one before."""
        self.wait()
        target = self._path(step).with_suffix(".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        dist.barrier(self._group)
        state = _copied(_state(trainer, step))
        written = dcp.async_save(state, checkpoint_id=str(target), process_group=self._group)
        assert isinstance(written, Future)
        self._pending = (step, written)
        self.last_step = step

    def poll(self) -> Done | None:
        """Makes the checkpoint that is being written final if it is on disk by now; never waits."""
        return self.wait() if self._pending is not None and self._pending[1].done() else None

    def wait(self) -> Done | None:
        """Waits for the checkpoint that is being written, if there is one, and makes it final.

        Raises:
            TimeoutError: it took longer than `checkpoint.timeout_s`.
            CheckpointBroken: it could not be written.
        """
        if self._pending is None:
            return None
        step, written = self._pending
        self._pending = None
        final = self._path(step)
        try:
            written.result(timeout=self._settings.timeout_s)
        except TimeoutError as error:
            limit = self._settings.timeout_s
            raise TimeoutError(
                f"checkpoint {final} was not written within checkpoint.timeout_s = {limit:g} s"
            ) from error
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointBroken(f"checkpoint {final} could not be written: {error}") from error
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            final.with_suffix(".tmp").rename(final)
            for _, old in self._complete()[: -self._settings.keep]:
                shutil.rmtree(old)
        return Done(step, final)

    def load_latest(self, trainer: Trainer, at_most: int | None = None) -> int:
        """Loads the newest complete checkpoint into the trainer and returns its step; 0 if there is none.

        `at_most` is the last step that the journal knows: a checkpoint beyond it (hub and learner died together,
        before the step's report was durable) is passed over, and written anew when training comes there again.

        Raises:
            CheckpointBroken: it cannot be read, or is of another model.
        """
        dist.barrier(self._group)  # nobody looks before rank 0 of an earlier call has renamed
        found = [done for done in self._complete() if at_most is None or done.step <= at_most]
        if not found:
            return 0
        step, path = found[-1]
        state = _state(trainer, step)
        try:
            dcp.load(state, checkpoint_id=str(path), process_group=self._group)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointBroken(
                f"checkpoint {path} cannot be loaded: {error}. It may be damaged or of another model.path; "
                f"delete that folder to resume from the one before ({max(0, len(found) - 1)} left)"
            ) from error
        if int(state["step"]) != step:
            raise CheckpointBroken(f"checkpoint {path} holds step {int(state['step'])}; was it renamed?")
        torch.set_rng_state(state["rng"])
        trainer.step = self.last_step = step
        return step

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _complete(self) -> list[Done]:
        """Complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        named = ((NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted(Done(int(match[1]), path) for match, path in named if match)


def _state(trainer: Trainer, step: int) -> dict[str, Tensor]:
    """What is stored: the live tensors of the trainer, the step, the random state of the CPU."""
    return trainer.state() | {"step": torch.tensor(step), "rng": torch.get_rng_state()}


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies: the writer must not see what later steps do to the live tensors."""
    with torch.no_grad():
        return {name: value.detach().clone().cpu() for name, value in state.items()}
