"""Evaluation on a finite split, with a real model and a real engine."""

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl.config import Config, Reward
from asyncrl.evaluate import evaluate, report
from asyncrl.settings import UsageError
from asyncrl.toy import init_model

ENVIRONMENT = '''
from asyncrl.envs.base import Start, Step
from asyncrl.messages import Task


class Counting:
    """Held-out tasks 0 .. size-1; the reward of each is its number."""

    def __init__(self, size):
        self.size = size

    def task(self, split, index):
        if split == "eval" and index >= self.size:
            raise IndexError(index)
        return Task(str(index), [{"role": "user", "content": f"{index}?"}], answer=index)

    def make(self):
        return Episode()


class Episode:
    async def reset(self, task):
        self.task = task
        return Start(messages=task.prompt)

    async def step(self, message):
        return Step(done=True, rewards={"number": float(self.task.answer)})

    async def close(self):
        pass


make = Counting
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


def config(folder: Path, size: int) -> Config:
    plugin = folder / "counting.py"
    plugin.write_text(ENVIRONMENT)
    return Config.model_validate(
        {
            "env": {"name": f"{plugin}:make", "args": {"size": size}},
            "sampling": {"max_tokens": 4},
            "generator": {"slots": 4, "max_model_len": 32},
        }
    )


async def test_a_finite_split_is_evaluated_once_through(model: Path, tmp_path: Path) -> None:
    found = await evaluate(config(tmp_path, size=3), str(model), 10)
    assert (found.tasks, found.rewarded, found.reward) == (3, 3, 1.0)
    assert found.stderr == pytest.approx(1 / 3**0.5)  # 0, 1, 2: a standard deviation of 1
    assert sum(found.statuses.values()) == 3
    assert 3 <= found.tokens <= 3 * 4


def test_no_more_tasks_are_run_than_asked_for(model: Path, tmp_path: Path) -> None:
    text, status = report(config(tmp_path, size=100), str(model), 2, as_json=True)
    found = json.loads(text)
    assert (found["tasks"], found["reward"], found["missing"], status) == (2, 0.5, "", 0)


def judged(folder: Path, body: str) -> Config:
    """Held-out tasks 0, 1 and 2, and a reward function besides."""
    (folder / "judges.py").write_text(f"def judge(answer):\n    {body}\n")
    reward = Reward(functions=[f"{folder}/judges.py:judge"])
    return config(folder, size=3).model_copy(update={"reward": reward})


def test_an_evaluation_without_any_reward_has_failed_and_says_why(model: Path, tmp_path: Path) -> None:
    lost = judged(tmp_path, "raise KeyError('lost')")
    text, status = report(lost, str(model), 3)
    assert status == 1
    assert "no reward at all on 3 held-out tasks" in text
    assert "nan" not in text
    assert "3 have no reward, most often because: reward function 'judge' raised KeyError: 'lost'" in text
    text, status = report(lost, str(model), 3, as_json=True)
    assert status == 1
    assert json.loads(text)["reward"] is None


def test_an_evaluation_with_some_rewards_gives_their_mean_and_the_commonest_reason(
    model: Path, tmp_path: Path
) -> None:
    text, status = report(judged(tmp_path, "return 0.0 if answer == 2 else 1 / 0"), str(model), 3)
    assert status == 0
    assert "mean reward 2.000" in text
    assert "2 have no reward, most often because: reward function 'judge' raised ZeroDivisionError" in text


@pytest.mark.parametrize(("size", "tasks"), [(0, 10), (3, 0)])
def test_an_evaluation_without_tasks_says_what_is_missing(
    model: Path, tmp_path: Path, size: int, tasks: int
) -> None:
    with pytest.raises(UsageError, match=rf"first {tasks} tasks .*'size': {size}.* at least 1"):
        asyncio.run(evaluate(config(tmp_path, size), str(model), tasks))
