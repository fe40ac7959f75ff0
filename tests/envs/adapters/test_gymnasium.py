"""Gymnasium environments as text: real ones of the library where it is installed, played to their ends."""

import asyncio
import threading
import time

import pytest

from asyncrl.envs.adapters.gymnasium_text import ActionError, compact, describe, read_action, readable
from asyncrl.envs.base import Replays, Snapshots, Truncates
from asyncrl.envs.own_thread import OwnThread
from asyncrl.envs.registry import PluginError, load

try:
    import gymnasium
    import numpy as np
    from gymnasium import spaces
except ImportError:
    gymnasium = None  # type: ignore[assignment]

# It is an extra, which the test environment does not install.
needs_gymnasium = pytest.mark.skipif(
    gymnasium is None, reason="Gymnasium is not installed: pip install 'asyncrl[gymnasium]'"
)


def says(text: str) -> dict:
    return {"role": "assistant", "content": text}


@needs_gymnasium
async def test_cart_pole_is_played_to_its_end_and_each_step_is_rewarded(play) -> None:
    environment = load("gymnasium", {"id": "CartPole-v1", "instructions": "Keep the pole up."})
    steps, start = await play(environment, environment.task("train", 0), [says("Left.\nAction: 0")] * 100)
    rules, spaces_text, observation = start.messages[0]["content"].split("\n\n")
    assert rules == "Keep the pole up."
    assert "a list of 4 numbers" in spaces_text
    assert "a whole number from 0 to 1" in spaces_text
    assert observation.startswith("[")
    assert steps[-1].done
    assert not steps[-1].messages
    assert 5 < len(steps) < 20, "a pole that is pushed to one side only falls soon"
    assert [step.rewards for step in steps] == [{"gymnasium": 1.0}] * len(steps)
    assert all(step.info == {} for step in steps)


@needs_gymnasium
async def test_the_time_limit_ends_an_episode_as_truncated(play) -> None:
    environment = load("gymnasium", {"id": "Pendulum-v1", "kwargs": {"max_episode_steps": 5}})
    steps, start = await play(environment, environment.task("train", 0), [says("[0.5]"), says("-1")] * 5)
    assert "each from -2.0 to 2.0" in start.messages[0]["content"]
    assert len(steps) == 5
    assert steps[-1].done
    assert [step.info for step in steps] == [{}] * 4 + [{"truncated": 1.0}]
    assert all(step.rewards["gymnasium"] < 0 for step in steps)


@needs_gymnasium
async def test_an_unreadable_action_is_an_error_that_the_model_sees_and_does_not_step(play) -> None:
    environment = load("gymnasium", {"id": "CartPole-v1"})
    answers = ["", "left", "2", "0 or 1", "0.5", "99999999999999999999", "1"]
    steps, _ = await play(environment, environment.task("train", 0), [says(text) for text in answers])
    for step in steps[:-1]:
        assert step.info == {"unreadable_actions": 1.0}
        assert step.rewards == {}
        assert "a whole number from 0 to 1" in step.messages[0]["content"]
    assert steps[-1].rewards == {"gymnasium": 1.0}
    assert isinstance(environment.make(), Truncates)
    assert await environment.make().truncated("truncated_turns") == {"gymnasium": 0.0}, (
        "0, not missing, for junk alone"
    )


@needs_gymnasium
async def test_a_task_is_a_seed_and_the_splits_share_none(play) -> None:
    environment = load("gymnasium", {"id": "CartPole-v1"})
    task = environment.task("eval", 3)
    assert task == load("gymnasium", {"id": "CartPole-v1"}).task("eval", 3)
    first, second = [await play(environment, task, [says("1")]) for _ in range(2)]
    assert first == second
    _, other = await play(environment, environment.task("train", 3), [says("1")])
    assert other != first[1]
    train, held_out = [
        {environment.task(split, i).metadata["seed"] for i in range(300)} for split in ("train", "eval")
    ]
    assert len(train) == len(held_out) == 300
    assert not train & held_out


