"""Agents that speak the chat-completions API over real HTTP: what they ask for is what the policy sees."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from asyncrl.envs.agent import AgentEnvironment, Outcome, make, process_agent
from asyncrl.envs.base import Environment, Message, Snapshots, Truncates
from asyncrl.envs.openai_messages import Refused
from asyncrl.envs.registry import load
from asyncrl.messages import Task

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def ask(session: ClientSession, base_url: str, key: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, **more}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
        answer = await response.json()
        return answer if response.status == 200 else {"status": response.status, **answer["error"]}


async def adder(task: Task, base_url: str, key: str) -> Outcome:
    """Adds with a tool as often as the model asks for it; rewards the right answer."""
    messages: list[Any] = [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": task.id}]},
    ]
    calls = 0
    async with ClientSession() as session:
        while True:
            answer = await ask(session, base_url, key, messages, tools=TOOLS, temperature=0.1)
            if "status" in answer:
                break
            choice = answer["choices"][0]
            messages.append(choice["message"])
            if choice["finish_reason"] != "tool_calls":
                break
            for call in choice["message"]["tool_calls"]:
                calls += 1
                found = sum(json.loads(call["function"]["arguments"])["of"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(found)})
    right = messages[-1]["content"] == task.answer
    return Outcome({"right": float(right), "unused": None}, {"calls": calls})


def tasks(split: str, index: int) -> Task:
    return Task(f"{index}+{index}", [], answer=str(2 * index))


def one(agent: Any) -> Any:
    return AgentEnvironment(tasks, agent).make()


def says(content: str, *calls: list[int]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": {"of": call}}}
            for i, call in enumerate(calls)
        ]
    return message


async def play(number: int) -> dict[str, Any]:
    env = one(adder)
    start = await env.reset(tasks("train", number))
    assert start.messages[0] == {"role": "system", "content": "Add."}
    assert start.messages[1] == {"role": "user", "content": f"what is {number}+{number}"}
    assert start.tools == TOOLS
    for _ in range(2):  # The policy's ids begin anew in each turn; the agent must not mix them up.
        step = await env.step(says("", [number, number], [1, 2]))
        assert not step.done
        assert step.messages == [
            {"role": "tool", "content": str(2 * number), "tool_call_id": "call_0", "name": "add"},
            {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        ]
    step = await env.step(says(str(2 * number)))
    await env.close()
    assert step.done
    return {"rewards": step.rewards, "info": step.info}


async def test_an_agent_with_tools_is_an_environment_and_many_share_one_server() -> None:
    assert isinstance(AgentEnvironment(tasks, adder), Environment)
    assert isinstance(one(adder), Truncates)
    assert not isinstance(one(adder), Snapshots)
    found = await asyncio.gather(*(play(number) for number in range(32)))
    assert found == [{"rewards": {"right": 1.0, "unused": None}, "info": {"calls": 4}}] * 32


async def test_an_episode_that_is_cut_off_keeps_the_rewards_of_an_agent_that_ends_in_order() -> None:
    env = one(adder)
    await env.reset(tasks("train", 1))
    await env.step(says("", [1, 1]))
    assert await env.truncated("truncated_turns") == {"right": 1.0, "unused": None}
    await env.close()


async def test_a_stream_is_one_chunk_with_the_calls() -> None:
    async def agent(task: Task, base_url: str, key: str) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            ClientSession() as session,
            session.post(f"{base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[1:] == ["data: [DONE]", ""]
        choice = json.loads(events[0].removeprefix("data: "))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["delta"]["tool_calls"][0]["index"] == 0
        return 0.5

    env = one(agent)
    await env.reset(tasks("train", 1))
    assert (await env.step(says("", [1]))).rewards == {"reward": 0.5}
    await env.close()


SAID = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
REWRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "edited": ("rewrites the conversation: message 0", {"messages": [{"role": "user", "content": "other"}]}),
    "shortened": ("must add to all of them", {"messages": []}),
    "answer changed": (
        "rewrites the conversation: message 1",
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "no"}]},
    ),
    "tools": ("tools have changed", {"tools": TOOLS}),
    "choices": ("n = 2", {"n": 2}),
    "a text as a message": ("a message is a str", {"messages": [*SAID, "go on"]}),
    "a call that is a text": (
        "none of chat completions: TypeError",
        {"messages": [*SAID, {"role": "assistant", "content": "b", "tool_calls": ["x"]}]},
    ),
    "image": (
        "part of type 'image_url'",
        {"messages": [*SAID, {"role": "user", "content": [{"type": "image_url"}]}]},
    ),
}


@pytest.mark.parametrize("what", REWRITES)
async def test_a_request_that_is_no_continuation_is_refused_to_the_agent_and_fails_the_episode(what: str) -> None:
    reason, wrong = REWRITES[what]
    heard: list[dict[str, Any]] = []

    async def agent(task: Task, base_url: str, key: str) -> float:
        first = [{"role": "user", "content": "x"}]
        async with ClientSession() as session:
            answer = await ask(session, base_url, key, first)
            more = [*first, answer["choices"][0]["message"], {"role": "user", "content": "y"}]
            heard.append(await ask(session, base_url, key, **({"messages": more} | wrong)))
        return 1.0

    env = one(agent)
    await env.reset(tasks("train", 1))
    with pytest.raises(Refused, match=reason):
        await env.step(says("a"))
    await env.close()
    assert heard == [] or (heard[0]["status"], reason in heard[0]["message"]) == (400, True)


async def test_two_requests_at_a_time_are_refused() -> None:
    async def agent(task: Task, base_url: str, key: str) -> float:
        async with ClientSession() as session:
            await asyncio.gather(
                *(ask(session, base_url, key, [{"role": "user", "content": "x"}]) for _ in range(2))
            )
        return 1.0

    env = one(agent)

    async def first_turn() -> None:
        await env.reset(tasks("train", 1))
        await env.step(says("a"))

    with pytest.raises(Refused, match="two requests at a time"):
        await first_turn()
    await env.close()


async def test_a_key_of_no_episode_and_one_whose_episode_is_over_are_refused() -> None:
    seen: list[str] = []

    async def agent(task: Task, base_url: str, key: str) -> float:
        seen[:] = [base_url, key]
        async with ClientSession() as session:
            assert (await ask(session, base_url, "sk-other", []))["status"] == 401
            await ask(session, base_url, key, [{"role": "user", "content": "x"}])
        return 1.0

    env = one(agent)
    await env.reset(tasks("train", 1))
    await env.step(says("a"))
    await env.close()
    async with ClientSession() as session:
        answer = await ask(session, *seen, [{"role": "user", "content": "x"}])
    assert (answer["status"], answer["code"]) == (401, "invalid_api_key")


async def test_what_an_agent_raises_or_returns_wrongly_fails_the_episode() -> None:
    async def raises(task: Task, base_url: str, key: str) -> float:
        raise KeyError("lost")

    async def silent(task: Task, base_url: str, key: str) -> float:
        return 1.0

    async def nothing(task: Task, base_url: str, key: str) -> Any:
        async with ClientSession() as session:
            await ask(session, base_url, key, [{"role": "user", "content": "x"}])

    async def quits(task: Task, base_url: str, key: str) -> float:
        sys.exit("bye")

    async def gives_up(task: Task, base_url: str, key: str) -> float:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="raised SystemExit: bye"):
        await one(quits).reset(tasks("train", 1))
    with pytest.raises(RuntimeError, match="raised CancelledError"):
        await one(gives_up).reset(tasks("train", 1))
    with pytest.raises(KeyError, match="lost"):
        await one(raises).reset(tasks("train", 1))
    with pytest.raises(RuntimeError, match="ended before it asked"):
        await one(silent).reset(tasks("train", 1))
    env = one(nothing)
    await env.reset(tasks("train", 1))
    with pytest.raises(TypeError, match="returned None, not a reward"):
        await env.step(says("a"))


async def test_closing_an_episode_stops_its_agent() -> None:
    stopped = asyncio.Event()

    async def agent(task: Task, base_url: str, key: str) -> float:
        async with ClientSession() as session:
            await ask(session, base_url, key, [{"role": "user", "content": "x"}])
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return 1.0

    env = one(agent)
    await env.reset(tasks("train", 1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await env.step(says("a"))
    await env.close()
    assert stopped.is_set()


PROCESS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": task["id"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"]
if said == "break":
    sys.exit("broken")
print("some log")
print("no number" if said == "talk" else json.dumps({"right": float(said == task["answer"])}))
"""


