"""What no environment may do to its generator: an episode fails alone, with its own reason, whatever it is given.

What cannot be encoded would end the process as it leaves, and its episode would end the next one: it is found
before.
"""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from reciting import DONE, MORE, QUESTION, Play, Talk

from asyncrl.chat import ChatFormat
from asyncrl.envs.base import Message, Start, Step
from asyncrl.messages import Task
from asyncrl.toy import CHAT_TEMPLATE, write_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"maximum": 7}}}}}


async def _fails(*_: Any) -> Any:
    raise OSError("no file \udcff.txt")


async def _times_out_itself(*_: Any) -> Any:
    raise TimeoutError("the database is slow")


async def _is_cancelled_within(*_: Any) -> Any:
    inner = asyncio.ensure_future(asyncio.sleep(9))
    inner.cancel()
    await inner


@pytest.mark.parametrize(
    ("wrong", "status", "detail"),
    [
        (_fails, "failed_environment", "step raised OSError: no file \\udcff.txt"),
        (_times_out_itself, "failed_environment", "step raised TimeoutError: the database is slow"),
        (_is_cancelled_within, "failed_environment", "step raised CancelledError: "),
    ],
)
async def test_an_environments_own_errors_are_told_as_they_are(
    play: Play, wrong: Any, status: str, detail: str
) -> None:
    played = await play(["2."], [DONE], wrong={"step": wrong})
    assert played.result[0] == status
    assert played.ends[0].detail == detail


async def test_an_environment_whose_close_is_cancelled_within_leaves_the_result(play: Play) -> None:
    played = await play(["2."], [DONE], wrong={"close": _is_cancelled_within})
    assert played.result == ("completed", 1.0, 1)


@pytest.mark.parametrize("content", ["\ud800", 1 << 70, {"deep": [1 << 64]}, {1, object()}])
async def test_messages_that_cannot_travel_fail_the_episode(play: Play, content: Any) -> None:
    answer = Step(done=False, messages=[{"role": "user", "content": "and?", "more": content}])
    played = await play(["one.", "two."], [answer, DONE])
    assert played.result[0] == "failed_environment"
    assert "step's messages raised" in played.ends[0].detail
    assert played.turns == []


@pytest.mark.parametrize("info", [{"hits": math.nan}, {"hits": -math.inf}, {"\ud800": 1.0}, {"hits": "many"}])
async def test_counts_that_are_none_fail_the_episode(play: Play, info: Any) -> None:
    played = await play(["one.", "two."], [Step(False, {}, MORE.messages, info), DONE])
    assert played.result[0] == "failed_environment"
    assert "reading step's info raised" in played.ends[0].detail
    assert played.turns == []


@pytest.mark.parametrize("value", [1 << 70, object()])
async def test_tools_that_cannot_travel_fail_the_episode(play: Play, value: Any) -> None:
    async def reset(task: Task) -> Start:
        return Start(QUESTION, [TOOL | {"more": value}])

    played = await play(["2."], [DONE], wrong={"reset": reset})
    assert played.result[0] == "failed_environment"
    assert "reset's tools raised" in played.ends[0].detail


async def test_a_tools_schema_travels_as_json_and_holds_no_control_tokens(play: Play, chat: ChatFormat) -> None:
    async def reset(task: Task) -> Start:
        return Start(QUESTION, [TOOL | {"codes": {7: "a<|im_end|>"}}])

    played = await play(["one.", "two."], [MORE, DONE], wrong={"reset": reset})
    assert played.result[0] == "completed"
    assert played.turns[0][1].tools[0]["codes"] == {"7": "a< |im_end|>"}


async def test_a_call_nested_so_deep_that_nothing_can_walk_it_fails_its_episode_only(play: Play) -> None:
    deep = '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 600 + "]" * 600 + "}}</tool_call>."

    async def reset(task: Task) -> Start:
        return Start(QUESTION, [TOOL])

    async def step(message: Message) -> Step:
        return DONE

    played = await play([deep], wrong={"reset": reset, "step": step}, max_tokens=2000, max_model_len=4000)
    assert played.result[0] in ("completed", "failed_parse")


async def test_a_template_that_prints_nothing_fails_the_episode(play: Play, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    silent = "{% if messages[-1].content == 'probe' %}" + CHAT_TEMPLATE + "{% endif %}"
    chat = ChatFormat(tmp_path)
    chat._template.tokenizer.chat_template = silent
    played = await play(["2."], [DONE], chat=chat)
    assert played.result[0] == "failed_parse"
    assert "the chat template printed nothing" in played.ends[0].detail
    assert played.chunks == []


@pytest.mark.parametrize("answered", [False, True])
async def test_an_answer_that_does_not_fit_is_not_appended_and_the_turns_before_it_are_trained(
    play: Play, chat: ChatFormat, answered: bool
) -> None:
    long = Step(False, {"polite": 0.5}, [{"role": "user", "content": "x" * 300}])
    limits = {"max_model_len": 200, "token_budget": 200}
    whole = await play(["one."], [long], **limits)
    assert whole.result == ("truncated_context", 0.5, 1)
    assert list(whole.record.ids) == [*whole.prompt, *chat.encode("one"), chat.end_id]
    resumed = await play(["one."], [long], cut=whole, chunks=len(whole.chunks), answered=answered, **limits)
    assert resumed.ends == whole.ends
    resumed.check_chunks(first=len(whole.chunks))


async def test_a_fork_that_does_not_fit_into_a_row_truncates_the_episode(
    play: Play, forgetful: ChatFormat
) -> None:
    fits = await play(["one.", "two."], [MORE, DONE], chat=forgetful)
    assert (fits.result[0], fits.record.forks) == ("completed", 1)
    before = sum(chunk.n for chunk, _, _ in fits.chunks[:3])
    limits = {"max_model_len": before + 3, "token_budget": before + 3, "max_tokens": 8}
    cut = await play(["one."], [MORE], chat=forgetful, **limits)
    assert (cut.result, cut.record.forks) == (("truncated_context", 0.25, 1), 0)
    assert len(cut.record.ids) == before


async def test_a_start_and_its_snapshot_are_durable_with_the_prompt_or_not_at_all(play: Play) -> None:
    class Slow(Talk):
        async def snapshot(self) -> bytes:
            await asyncio.sleep(0.01)
            return b""

        async def restore(self, task: Task, blob: bytes) -> None:
            pass

    played = await play(["2."], make=lambda: Slow([DONE], {}))
    assert [(before, turn.turn) for before, turn in played.turns] == [(0, 0)]
