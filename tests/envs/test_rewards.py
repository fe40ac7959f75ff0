"""Reward functions: the three signatures, what they may return, what they may do wrong, and the weighted sum."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Reward
from asyncrl.envs.registry import PluginError
from asyncrl.envs.reward_signatures import EpisodeView, adapt
from asyncrl.envs.rewards import THREADS, RewardFault, Rewards, named, total
from asyncrl.messages import EpisodeStatus, Task

QUESTION = {"role": "user", "content": "2+2="}
VIEW = EpisodeView(
    Task("t-1", [QUESTION], "4", {"data_source": "sums", "level": 3}),
    [QUESTION],
    [
        {"role": "assistant", "content": "let me ask"},
        {"role": "tool", "content": "it is 5"},
        {"role": "assistant", "content": [{"type": "text", "text": "it is "}, {"type": "text", "text": "4"}]},
    ],
    "completed",
    "arithmetic",
)

Load = Callable[..., Rewards]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads the functions of a source text, by their names."""

    def make(source: str, *names: str, model: Any = None, **keys: Any) -> Rewards:
        file = tmp_path / "judges.py"
        file.write_text("import asyncio, threading, time\nimport numpy as np\n" + source)
        return Rewards(Reward(functions=[f"{file}:{name}" for name in names or ("reward",)], **keys), model)

    return make


async def _fails(rewards: Rewards) -> tuple[EpisodeStatus, str]:
    with pytest.raises(RewardFault) as caught:
        await rewards.of(VIEW, {})
    return caught.value.status, str(caught.value)


# ---- signatures ------------------------------------------------------------------------------------


async def test_a_native_function_gets_what_its_parameters_name(load: Load) -> None:
    source = """
def whole(episode): return len(episode.messages)
def parts(task, messages, completion, final, answer, *, more=1):
    assert task.id == "t-1" and len(messages) == 4 and more == 1
    assert completion == "let me ask\\nit is 4" and final == "it is 4" and answer == "4"
    return final.endswith(answer)
async def later(completion, **everything):
    await asyncio.sleep(0)
    return len(everything)
class Judge:
    async def __call__(self, answer): return float(answer)
judge = Judge()
"""
    rewards = load(source, "whole", "parts", "later", "judge")
    assert await rewards.of(VIEW, {"own": 0.5}) == {
        "own": 0.5, "whole": 4.0, "parts": 1.0, "later": 5.0, "judge": 4.0
    }  # fmt: skip


async def test_verls_function_gets_the_assistants_text_without_the_tools(load: Load) -> None:
    source = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["level"] == 3
    assert "5" not in solution_str
    return {"score": solution_str.endswith(ground_truth), "length": len(solution_str), "pred": "4"}
async def number(solution_str, ground_truth): return 0.25
"""
    assert await load(source, "compute_score", "number").of(VIEW, {}) == {"compute_score": 1.0, "number": 0.25}
    bare = EpisodeView(Task("t", [], 1, {"extra_info": {"index": 7}}), [], VIEW.turns, "completed", "gsm")
    source = "def reward(data_source, solution_str, ground_truth, extra_info): return extra_info['index']"
    assert await load(source).of(bare, {}) == {"reward": 7.0}


async def test_trls_function_gets_lists_of_one_and_the_tasks_columns(load: Load) -> None:
    source = """
def all_columns(prompts, completions, **columns):
    assert prompts == [[{"role": "user", "content": "2+2="}]]
    assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
    assert columns == {"answer": ["4"], "data_source": ["sums"], "level": [3]}
    return [1.0]
