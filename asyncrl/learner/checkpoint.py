"""The learner's checkpoints: written while training goes on, complete or not there, for any number of ranks.

`torch.distributed.checkpoint` writes what `Trainer.state` holds (shards of parameters and moments), with the step
and the random state. Only tensors are stored. What makes the files a complete checkpoint that can be verified, and
which ones are kept, is `asyncrl.learner.checkpoint_folder`'s.

    every rank:  copy the state ─▶ train on
                      └─▶ writer thread ─▶ disk ─▶ rank 0: complete, delete old ones ─┐
    main thread: `poll` once per step, or `wait` before the next one ◀─ what became of it, for the hub

    | waits for                     | unblocked by                      | limit                |
    |-------------------------------|-----------------------------------|----------------------|
    | the checkpoint before         | its writer thread                 | checkpoint.timeout_s |
    | the other ranks' parts        | their writer threads              | checkpoint.timeout_s |
    | which checkpoint to load      | rank 0, once it has verified one  | checkpoint.timeout_s |

Called by the learner process. `asyncrl.learner.export` writes Hugging Face folders; this does not.
"""

from __future__ import annotations

import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.config import Checkpoint
from asyncrl.learner.checkpoint_folder import CheckpointFolder
from asyncrl.learner.update import Trainer

MOST_FAILURES = 3
"""Checkpoints in a row that may fail to be written; then the run stops, for it would lose ever more."""


class Written(NamedTuple):
    """What became of a checkpoint that was being written."""

    step: int
    path: Path
    kept: list[int]
    """Steps of all complete checkpoints now, oldest first; rank 0 only."""
    error: str = ""
    """Why it could not be written; empty: it is complete and durable."""


class CheckpointBroken(RuntimeError):
    """No checkpoint can be loaded into this model, or written."""


