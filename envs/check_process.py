"""The process in which the conformance test makes and plays an environment: on its main thread, as generators do.

    stdin: one JSON table {name, args, tasks, timeout_s, episodes, parent} ──▶ stdout: lines of JSON [kind, value]

It is a process of its own so that a call that blocks, exits or crashes ends this process and not its caller's, and
so that facts can be compared between two processes with different hash seeds. What the environment itself prints
goes to stderr. Called by `asyncrl.envs.check` only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from asyncrl.envs.base import Environment, Split
from asyncrl.envs.check_player import Broken, Player, Tell, Trace, difference, shown, travels
from asyncrl.envs.check_resume import resumed
from asyncrl.envs.check_scripts import Script, honest, junk
from asyncrl.envs.registry import PluginError, load
from asyncrl.messages import Task
from asyncrl.process import die_with_parent

DRAWN = 64
"""Tasks of each split that are drawn and compared; fewer if drawing them takes longer than `DRAWING_S`."""
DRAWING_S = 5.0


def main() -> None:
    """Reads the order, does what it says, and tells what was found."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        order = json.load(sys.stdin)
        die_with_parent(order["parent"])

        def tell(kind: str, value: Any) -> None:
            out.write(json.dumps([kind, value]) + "\n")

        tell("now", "make the environment")
        try:
            environment = load(order["name"], order["args"])
        except PluginError as error:
            tell("unusable", str(error))
            return
        asyncio.run(Examination(environment, order, tell).run())


