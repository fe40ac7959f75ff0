"""Environments of verifiers in a Python of their own, through a real worker: rewards, metrics, tools, a cut-off.

The interpreter that ASYNCRL_VERIFIERS_PYTHON names must have verifiers 0.4.0, aiohttp, and asyncrl with msgspec,
pyzmq and pydantic.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.base import Environment, Truncates
from asyncrl.envs.registry import PluginError, load
from asyncrl.envs.worker_client import make
from asyncrl.transport import free_port_pair

PYTHON = os.environ.get("ASYNCRL_VERIFIERS_PYTHON")
needs_verifiers = pytest.mark.skipif(
    PYTHON is None, reason="needs an interpreter with verifiers and asyncrl: set ASYNCRL_VERIFIERS_PYTHON"
)

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.branches[-1].messages[-1].content == task.answer)

    @vf.metric
    async def messages(self, trace) -> float:
        return float(len(trace.branches[-1].messages))


class Config(vf.TasksetConfig):
    count: int = 20


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Sum(Data(prompt=f"{n}+{n}=", answer=str(2 * n), system_prompt="Digits."), self.config.task)
"""

BOXES = '''
import verifiers.v1 as vf

__all__ = ["Boxes"]
CONTENTS = {"red": "7", "blue": "9"}


class Box(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look(self, colour: str) -> str:
        """What is in the box of a colour."""
        return CONTENTS[colour]


class Data(vf.TaskData):
    colour: str = ""


class Look(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Box(vf.ToolsetConfig())]

    @vf.reward
    async def found(self, task, trace) -> float:
        return float(trace.branches[-1].messages[-1].content == CONTENTS[task.colour])


class Boxes(vf.Taskset[Look]):
    def load(self):
        for colour in CONTENTS:
            yield Look(Data(prompt=f"What is in the {colour} box?", colour=colour), self.config.task)


if __name__ == "__main__":
    Box.run()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "sums.py").write_text(SUMS)
    (folder / "boxes.py").write_text(BOXES)
    return folder


def serve(folder: Path, **args: object) -> Iterator[Environment]:
    assert PYTHON is not None
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    command = [PYTHON, "-P", "-m", "asyncrl", "env-worker", "--env", "asyncrl.envs.adapters.verifiers:make"]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    worker = subprocess.Popen([*command, "--env.args", json.dumps(args), "--endpoint", endpoint], env=environ)
    try:
        yield make(endpoint, timeout_s=120)
    finally:
        worker.terminate()
        worker.wait(30)


@pytest.fixture(scope="module")
def sums(folder: Path) -> Iterator[Environment]:
    yield from serve(folder, taskset="sums", taskset_args={"count": 30})


@pytest.fixture(scope="module")
def boxes(folder: Path) -> Iterator[Environment]:
    yield from serve(folder, taskset="boxes", eval_args={})


@needs_verifiers
async def test_rewards_and_metrics_are_taken_over_by_name(sums: Environment) -> None:
    async def play(index: int, off: int) -> tuple[object, object]:
        task = sums.task("train", index)
        env = sums.make()
        start = await env.reset(task)
        assert start.messages == task.prompt
        assert start.messages[0] == {"role": "system", "content": "Digits."}
        number = int(start.messages[1]["content"].partition("+")[0])
        step = await env.step({"role": "assistant", "content": str(2 * number + off)})
        await env.close()
        assert step.done
        return step.rewards, step.info

    found = await asyncio.gather(*(play(index, index % 2) for index in range(16)))
    assert found == [({"right": 2.0 * (index % 2 == 0)}, {"messages": 3.0}) for index in range(16)]


@needs_verifiers
def test_one_task_in_ten_is_held_out(sums: Environment) -> None:
    train = {sums.task("train", index).prompt[1]["content"] for index in range(27)}
    held_out = {sums.task("eval", index).prompt[1]["content"] for index in range(3)}
    assert len(train | held_out) == 30
    for split, index in (("train", 27), ("eval", 3)):
        with pytest.raises(IndexError):
            sums.task(split, index)  # type: ignore[arg-type]


@needs_verifiers
async def test_the_tasks_tools_are_called_and_a_cut_off_episode_is_scored(boxes: Environment) -> None:
    task = boxes.task("train", 1)

    async def begin() -> Any:
        env = boxes.make()
        start = await env.reset(task)
        name = start.tools[0]["function"]["name"]
        call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"colour": "blue"}}}
        step = await env.step({"role": "assistant", "content": "", "tool_calls": [call]})
        assert step.messages == [{"role": "tool", "content": "9", "tool_call_id": "call_0", "name": name}]
        return env

    env, cut = await asyncio.gather(begin(), begin())
    assert (await env.step({"role": "assistant", "content": "9"})).rewards == {"found": 1.0}
    assert isinstance(cut, Truncates)
    assert await cut.truncated("truncated_turns") == {"found": 0.0}
    await asyncio.gather(env.close(), cut.close())


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_without_the_library_the_error_names_the_extra_and_the_worker() -> None:
    with pytest.raises(PluginError, match=r"pip install 'asyncrl\[verifiers\]'.*env-worker"):
        load("asyncrl.envs.adapters.verifiers:make", {"taskset": "sums"})
