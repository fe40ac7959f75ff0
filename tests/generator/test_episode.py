"""One episode: its turns, its token record, its chunks, and what the environment may do wrong.

The engine recites fixed answers (`reciting.py`), so that every token and sequence number is known in advance; the
tokenizer, the chat template, the record and the episode loop are the real ones.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reciting import DELTA, DONE, MORE, QUESTION, VERSION, Play

from asyncrl.chat import ChatFormat
from asyncrl.envs.base import Start, Step
from asyncrl.messages import Span

# ---- turns -----------------------------------------------------------------------------------------


async def test_a_turn_that_stops_is_rewarded_and_completes_the_episode(play: Play, chat: ChatFormat) -> None:
    played = await play(["2 I guess."], [DONE])
    assert played.result == ("completed", 1.0, 1)
    assert played.envs[0].heard == ["2 I guess"]
    assert played.envs[0].closed == 1
    sampled = [*chat.encode("2 I guess"), chat.end_id]
    assert list(played.record.ids) == played.prompt + sampled
    assert played.record.spans == [Span(len(played.prompt), -1, False)] + [
        Span(n, VERSION, True) for n in (3, 3, 3, 1)
    ]
    assert played.chunks[0][2] == [0.0] * len(played.prompt)
    assert played.chunks[1][2] == [-0.5] * 3
    (ids, params) = played.requests[0]
    assert (ids, params.max_tokens, params.seed) == (played.prompt, 16, 11)
    played.check_chunks()


async def test_a_turn_cut_at_max_tokens_is_rewarded_and_truncated(play: Play) -> None:
    played = await play(["twenty-two"], [DONE], max_tokens=4)
    assert played.result == ("truncated_length", 1.0, 1)
    assert played.envs[0].heard == ["twen"]
    played.check_chunks()


async def test_a_turn_cut_by_the_context_is_rewarded_and_truncated(play: Play, chat: ChatFormat) -> None:
    room = len(chat.prompt_ids(QUESTION)) + 5
    played = await play(["twenty-two"], [DONE], max_tokens=room - 1, max_model_len=room)
    assert played.result == ("truncated_context", 1.0, 1)
    assert played.envs[0].heard == ["twent"]
    assert len(played.record.ids) == room
    played.check_chunks()


async def test_a_prompt_that_fills_the_context_is_given_to_neither_engine_nor_environment(play: Play) -> None:
    played = await play(["no"], [DONE], max_tokens=1, max_model_len=4)
    assert played.result == ("truncated_context", None, 0)
    assert played.requests == []
    assert played.envs[0].heard == []
    played.check_chunks()


async def test_a_suffix_that_fills_the_context_leaves_the_earlier_rewards(play: Play, chat: ChatFormat) -> None:
    room = len(chat.prompt_ids(QUESTION)) + 4
    played = await play(["ab."], [MORE], max_tokens=4, max_model_len=room)
    assert played.result == ("truncated_context", 0.25, 1)
    played.check_chunks()


async def test_later_turns_are_appended_as_suffixes_of_the_sampled_ids(play: Play, chat: ChatFormat) -> None:
    played = await play(["two.", "sure."], [MORE, DONE])
    assert played.result == ("completed", 1.25, 2)
    assert played.envs[0].heard == ["two", "sure"]
    first = [*chat.encode("two"), chat.end_id]
    talk = [*QUESTION, {"role": "assistant", "content": "two"}, *MORE.messages]
    whole = chat.prompt_ids(talk)
    assert whole[: len(played.prompt + first)] == played.prompt + first
    assert list(played.record.ids) == [*whole, *chat.encode("sure"), chat.end_id]
    suffix = len(whole) - len(played.prompt) - len(first)
    assert [(span.n, span.sampled) for span in played.record.spans] == [
        (len(played.prompt), False), (3, True), (1, True), (suffix, False), (3, True), (2, True)
    ]  # fmt: skip
    assert played.requests[1][0] == whole
    played.check_chunks()


async def test_more_turns_than_max_turns_truncate_the_episode(play: Play) -> None:
    played = await play(["a.", "b.", "c."], [MORE] * 3, max_turns=2)
    assert played.result == ("truncated_turns", 0.5, 2)
    assert len(played.requests) == 2
    played.check_chunks()


@pytest.mark.parametrize(("chunks", "answered"), [*((n, False) for n in range(7)), (3, True)])
async def test_an_episode_cut_after_any_chunk_goes_on_as_if_nothing_had_happened(
    play: Play, chunks: int, answered: bool
) -> None:
    script: tuple[Any, Any] = (["two.", "sure."], [MORE, DONE])
    whole = await play(*script)
    assert len(whole.chunks) == 6
    resumed = await play(*script, cut=whole, chunks=chunks, answered=answered)
    assert [(c.seq, c.sampled, tokens) for c, tokens, _ in resumed.chunks] == [
        (c.seq, c.sampled, tokens) for c, tokens, _ in whole.chunks[chunks:]
    ]
    assert resumed.ends == whole.ends
    assert resumed.envs[0].heard == ["two", "sure"]
    assert list(resumed.record.ids) == list(whole.record.ids)
    resumed.check_chunks(first=chunks)


async def test_a_turn_resumed_midway_samples_only_what_max_tokens_leaves(play: Play) -> None:
    whole = await play(["twenty-two"], [DONE], max_tokens=8)
    resumed = await play(["twenty-two"], [DONE], cut=whole, chunks=2, max_tokens=8)
    assert [params.max_tokens for _, params in resumed.requests] == [8 - DELTA]
    assert resumed.result == whole.result == ("truncated_length", 1.0, 1)


@pytest.mark.parametrize(("greedy", "temperature"), [(False, 0.7), (True, 0.0)])
async def test_a_greedy_lease_is_sampled_at_temperature_0_resumed_or_not(
    play: Play, greedy: bool, temperature: float
) -> None:
    whole = await play(["two.", "sure."], [MORE, DONE], greedy=greedy)
    resumed = await play(["two.", "sure."], [MORE, DONE], greedy=greedy, cut=whole, chunks=2)
    assert [params.temperature for _, params in whole.requests + resumed.requests] == [temperature] * 4
    assert resumed.ends == whole.ends


# ---- rewards ---------------------------------------------------------------------------------------


async def test_a_missing_reward_is_no_reward_of_zero(play: Play) -> None:
    assert (await play(["2."], [Step(done=True, rewards={"judge": None})])).result == ("completed", None, 1)
    assert (await play(["2."], [Step(done=True)])).result == ("completed", None, 1)


async def test_rewards_are_summed_over_turns_by_name_and_their_sum_is_the_reward(play: Play) -> None:
    steps = [
        Step(done=False, rewards={"polite": 0.25, "judge": None, "late": None}, messages=MORE.messages),
        Step(done=False, rewards={}, messages=MORE.messages),
        Step(done=True, rewards={np.str_("polite"): 0.5, "judge": None, "late": np.float32(-1)}),
    ]
    played = await play(["a.", "b.", "c."], steps)
    assert played.ends[0].rewards == {"polite": 0.75, "late": -1.0}
    assert played.result == ("completed", -0.25, 3)


async def test_an_episode_that_fails_gives_up_the_rewards_of_its_earlier_turns(play: Play) -> None:
    played = await play(["a.", "b."], [MORE, "no step"])
    assert played.result == ("failed_environment", None, 1)
    assert played.ends[0].rewards == {}


async def test_a_reward_whose_name_is_no_text_fails_the_episode(play: Play) -> None:
    played = await play(["2."], [Step(done=True, rewards={3: 1.0})])  # type: ignore[dict-item]
    assert played.result[:2] == ("failed_reward", None)
    assert played.ends[0].detail == "a reward has the name 3, which is no plain text"


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), "0.5", np.array(0.5)])
async def test_a_reward_of_any_numeric_type_becomes_a_plain_float(play: Play, value: Any) -> None:
    played = await play(["2."], [Step(done=True, rewards={"right": value})])
    assert played.result == ("completed", 0.5, 1)


@pytest.mark.parametrize("value", ["good", float("nan"), float("-inf"), [1.0], np.float64("nan")])
async def test_a_reward_that_is_no_number_fails_the_episode_and_is_named(play: Play, value: Any) -> None:
    played = await play(["2."], [Step(done=True, rewards={"right": value})])
    assert played.result[:2] == ("failed_reward", None)
    assert played.ends[0].detail == f"reward 'right' = {value!r} is no number"


# ---- reward functions ------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`[reward]` with one function, `judge`, of the given source text."""

    def settings(source: str, **keys: Any) -> dict[str, Any]:
        (tmp_path / "judges.py").write_text(source)
        return {"functions": [f"{tmp_path}/judges.py:judge"]} | keys

    return settings