def one_column(completions, level): return [level[0] / 2 for _ in completions]
def missing(completions, **columns): return [None]
"""
    rewards = load(source, "all_columns", "one_column", "missing")
    assert await rewards.of(VIEW, {}) == {"all_columns": 1.0, "one_column": 1.5}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def reward(text): return 0", "takes (text), and nothing is given for text"),
        ("def reward(): return 0", "takes ()."),
        ("def reward(*args): return 0", "takes (*args)."),
        ("def reward(final, /): return 0", "nothing is given for final"),
        ("def reward(final, reference): return 0", "nothing is given for reference"),
        ("def reward(solution_str, ground_truth, tokenizer): return 0", "nothing is given for tokenizer"),
        ("def reward(completions, completion_ids): return [0]", "nothing is given for completion_ids"),
        ("class reward:\n    def __init__(self, episode): pass", "is of type type, and not a function"),
        ("reward = 3", "is of type int, and not"),
        ("reward = max", "does not tell its parameters"),
    ],
)
def test_a_function_that_fits_no_signature_is_refused_and_told_all_three(
    load: Load, source: str, said: str
) -> None:
    with pytest.raises(PluginError) as caught:
        load(source)
    text = str(caught.value)
    assert "judges.py:reward" in text
    assert said in text
    assert "reward(episode)" in text
    assert "compute_score(data_source, solution_str, ground_truth, extra_info=None)" in text
    assert "reward(prompts, completions, **kwargs) -> list" in text


def test_an_unknown_function_and_two_of_one_name_are_refused(load: Load) -> None:
    with pytest.raises(PluginError, match="has no 'lenght'; did you mean 'length'"):
        load("def length(final): return 0", "lenght")
    with pytest.raises(PluginError, match="there is no reward function named 'nobody'"):
        Rewards(Reward(functions=["nobody"]))
    with pytest.raises(PluginError, match=r"'length' of .* is that of two of them"):
        load("def length(final): return 0", "length", "length")
    with pytest.raises(PluginError, match=r"'model' of .* is the reward model's"):
        load("def model(final): return 0", "model")


def test_they_are_loaded_without_torch() -> None:
    code = "import sys, asyncrl.envs.rewards, asyncrl.scorer_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


# ---- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def reward(final): return None", {}),
        ("def reward(final): return np.float32(0.5)", {"reward": 0.5}),
        ("def reward(final): return True", {"reward": 1.0}),
        ("def reward(final): return {'format': 0.25, 'right': 1, 'judge': None}", {"format": 0.25, "right": 1.0}),
        ("def reward(completions): return np.array([2.0])", {"reward": 2.0}),
        ("def reward(solution_str, ground_truth): return {'score': None}", {}),
    ],
)
async def test_a_reward_is_a_number_or_missing_or_several_by_name(
    load: Load, source: str, expected: dict[str, float]
) -> None:
    assert await load(source).of(VIEW, {}) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def reward(final): return 'good'", "reward 'reward' = 'good' is no number"),
        ("def reward(final): return float('nan')", "reward 'reward' = nan is no number"),
        ("def reward(final): return {3: 1.0}", "a reward has the name 3, which is no plain text"),
        ("def reward(completions): return 1.0", "it returned 1.0, not a list with the reward of its one"),
        ("def reward(completions): return [1.0, 2.0]", "not a list with the reward of its one completion"),
        ("def reward(solution_str, ground_truth): return {'acc': 1}", "a dict without 'score' (keys: acc)"),
        ("def reward(final): raise KeyError('lost')", "reward function 'reward' raised KeyError: 'lost'"),
        ("async def reward(final): raise KeyError('lost')", "raised KeyError: 'lost'"),
        ("def reward(final): return next(iter(()))", "raised StopIteration"),
        ("def reward(final): raise TimeoutError('of its own')", "raised TimeoutError: of its own"),
        ("async def reward(final): raise TimeoutError('of its own')", "raised TimeoutError: of its own"),
        ("def reward(final): raise SystemExit(3)", "raised SystemExit: 3"),
        ("async def reward(final): raise SystemExit(3)", "raised SystemExit: 3"),
        ("def reward(final): raise asyncio.CancelledError", "raised CancelledError"),
        ("async def reward(final): raise asyncio.CancelledError", "raised CancelledError"),
        ("def reward(completions, subject): return [1]", "missing 1 required positional argument: 'subject'"),
    ],
)
async def test_whatever_a_function_does_wrong_fails_the_episode_with_the_reason(
    load: Load, source: str, said: str
) -> None:
    status, text = await _fails(load(source))
    assert status is EpisodeStatus.FAILED_REWARD
    assert said in text


async def test_two_rewards_of_one_name_cannot_be_told_apart_and_fail_the_episode(load: Load) -> None:
    rewards = load("def right(final): return 1\ndef many(final): return {'right': 0}", "right", "many")
    assert await _fails(rewards) == (
        EpisodeStatus.FAILED_REWARD,
        "two rewards are named 'right'; rename one, so that they can be told apart",
    )


# ---- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["def {}(task):\n    while True: pass", "async def {}(task): await asyncio.sleep(3600)"]
)
async def test_a_function_that_does_not_answer_in_time_fails_its_own_episode_only(load: Load, source: str) -> None:
    hangs = load(source.format("hangs"), "hangs", timeout_s=0.3)
    fine = load("def fine(task): return 1.0", "fine", timeout_s=600)
    failure, reward = await asyncio.gather(_fails(hangs), fine.of(VIEW, {}))
    assert failure[0] is EpisodeStatus.FAILED_TIME
    assert failure[1] == "reward function 'hangs' did not answer within reward.timeout_s = 0.3 s"
    assert reward == {"fine": 1.0}


async def _until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def test_a_loop_without_end_is_stopped_and_leaves_no_thread(load: Load) -> None:
    rewards = load("def reward(final):\n    while True: pass", timeout_s=0.1)
    assert (await _fails(rewards))[0] is EpisodeStatus.FAILED_TIME
    await _until(lambda: all(thread.name != "reward" for thread in threading.enumerate()))


async def test_a_thread_that_has_ended_is_not_stopped_for_its_ident_may_be_anothers(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit: list[Any] = []
    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", lambda ident, _: hit.append(ident.value))
    source = """
