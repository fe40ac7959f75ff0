"""The conformance test passes sound environments and finds planted defects, whatever they do to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.envs.check import Report, check_env
from asyncrl.envs.registry import PluginError

SOUND = """
import asyncio, json, os, random, sys, time
from asyncrl.envs.base import Start, Step
from asyncrl.messages import Task

class Episode:
    async def reset(self, task):
        self.answer, self.turn = task.answer, 0
        return Start(task.prompt)

    async def step(self, message):
        self.turn += 1
        right = message["content"] == self.answer
        if right or self.turn == 2:
            return Step(True, {"right": float(right)})
        return Step(False, {}, [{"role": "user", "content": f"no, not after {self.turn}"}])

    async def close(self): pass
    async def snapshot(self): return json.dumps(self.turn).encode()
    async def restore(self, task, blob): self.answer, self.turn = task.answer, json.loads(blob)

class World:
    episode = Episode
    def task(self, split, index):
        answer = f"{split}-{index}"
        return Task(answer, [{"role": "user", "content": "Say " + answer}], answer)
    def demonstration(self, task): return task.answer
    def make(self): return self.episode()
"""


def _check(tmp_path: Path, changes: str, *, timeout_s: float = 5.0, tasks: int = 1) -> Report:
    path = tmp_path / "planted.py"
    path.write_text(f"{SOUND}\n{changes}")
    return check_env(f"{path}:World", tasks=tasks, timeout_s=timeout_s)


def test_arithmetic_keeps_every_promise() -> None:
    report = check_env("arithmetic", {"digits": 1}, tasks=2)
    assert report.problems == [], report.text()
    assert set(report.timings) == {"task", "reset", "step", "close"}
    assert report.text().endswith("no problem found")


def test_a_sound_environment_with_turns_and_snapshots_has_neither_problems_nor_notes(tmp_path: Path) -> None:
    report = _check(tmp_path, "")
    assert (report.problems, report.notes) == ([], []), report.text()
    assert report.timings["snapshot"][2] == report.timings["restore"][2] == 2, "a task of two turns"


DEFECTS = {
    "tasks": (
        """def task(self, split, index):
    return Task("one", [{"role": "user", "content": str(hash(split)) + str(index)}], "a")
World.task = task""",
        [
            "is not the same in two processes",
            "random.Random(f'{split}-{index}')",
            "differ and have the same id 'one'",
        ],
    ),
    "splits": (
        """World.task = lambda self, split, index: Task(f"{split}{index}", [{"role": "user", "content": ""}], 7)
World.demonstration = lambda self, task: str(task.answer)
async def step(self, message): return Step(True, {"right": float("inf")})
Episode.step = step""",
        [
            "task('train', 0) and task('eval', 0) are the same problem",
            "step gave {'right': inf}: reward 'right' = inf",
        ],
    ),
    "randomness and form": (
        """async def step(self, message):
    return Step(False, {}, [{"role": "user", "content": str(random.random())}] if message["content"] else [])
async def close(self): del self.turn
Episode.step, Episode.close = step, close""",
        [
            "with the same messages (the demonstration) differ",
            "the demonstration of task train-0 ends before",
            "step is not done and gave no message",
            "close raised AttributeError",
        ],
    ),
    "rewards and snapshots": (
        """import pickle
async def reset(self, task):
    self.answer, self.turn = task.answer, 0
    return Start([{"role": "user", "content": str(hash(task.id))}])
async def step(self, message):
    self.turn += 1
    return Step(self.turn == 2, {"right": 1.0 if "9" in message["content"] else 0.5}, [
        {"role": "user", "content": "?"}])
def demonstration(self, task):
    said = {"role": "assistant", "content": "?"}
    return [said, {"role": "user", "content": "?"}, said]