async def test_functions_see_the_whole_episode_and_count_by_their_weights(play: Play, judged: Any) -> None:
    source = """
def judge(episode):
    assert [(m["role"], m["content"]) for m in episode.messages] == [
        ("user", "1+1="), ("assistant", "two"), ("user", "and?"), ("assistant", "sure")
    ]
    assert len(episode.prompt) == 1 and episode.status == "completed"
    return len(episode.completion)
"""
    weights = {"judge": -0.5, "polite": 2.0}
    whole = await play(["two.", "sure."], [MORE, DONE], reward=judged(source, weights=weights))
    assert whole.ends[0].rewards == {"polite": 0.25, "right": 1.0, "judge": 8.0}
    assert whole.result == ("completed", 2 * 0.25 + 1.0 - 0.5 * 8.0, 2)
    for chunks in (2, 4, 6):
        resumed = await play(["two.", "sure."], [MORE, DONE], cut=whole, chunks=chunks, reward=judged(source))
        assert resumed.ends[0].rewards == whole.ends[0].rewards


async def test_a_truncated_episode_is_judged_and_one_without_a_turn_is_not(play: Play, judged: Any) -> None:
    reward = judged("def judge(episode): return {episode.status + ':' + episode.final: 1.0}")
    cut = await play(["twenty-two"], [Step(done=True)], max_tokens=4, reward=reward)
    assert cut.ends[0].rewards == {"truncated_length:twen": 1.0}
    empty = await play(["no"], [DONE], max_tokens=1, max_model_len=4, reward=reward)
    assert empty.result == ("truncated_context", None, 0)


