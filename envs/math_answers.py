r"""Mathematical answers, judged by math-verify: `\frac{1}{2}`, `0.5` and `1/2` are the same.

    {"problem": "What is 1/4 + 1/4?", "answer": "\\frac12"}            `question` instead of `problem` is as good
    {"question": "...", "solution": "... so it is \\boxed{12}"}        or `#### 12` at the end, as in GSM8K

Two plug-ins: `make`, an environment of one turn over JSON lines like these, and `math_reward`, a reward function
for other environments. math-verify finds the answer in what the assistant said (`\boxed{}` first). It stops
itself with a signal, which works in main threads only, and sympy may take for ever, so it runs in processes of
its own (`asyncrl.envs.process_pool`). An answer that it does not judge in time is no wrong answer: the episode
fails and is dropped. One on which it raises is wrong, and counted. Needs `pip install 'asyncrl[math]'`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.process_pool import CallLost, CallRaised, ProcessPool
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.rows import JsonLines
from asyncrl.envs.sources import Rows
from asyncrl.messages import EpisodeStatus, Task

LIMIT_S = 10.0
"""Default time limit of judging one answer; a usual one takes milliseconds."""
CHECKED = 100
"""So many rows of each file have their answers parsed when the environment is made; the others when drawn."""
GOLDS_S = 60.0
"""Time limit of parsing them."""
JUDGE = f"{__name__}:judge"


class Judge:
    """Judges answers in a pool of processes.

    Args:
        workers: most processes.
        limit_s: time limit of each judgement, in seconds.
    """

    def __init__(self, workers: int = 2, limit_s: float = LIMIT_S) -> None:
        self._pool = ProcessPool(f"{__name__}:load_library", workers)
        self._limit_s = limit_s

    def wrong_golds(self, golds: list[str]) -> dict[str, str]:
        """Those reference answers that nothing could be compared with, each with the reason.

        Raises:
            CallRaised: math-verify is not installed, or cannot be imported.
            CallLost: parsing took too long.
        """
        found: dict[str, str] = self._pool.call(f"{__name__}:find_wrong", golds, limit_s=GOLDS_S)
        return found

    def of(self, gold: str, text: str) -> tuple[bool, str | None]:
        """Whether the answer in a text is right, and what math-verify raised on it, if it did.

        Raises:
            CallLost: there was no judgement within the limit.
        """
        try:
            right, error = self._pool.call(JUDGE, gold, text, limit_s=self._limit_s)
        except CallRaised as raised:  # Of a gold that was checked: the text provoked it.
            return False, str(raised)
        return right, error

    async def aof(self, gold: str, text: str) -> tuple[bool, str | None]:
        """The same from a coroutine."""
        try:
            right, error = await self._pool.acall(JUDGE, gold, text, limit_s=self._limit_s)
        except CallRaised as raised:
            return False, str(raised)
        return right, error


class MathAnswers:
    """The environment: problems, and answers that are checked before anyone is asked."""

    def __init__(self, rows: Rows, judge: Judge, checked: set[str]) -> None:
        self._rows, self._judge, self._checked = rows, judge, checked

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th problem of a split.

        Raises:
            IndexError: there are no more.
            ValueError: math-verify cannot read its reference answer.
        """
        task = self._rows.task(split, index)
        if task.answer not in self._checked:
            wrong = self._judge.wrong_golds([task.answer])
            if wrong:
                raise ValueError(f"row {task.id}: {wrong[task.answer]}; correct the row or leave it out")
            self._checked.add(task.answer)
        return task

    def make(self) -> MathEnv:
        """A new, unused episode."""
        return MathEnv(self._judge)

    def demonstration(self, task: Task) -> str:
        """The row's solution, or the boxed answer alone."""
        return str(task.metadata.get("solution") or task.answer)