class Checkpointer:
    """Writes and reads the checkpoints of one folder. `save`, `load_latest` and `tensors` are collective, the
    others not: rank 0's writer ends only when the parts of all ranks are on disk. Only `save` and `tidy` change
    the folder."""

    def __init__(self, folder: Path, settings: Checkpoint) -> None:
        """Makes a process group of its own, so that the writer's collectives never meet the training's."""
        self._folder = CheckpointFolder(folder, settings)
        self._limit_s = settings.timeout_s
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[list[int]]] | None = None
        self._rewards: dict[int, float] = {}
        self._failures = 0
        self.last_step = -1
        """Step of the newest checkpoint that was begun or loaded; -1 for none."""
        self.passed_over: dict[int, str] = {}
        """Rank 0: steps of the checkpoints that `load_latest` did not load, and why."""

    def observe(self, step: int, reward: float) -> None:
        """Takes a step's mean reward; a checkpoint remembers the mean since the one before (`keep_best`)."""
        self._rewards[step] = reward

    def save(self, trainer: Trainer, step: int) -> Written | None:
        """Begins to write the state after `step`, and returns when it is copied.

        Waits for the checkpoint before, if it is still being written, and returns what became of that; see `wait`.
        """
        before = self.wait()
        if self._rank == 0:
            self._folder.drop(step)
        dist.barrier(self._group)
        target = str(self._folder.unfinished(step))
        parts = dcp.async_save(_state(trainer, step), checkpoint_id=target, process_group=self._group)
        assert isinstance(parts, Future)
        reward = fmean(self._rewards.values()) if self._rewards else None
        self._pending = (step, self._thread.submit(self._finish, step, reward, parts))
        self.last_step = step
        return before

    def poll(self) -> Written | None:
        """What became of the checkpoint that is being written, if that is decided by now; never waits."""
        return self.wait() if self._pending is not None and self._pending[1].done() else None

    def wait(self) -> Written | None:
        """Waits for the checkpoint that is being written, if there is one.

        One that could not be written is no error: training goes on with the checkpoint before, until the next.

        Raises:
            TimeoutError: it took longer than `checkpoint.timeout_s`.
            CheckpointBroken: rank 0: it is the third in a row that could not be written.
        """
        if self._pending is None:
            return None
        (step, writing), self._pending = self._pending, None
        path = self._folder.path(step)
        if not futures.wait([writing], self._limit_s).done:
            raise TimeoutError(
                f"learner-{self._rank} waited for its writer thread: checkpoint {path} was not on disk within "
                f"checkpoint.timeout_s = {self._limit_s:g} s; is the disk slow, or gone? Raise the limit, or "
                "checkpoint.every, and resume the run"
            )
        error = writing.exception()
        if error is None:
            self._failures = 0
            self._rewards = {at: reward for at, reward in self._rewards.items() if at > step}
            return Written(step, path, writing.result())
        if not isinstance(error, (CheckpointException, OSError)):
            raise error  # Not the disk's fault, for example a rank that is gone.
        return self._failed(step, path, _reason(error))

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return self._folder.complete()

    def load_latest(self, trainer: Trainer, at_most: int | None = None) -> int:
        """Loads the newest sound checkpoint into the trainer and returns its step; 0 if there is none.

        Args:
            trainer: whose tensors are overwritten.
            at_most: the last step that the journal knows. A checkpoint beyond it (a power cut took the journal's
                last commits) is passed over, and written anew when training comes there again.

        Raises:
            CheckpointBroken: it is sound, but of another model.
            OSError: the folder cannot be read.
            TimeoutError: rank 0 did not say in time which one is to be loaded.
        """
        step = self._agree(at_most)
        if step == 0:
            return 0
        state = _state(trainer, step)
        self._read(state, step)
        torch.set_rng_state(state["rng"])
        trainer.step = self.last_step = step
        return step

    def tensors(self, trainer: Trainer, step: int) -> dict[str, Tensor]:
        """What a complete checkpoint holds of `trainer.state()`, beside the live tensors. Collective.

        Raises:
            CheckpointBroken: it cannot be read, or is of another model.
        """
        held = {name: torch.empty_like(tensor) for name, tensor in trainer.state().items()}
        self._read(held, step)
        return held

    def tidy(self) -> None:
        """Rank 0, after `load_latest`: clears away the halves of a crash, and sets aside what was passed over."""
        self._folder.tidy(self.passed_over)

    # ---- writing ----

    def _finish(self, step: int, reward: float | None, parts: Future[object]) -> list[int]:
        """In the writer thread: makes the checkpoint complete once its parts are on disk."""
        parts.result()
        return [] if self._rank else self._folder.finish(step, reward)

    def _failed(self, step: int, path: Path, reason: str) -> Written:
        self.last_step = -1
        if self._rank == 0:
            self._folder.drop(step)
            self._failures += 1
        if self._failures == MOST_FAILURES:
            raise CheckpointBroken(
                f"checkpoint {path} could not be written, the {MOST_FAILURES}rd in a row: {reason}. Complete are "
                f"steps {self.complete()}; free some space, then resume the run"
            )
        return Written(step, path, self.complete(), reason)

    # ---- reading ----

    def _read(self, state: dict[str, Tensor], step: int) -> None:
        """Overwrites the tensors with a checkpoint's."""
        try:
            dcp.load(state, checkpoint_id=str(self._folder.path(step)), process_group=self._group)
        except (CheckpointException, OSError) as error:  # What else there is comes of a rank that is gone.
            raise CheckpointBroken(
                f"checkpoint {self._folder.path(step)} is whole, for its checksums fit, but cannot be loaded: "
                f"{_reason(error)}. Is it of another model.path?"
            ) from error

    def _agree(self, at_most: int | None) -> int:
        """The step to load on all ranks: rank 0 looks, the others are told."""
        chosen, broken = torch.tensor(-1), None
        if self._rank == 0:
            try:
                step, self.passed_over = self._folder.newest_sound(at_most)
                chosen.fill_(step)
            except OSError as error:
                broken = error  # Raised below: the other ranks must be told before this one leaves.
        began = time.monotonic()
        try:
            dist.broadcast(chosen, 0, group=self._group)
        except RuntimeError as error:
            if time.monotonic() - began < self._limit_s:
                raise  # Rank 0 is gone, not slow: all ranks start again.
            raise TimeoutError(
                f"learner-{self._rank} waited for rank 0 to say which checkpoint is sound: no answer within "
                f"checkpoint.timeout_s = {self._limit_s:g} s"
            ) from error
        if broken is not None:
            raise broken
        if int(chosen) < 0:
            raise CheckpointBroken(f"learner-{self._rank}: rank 0 could not look for one; its log says why")
        return int(chosen)


def _state(trainer: Trainer, step: int) -> dict[str, Tensor]:
    """What is stored: the live tensors of the trainer, the step, the random state of the CPU."""
    return trainer.state() | {"step": torch.tensor(step), "rng": torch.get_rng_state()}


def _reason(error: BaseException) -> str:
    """The first rank's own error; torch's text holds its whole traceback."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)