@pytest.mark.parametrize(
    ("body", "limit", "status", "detail"),
    [
        ("raise KeyError('lost')", {}, "failed_reward", "reward function 'judge' raised KeyError: 'lost'"),
        (
            "while True: pass",
            {"timeout_s": 0.2},
            "failed_time",
            "'judge' did not answer within reward.timeout_s = 0.2 s",
        ),
    ],
)
async def test_a_function_that_fails_fails_the_episode_which_then_has_no_reward_at_all(
    play: Play, judged: Any, body: str, limit: dict[str, float], status: str, detail: str
) -> None:
    reward = judged(f"def judge(final):\n    {body}", **limit)
    played = await play(["two."], [DONE], reward=reward)
    assert played.result == (status, None, 1)
    assert played.ends[0].rewards == {}
    assert detail in played.ends[0].detail
    assert played.envs[0].closed == 1


async def test_a_failed_episode_is_not_judged(play: Play, judged: Any) -> None:
    reward = judged("def judge(final): raise AssertionError('called')")
    played = await play(["two."], [DONE], wrong={"step": raise_later}, reward=reward)
    assert "step raised KeyError" in played.ends[0].detail


# ---- the fault boundary ----------------------------------------------------------------------------


async def raise_later(*_: Any) -> Any:
    raise KeyError("lost")


def raise_now(*_: Any) -> Any:
    raise KeyError("lost")


async def wait_forever(*_: Any) -> Any:
    await asyncio.Event().wait()


async def return_text(*_: Any) -> Any:
    return "text"


def return_at_once(*_: Any) -> Any:
    return DONE


async def give_malformed_messages(*_: Any) -> Any:
    return Start(messages=[{"content": "no role"}])


async def give_no_messages(*_: Any) -> Any:
    return Step(done=False, messages=None)  # type: ignore[arg-type]


async def give_no_rewards(*_: Any) -> Any:
    return Step(done=True, rewards=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "wrong", "detail"),
    [
        ("reset", raise_later, "reset raised KeyError: 'lost'"),
        ("reset", raise_now, "reset raised KeyError: 'lost'"),
        ("reset", return_text, "reset returned str, not Start"),
        ("reset", return_at_once, "write it as `async def reset`"),
        ("reset", give_malformed_messages, "the chat template raised"),
        ("step", raise_later, "step raised KeyError: 'lost'"),
        ("step", raise_now, "step raised KeyError: 'lost'"),
        ("step", return_text, "step returned str, not Step"),
        ("step", return_at_once, "write it as `async def step`"),
        ("step", give_no_messages, "step's messages raised ValidationError: Expected `array`, got `null`"),
        ("step", give_no_rewards, "reading step's rewards raised"),
    ],
)
async def test_whatever_a_method_does_wrong_fails_its_own_episode_only(
    play: Play, method: str, wrong: Callable[..., Any], detail: str
) -> None:
    played = await play(["2."], [DONE], wrong={method: wrong})
    malformed = wrong is give_malformed_messages
    assert played.result[:2] == ("failed_parse" if malformed else "failed_environment", None)
    assert detail in played.ends[0].detail
    assert played.envs[0].closed == 1
    played.check_chunks()


@pytest.mark.parametrize(("make", "detail"), [(raise_now, "make raised KeyError"), (lambda: 3, "reset raised")])
async def test_an_environment_that_cannot_be_made_fails_the_episode(
    play: Play, make: Callable[[], Any], detail: str
) -> None:
    played = await play(["2."], [DONE], make=make)
    assert played.result == ("failed_environment", None, 0)
    assert detail in played.ends[0].detail
    assert played.ends[0].seq == 0


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_an_environment_that_does_not_answer_in_time_fails_the_episode(play: Play, method: str) -> None:
    played = await play(["2."], [DONE], wrong={method: wait_forever}, timeout_s=0.05)
    assert played.result[:2] == ("failed_time", None)
    assert played.ends[0].detail == f"{method} did not answer within env.timeout_s = 0.05 s"
    assert played.envs[0].closed == 1


@pytest.mark.parametrize("wrong", [raise_later, raise_now, wait_forever, return_at_once])
async def test_a_failure_to_close_leaves_the_result(
    play: Play, wrong: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    played = await play(["2."], [DONE], wrong={"close": wrong}, timeout_s=0.05)
    assert played.result == ("completed", 1.0, 1)
    assert "environment of episode 3 failed to close" in capsys.readouterr().out
