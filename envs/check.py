"""The conformance test of environments: `check_env("my-env")` in a test of yours, or `asyncrl envs check my-env`.

It checks what the rest of the system relies on: tasks that are the same in every process, answers that depend on
nothing but task and messages, junk that neither breaks an episode nor earns more than an honest answer, rewards
that are numbers, and episodes that go on elsewhere as they would have here. gymnasium's `check_env` is the model.
It does not look for ways to cheat beyond the fixed scripts that it plays (`asyncrl.envs.check_scripts`).

    check_env ─┬─▶ process 1 (hash seed 1): tasks, one episode each ──┐
               └─▶ process 2 (hash seed 2): the same, all episodes ───┴─▶ compared ──▶ Report

The environment runs in processes of its own (`asyncrl.envs.check_process`), which are killed when a call neither
answers nor gives way. Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from asyncrl.envs.check_player import difference, shown
from asyncrl.envs.registry import PluginError

MAKE_S = 120.0
"""Longest wait for the process, its imports and the environment itself."""
EXIT_S = 10.0


@dataclass(slots=True)
class Report:
    """What was found."""

    problems: list[str]
    """One sentence each; empty if the environment keeps all promises that were checked."""
    notes: list[str]
    """What was not checked, and why."""
    timings: dict[str, tuple[float, float, int]]
    """Mean and longest time in milliseconds, and number of calls, by method."""

    def text(self) -> str:
        """The report for people; ends with the timings and the verdict."""
        lines = [f"FAIL  {problem}" for problem in self.problems] + [f"note  {note}" for note in self.notes]
        width = max(map(len, self.timings), default=0)
        lines += [
            f"ok    {what:<{width}}  {mean:.3g} ms, longest {longest:.3g} ms ({count} calls)"
            for what, (mean, longest, count) in self.timings.items()
        ]
        count = len(self.problems)
        return "\n".join([*lines, f"{count} problem{'s' * (count != 1)}" if count else "no problem found"])


def check_env(
    name: str, args: Mapping[str, Any] | None = None, *, tasks: int = 4, timeout_s: float = 30.0
) -> Report:
    """Checks an environment.

    Args:
        name: as for `asyncrl train --env`: an installed one, `package.module:object` or `file.py:object`.
        args: its arguments (`env.args`).
        tasks: training tasks whose episodes are played, at least 1.
        timeout_s: time limit of each call, as `env.timeout_s`.

    Raises:
        PluginError: the environment cannot be made.
        ValueError: `tasks` or `timeout_s` is too small.
    """
    if tasks < 1 or not timeout_s > 0:
        raise ValueError(f"tasks = {tasks}, timeout_s = {timeout_s}: at least 1, and more than 0 s")
    order = {"name": name, "args": dict(args or {}), "tasks": tasks, "timeout_s": timeout_s, "parent": os.getpid()}
    first = _examine(order | {"episodes": False}, hash_seed=1)
    whole = _examine(order | {"episodes": True}, hash_seed=2) if first.ended else first
    if whole is not first:
        _compare(first, whole)
    _compare_tasks(whole)
    problems = [
        text + (f" ({count - 1} more like it)" if count > 1 else "") for text, count in whole.found.values()
    ]
    timings = {
        what: (1e3 * fmean(times), 1e3 * max(times), len(times)) for what, times in whole.seconds.items() if times
    }
    return Report(problems, list(whole.notes), timings)


# ---- the process that plays ------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    """What a process told."""

    found: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Problems by key: the first sentence, and how many there were."""
    notes: dict[str, None] = field(default_factory=dict)
    tasks: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    ended: bool = False

    def problem(self, key: str, sentence: str) -> None:
        text, count = self.found.get(key, (sentence, 0))
        self.found[key] = text, count + 1

    def take(self, kind: str, value: Any) -> None:
        """Keeps one line of what the process told."""
        match kind:
            case "problem":
                self.problem(*value)
            case "note":
                self.notes[value] = None
            case "task":
                self.tasks.append(tuple(value))
            case "fact":
                self.facts[value[0]] = value[1]
            case "seconds":
                self.seconds = value
            case "unusable":
                raise PluginError(value)
            case "end":
                self.ended = True