class MathEnv:
    """One episode: a problem, an answer, done."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._gold: str | None = None

    async def reset(self, task: Task) -> Start:
        """Shows the problem."""
        self._gold = str(task.answer)
        return Start(messages=list(task.prompt))

    async def step(self, message: Message) -> Step:
        """Rewards the right answer with 1.

        Raises:
            RewardFault: it could not be judged in time.
        """
        if self._gold is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        said = message.get("content")
        try:
            right, error = await self._judge.aof(self._gold, said if isinstance(said, str) else "")
        except CallLost as lost:
            raise RewardFault(EpisodeStatus.FAILED_TIME, f"the answer was not judged: {lost}") from lost
        return Step(True, {"correct": float(right)}, info={"judge_errors": float(error is not None)})

    async def close(self) -> None:
        """Holds nothing; the processes belong to the environment."""


def make(
    data: str,
    eval_data: str | None = None,
    instruction: str = "Put the final answer in \\boxed{}.",
    limit_s: float = LIMIT_S,
    workers: int = 2,
    seed: int = 0,
) -> MathAnswers:
    r"""The entry point.

    Args:
        data: file of training problems (see above). Without `eval_data` a tenth is held out for evaluation.
        eval_data: file of evaluation problems.
        instruction: stands below each problem; "" for none.
        limit_s: time limit of judging one answer, in seconds. Keep it below `env.timeout_s`.
        workers: most processes that judge, in each generator; each takes about 100 MB.
        seed: another seed shuffles the training problems in another way.

    Raises:
        ValueError: an argument is out of its range, or a row has no problem or no usable answer: file and row.
        CallRaised: math-verify is not installed.
    """
    check_seconds("limit_s", limit_s)
    check_whole("workers", workers, 1)
    train = _rows(data, instruction)
    evaluation = None if eval_data is None else _rows(eval_data, instruction)
    judge, checked = Judge(workers, limit_s), set()
    for path, rows in ((data, train), (eval_data, evaluation or [])):
        golds = [row["answer"] for row in rows[:CHECKED]]
        wrong = judge.wrong_golds(golds)
        if wrong:
            number = next(i for i, gold in enumerate(golds) if gold in wrong)
            raise ValueError(f"{path}, row {number}: {wrong[golds[number]]}; correct the row or leave it out")
        checked |= set(golds)
    return MathAnswers(Rows(train, evaluation, seed=seed), judge, checked)


def math_reward(final: str, answer: Any) -> float:
    """The reward function: 1.0 if the assistant's last message has the right answer, else 0.0.

    Raises:
        ValueError: the task has no answer.
        CallLost: there was no judgement within 10 s. Both fail the episode.
    """
    right, _ = _shared_judge().of(gold_of({"answer": answer}), final)
    return float(right)


def gold_of(row: Mapping[str, Any]) -> str:
    r"""A row's reference answer in `\boxed{}`, as math-verify is given it.

    Raises:
        ValueError: it has none.
    """
    answer, solution = (str(row.get(key) if row.get(key) is not None else "") for key in ("answer", "solution"))
    for text in (answer, solution):
        if "\\boxed" in text:
            return text[text.rindex("\\boxed") :]
        if "####" in text:
            return f"\\boxed{{{text.rpartition('####')[2].strip()}}}"
    if answer.strip():
        return f"\\boxed{{{answer.strip().strip('$')}}}"
    raise ValueError("it has no `answer`, and no `solution` with \\boxed{} or ####")


def _rows(path: str, instruction: str) -> list[dict[str, Any]]:
    file = JsonLines(Path(path))
    return [_row(row, file.where(number), instruction) for number, row in enumerate(file)]


def _row(row: Mapping[str, Any], where: str, instruction: str) -> dict[str, Any]:
    problem = row.get("problem") or row.get("question")
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"{where}: it has no text `problem` or `question` (columns: {', '.join(row) or 'none'})")
    try:
        found = {"prompt": f"{problem}\n{instruction}".rstrip(), "answer": gold_of(row)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return found | {key: row[key] for key in ("solution", "level", "data_source") if row.get(key) is not None}


@functools.cache
def _shared_judge() -> Judge:
    """That of the reward function, which has no place of its own to keep one."""
    return Judge()


# ---- in the process ------------------------------------------------------------------------------


def load_library() -> None:
    """Imports math-verify in a new process; it warns that it has no time limit of its own there."""
    _library()
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _library() -> Any:
    return load_extra("math_verify", "math", "math")


def find_wrong(golds: Iterable[str]) -> dict[str, str]:
    """See `Judge.wrong_golds`."""
    reasons = {gold: _reason(gold) for gold in golds}
    return {gold: reason for gold, reason in reasons.items() if reason is not None}


def judge(gold: str, text: str) -> tuple[bool, str | None]:
    """See `Judge.of`. A comparison that raises may be one of several, so the others are still made."""
    verify = _library().verify
    reference, answer = _parse(gold), _parse(text)
    try:
        return verify(reference, answer, timeout_seconds=None, raise_on_error=True), None
    except Exception as error:  # sympy raises whatever it likes; the answer provoked it.
        return verify(reference, answer, timeout_seconds=None), f"{type(error).__name__}: {error}"


def _parse(text: str) -> list[Any]:
    found: list[Any] = _library().parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def _reason(gold: str) -> str | None:
    """Why a reference answer cannot be used; None if it can."""
    try:
        found = _parse(gold)
        right, error = judge(gold, gold)
    except Exception as raised:
        return f"math-verify cannot read the answer {gold!r}: {type(raised).__name__}: {raised}"
    if all(isinstance(each, str) for each in found):
        return f"math-verify finds no mathematical expression in the answer {gold!r}"
    return (
        None if right else f"math-verify does not find the answer {gold!r} equal to itself ({error or 'no error'})"
    )
