"""The environment with Python as a tool: its tasks, what the policy sees of its code, and the reward."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from asyncrl.envs.base import Demonstrates, Environment, Interruptible, Message, Replays, Step
from asyncrl.envs.python_tool import make
from asyncrl.envs.registry import load


def _call(*codes: str) -> Message:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "python", "arguments": {"code": code}}}
        for n, code in enumerate(codes)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


async def _answers(*codes: str, **args: object) -> list[str]:
    environment = make(**args)
    env = environment.make()
    await env.reset(environment.task("train", 0))
    step = await env.step(_call(*codes))
    await env.close()
    assert not step.done
    return [message["content"] for message in step.messages]


def test_it_is_an_environment_with_demonstrations_that_is_found_by_its_name() -> None:
    environment = load("python-tool", {"numbers": 2})
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrates)


async def test_the_demonstration_is_what_really_happens_and_earns_the_reward() -> None:
    environment = make()
    for index in range(4):
        task = environment.task("train", index)
        call, told, answer = environment.demonstration(task)
        env = environment.make()
        start = await env.reset(task)
        assert [tool["function"]["name"] for tool in start.tools] == ["python"]
        assert (await env.step(call)).messages == [told]
        assert await env.step(answer) == Step(True, {"right": 1.0})


async def test_a_wrong_answer_earns_nothing() -> None:
    env = make().make()
    await env.reset(make().task("train", 0))
    assert (await env.step({"role": "assistant", "content": "12"})).rewards == {"right": 0.0}


def test_tasks_are_the_same_everywhere_and_the_splits_share_no_numbers() -> None:
    environment = make(numbers=2, digits=1)
    assert [environment.task("train", n).prompt[0]["content"] for n in range(3)] == ["9*2=", "8^3+3^3=", "5*8="]

    def numbers(split: str) -> Iterator[tuple[int, ...]]:
        for index in range(300):
            code = environment.task(split, index).metadata["code"]
            yield tuple(sorted(int(part[0]) for part in code.replace("+", "*").replace("**", "^").split("*")))

    assert not set(numbers("train")) & set(numbers("eval"))


async def test_what_the_code_prints_its_last_value_and_its_error_are_what_the_policy_sees() -> None:
    first, second, third = await _answers("print(1)\n2", "1 / 0", "x = 1")
    assert first == "1\n2"
    assert second.endswith("ZeroDivisionError: division by zero")
    assert third == "(nothing was printed)"


async def test_code_that_does_not_end_is_an_error_that_the_policy_sees() -> None:
    assert await _answers("print(1)\nwhile True: pass", seconds=1) == ["1\nerror: stopped after 1 s"]


async def test_no_more_calls_run_at_once_than_there_is_room_for() -> None:
    code = "import time\nbegan = time.time()\ntime.sleep(0.1)\nprint(began, time.time())"
    spans = [tuple(map(float, text.split())) for text in await _answers(code, code, code, at_once=1)]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))


async def test_a_recorded_turn_is_taken_over_and_a_lost_one_is_run_again() -> None:
    environment = make()
    task = environment.task("train", 0)
    call, told, answer = environment.demonstration(task)
    env = environment.make()
    assert isinstance(env, Replays)
    assert isinstance(env, Interruptible)
    await env.reset(task)
    await env.replay(call, Step(False, messages=[told]))
    assert (await env.interrupted(_call("6 * 7"))).messages[0]["content"] == "42"
    assert (await env.step(answer)).rewards == {"right": 1.0}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"sandbox": "docker"}, "env.args.sandbox = 'docker': must be 'auto', 'namespaces'"),
        ({"numbers": 1}, "env.args.numbers = 1: must be a whole number from 2 to 9"),
        ({"seconds": 0}, "env.args.seconds or env.args.memory_mb: limit seconds = 0"),
        ({"at_once": 0}, "env.args.at_once = 0"),
    ],
)
def test_a_senseless_argument_is_refused(args: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(**args)


async def test_many_episodes_share_the_sandbox() -> None:
    environment = make()
    task = environment.task("eval", 0)

    async def episode() -> Step:
        env = environment.make()
        await env.reset(task)
        return await env.step(_call(task.metadata["code"]))

    steps = await asyncio.gather(*(episode() for _ in range(5)))
    assert {step.messages[0]["content"] for step in steps} == {task.answer}
