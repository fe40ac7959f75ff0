"""The text adventure: every house can be solved, and whatever is said in it is answered."""

import asyncio

import pytest

from asyncrl.envs.base import Demonstrates, Environment, Message, Snapshots, Step
from asyncrl.envs.check import check_env
from asyncrl.envs.text_game import TextGame, TextGameEnv, make
from asyncrl.messages import Task


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def _begun(environment: TextGame, task: Task) -> TextGameEnv:
    env = environment.make()
    await env.reset(task)
    return env


async def _play(environment: TextGame, task: Task, lines: list[str]) -> list[Step]:
    env = await _begun(environment, task)
    return [await env.step(_says(line)) for line in lines]


def _commands(environment: TextGame, task: Task) -> list[str]:
    return [message["content"] for message in environment.demonstration(task) if message["role"] == "assistant"]


@pytest.mark.parametrize(
    ("width", "height", "locked"), [(3, 3, True), (3, 3, False), (2, 1, True), (1, 4, True), (6, 6, True)]
)
def test_the_demonstration_of_every_house_ends_at_the_treasure(width: int, height: int, locked: bool) -> None:
    environment = make(width=width, height=height, locked=locked)
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrates)
    for index in range(20):
        task = environment.task("train", index)
        shown = environment.demonstration(task)
        commands = _commands(environment, task)
        steps = asyncio.run(_play(environment, task, commands))
        assert len(steps) == task.answer
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert steps[-1].rewards == {"treasure": 1.0}
        assert [m for step in steps for m in step.messages] == [m for m in shown if m["role"] == "user"]
        assert ("take key" in commands) is locked


def test_the_houses_of_the_splits_and_of_seeds_differ_and_are_the_same_everywhere() -> None:
    environment = make()
    tasks = [environment.task(split, index) for split in ("train", "eval") for index in range(50)]
    assert len({str(environment.house(task)) for task in tasks}) == 100
    assert make().task("train", 7) == make().task("train", 7) != make(seed=1).task("train", 7)


async def test_unknown_commands_and_impossible_ones_are_answered_and_change_nothing() -> None:
    environment = make()
    task = environment.task("train", 0)
    env = await _begun(environment, task)
    before = await env.snapshot()
    for text in (
        "",
        "dance",
        "go",
        "go up",
        "take",
        "take lamp",
        "open north",
        "go north go south",
        "\x00",
        "é" * 999,
    ):
        step = await env.step(_says(text))
        assert "That is no command. Commands: go north" in step.messages[0]["content"]
        assert step.info == {"unknown_commands": 1.0}
    steps = [await env.step(message) for message in ({"role": "assistant"}, {"role": "assistant", "content": [1]})]
    assert all("no command" in step.messages[0]["content"] for step in steps)
    for way in ("north", "east", "south", "west"):
        text = (await env.step(_says(f"unlock {way}"))).messages[0]["content"]
        assert text.startswith(("There is no exit", "There is nothing to unlock", "You have no key"))
    assert await env.snapshot() == before


async def test_a_locked_door_stays_shut_without_the_key() -> None:
    environment = make(width=2, height=1)
    task = environment.task("train", 0)
    take, unlock, go = _commands(environment, task)
    steps = await _play(
        environment, task, [go, unlock, take, take, go, unlock, unlock, f"I think.\n{go.upper()}."]
    )
    told = [step.messages[0]["content"].split(". ")[0] for step in steps[:-1]]
    assert told == [
        "The door is locked",
        "You have no key",
        "You take the key",
        "There is no key",
        "The door is locked",
        "You unlock the door",
        "There is nothing to unlock",
    ]
    assert steps[-1].rewards == {"treasure": 1.0}


async def test_an_episode_goes_on_from_its_snapshot_elsewhere() -> None:
    environment = make()
    task = environment.task("eval", 3)
    commands = _commands(environment, task)
    env = await _begun(environment, task)
    for command in commands[:-1]:
        await env.step(_says(command))
        blob = await env.snapshot()
        env = make().make()
        assert isinstance(env, Snapshots)
        await env.restore(task, blob)
    assert (await env.step(_says(commands[-1]))).rewards == {"treasure": 1.0}


async def test_one_that_is_cut_off_gets_nothing_and_shaping_sums_up_to_one() -> None:
    assert await make().make().truncated("truncated_turns") == {"treasure": 0.0}
    environment = make(shaped=True)
    task = environment.task("train", 1)
    commands = _commands(environment, task)
    steps = await _play(environment, task, ["look", commands[0], "look", *commands[1:]])
    assert sum(step.rewards["progress"] or 0.0 for step in steps) == pytest.approx(1.0)
    assert steps[0].rewards == {"progress": 0.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [("width", 0), ("height", 7), ("width", True), ("locked", 1), ("shaped", "no"), ("seed", "x")],
)
def test_a_bad_argument_is_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"env\.args\.{key} = "):
        make(**{key: value})
    with pytest.raises(ValueError, match="two rooms at least"):
        make(width=1, height=1)


def test_it_keeps_the_promises_of_environments() -> None:
    assert check_env("asyncrl.envs.text_game:make", tasks=1).problems == []