@needs_gymnasium
async def test_an_episode_goes_on_elsewhere_by_doing_its_actions_again(play) -> None:
    environment = load("gymnasium", {"id": "CartPole-v1"})
    task, messages = environment.task("train", 1), [says(text) for text in ("1", "nonsense", "0", "0", "1")]
    assert not isinstance(environment.make(), Replays | Snapshots), "so the runtime does the steps again"
    assert await play(environment, task, messages) == await play(environment, task, messages)


@needs_gymnasium
def test_arguments_that_make_no_environment_are_refused_before_a_run_starts() -> None:
    with pytest.raises(PluginError, match=r"env\.args\.id = 'CartPole-v77'.*gymnasium\.make raised"):
        load("gymnasium", {"id": "CartPole-v77"})
    with pytest.raises(PluginError, match=r"env\.args\.kwargs = \{'wheels': 3\}"):
        load("gymnasium", {"id": "CartPole-v1", "kwargs": {"wheels": 3}})
    with pytest.raises(PluginError, match=r"env\.args\.digits = 17"):
        load("gymnasium", {"id": "CartPole-v1", "digits": 17})


@pytest.mark.skipif(gymnasium is not None, reason="Gymnasium is installed, and this is about its absence")
def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(PluginError, match=r"pip install 'asyncrl\[gymnasium\]'"):
        load("gymnasium", {"id": "CartPole-v1"})


@needs_gymnasium
def test_every_kind_of_action_is_read_from_the_last_line() -> None:
    box = spaces.Box(np.float32([0.0, -1.0]), np.float32([1.0, 1.0]), dtype=np.float32)
    assert read_action(spaces.Discrete(3, start=5), "I was at 2.\n\nAction: 7.\n") == 7
    assert read_action(spaces.MultiDiscrete([3, 2]), "so [2, 1]!").tolist() == [2, 1]
    assert read_action(spaces.MultiBinary(2), "[1, 0]").tolist() == [1, 0]
    assert read_action(box, "[0.25, -1]").tolist() == [0.25, -1.0]
    assert read_action(spaces.Text(10, charset="go north"), "thinking\ngo north ") == "go north"
    refused = [
        (spaces.MultiDiscrete([3, 2]), "[2, 2]"),
        (spaces.MultiDiscrete([3, 2]), "[1.5, 0]"),
        (box, "[0.5]"),
    ]
    refused += [(box, "[2, 0]"), (box, "[NaN, 0]"), (box, '["a", 0]'), (spaces.Text(3), "north")]
    for space, line in refused:
        with pytest.raises(ActionError, match="is no action"):
            read_action(space, line)
    assert not readable(spaces.Dict({"a": spaces.Discrete(2)}))


@needs_gymnasium
def test_observations_are_printed_compactly() -> None:
    assert compact(np.array([[0.123456, -0.00001], [2.0, np.inf]])) == "[[0.1235, 0.0], [2.0, inf]]"
    assert compact({"at": 3, "bag": (1, np.float32(0.5))}) == "at: 3\nbag: (1, 0.5)"
    assert len(compact(np.arange(10_000))) < 100
    assert describe(spaces.Tuple([spaces.Discrete(2), spaces.Text(4)])).startswith(
        "a whole number from 0 to 1 and"
    )


async def test_calls_of_one_episode_share_a_thread_and_what_they_raise_comes_back() -> None:
    thread = OwnThread("test")
    idents = [await thread.call(threading.get_ident) for _ in range(3)]
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()
    for raised in (KeyError("x"), SystemExit("x")):
        with pytest.raises((KeyError, RuntimeError), match="x"):
            await thread.call(_raise, raised)
    assert await thread.call(max, 1, 2) == 2
    thread.end()


async def test_a_call_that_hangs_is_given_up_and_its_loop_is_stopped() -> None:
    thread, going = OwnThread("test"), threading.Event()

    def hang() -> None:
        try:
            while True:
                time.sleep(0.01)  # The fault: a call that never returns, in Python, where it can be stopped.
        finally:
            going.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await thread.call(hang)
    assert thread.lost
    assert await asyncio.to_thread(going.wait, 10)
    with pytest.raises(RuntimeError, match="is lost"):
        await thread.call(max, 1, 2)


def _raise(error: BaseException) -> None:
    raise error
