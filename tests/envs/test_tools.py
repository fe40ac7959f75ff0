"""Tools answer calls: at once, in order, within limits; and whatever goes wrong is a text that the model sees."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from asyncrl.envs.base import Message, ToolFault
from asyncrl.envs.tools import Tool, Tools, side_effects


def calling(*calls: tuple[str, Any], malformed: list[str] | None = None) -> Message:
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": ""} | ({"tool_calls": made} if made else {}) | (
        {"malformed_calls": malformed} if malformed else {}
    )  # fmt: skip


async def answers(tools: Tools, *calls: tuple[str, Any], **more: Any) -> list[str]:
    step = await tools.answer(calling(*calls), **more)
    assert not step.done
    return [message["content"] for message in step.messages]


def double(number: int) -> int:
    """Doubles."""
    return 2 * number


async def later(text: str) -> str:
    """Says it."""
    await asyncio.sleep(0)
    return text


def fails(how: str) -> str:
    """Fails."""
    raise {
        "value": ValueError("no such thing"),
        "exit": SystemExit(3),
        "stop": StopIteration(),
        "time": TimeoutError("its"),
    }[how]


async def test_each_call_is_answered_in_order_with_its_name_and_id() -> None:
    step = await Tools([double, later]).answer(calling(("later", {"text": "hi"}), ("double", {"number": "21"})))
    assert step.messages == [
        {"role": "tool", "name": "later", "tool_call_id": "call_0", "content": "hi"},
        {"role": "tool", "name": "double", "tool_call_id": "call_1", "content": "42"},
    ]
    assert step.info == {"tool_errors": 0}


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_calls_of_a_message_overlap(kind: str) -> None:
    threads, tasks = threading.Barrier(3), asyncio.Barrier(3)

    def meet(who: int) -> int:
        """Waits for the others."""
        threads.wait()
        return who

    async def meet_later(who: int) -> int:
        """Waits for the others."""
        await tasks.wait()
        return who

    function = meet if kind == "sync" else meet_later
    calls = [(function.__name__, {"who": who}) for who in range(3)]
    assert await answers(Tools([function], timeout_s=60), *calls) == ["0", "1", "2"]


async def test_one_at_a_time_means_in_order_and_never_beside_one_that_hangs() -> None:
    go, made = threading.Event(), []

    def hang() -> None:
        """Hangs."""
        while not go.is_set():
            try:
                go.wait()
            except SystemExit:
                continue

    def note(number: int) -> None:
        """Notes."""
        made.append(number)

    tools = Tools([hang, note], timeout_s=0.1, one_at_a_time=True)
    await answers(tools, *(("note", {"number": number}) for number in range(20)))
    assert made == list(range(20))
    late = "error: {} did not answer within 0.1 s"
    assert await answers(tools, ("hang", {}), ("note", {"number": 20})) == [
        late.format("hang"),
        late.format("note"),
    ]
    assert made == list(range(20))
    go.set()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_hung_tool_is_an_error_that_the_model_sees_and_harms_no_other(kind: str) -> None:
    go = threading.Event()

    def sync() -> None:
        """Hangs."""
        go.wait()

    async def coroutine() -> None:
        """Hangs."""
        await asyncio.Event().wait()

    hang = Tool.of(sync if kind == "sync" else coroutine, timeout_s=0.1)
    step = await Tools([hang, double], timeout_s=60).answer(calling((hang.name, {}), ("double", {"number": 2})))
    assert [m["content"] for m in step.messages] == [f"error: {hang.name} did not answer within 0.1 s", "4"]
    assert step.info == {"tool_errors": 1}
    go.set()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("triple", {}, "error: there is no tool 'triple'; there are: double, later, fails"),
        ("double", {"number": "two"}, "error: double: Expected `int`, got `str` - at `$.number`; it {T}"),
        ("double", {}, "error: double: Object missing required field `number`; it {T}"),
        ("double", {"number": 2, "times": 3}, "error: double: Object contains unknown field `times`; it {T}"),
        ("double", [2], "error: double: Expected `object`, got `array`; it {T}"),
        ("double", None, "error: double: Object missing required field `number`; it {T}"),
        ("fails", {"how": "value"}, "error: ValueError: no such thing"),
        ("fails", {"how": "exit"}, "error: SystemExit: 3"),
        ("fails", {"how": "stop"}, "error: StopIteration: "),
        ("fails", {"how": "time"}, "error: TimeoutError: its"),
    ],
)  # fmt: skip
async def test_whatever_goes_wrong_is_a_text_that_the_model_sees(name: str, arguments: Any, said: str) -> None:
    step = await Tools([double, later, fails]).answer(calling((name, arguments)))
    expected = said.replace("{T}", "takes number: integer")
    assert [message["content"] for message in step.messages] == [expected]
    assert step.info == {"tool_errors": 1}


async def test_a_tool_that_cannot_be_used_at_all_is_a_fault_when_the_others_have_ended() -> None:
    ended = []

    async def gone() -> None:
        """Is gone."""
        raise ToolFault("its server is gone")

    async def slow() -> None:
        """Takes its time."""
        await asyncio.sleep(0.05)
        ended.append("slow")

    for alone in (False, True):
        with pytest.raises(ToolFault, match="its server is gone"):
            await Tools([gone, slow], one_at_a_time=alone).answer(calling(("slow", {}), ("gone", {})))
    assert ended == ["slow", "slow"]


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("as it is", "as it is"),
        ("half \ud83d", "half ?"),
        (None, "null"),
        (1.5, "1.5"),
        ({"ä": [1, True]}, '{"ä":[1,true]}'),
        ({1, 2}, "[1,2]"),
        (
            object(),
            "error: give returned object, which is not JSON: Encoding objects of type object is unsupported",
        ),
    ],
)
async def test_a_result_is_text_or_json(returned: Any, shown: str) -> None:
    def give() -> Any:
        """Gives."""
        return returned

    assert await answers(Tools([give]), ("give", {})) == [shown]


async def test_a_malformed_call_is_an_error_beside_the_calls_that_can_be_read() -> None:
    step = await Tools([double]).answer(calling(("double", {"number": 1}), malformed=["{double", "x" * 300]))
    assert [message["role"] for message in step.messages] == ["tool"] * 3
    assert all((m["name"], m["tool_call_id"]) == ("double", "call_0") for m in step.messages)
    assert step.messages[1]["content"] == "error: this call cannot be read: {double"
    assert len(step.messages[2]["content"]) < 250
    assert step.info == {"tool_errors": 0}


async def test_malformed_calls_alone_are_answered_by_one_user_message() -> None:
    step = await Tools([double]).answer(calling(malformed=["{double", "{triple"]))
    text = "error: this call cannot be read: {double\nerror: this call cannot be read: {triple"
    assert step.messages == [{"role": "user", "content": text}]
    assert step.info == {"tool_errors": 0}


async def test_a_call_with_side_effects_is_not_repeated_and_the_model_is_told() -> None:
    sent = []

    @side_effects
    def send(text: str) -> str:
        """Sends."""
        sent.append(text)
        return "sent"

    tools = Tools([send, double])
    assert await answers(tools, ("send", {"text": "a"})) == ["sent"]
    assert await answers(
        tools, ("send", {"text": "b"}), ("double", {"number": 2}), ("send", {"words": 3}), interrupted=True
    ) == [
        "error: send was called, but whether the call took effect is unknown; it is not repeated",
        "4",
        "error: send: Object contains unknown field `words`; it takes text: string",
    ]  # fmt: skip
    assert sent == ["a"]
    assert tools.effects(calling(("double", {}), ("send", {}), ("lost", {}))) == ["send"]


async def test_a_subset_has_only_its_tools() -> None:
    some = Tools([double, later, fails]).only(["later", "double"])
    assert [schema["function"]["name"] for schema in some.schemas] == ["later", "double"]
    assert await answers(some, ("fails", {"how": "exit"})) == [
        "error: there is no tool 'fails'; there are: later, double"
    ]
    with pytest.raises(ValueError, match="there is no tool 'triple'; there are: later, double"):
        some.only(["triple"])


async def test_a_tool_need_not_be_a_function() -> None:
    async def call(**arguments: Any) -> str:
        return str(arguments)

    schema = {"type": "function", "function": {"name": "far", "description": "", "parameters": {}}}
    far = Tool(schema, call, lambda given: msgspec.convert(given, dict[str, int]))
    assert await answers(Tools([far]), ("far", {"a": 1}), ("far", {"a": "b"})) == [
        "{'a': 1}",
        "error: far: Expected `int`, got `str` - at `$[...]`; it takes no arguments",
    ]


async def test_a_cancelled_answer_stops_its_threads() -> None:
    running = []

    def spin() -> None:
        """Spins."""
        running.append(threading.current_thread())
        while True:
            pass

    task = asyncio.create_task(Tools([spin], timeout_s=60).answer(calling(("spin", {}))))
    while not running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(running[0].join, 30)
    assert not running[0].is_alive()


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools have the name 'double'"):
        Tools([double, double])