async def test_an_agent_may_be_a_command(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(
        "from asyncrl.messages import Task\n\ndef tasks(split, index):\n    return Task('2+2', [], '4')\n"
    )
    command = [sys.executable, "-c", PROCESS]
    environment = load("asyncrl.envs.agent:make", {"tasks": f"{tmp_path}/tasks.py:tasks", "command": command})

    async def said(text: str) -> Any:
        env = environment.make()
        assert (await env.reset(environment.task("train", 0))).messages == [{"role": "user", "content": "2+2"}]
        try:
            return await env.step(says(text))
        except RuntimeError as error:
            return str(error)
        finally:
            await env.close()

    right, broken, talk = await asyncio.gather(said("4"), said("break"), said("talk"))
    assert right.rewards == {"right": 1.0}
    assert "exited with status 1: broken" in broken
    assert "no reward in JSON: 'no number'" in talk


async def test_closing_kills_a_command() -> None:
    env = one(
        process_agent(
            [sys.executable, "-c", PROCESS.replace("if said", "import time; time.sleep(600)\nif said", 1)]
        )
    )
    await env.reset(tasks("train", 1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await env.step(says("a"))
    async with asyncio.timeout(30):
        await env.close()
    assert env._work.cancelled()


@pytest.mark.parametrize(
    "arguments", [{}, {"agent": "a:b", "command": ["x"]}, {"command": "x y"}, {"command": [1]}]
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"env\.args\."):
        make("tasks.py:tasks", **arguments)
