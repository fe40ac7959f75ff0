"""Environments made of tools, tasks and a reward function: when they end, what is scored, how they are resumed."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.envs.base import Demonstrates, Environment, Interruptible, Message, Replays, Snapshots, Truncates
from asyncrl.envs.registry import PluginError, load
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.sources import Rows
from asyncrl.envs.tool_env import ToolEnv
from asyncrl.envs.tools import side_effects
from asyncrl.messages import EpisodeStatus, Task

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"double {i}", "answer": str(2 * i)} for i in range(10)]
TASK = Task("t", [{"role": "user", "content": "double 2"}], "4")
CALLED: list[str] = []


def calling(name: str, **arguments: Any) -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def double(number: int) -> int:
    """Doubles."""
    CALLED.append("double")
    return 2 * number


@side_effects
def send(text: str) -> str:
    """Sends."""
    CALLED.append("send")
    return "sent"


def right(final: str, answer: str) -> float:
    return float(final == answer)


@pytest.fixture(autouse=True)
def _nothing_called() -> None:
    CALLED.clear()


async def test_an_episode_goes_on_while_tools_are_called_and_then_is_scored() -> None:
    environment = ToolEnv([double, send], Rows(ROWS), right, system="You count.")
    assert isinstance(environment, Environment)
    task = environment.task("train", 0)
    env = environment.make()
    start = await env.reset(task)
    assert start.messages == [{"role": "system", "content": "You count."}, *task.prompt]
    assert [tool["function"]["name"] for tool in start.tools] == ["double", "send"]
    step = await env.step(calling("double", number=2))
    assert (step.done, step.rewards, step.messages[0]["content"]) == (False, {}, "4")
    step = await env.step(calling("triple"))
    assert (step.done, step.info) == (False, {"tool_errors": 1})
    step = await env.step(said(task.answer))
    assert (step.done, step.rewards, step.messages) == (True, {"right": 1.0}, [])
    await env.close()


async def test_the_message_that_reaches_max_turns_is_scored_as_it_is() -> None:
    env = ToolEnv([double], Rows(ROWS), right, max_turns=2).make()
    await env.reset(TASK)
    assert not (await env.step(calling("double", number=2))).done
    step = await env.step(calling("double", number=2))
    assert (step.done, step.rewards) == (True, {"right": 0.0})
    assert CALLED == ["double"]


async def test_an_episode_that_is_cut_off_is_scored_as_it_is_if_anything_was_said() -> None:
    def cut(episode: EpisodeView) -> float:
        return float(episode.status == "truncated_length" and len(episode.turns) == 2)

    env = ToolEnv([double], Rows(ROWS), cut).make()
    await env.reset(TASK)
    assert isinstance(env, Truncates)
    assert await env.truncated("truncated_context") == {}
    await env.step(calling("double", number=2))
    assert await env.truncated("truncated_length") == {"cut": 1.0}


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    assert (data_source, extra_info) == ("sums", {"index": 7})
    return {"score": float(solution_str.endswith(ground_truth)), "length": 1.0}


async def trl(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
    assert prompts == [TASK.prompt]
    return [float(completions[0][-1]["content"] == answer[0])]


@pytest.mark.parametrize("reward", [verl, trl])
async def test_reward_functions_of_verl_and_trl_work_as_they_are(reward: Any) -> None:
    env = ToolEnv([double], Rows(ROWS), reward).make()
    await env.reset(Task("t", TASK.prompt, "4", {"data_source": "sums", "extra_info": {"index": 7}}))
    await env.step(calling("double", number=2))
    assert (await env.step(said("4"))).rewards == {reward.__name__: 1.0}


async def test_a_reward_that_fails_is_missing_and_not_zero() -> None:
    def broken(final: str) -> float:
        raise KeyError("lost")

    def hung(final: str) -> float:
        while True:
            pass

    for reward, status, text in (
        (broken, EpisodeStatus.FAILED_REWARD, "reward function 'broken' raised KeyError: 'lost'"),
        (hung, EpisodeStatus.FAILED_TIME, "did not answer within the environment's reward_timeout_s = 0.1 s"),
    ):
        env = ToolEnv([double], Rows(ROWS), reward, reward_timeout_s=0.1).make()
        await env.reset(TASK)
        with pytest.raises(RewardFault) as caught:
            await env.step(said("4"))
        assert caught.value.status is status
        assert text in str(caught.value)
    env = ToolEnv([double], Rows(ROWS), lambda final: None).make()
    await env.reset(TASK)
    assert (await env.step(said("4"))).rewards == {}


async def test_a_lost_episode_goes_on_elsewhere_without_any_call() -> None:
    environment = ToolEnv([double], Rows(ROWS), trl)
    first, second = environment.make(), environment.make()
    message = calling("double", number=2)
    await first.reset(TASK)
    step = await first.step(message)
    await second.reset(TASK)
    assert isinstance(second, Replays)
    assert not isinstance(second, Snapshots)
    await second.replay(message, step)
    assert CALLED == ["double"]
    assert (await second.step(said("4"))).rewards == {"trl": 1.0}


async def test_a_call_with_side_effects_that_may_have_been_made_is_not_made_again() -> None:
    env = ToolEnv([double, send], Rows(ROWS), right).make()
    await env.reset(TASK)
    assert isinstance(env, Interruptible)
    step = await env.interrupted(calling("send", text="hi"))
    assert "unknown" in step.messages[0]["content"]
    assert CALLED == []
    assert (await env.interrupted(calling("double", number=3))).messages[0]["content"] == "6"


async def test_a_task_may_have_some_of_the_tools() -> None:
    environment = ToolEnv([double, send], Rows(ROWS), right)
    env = environment.make()
    start = await env.reset(Task("t", TASK.prompt, "4", {"tools": ["double"]}))
    assert [tool["function"]["name"] for tool in start.tools] == ["double"]
    assert "there is no tool 'send'" in (await env.step(calling("send", text="a"))).messages[0]["content"]
    assert (await environment.make().reset(Task("t", TASK.prompt, "4", {"tools": []}))).tools == []
    assert len((await environment.make().reset(TASK)).tools) == 2
    for tools, text in ((["triple"], "there is no tool 'triple'"), ("double", "must be a list of names of tools")):
        with pytest.raises(ValueError, match=text):
            await environment.make().reset(Task("t", TASK.prompt, "4", {"tools": tools}))


async def test_a_task_keeps_a_system_prompt_of_its_own() -> None:
    prompt = [{"role": "system", "content": "Mine."}, *TASK.prompt]
    env = ToolEnv([double], Rows(ROWS), right, system="Yours.").make()
    assert (await env.reset(Task("t", prompt, "4"))).messages == prompt


async def test_what_cannot_work_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="has no docstring"):
        ToolEnv([right], Rows(ROWS), right)
    with pytest.raises(PluginError, match="nothing is given for text"):
        ToolEnv([double], Rows(ROWS), lambda text: 0.0)
    with pytest.raises(RuntimeError, match="call reset"):
        await ToolEnv([double], Rows(ROWS), right).make().step(said("4"))


# ---- the example -----------------------------------------------------------------------------------


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_tools", ROOT / "examples" / "tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_examples_demonstration_is_what_its_tools_answer_and_earns_the_reward(
    example: ModuleType,
) -> None:
    environment = load(str(ROOT / "examples" / "tools.py") + ":make", {})
    assert isinstance(environment, Demonstrates)
    for index in range(20):
        task = environment.task("train", index)
        env = environment.make()
        await env.reset(task)
        shown = list(environment.demonstration(task))
        while shown:
            step = await env.step(shown.pop(0))
            assert step.messages == shown[: len(step.messages)]
            del shown[: len(step.messages)]
        assert (step.done, step.rewards) == (True, {"right": 1.0})
    with pytest.raises(ValueError, match="'gin' is not for sale"):
        example.price("gin")