World.demonstration = demonstration
async def snapshot(self): return pickle.dumps(0)
async def restore(self, task, blob): self.turn = 0
Episode.reset, Episode.step, Episode.snapshot, Episode.restore = reset, step, snapshot, restore""",
        [
            "the episode of task train-0 with the demonstration is not the same in two processes",
            "400 digits earns 2 on task train-0, and the demonstration earns 1",
            "400 digits earns 2 on each of 1 tasks, and no answer earned more",
            "an episode restored from a snapshot goes on in another way after turn 1",
            "a snapshot is a pickle",
        ],
    ),
    "junk and replay": (
        """honest = Episode.step
async def step(self, message):
    if "7" in message["content"] or not message["content"]: return await honest(self, message)
    int(message["content"])
async def replay(self, message, step): pass
del Episode.snapshot, Episode.restore
Episode.step, Episode.replay = step, replay""",
        [
            "step raised ValueError: invalid literal",
            "more like it)",
            "step returned NoneType, not Step (task train-0, 400 digits)",
            "an episode with replayed turns goes on in another way after turn 1",
        ],
    ),
    "a task that is no JSON": (
        """World.task = lambda self, split, index: Task(f"{split}-{index}", [], (1, 2))""",
        ["task('train', 0) is not the same after a round trip through JSON", "there is no task"],
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_explained(tmp_path: Path, name: str) -> None:
    changes, sentences = DEFECTS[name]
    report = _check(tmp_path, changes)
    for sentence in sentences:
        assert sentence in report.text()
    assert "problem found" not in report.text()


def test_a_step_that_never_answers_is_told_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    hang = "async def step(self, message): await asyncio.sleep(3600 * (message['content'] == 'foo'))\n"
    report = _check(tmp_path, hang + "Episode.step = step", timeout_s=0.3)
    text = report.text()
    assert "step did not answer within 0.3 s (task train-0, 'foo')" in text
    assert "step returned NoneType, not Step" in text


def test_a_step_that_blocks_the_loop_is_ended_from_outside(tmp_path: Path) -> None:
    block = "async def step(self, message): time.sleep(3600)\nEpisode.step = step"
    report = _check(tmp_path, block, timeout_s=0.05)
    assert "step (task train-0, the demonstration) neither answered nor gave way" in report.text()


@pytest.mark.parametrize(
    ("code", "text"), [("os._exit(3)", "the process ended in step"), ("sys.exit(3)", "SystemExit")]
)
def test_a_step_that_ends_the_process_is_named(tmp_path: Path, code: str, text: str) -> None:
    report = _check(tmp_path, f"async def step(self, message): {code}\nEpisode.step = step")
    assert text in report.text()
    assert "(task train-0, the demonstration)" in report.text()


def test_a_demonstration_must_happen_as_it_says(tmp_path: Path) -> None:
    report = _check(
        tmp_path,
        """World.demonstration = lambda self, task: [
            {"role": "assistant", "content": "?"}, {"role": "user", "content": "go on"},
            {"role": "assistant", "content": task.answer}]""",
    )
    (problem,) = report.problems
    assert "says that the environment answers [{'role': 'user', 'content': 'go on'}]" in problem
    assert "no, not after 1" in problem


def test_without_an_honest_answer_it_says_what_was_not_checked(tmp_path: Path) -> None:
    report = _check(
        tmp_path,
        """del World.demonstration
World.task = lambda self, split, index: Task(f"{split}-{index}", [{"role": "user", "content": "?"}])
del Episode.snapshot, Episode.restore""",
    )
    assert report.problems == [], report.text()
    assert "tasks differ in nothing but their ids" in report.text()
    assert "no answer earned more than 0" in report.text()
    assert "no snapshots and no replay" in report.text()


def test_an_environment_that_cannot_be_made_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"digits = 0"):
        check_env("arithmetic", {"digits": 0})
    with pytest.raises(PluginError, match="no environment named 'nobody'"):
        check_env("nobody")
    with pytest.raises(ValueError, match="tasks = 0"):
        check_env("arithmetic", tasks=0)
