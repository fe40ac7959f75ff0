"""The client of OpenEnv's protocol: real episodes on a real server where there is one, faults on a small one.

The real server is `openenv_server.py`, run by the interpreter that ASYNCRL_OPENENV_PYTHON names, or by this one if
it has openenv. The faults that it cannot be made to have come from a WebSocket server of the tests' own.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.envs.base import Message, Replays, Snapshots, ToolFault, Truncates
from asyncrl.envs.registry import PluginError, load

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed: pip install 'asyncrl[http]'")

TEMPLATE = {"number": "$text"}
START_LIMIT_S = 60


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def guesses(*numbers: object) -> Message:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "guess", "arguments": {"number": number}}}
        for i, number in enumerate(numbers)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def bisect(conversation: list[Message]) -> Message:
    """Plays from what it is shown: guesses the middle of `low` and `high`."""
    low, high = map(int, re.findall(r'"(?:low|high)": (\d+)', conversation[-1]["content"]))
    return says(f" {(low + high) // 2}\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Starts the real server; its address."""
    python = os.environ.get("ASYNCRL_OPENENV_PYTHON") or (
        sys.executable if importlib.util.find_spec("openenv") else ""
    )
    if not python:  # Its server cannot live beside what the engines need.
        pytest.skip("no OpenEnv server: set ASYNCRL_OPENENV_PYTHON to an interpreter that has openenv (0.10.0)")
    port = free_port()
    process = subprocess.Popen([python, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None, "the server ended while it started"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, f"the server did not start within {START_LIMIT_S} s"
            time.sleep(0.1)  # Another process opens the port; there is no event to wait for.
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


async def test_episodes_on_a_real_server_are_won_by_playing_from_its_observations(server: str, play) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE, "instructions": "Guess."})
    games = [play(environment, environment.task("train", i), bisect) for i in range(4)]
    for steps, start in await asyncio.gather(*games):
        assert start.messages[0]["content"].startswith('Guess.\n\n{"message": "Guess a number from 0 to 99."')
        assert steps[-1].done
        assert not steps[-1].messages
        assert len(steps) <= 7
        assert [step.rewards for step in steps] == [{"openenv": 0.0}] * (len(steps) - 1) + [{"openenv": 1.0}]


async def test_the_seed_of_a_task_is_the_seed_of_its_reset(server: str, play) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE, "observation": "message"})
    tasks = [environment.task("train", index) for index in range(6)]
    games = [await play(environment, task, [says("50"), says("25")]) for task in [*tasks, *tasks]]
    assert games[:6] == games[6:]
    assert len({str(game) for game in games[:6]}) > 1
    assert games[0][1].messages == [{"role": "user", "content": "Guess a number from 0 to 99."}]


async def test_an_action_that_the_server_refuses_is_an_error_that_the_model_sees(server: str, play) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE})
    answers = [says("a half"), says("-3"), says("50")]
    steps, _ = await play(environment, environment.task("train", 0), answers)
    assert "number: Input should be a valid integer" in steps[0].messages[0]["content"]
    assert "numbers are not negative" in steps[1].messages[0]["content"]
    assert [step.info for step in steps] == [{"refused_actions": 1.0}] * 2 + [{}]
    assert [step.rewards for step in steps[:2]] == [{}, {}]


async def test_the_tool_has_the_servers_schema_and_every_call_is_an_action(server: str, play) -> None:
    environment = load("openenv", {"url": server, "tool": "guess"})
    script = [says("fifty?"), guesses("x", 50), guesses(100), guesses(*range(100))]
    steps, start = await play(environment, environment.task("train", 2), script)
    (tool,) = start.tools
    assert tool["function"]["name"] == "guess"
    assert tool["function"]["description"] == "A guess of the number."
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]
    assert "calls no tool" in steps[0].messages[0]["content"]
    assert [(answer["role"], answer["tool_call_id"]) for answer in steps[1].messages] == [
        ("tool", "call_0"),
        ("tool", "call_1"),
    ]
    assert steps[1].messages[0]["content"].startswith("Error: ")
    assert steps[1].info == {"refused_actions": 1.0}
    assert steps[2].rewards == {"openenv": -1.0}, "what was ruled out costs a point"
    assert steps[3].done
    assert steps[3].rewards["openenv"] <= 1.0


async def test_an_episode_goes_on_elsewhere_by_doing_its_actions_again(server: str, play) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE})
    assert not isinstance(environment.make(), Replays | Snapshots), "so the runtime does the steps again"
    messages = [says("0"), says("99"), says("100")]
    task = environment.task("train", 0)
    assert await play(environment, task, messages) == await play(environment, task, messages)


