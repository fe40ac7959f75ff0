"""Sums with a calculator, and guessing: tasks, tool, rewards, demonstrations that win."""

import asyncio
import json
import random

import pytest

from asyncrl.envs import calculator as calculator_env
from asyncrl.envs import guess_number
from asyncrl.envs.base import Environment, Message, Snapshots
from asyncrl.envs.calculator import calculator
from asyncrl.messages import Task


def _play(environment: Environment, task: Task, said: list[Message]) -> dict[str, float | None]:
    """The rewards of an episode in which the assistant says its part of a demonstration; the answers are those."""

    async def episode() -> dict[str, float | None]:
        env = environment.make()
        await env.reset(task)
        for at, message in enumerate(said):
            if message["role"] == "assistant":
                step = await env.step(message)
                if step.done:
                    assert at == len(said) - 1
                    return step.rewards
                assert step.messages == [said[at + 1]]
        raise AssertionError("the demonstration does not end the episode")

    return asyncio.run(episode())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_demonstrations_of_sums_win_with_and_without_the_tool(share: float) -> None:
    environment = calculator_env.make(tool_share=share)
    for index in range(5):
        task = environment.task("train", index)
        shown = environment.demonstration(task)
        assert len(shown) == (3 if share else 1)
        assert _play(environment, task, shown) == {"right": 1.0}


def test_the_share_of_demonstrations_with_the_tool_is_what_was_asked_for() -> None:
    environment = calculator_env.make(tool_share=0.3)
    shown = [environment.demonstration(environment.task("train", index)) for index in range(1000)]
    assert sum(len(messages) == 3 for messages in shown) / 1000 == pytest.approx(0.3, abs=0.05)


def test_sums_of_the_two_splits_have_no_numbers_in_common() -> None:
    environment = calculator_env.make(numbers=2, digits=1)
    seen = {
        split: {tuple(sorted(environment.task(split, i).metadata["expression"].split("+"))) for i in range(300)}
        for split in ("train", "eval")
    }
    assert not seen["train"] & seen["eval"]


def test_the_calculator_computes_what_python_computes() -> None:
    draw = random.Random(0)
    for _ in range(200):
        terms = [str(draw.randrange(1, 100)) for _ in range(4)]
        text = terms[0] + "".join(draw.choice(["+", "-", "*", "/", "*-", " + ("]) + term for term in terms[1:])
        text += ")" * text.count("(")
        assert float(calculator(text)) == pytest.approx(eval(text))
    assert calculator("12+34+56") == "102"


@pytest.mark.parametrize("text", ["__import__('os')", "2**99", "a+1", "1+", "'x'*9", "(1).real", "1" * 300, "1/0"])
def test_the_calculator_computes_nothing_else(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(text)


@pytest.mark.parametrize("largest", [1, 5, 31, 100])
def test_halving_always_finds_the_number(largest: int) -> None:
    environment = guess_number.make(largest)
    for index in range(50):
        task = environment.task("eval", index)
        assert _play(environment, task, environment.demonstration(task)) == {"found": 1.0}


@pytest.mark.parametrize("junk", ["", "foo", "-1", "32", "9" * 400])
def test_what_is_no_guess_loses(junk: str) -> None:
    environment = guess_number.make(31)
    assert _play(environment, environment.task("train", 0), [{"role": "assistant", "content": junk}]) == {
        "found": 0.0
    }


def test_a_guessing_episode_goes_on_from_its_snapshot() -> None:
    async def rest() -> tuple[bytes, bool]:
        task = Task("t", [], answer=20)
        env = guess_number.make(31, guesses=2).make()
        await env.reset(task)
        await env.step({"role": "assistant", "content": "3"})
        assert isinstance(env, Snapshots)
        blob, again = await env.snapshot(), guess_number.make(31, guesses=2).make()
        await again.restore(task, blob)
        return blob, (await again.step({"role": "assistant", "content": "4"})).done

    blob, done = asyncio.run(rest())
    assert json.loads(blob) == [20, 1]
    assert done


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (calculator_env.make, {"numbers": 1}),
        (calculator_env.make, {"digits": 10}),
        (calculator_env.make, {"tool_share": 1.5}),
        (guess_number.make, {"largest": 0}),
        (guess_number.make, {"guesses": 0}),
    ],
)
def test_an_argument_out_of_its_range_is_named(make, args: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"env\.args\.{next(iter(args))} = "):
        make(**args)