def _examine(order: dict[str, Any], hash_seed: int) -> _Outcome:
    """Runs a process to its end, or kills it when it is silent for longer than any call may take."""
    outcome, now, limit_s = _Outcome(), "start", MAKE_S
    # Twice the limit: the process has noticed a call that gives way long before.
    patience_s = 2 * order["timeout_s"] + 2
    with _process(order, hash_seed) as (process, lines):
        while not outcome.ended:
            try:
                line = lines.get(timeout=limit_s)
            except queue.Empty:
                rest = "Nothing after it was checked."
                text = f"{now} neither answered nor gave way, so it holds up every episode of a generator. {rest}"
                outcome.problem("blocks", text)
                break
            if line is None:
                outcome.problem("died", f"the process ended in {now}. Nothing after it was checked.")
                break
            kind, value = json.loads(line)
            if kind == "now":
                now = value
            else:
                outcome.take(kind, value)
            limit_s = MAKE_S if now == "make the environment" else patience_s
        if outcome.ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)  # What it does at its exit is not cut short.
    return outcome


@contextlib.contextmanager
def _process(
    order: dict[str, Any], hash_seed: int
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str | None]]]:
    """Starts the process; gives it and the lines that it writes, with None at their end."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path}
    lines: queue.Queue[str | None] = queue.Queue()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "asyncrl.envs.check_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(order))
        yield process, lines
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # With it go the processes that the environment started.
        process.wait(EXIT_S)
        reader.join(EXIT_S)
        process.stdout.close()


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


# ---- what is compared --------------------------------------------------------------------------------


def _compare(first: _Outcome, second: _Outcome) -> None:
    """Tasks and episodes of two processes must be the same."""
    tasks = {(split, index): parts for split, index, parts in first.tasks}
    for split, index, parts in second.tasks:
        other = tasks.get((split, index))
        if other is not None and other != parts:
            second.problem(
                "task differs",
                f"task({split!r}, {index}) is not the same in two processes: "
                f"{difference(json.dumps(other), json.dumps(parts))}; draw it by hashing the split and the index "
                "with hashlib, or with random.Random(f'{split}-{index}')",
            )
    for what, text in second.facts.items():
        if first.facts.get(what, text) != text:
            text = f"{what} is not the same in two processes: {difference(first.facts[what], text)}"
            second.problem("episode differs", text)


def _compare_tasks(outcome: _Outcome) -> None:
    """An id stands for one task, which may come again, and no task of one split is in the other."""
    ids: dict[str, tuple[str, str]] = {}
    problems: dict[str, dict[str, str]] = {"train": {}, "eval": {}}
    for split, index, parts in outcome.tasks:
        where = f"task({split!r}, {index})"
        text = json.dumps([parts["prompt"], parts["answer"], parts["metadata"]], sort_keys=True)
        other, same = ids.setdefault(parts["id"], (where, text))
        if same != text:
            outcome.problem("ids", f"{other} and {where} differ and have the same id {shown(parts['id'])!r}")
        problems[split].setdefault(text, where)
    for split, found in problems.items():
        if not found and outcome.ended:
            outcome.notes[f"the split {split!r} has no task"] = None
    hidden = all(parts["answer"] is None and not parts["metadata"] for _, _, parts in outcome.tasks)
    if hidden and len(problems["train"]) + len(problems["eval"]) < len(outcome.tasks):
        outcome.notes["tasks differ in nothing but their ids, so the splits were not compared"] = None
        return
    for text in (text for text in problems["train"] if text in problems["eval"]):
        where = f"{problems['train'][text]} and {problems['eval'][text]}"
        outcome.problem("splits", f"{where} are the same problem: {shown(text)}; evaluate on tasks of their own")
