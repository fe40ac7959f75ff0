"""Where tasks come from: rows of a file (`asyncrl.envs.rows`) or of any sequence, and iterators of rows.

    Rows(read("train.jsonl"))                                  a share of it, by hash, is the evaluation's
    Rows(read("train.parquet"), read("test.parquet"))          a file for each
    Rows(datasets.load_dataset(...))                           what has a length and gives a dict for an index
    Stream(function)                                           a function that returns an iterator, maybe endless

A source keeps no place: the hub's journal knows the next index, and a task is a function of split and index alone.
Called by environments (`asyncrl.envs.tool_env`, `methods`, `single_turn`); only the hub asks for tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np

from asyncrl.envs.base import Split
from asyncrl.envs.rows import Row, task_of
from asyncrl.messages import Task

SEARCH = 100_000
"""A stream that gives less than one task of a split in this many rows is taken to have no more."""


class Sequence(Protocol):
    """Rows that can be counted: a list, a file, a data set of Hugging Face's `datasets`."""

    def __len__(self) -> int:
        """Their number."""

    def __getitem__(self, index: int, /) -> Any:
        """One of them."""


class TaskSource(Protocol):
    """What gives an environment its tasks."""

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split: always the same; IndexError if there are no more."""


class Rows:
    """Tasks from rows that can be counted.

    The training split is shuffled anew in each epoch; the evaluation split is as it stands, and is not repeated.

    Args:
        train: the rows: anything with a length that gives a dict for an index, for example a list, what `read`
            returns, or a data set of Hugging Face's `datasets`.
        evaluation: the rows of the evaluation split. None: a share of `train`.
        seed: another seed shuffles in another way; the splits stay.
        epochs: the training split ends after this many; None: never.
        share: of `train`, this part is held out for evaluation, by a hash of the prompt alone.

    Raises:
        ValueError: an argument is out of its range, or the first row is no task.
    """

    def __init__(
        self,
        train: Sequence,
        evaluation: Sequence | None = None,
        *,
        seed: int = 0,
        epochs: int | None = None,
        share: float = 0.1,
    ) -> None:
        _check(seed, epochs, share)
        self._train, self._evaluation = train, evaluation
        self._seed, self._epochs, self._share = seed, epochs, share
        self._order: tuple[int, Any] = -1, None
        for rows in (train, evaluation):
            if rows is not None:
                if not len(rows):
                    raise ValueError("there are no rows")
                task_of(rows[0], "", _where(rows, 0))

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split; its id is the split and the number of its row.

        Raises:
            IndexError: there are no more.
            ValueError: a row is no task, or all are held out.
        """
        numbers = self._numbers[split]
        epoch, place = divmod(index, max(1, len(numbers)))
        if split == "eval":
            over, rows = epoch > 0, self._train if self._evaluation is None else self._evaluation
        else:
            over, rows = self._epochs is not None and epoch >= self._epochs, self._train
            numbers = self._shuffled(epoch)
        if over or not len(numbers):
            raise IndexError(f"the split {split!r} has no task {index}")
        number = int(numbers[place])
        return task_of(rows[number], f"{split}/{number}", _where(rows, number))

    @cached_property
    def _numbers(self) -> dict[Split, Any]:
        """The numbers of the rows of each split."""
        if self._evaluation is not None:
            return {"train": np.arange(len(self._train)), "eval": np.arange(len(self._evaluation))}
        tasks = (task_of(row, "", _where(self._train, i)) for i, row in enumerate(iter(self._train)))
        held_out = np.array([is_held_out(task, self._share) for task in tasks])
        if held_out.all():
            raise ValueError(
                f"all {len(held_out)} rows are held out for evaluation: those of one prompt stay together; give "
                "more prompts, a smaller share, or the evaluation split as rows of its own"
            )
        return {"train": np.flatnonzero(~held_out), "eval": np.flatnonzero(held_out)}

    def _shuffled(self, epoch: int) -> Any:
        """The numbers of the training split in the order of an epoch."""
        if self._order[0] != epoch:
            # NumPy promises that RandomState's streams never change; those of its Generator may.
            random = np.random.RandomState(np.frombuffer(_digest(f"{self._seed}/{epoch}".encode()), "<u4"))
            self._order = epoch, random.permutation(self._numbers["train"])
        return self._order[1]


class Stream:
    """Tasks from an iterator: read as far as they are asked for, kept, and neither shuffled nor repeated.

    Args:
        rows: returns an iterator of rows, the same ones each time: a run that is resumed reads it from the start.
        share: this part is held out for evaluation, by a hash of the prompt alone.

    Raises:
        ValueError: the share is out of its range.
    """

    def __init__(self, rows: Callable[[], Iterator[Row]], *, share: float = 0.1) -> None:
        _check(0, None, share)
        self._rows, self._share = enumerate(rows()), share
        self._read = 0
        self._kept: dict[Split, list[Task]] = {"train": [], "eval": []}

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split; its id is the split and the number of its row.

        Raises:
            IndexError: the iterator has ended, or gave so few tasks of the split that there may be no more.
            ValueError: a row is no task.
        """
        kept = self._kept[split]
        while index >= len(kept):
            if self._read >= (index + 1) * SEARCH or not self._read_one():
                raise IndexError(f"the split {split!r} has no task {index} in {self._read} rows")
        return kept[index]

    def _read_one(self) -> bool:
        number, row = next(self._rows, (-1, None))
        if number < 0:
            return False
        self._read += 1
        task = task_of(row, "", f"row {number}")
        split: Split = "eval" if is_held_out(task, self._share) else "train"
        self._kept[split].append(msgspec.structs.replace(task, id=f"{split}/{number}"))
        return True


def is_held_out(task: Task, share: float) -> bool:
    """Whether a task is one of the share that is held out: a function of its prompt alone, whatever the seed."""
    text = msgspec.json.encode(task.prompt, order="deterministic")
    return int.from_bytes(_digest(text)[:8], "little") < share * 2**64


# ---- machinery -----------------------------------------------------------------------------------


def _digest(text: bytes) -> bytes:
    """A hash that is the same on every machine, unlike Python's `hash`."""
    return hashlib.blake2b(text, digest_size=16).digest()


def _where(rows: Sequence, number: int) -> str:
    """The place of a row: files know it better."""
    where = getattr(rows, "where", None)
    return where(number) if where is not None else f"row {number}"


def _check(seed: Any, epochs: Any, share: Any) -> None:
    for name, value, least in (("seed", seed, 0), ("epochs", epochs, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} = {value!r}: must be a whole number from {least}")
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"share = {share!r}: must be a number from 0 and below 1")
