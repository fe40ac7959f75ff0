"""Single-turn environments from data and a reward function, from Python and through the entry point `data`."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.base import Demonstrates, Environment
from asyncrl.envs.registry import PluginError, load
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.single_turn import SingleTurn, make
from asyncrl.envs.sources import Rows

ROWS = [{"question": f"{i}+{i}=", "answer": 2 * i} for i in range(50)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


async def rewards(environment: SingleTurn, content: Any, index: int = 0) -> dict[str, float | None]:
    env = environment.make()
    await env.reset(environment.task("train", index))
    step = await env.step({"role": "assistant", "content": content})
    await env.close()
    assert step.done
    assert not step.messages
    return step.rewards


async def test_the_entry_point_takes_a_file_and_compares_with_the_answer(data: Path) -> None:
    environment = load("data", {"path": str(data)})
    assert isinstance(environment, SingleTurn)
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrates)
    task = environment.task("train", 3)
    for said, reward in ((f" {task.answer}\n", 1.0), (f"{task.answer}0", 0.0), ("", 0.0), (None, 0.0)):
        assert await rewards(environment, said, 3) == {"correct": reward}
    assert await rewards(environment, environment.demonstration(task), 3) == {"correct": 1.0}


async def test_a_reward_function_of_any_signature_may_be_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "def right(final, answer): return final == str(answer)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'data' and extra_info == {}\n"
        "    return {'score': float(solution_str == str(ground_truth)), 'length': 1}\n"
        "async def columns(prompts, completions, answer, **rest):\n"
        "    return [float(completions[0][0]['content'] == str(answer[0]))]\n"
        "def broken(final): raise KeyError('lost')\n"
    )
    for name in ("right", "compute_score", "columns"):
        environment = make(str(data), f"{tmp_path / 'judges.py'}:{name}", seed=1)
        answer = environment.task("train", 0).answer
        assert await rewards(environment, str(answer)) == {name: 1.0}
        assert await rewards(environment, "other") == {name: 0.0}
    with pytest.raises(RewardFault, match="reward function 'broken' raised KeyError: 'lost'"):
        await rewards(make(str(data), f"{tmp_path / 'judges.py'}:broken"), "1")


async def test_evaluation_may_have_a_file_of_its_own(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "test.jsonl"
    other.write_text('{"prompt": [{"role": "user", "content": "9+9="}], "answer": "18"}')
    environment = make(str(data), eval_path=str(other), epochs=1, system="Count.")
    assert [environment.task("train", i).prompt for i in range(50)]
    with pytest.raises(IndexError):
        environment.task("train", 50)
    task = environment.task("eval", 0)
    start = await environment.make().reset(task)
    assert start.messages == [{"role": "system", "content": "Count."}, {"role": "user", "content": "9+9="}]


def test_what_cannot_work_is_refused_at_the_start(data: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "Write a poem."}')
    with pytest.raises(ValueError, match=r"bare\.jsonl, line 1: no 'answer' to compare with"):
        make(str(bare))
    with pytest.raises(PluginError, match=r"env.args = .*no\.jsonl cannot be read"):
        load("data", {"path": str(tmp_path / "no.jsonl")})
    with pytest.raises(ValueError, match=r"env\.args\.path = 3: must be the name of"):
        make(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"env\.args\.reward_timeout_s = 0: must be a number above 0"):
        make(str(data), reward_timeout_s=0)
    with pytest.raises(ValueError, match="share = 2: must be a number from 0 and below 1"):
        make(str(data), share=2)
    with pytest.raises(PluginError, match="there is no reward function named 'nobody'"):
        make(str(data), "nobody")


async def test_a_step_before_the_reset_and_a_demonstration_without_an_answer_are_errors() -> None:
    environment = SingleTurn(Rows([{"prompt": "Write a poem."}], share=0), lambda final: 1.0)
    with pytest.raises(RuntimeError, match="call reset"):
        await environment.make().step({"role": "assistant", "content": ""})
    with pytest.raises(ValueError, match="task 'train/0' has no 'answer'"):
        environment.demonstration(environment.task("train", 0))