go, ran = threading.Event(), []
def reward(final):
    ran.append(threading.current_thread())
    go.wait()
"""
    rewards = load(source)
    its = rewards._calls["reward"]._adapted.function.__globals__
    task = asyncio.create_task(rewards.of(VIEW, {}))
    await _until(lambda: bool(its["ran"]))
    its["go"].set()
    its["ran"][0].join()  # The loop stands still meanwhile, so it has not heard of the result yet.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hit == []


async def test_calls_that_hang_keep_their_room_so_there_are_never_more_of_them_than_room(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.envs.rewards.THREADS", 2)
    source = """
go, ran = threading.Event(), []
def reward(final):
    try:
        ran.append(final)
        go.wait()
    except SystemExit:
        go.wait()
"""
    rewards = load(source, timeout_s=600)
    its = rewards._calls["reward"]._adapted.function.__globals__
    hung = [asyncio.create_task(rewards.of(VIEW, {})) for _ in range(2)]
    await _until(lambda: len(its["ran"]) == 2)
    for task in hung:
        task.cancel()
    await asyncio.gather(*hung, return_exceptions=True)
    rewards._calls["reward"]._limit_s = 0.05
    for _ in range(3):
        status, text = await _fails(rewards)
        assert status is EpisodeStatus.FAILED_TIME
        assert text.endswith("did not answer within reward.timeout_s = 0.05 s; 2 calls of it are still running")
    assert len(its["ran"]) == 2
    its["go"].set()
    await _until(lambda: rewards._calls["reward"]._room._value == 2)


async def test_a_thread_that_cannot_be_started_fails_the_episode_and_keeps_no_room(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rewards = load("def reward(final): return 1.0")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        for _ in range(THREADS + 1):
            status, text = await _fails(rewards)
    assert status is EpisodeStatus.FAILED_REWARD
    assert "none can be started: can't start new thread" in text
    assert await rewards.of(VIEW, {}) == {"reward": 1.0}


async def test_a_sync_function_does_not_hold_up_the_loop_or_its_like(load: Load) -> None:
    source = f"""
all_but_one = threading.Barrier({THREADS})
def together(final): all_but_one.wait()
async def last(final): return 1.0
"""
    rewards = load(source, "together")
    many = [asyncio.create_task(rewards.of(VIEW, {})) for _ in range(THREADS - 1)]
    for _ in range(100):
        assert await load(source, "last").of(VIEW, {}) == {"last": 1.0}
    assert not any(task.done() for task in many)
    many.append(asyncio.create_task(rewards.of(VIEW, {})))
    assert await asyncio.gather(*many) == [{}] * THREADS


async def test_a_revoked_episode_cancels_what_is_called_for_it(load: Load) -> None:
    source = """
running = []
def reward(final):
    running.append(threading.current_thread())
    while True: pass
"""
    rewards = load(source, timeout_s=600)
    running = rewards._calls["reward"]._adapted.function.__globals__["running"]
    task = asyncio.create_task(rewards.of(VIEW, {}))
    await _until(lambda: bool(running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until(lambda: not running[0].is_alive())


async def test_a_model_that_does_not_answer_is_named_with_its_address(load: Load) -> None:
    async def silent(episode: EpisodeView) -> float:
        return await asyncio.get_running_loop().create_future()

    rewards = Rewards(Reward(endpoint="tcp://10.0.0.7:5600", timeout_s=0.05), silent)
    assert await _fails(rewards) == (
        EpisodeStatus.FAILED_TIME,
        "reward function 'model' (scorer at tcp://10.0.0.7:5600) did not answer within reward.timeout_s = 0.05 s",
    )


# ---- the weighted sum ------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6)
by_name = st.dictionaries(st.sampled_from("abcd"), finite)


@given(by_name, by_name)
@settings(max_examples=30, deadline=None)
def test_the_reward_is_the_weighted_sum_of_those_that_are_there(
    rewards: dict[str, float], weights: dict[str, float]
) -> None:
    expected = None
    for name in rewards:
        weight = weights[name] if name in weights else 1.0  # noqa: SIM401 - the slow way on purpose
        expected = (expected or 0.0) + weight * rewards[name]
    assert total(rewards, weights) == pytest.approx(expected)


def test_an_episode_without_rewards_has_none_and_one_of_weight_0_has_0() -> None:
    assert total({}, {"a": 2.0}) is None
    assert total({"a": 3.0}, {"a": 0.0}) == 0.0
    assert named({"a": None, "b": np.float64(2)}) == {"b": 2.0}


def test_async_is_seen_through_objects_and_methods() -> None:
    class Judge:
        async def __call__(self, final: str) -> float:
            return 1.0

        async def judge(self, final: str) -> float:
            return 1.0

        def sync(self, final: str) -> float:
            return 1.0

    found = [adapt(function, "it").is_async for function in (Judge(), Judge().judge, Judge().sync)]
    assert found == [True, True, False]