class Examination:
    """All checks of one environment, in order."""

    def __init__(self, environment: Environment, order: dict[str, Any], tell: Tell) -> None:
        self.environment, self.order, self.tell = environment, order, tell
        self.player = Player(environment, order["timeout_s"], tell)
        self.scores: dict[str, list[float | None]] = {}
        """Scores of each junk script, one for each task."""
        self.best = 0.0

    async def run(self) -> None:
        """Tasks first, then the episodes of the first few."""
        splits: tuple[Split, ...] = ("train", "eval")
        tasks = [task for split in splits for task in self.tasks(split)]
        if not tasks:
            self.tell("problem", ["no tasks", "there is no task: task('train', 0) and task('eval', 0) give none"])
        for task in tasks[: self.order["tasks"]]:
            await self.fact(task)
            if self.order["episodes"]:
                await self.episodes(task)
        if self.order["episodes"] and tasks:
            await self.unstarted()
            self.constant_junk()
        self.tell("seconds", self.player.seconds)
        self.tell("end", None)

    # ---- tasks ---------------------------------------------------------------------------------------

    def tasks(self, split: Split) -> Iterator[Task]:
        """Draws tasks and states each as a fact."""
        began = time.perf_counter()
        for index in range(DRAWN):
            if index >= self.order["tasks"] and time.perf_counter() - began > DRAWING_S:
                return
            task = self.task(split, index)
            if task is None:
                return
            parts = {"id": task.id, "prompt": task.prompt, "answer": task.answer, "metadata": task.metadata}
            where = f"task({split!r}, {index})"
            wrong = travels(parts)
            if wrong:
                self.player.problem("task travels", f"{where} {wrong}: {shown(parts)}")
                return
            self.tell("task", [split, index, parts])
            yield task

    def task(self, split: Split, index: int) -> Task | None:
        """One task; None behind the last one, and where it fails."""
        where, began = f"task({split!r}, {index})", time.perf_counter()
        self.tell("now", where)
        try:
            task = self.environment.task(split, index)
        except IndexError:
            return None
        except (Exception, SystemExit) as error:
            self.player.problem("task raised", f"{where} raised {type(error).__name__}: {shown(error)}")
            return None
        self.player.seconds["task"].append(time.perf_counter() - began)
        if not isinstance(task, Task):
            self.player.problem("task kind", f"{where} returned {type(task).__name__}, not asyncrl.messages.Task")
            return None
        return task

    # ---- episodes ------------------------------------------------------------------------------------

    async def fact(self, task: Task) -> None:
        """The honest episode, or one of junk, as a fact that must be the same in another process."""
        script = self.honest(task) or next(junk([]))
        trace = await self.trace(task, script)
        if trace is not None:
            self.tell("fact", [f"the episode of task {task.id} with {script.title}", trace.text()])

    def honest(self, task: Task) -> Script | None:
        """The honest script, if there is one and it can be read."""
        try:
            return self.player.guard("demonstration", lambda: honest(self.environment, task), f"task {task.id}")
        except Broken:
            return None

    async def trace(self, task: Task, script: Script) -> Trace | None:
        """An episode; None if it failed, which has been told."""
        try:
            return await self.player.play(task, script.messages, f"task {task.id}, {script.title}")
        except Broken:
            return None

    async def episodes(self, task: Task) -> None:
        """All episodes of one task."""
        script = self.honest(task)
        ideal = await self.trace(task, script) if script else None
        if script and ideal:
            self.demonstrated(task, script, ideal)
            await self.again(task, script, ideal)
        tools = ideal.start.tools if ideal else []
        longest = (script, ideal) if script and ideal else None
        for nonsense in junk(tools):
            trace = await self.trace(task, nonsense)
            if trace is None:
                continue
            self.judge(task, script, ideal, nonsense, trace)
            if longest is None or len(trace.steps) > len(longest[1].steps):
                longest = nonsense, trace
        if longest is None:
            return
        if longest[0] is not script:
            await self.again(task, *longest)
        await resumed(self.player, task, *longest)

    async def again(self, task: Task, script: Script, trace: Trace) -> None:
        """Two more episodes at the same time, which must be like the first."""
        for other in await asyncio.gather(self.trace(task, script), self.trace(task, script)):
            if other is not None and other.text() != trace.text():
                self.player.problem(
                    "not deterministic",
                    f"two episodes of task {task.id} with the same messages ({script.title}) differ: "
                    f"{difference(trace.text(), other.text())}; let all randomness come from the task",
                )

    def demonstrated(self, task: Task, script: Script, trace: Trace) -> None:
        """A demonstration must happen as it says."""
        if script.title != "the demonstration":
            return
        if not trace.steps[-1].done or len(trace.steps) < len(script.messages):
            end = "before" if not trace.steps[-1].done else "after"
            self.player.problem(
                "demonstration", f"the demonstration of task {task.id} ends {end} its episode does"
            )
        for said, step in zip(script.answers, trace.steps, strict=False):
            if list(said) != step.messages:
                self.player.problem(
                    "demonstration",
                    f"the demonstration of task {task.id} says that the environment answers {shown(said)}, and it "
                    f"answered {shown(step.messages)}",
                )

    # ---- scores --------------------------------------------------------------------------------------

    def judge(self, task: Task, script: Script | None, ideal: Trace | None, bad: Script, trace: Trace) -> None:
        """Junk must not earn more than the honest answer."""
        score = trace.score
        self.scores.setdefault(bad.title, []).append(score)
        honest = ideal.score if ideal else None
        self.best = max(self.best, score or 0.0, honest or 0.0)
        if script is None or ideal is None or score is None:
            return
        if honest is None or score > honest + 1e-9:
            self.player.problem(
                f"junk {bad.title}",
                f"{bad.title} earns {score:g} on task {task.id}, and {script.title} earns "
                f"{'nothing' if honest is None else f'{honest:g}'}",
            )

    def constant_junk(self) -> None:
        """Where the honest answer is not known: junk must not earn the most there is everywhere."""
        given = [score for scores in self.scores.values() for score in scores if score is not None]
        if not given:
            self.tell("note", "no junk was given a reward, so rewards were not compared")
        elif self.best <= 0:
            self.tell("note", "no answer earned more than 0, so it was not checked that junk earns less")
        for title, scores in self.scores.items():
            if self.best > 0 and all(score is not None and score >= self.best for score in scores):
                text = f"{title} earns {self.best:g} on each of {len(scores)} tasks, and no answer earned more"
                self.player.problem("junk maximum", text)

    # ---- what else an episode can do -----------------------------------------------------------------

    async def unstarted(self) -> None:
        """Closing an episode that was never started, and closing one twice."""
        try:
            env = self.player.make("without reset")
        except Broken:
            return
        await self.player.close(env, "without reset")
        await self.player.close(env, "a second time")


if __name__ == "__main__":
    main()
