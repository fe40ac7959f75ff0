"""Rows of data: what makes a row a task, and the files that rows are read from.

| column | becomes |
|---|---|
| the first of `prompt`, `messages`, `question` | the task's prompt: chat messages, or the user's text |
| `answer`, or else verl's `reward_model.ground_truth` | the task's answer |
| everything else | metadata, among it verl's `data_source` and `extra_info` |

A column that is null counts as absent. What is wrong with a row is said with its file and line. Called by
`asyncrl.envs.sources`, which makes tasks of rows, and by `asyncrl.envs.single_turn`.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.envs.base import Message
from asyncrl.messages import Task

Row = Mapping[str, Any]

PROMPTS = ("prompt", "messages", "question")
BLANK = b" \t\r\n\xef\xbb\xbf"
"""White space, and the mark that some editors begin a file with."""


class File(Protocol):
    """The rows of a file, read when they are asked for."""

    def __len__(self) -> int:
        """Their number."""

    def __getitem__(self, index: int) -> Row:
        """One of them."""

    def __iter__(self) -> Iterator[Row]:
        """All of them, in order."""

    def where(self, index: int) -> str:
        """The place of one, for messages."""


def read(path: str | Path) -> File:
    """The rows of a file, each of them checked.

    Args:
        path: ends in `.jsonl` (one JSON object per line) or `.parquet` (needs `pip install 'asyncrl[parquet]'`).

    Raises:
        ValueError: the file cannot be read, has no rows, or one of them is no task: file, line, what is allowed.
    """
    kinds: dict[str, type[JsonLines] | type[Parquet]] = {".jsonl": JsonLines, ".parquet": Parquet}
    kind = kinds.get(Path(path).suffix)
    if kind is None:
        raise ValueError(f"{path}: give a file whose name ends in {' or '.join(kinds)}")
    rows: File = kind(Path(path))
    if not len(rows):
        raise ValueError(f"{path} is empty; it must hold at least one row")
    for index, row in enumerate(rows):
        task_of(row, "", rows.where(index))
    return rows


def task_of(row: Any, name: str, where: str) -> Task:
    """The task of a row.

    Args:
        row: a mapping from column to value.
        name: the task's id.
        where: the row's place, for messages.

    Raises:
        ValueError: it is no row, has no prompt, or cannot be sent as JSON.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: a {type(row).__name__}; a row is a mapping from column to value")
    try:
        told = msgspec.json.encode({key: value for key, value in row.items() if value is not None})
        columns = msgspec.json.decode(told)
        msgspec.msgpack.encode(columns)  # As which it will travel: it has no whole numbers beyond 64 bits.
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: a column cannot be sent as JSON: {error}; drop it or make it text") from None
    column = next((name for name in PROMPTS if name in columns), None)
    if column is None:
        given = ", ".join(map(str, columns)) or "none"
        raise ValueError(f"{where}: no column {', '.join(map(repr, PROMPTS))}; there are: {given}")
    prompt = _prompt(columns.pop(column), column, where)
    answer = columns.pop("answer", None)
    judge = columns.get("reward_model")
    if answer is None and isinstance(judge, dict):
        answer = judge.get("ground_truth")
    return Task(id=name, prompt=prompt, answer=answer, metadata=columns)


class JsonLines:
    """The lines of a JSON-lines file. It holds their places only, so the file must stay as it is during a run.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._lines = array("Q"), array("Q")
        try:
            with path.open("rb") as file:
                start = 0
                for number, line in enumerate(file, 1):
                    if line.strip(BLANK):
                        self._starts.append(start)
                        self._lines.append(number)
                    start += len(line)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return self._row(file.readline(), index)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for index, line in enumerate(line for line in file if line.strip(BLANK)):
                yield self._row(line, index)

    def where(self, index: int) -> str:
        """File and line."""
        return f"{self._path}, line {self._lines[index]}"

    def _row(self, line: bytes, index: int) -> Row:
        try:
            row = msgspec.json.decode(line.strip(BLANK))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.where(index)}: no JSON: {error}; one object per line is needed") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(index)}: a {type(row).__name__}; one JSON object per line is needed")
        return row


class Parquet:
    """The rows of a parquet file, held in memory by column.

    Raises:
        ValueError: pyarrow is not installed, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ValueError(f"{path}: parquet needs pyarrow: pip install 'asyncrl[parquet]'") from error
        try:
            self._table = parquet.read_table(path)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError.
            raise ValueError(f"{path} cannot be read: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        (row,) = self._table.slice(index, 1).to_pylist()
        return row

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def where(self, index: int) -> str:
        """File and row."""
        return f"{self._path}, row {index}"


# ---- machinery -----------------------------------------------------------------------------------


def _prompt(value: Any, column: str, where: str) -> list[Message]:
    """The messages of a column, checked."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {column!r} must be a text or a list of messages, and is {value!r:.60}")
    for message in value:
        whole = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not whole or not isinstance(message.get("content"), str | list):
            raise ValueError(
                f'{where}: {column!r}: a message is {{"role": ..., "content": ...}}, and this is {message!r:.60}'
            )
    if value[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: {column!r} ends with an assistant's message, so nothing is left to say; move it to 'answer'"
        )
    return value