async def test_a_server_that_is_full_says_so_and_has_room_again_after_a_close(server: str) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE})
    envs = [environment.make() for _ in range(5)]
    await asyncio.gather(*(env.reset(environment.task("train", 0)) for env in envs[:4]))
    with pytest.raises(ToolFault, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
        await envs[4].reset(environment.task("train", 0))
    await asyncio.gather(*(env.close() for env in envs))
    late = environment.make()
    await late.reset(environment.task("train", 0))
    await late.close()


async def test_a_reset_that_the_server_refuses_is_the_environments_fault(server: str) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE, "reset": {"refuse": True}})
    env = environment.make()
    with pytest.raises(RuntimeError, match="no game today"):
        await env.reset(environment.task("train", 0))
    await env.close()


async def test_a_hung_action_ends_within_the_time_limit(server: str) -> None:
    environment = load("openenv", {"url": server, "action": TEMPLATE, "timeout_s": 0.3})
    env = environment.make()
    await env.reset(environment.task("train", 0))
    with pytest.raises(ToolFault, match=r"no answer to 'step' within env\.args\.timeout_s = 0\.3 s"):
        await env.step(says("1000"))
    await env.close()


# ---- faults, from a server of the tests' own ---------------------------------------------------------


@contextlib.asynccontextmanager
async def answering(handler: Callable[[object, dict], Awaitable[None]]) -> AsyncIterator[str]:
    """A WebSocket server that leaves each message to the handler."""

    async def serve(request):
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        async for message in connection:
            await handler(connection, message.json())
        return connection

    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def seen(reward: float | None = None, done: bool = False) -> dict:
    return {"type": "observation", "data": {"observation": {"text": "hm"}, "reward": reward, "done": done}}


async def test_a_server_that_is_gone_or_talks_nonsense_is_a_tool_fault() -> None:
    async def close(connection, message) -> None:
        await connection.close()

    async def nonsense(connection, message) -> None:
        await connection.send_json([1, 2, 3])

    for handler, expected in ((close, "ended the connection"), (nonsense, "none of OpenEnv's")):
        async with answering(handler) as url:
            env = load("openenv", {"url": url, "action": TEMPLATE}).make()
            with pytest.raises(ToolFault, match=expected):
                await env.reset(load("openenv", {"url": url, "action": TEMPLATE}).task("train", 0))
            await env.close()
    for action in (TEMPLATE, None):
        environment = load("openenv", {"url": f"http://127.0.0.1:{free_port()}", "action": action})
        env = environment.make()
        with pytest.raises(ToolFault, match=r"env\.args\.url.*cannot be used"):
            await env.reset(environment.task("train", 0))
        await env.close()


async def test_an_episode_that_ends_without_any_reward_has_a_missing_one(play) -> None:
    async def handler(connection, message) -> None:
        steps = message["data"].get("number")
        await connection.send_json(seen(reward=0.5 if steps == "pay" else None, done=steps == "end"))

    async with answering(handler) as url:
        environment = load("openenv", {"url": url, "action": TEMPLATE, "observation": "text"})
        steps, _ = await play(environment, environment.task("train", 0), [says("go"), says("end")])
        assert [step.rewards for step in steps] == [{}, {"openenv": None}]
        steps, _ = await play(environment, environment.task("train", 0), [says("pay"), says("end")])
        assert [step.rewards for step in steps] == [{"openenv": 0.5}, {}]
        environment = load("openenv", {"url": url, "action": TEMPLATE, "observation": "words"})
        with pytest.raises(KeyError, match=r"env\.args\.observation = 'words'.*'text'"):
            await play(environment, environment.task("train", 0), [])


async def test_an_episode_that_is_cut_off_before_any_reward_earns_nothing() -> None:
    env = load("openenv", {"url": "http://127.0.0.1:1", "action": TEMPLATE}).make()
    assert isinstance(env, Truncates)
    assert await env.truncated("truncated_turns") == {"openenv": 0.0}


def test_arguments_are_checked_and_named() -> None:
    for args, expected in (
        ({"url": "localhost:8000"}, r"env\.args\.url = 'localhost:8000'"),
        ({"url": "http://x", "action": {"message": "hello"}}, r"env\.args\.action .*\$text"),
        ({"url": "http://x", "tool": "two words"}, r"env\.args\.tool = 'two words'"),
        ({"url": "http://x", "timeout_s": 0}, r"env\.args\.timeout_s = 0"),
        ({"url": "http://x", "reset": [1]}, r"env\.args\.reset = \[1\]"),
    ):
        with pytest.raises(PluginError, match=expected):
            load("openenv", args)
