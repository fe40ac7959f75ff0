"""Environments of MCP servers: a real server in this process, as a process over its stdin, and over HTTP."""

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.envs.base import Interruptible, Message, Replays, Step, ToolFault
from asyncrl.envs.registry import PluginError, load

try:
    import mcp
except ImportError:
    mcp = None  # type: ignore[assignment]

# It is an extra, which the test environment does not install.
needs_mcp = pytest.mark.skipif(mcp is None, reason="the MCP SDK is not installed: pip install 'asyncrl[mcp]'")

SERVER = Path(__file__).with_name("mcp_server.py")
IN_PROCESS = {"server": f"{SERVER}:server"}
STDIO = {"command": [sys.executable, str(SERVER)]}
TASKS = {"tasks": [{"question": "What is 2 + 3?", "answer": "5"}], "share": 0.0}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, object]) -> Message:
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


@pytest.fixture
def reward(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "judge.py"
    file.write_text("def right(final: str, answer: str) -> float:\n    return float(final.strip() == answer)\n")
    return {"reward": f"{file}:right"}


def told(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


@needs_mcp
@pytest.mark.parametrize("where", [IN_PROCESS, STDIO], ids=["in process", "stdio"])
@pytest.mark.parametrize("shared", [False, True], ids=["own session", "shared session"])
async def test_an_episode_calls_the_servers_tools_and_is_rewarded_for_its_answer(
    where, shared, reward, play
) -> None:
    environment = load("mcp", {**where, **TASKS, **reward, "shared": shared, "system": "Use tools."})
    task = environment.task("train", 0)
    script = [calls(("add", {"a": 2, "b": 3}), ("add", {"a": -1, "b": 1})), says("5")]
    games = await asyncio.gather(*(play(environment, task, script) for _ in range(2)))
    for steps, start in games:
        assert start.messages == [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "What is 2 + 3?"},
        ]
        assert [tool["function"]["name"] for tool in start.tools] == ["add", "note", "fail", "hang", "die"]
        assert start.tools[0]["function"]["description"] == "Adds two numbers."
        assert start.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert told(steps[0]) == ["5", "0"]
        assert steps[0].info == {"tool_errors": 0}
        assert steps[1].done
        assert steps[1].rewards == {"right": 1.0}


@needs_mcp
async def test_an_error_of_a_tool_is_a_message_that_the_model_sees(play) -> None:
    environment = load("mcp", {**IN_PROCESS, **TASKS, "tool_timeout_s": 0.3, "tools": ["add", "fail", "hang"]})
    bad = calls(("fail", {"reason": "no luck"}), ("add", {"a": "x"}), ("die", {}), ("hang", {}), ("add", [1]))
    steps, start = await play(environment, environment.task("train", 0), [bad])
    assert len(start.tools) == 3
    failed, malformed, unknown, late, no_object = told(steps[0])
    assert "no luck" in failed
    assert "error" in malformed
    assert "there is no tool 'die'" in unknown
    assert "did not answer within 0.3 s" in late
    assert "Expected `object`" in no_object
    assert steps[0].info == {"tool_errors": 5}
    assert not steps[0].done


@needs_mcp
@pytest.mark.parametrize("shared", [False, True], ids=["own session", "shared session"])
async def test_a_server_that_dies_is_a_tool_fault_and_the_next_episode_has_a_new_one(shared, play) -> None:
    environment = load("mcp", {**STDIO, **TASKS, "shared": shared})
    task = environment.task("train", 0)
    with pytest.raises(ToolFault, match=r"the MCP server .* cannot be used"):
        await play(environment, task, [calls(("die", {}))])
    steps, _ = await play(environment, task, [calls(("add", {"a": 1, "b": 1}))])
    assert told(steps[0]) == ["2"]


@needs_mcp
async def test_a_server_that_cannot_be_started_or_reached_is_a_tool_fault(play) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nothing listens here.
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"
        # The fault: a server that never says a word.
        silent = [sys.executable, "-c", "import time; time.sleep(60)"]
        for where in ({"command": ["/no/such/server"]}, {"url": address}, {"command": silent}):
            environment = load("mcp", {**where, **TASKS, "open_timeout_s": 3 if "url" in where else 1})
            with pytest.raises(ToolFault, match="cannot be used"):
                await play(environment, environment.task("train", 0), [])


@contextlib.asynccontextmanager
async def over_http() -> AsyncIterator[str]:
    """The same server over Streamable HTTP, in a thread of its own."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn, which the MCP SDK brings, is not installed")
    from asyncrl.envs.registry import load_plugin

    app = load_plugin("asyncrl.envs", f"{SERVER}:server", "MCP server").streamable_http_app()
    listening = socket.create_server(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=serving.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    finally:
        serving.should_exit = True
        await asyncio.to_thread(thread.join, 10)


@needs_mcp
async def test_a_server_elsewhere_is_reached_over_http_and_its_end_is_a_tool_fault(play) -> None:
    async with over_http() as url:
        environment = load("mcp", {"url": url, **TASKS})
        steps, _ = await play(environment, environment.task("train", 0), [calls(("add", {"a": 4, "b": 4}))])
        assert told(steps[0]) == ["8"]
        env = environment.make()
        await env.reset(environment.task("train", 0))
    with pytest.raises(ToolFault, match="cannot be used"):
        await env.step(calls(("add", {"a": 4, "b": 4})))
    await env.close()


@needs_mcp
async def test_a_shared_session_takes_recorded_turns_over_and_its_own_makes_their_calls_again() -> None:
    message, recorded = calls(("note", {"text": "x"})), Step(False, info={"tool_errors": 0})
    counts = {}
    for shared in (True, False):
        environment = load("mcp", {**STDIO, **TASKS, "shared": shared})
        env = environment.make()
        assert isinstance(env, Replays)
        await env.reset(environment.task("train", 0))
        await env.replay(message, recorded)
        counts[shared] = told(await env.step(message))
        if not shared:
            with pytest.raises(RuntimeError, match="do not repeat themselves"):
                await env.replay(calls(("fail", {"reason": "now"})), recorded)
        await env.close()
    assert counts == {True: ["1 notes"], False: ["2 notes"]}


@needs_mcp
async def test_calls_with_side_effects_are_not_made_twice() -> None:
    for effects in (["note"], True):
        environment = load("mcp", {**IN_PROCESS, **TASKS, "side_effects": effects})
        env = environment.make()
        assert isinstance(env, Interruptible)
        await env.reset(environment.task("train", 0))
        with pytest.raises(RuntimeError, match=r"'note' has side effects.*env\.args\.shared"):
            await env.replay(calls(("note", {"text": "x"})), Step(False))
        step = await env.interrupted(calls(("note", {"text": "x"}), ("add", {"a": 1, "b": 2})))
        assert "unknown" in told(step)[0]
        assert (told(step)[1] == "3") == (effects != True)  # noqa: E712
        await env.close()


@needs_mcp
async def test_text_is_what_the_model_is_shown_of_other_results() -> None:
    from mcp.types import CallToolResult, ImageContent, TextContent

    from asyncrl.envs.adapters.mcp_session import text_of

    picture = ImageContent(type="image", data="", mime_type="image/png")
    mixed = CallToolResult(content=[TextContent(type="text", text="a"), picture])
    assert text_of(mixed) == "a\n[image, which cannot be shown]"
    assert text_of(CallToolResult(content=[], structured_content={"a": 1})) == '{"a": 1}'


@needs_mcp
def test_arguments_are_checked_and_named() -> None:
    for args, expected in (
        (TASKS, "give one of command, url and server, and not none"),
        ({**TASKS, **STDIO, "url": "http://x"}, "and not command and url"),
        ({**TASKS, "command": "uvx time"}, r"env\.args\.command = 'uvx time'"),
        ({**TASKS, "url": "localhost"}, r"env\.args\.url = 'localhost'"),
        ({**TASKS, "server": "tests"}, r"env\.args\.server = 'tests'"),
        (STDIO, "give either path"),
        ({**TASKS, **STDIO, "tool_timeout_s": 0}, r"env\.args\.tool_timeout_s = 0"),
        ({**TASKS, **STDIO, "side_effects": "note"}, r"env\.args\.side_effects"),
    ):
        with pytest.raises(PluginError, match=expected):
            load("mcp", args)


@pytest.mark.skipif(mcp is not None, reason="the MCP SDK is installed, and this is about its absence")
def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(PluginError, match=r"pip install 'asyncrl\[mcp\]'"):
        load("mcp", {**STDIO, **TASKS})
