"""Rewards over HTTP: the protocol of NeMo-Gym's resources servers, and the plain one.

NeMo-Gym has no distribution for Python 3.11, so its own servers cannot run here. The server below is the tests'
own, written after NeMo-Gym's example of a counter with sessions: a real HTTP server with the same routes, bodies
and cookies, but none of its code.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.base import Message, Replays, Snapshots, ToolFault, Truncates
from asyncrl.envs.registry import PluginError, load
from asyncrl.envs.rewards import RewardFault

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed: pip install 'asyncrl[http]'")


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, object]) -> Message:
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


ADD = {
    "type": "function",
    "name": "increment_counter",
    "description": "Adds to the counter.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
SEE = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}}


def row(start: int, expected: int, **more: Any) -> dict[str, Any]:
    said = [
        {"role": "developer", "content": "Use the tools."},
        {"role": "user", "content": [{"type": "input_text", "text": f"Bring {start} to {expected}."}]},
    ]
    params = {"input": said, "tools": [ADD, SEE]}
    return {"responses_create_params": params, "initial_count": start, "expected_count": expected, **more}


class Counter:
    """Counters by session, which is a cookie, and the requests for a reward."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []

    async def seed(self, request):
        body = await request.json()
        if body["initial_count"] < 0:
            return web.json_response({"detail": "counters are not negative"}, status=422)
        session = secrets.token_hex(8)
        self.counts[session] = body["initial_count"]
        response = web.json_response({})
        response.set_cookie("session", session)
        return response

    async def add(self, request):
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return web.json_response({"detail": "count: must be an integer"}, status=422)
        if body["count"] == 99:
            await asyncio.sleep(30)
        self.counts[request.cookies["session"]] += body["count"]
        return web.json_response({"success": True})

    async def see(self, request):
        return web.json_response({"count": self.counts[request.cookies["session"]]})

    async def verify(self, request):
        body = await request.json()
        self.verified.append(body)
        if "verdict" in body:
            return web.json_response(body["verdict"], status=body.get("status", 200))
        reward = float(self.counts[request.cookies["session"]] == body["expected_count"])
        return web.json_response({**body, "reward": reward})


@contextlib.asynccontextmanager
async def serving(**routes: Any) -> AsyncIterator[str]:
    """A real HTTP server with a POST route for each name."""
    app = web.Application()
    for name, handler in routes.items():
        app.router.add_post(f"/{name}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def resources() -> AsyncIterator[tuple[str, Counter]]:
    counter = Counter()
    routes = {"increment_counter": counter.add, "get_counter_value": counter.see, "verify": counter.verify}
    async with serving(seed_session=counter.seed, **routes) as url:
        yield url, counter


def written(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(file)


ADD_TWICE = [calls(("increment_counter", {"count": 2})), calls(("get_counter_value", {})), says("Done: 5.")]


async def test_an_episode_has_a_session_calls_its_tools_and_is_verified(tmp_path: Path, play) -> None:
    async with resources() as (url, counter):
        environment = load("nemo-gym", {"url": url, "path": written(tmp_path, row(3, 5)), "share": 0.0})
        task = environment.task("train", 0)
        games = await asyncio.gather(*(play(environment, task, ADD_TWICE) for _ in range(3)))
        for steps, start in games:
            assert start.messages == [
                {"role": "system", "content": "Use the tools."},
                {"role": "user", "content": "Bring 3 to 5."},
            ]
            assert [tool["function"]["name"] for tool in start.tools] == ["increment_counter", "get_counter_value"]
            assert start.tools[0]["function"]["parameters"] == ADD["parameters"]
            assert [json.loads(step.messages[0]["content"]) for step in steps[:2]] == [
                {"success": True},
                {"count": 5},
            ]
            assert steps[2].done
            assert steps[2].rewards == {"nemo_gym": 1.0}
        assert sorted(counter.counts.values()) == [5, 5, 5], "each episode has a session of its own"


async def test_verify_is_sent_the_row_and_a_response_whose_calls_and_outputs_match(tmp_path: Path, play) -> None:
    async with resources() as (url, counter):
        given = row(3, 5, uuid="x")
        environment = load("nemo-gym", {"url": url, "path": written(tmp_path, given), "share": 0.0})
        await play(environment, environment.task("train", 0), ADD_TWICE)
        (sent,) = counter.verified
        response = sent.pop("response")
        assert sent == given
        assert response["object"] == "response"
        assert response["tools"] == [ADD, SEE]
        items = response["output"]
        kinds = ["function_call", "function_call_output"] * 2 + ["message"]
        assert [item["type"] for item in items] == kinds
        assert items[0]["call_id"] == items[1]["call_id"] != items[2]["call_id"] == items[3]["call_id"]
        assert json.loads(items[0]["arguments"]) == {"count": 2}
        assert items[4]["content"] == [{"type": "output_text", "text": "Done: 5.", "annotations": []}]


async def test_a_refused_call_is_an_error_that_the_model_sees(tmp_path: Path, play) -> None:
    async with resources() as (url, _):
        args = {
            "url": url,
            "path": written(tmp_path, row(3, 5)),
            "share": 0.0,
            "tool_timeout_s": 0.3,
            "timeout_s": 0.2,
        }
        environment = load("nemo-gym", args)
        wrong = calls(
            ("increment_counter", {"count": "two"}), ("verify", {}), ("increment_counter", {"count": 99})
        )
        steps, _ = await play(environment, environment.task("train", 0), [wrong])
        refused, route, late = [message["content"] for message in steps[0].messages]
        assert "422" in refused
        assert "count: must be an integer" in refused
        assert "there is no tool 'verify'" in route, "the server's own routes are no tools"
        assert "did not answer within 0.3 s" in late
        assert steps[0].info == {"tool_errors": 3}


async def test_an_episode_at_its_last_turn_and_one_that_is_cut_off_are_scored_as_they_stand(
    tmp_path: Path, play
) -> None:
    async with resources() as (url, _):
        args = {"url": url, "path": written(tmp_path, row(3, 5)), "share": 0.0}
        task = load("nemo-gym", args).task("train", 0)
        steps, _ = await play(load("nemo-gym", {**args, "max_turns": 2}), task, [ADD_TWICE[0], ADD_TWICE[1]])
        assert steps[1].done
        assert steps[1].rewards == {"nemo_gym": 1.0}
        env = load("nemo-gym", args).make()
        assert isinstance(env, Truncates)
        await env.reset(task)
        await env.step(ADD_TWICE[0])
        assert await env.truncated("truncated_turns") == {"nemo_gym": 1.0}
        await env.close()


async def test_a_reward_that_is_no_measurement_is_missing_and_one_that_is_no_number_is_a_fault(
    tmp_path: Path, play
) -> None:
    async with resources() as (url, _):
        args = {"url": url, "share": 0.0}
        masked = row(3, 5, verdict={"reward": 0.0, "mask_sample": True})
        environment = load("nemo-gym", {**args, "path": written(tmp_path, masked)})
        steps, _ = await play(environment, environment.task("train", 0), [says("?")])
        assert steps[0].rewards == {"nemo_gym": None}
        for more in (
            {"verdict": {}},
            {"verdict": {"reward": "good"}},
            {"verdict": [1]},
            {"verdict": {}, "status": 500},
        ):
            environment = load("nemo-gym", {**args, "path": written(tmp_path, row(3, 5, **more))})
            with pytest.raises(RewardFault, match="gave no reward"):
                await play(environment, environment.task("train", 0), [says("?")])


async def test_a_server_that_is_gone_or_hangs_is_a_tool_fault_and_a_refused_row_is_none(
    tmp_path: Path, play
) -> None:
    async def hang(request):
        await asyncio.sleep(30)

    path = written(tmp_path, row(3, 5))
    async with serving(seed_session=hang) as url:
        environment = load("nemo-gym", {"url": url, "path": path, "share": 0.0, "timeout_s": 0.3})
        with pytest.raises(ToolFault, match=r"no answer within env\.args\.timeout_s = 0\.3 s"):
            await play(environment, environment.task("train", 0), [])
    with pytest.raises(ToolFault, match="no answer"):
        await play(environment, environment.task("train", 0), [])
    async with resources() as (url, _):
        environment = load("nemo-gym", {"url": url, "path": written(tmp_path, row(-1, 5)), "share": 0.0})
        with pytest.raises(RuntimeError, match=r"422.*counters are not negative"):
            await play(environment, environment.task("train", 0), [])


async def test_an_episode_goes_on_elsewhere_in_a_session_of_its_own(tmp_path: Path, play) -> None:
    async with resources() as (url, counter):
        environment = load("nemo-gym", {"url": url, "path": written(tmp_path, row(3, 5)), "share": 0.0})
        assert not isinstance(environment.make(), Replays | Snapshots), "so the runtime does the steps again"
        task = environment.task("train", 0)
        lost, _ = await play(environment, task, ADD_TWICE[:2])
        heir, _ = await play(environment, task, ADD_TWICE)
        assert heir[:2] == lost
        assert heir[2].rewards == {"nemo_gym": 1.0}
        assert list(counter.counts.values()) == [5, 5]


async def test_the_plain_protocol_scores_a_task_and_its_messages(tmp_path: Path, play) -> None:
    asked: list[dict[str, Any]] = []

    async def judge(request):
        asked.append(await request.json())
        right = asked[-1]["messages"][-1]["content"] == asked[-1]["task"]["answer"]
        return web.json_response({"reward": 1 if right else 0})

    path = written(tmp_path, {"question": "2 + 3?", "answer": "5", "level": 1})
    async with serving(judge=judge) as url:
        environment = load("nemo-gym", {"url": f"{url}/judge", "path": path, "protocol": "plain", "share": 0.0})
        task = environment.task("train", 0)
        for answer, reward in (("5", 1.0), ("6", 0.0)):
            steps, start = await play(environment, task, [says(answer)])
            assert start.messages == [{"role": "user", "content": "2 + 3?"}]
            assert start.tools == []
            assert steps[0].done
            assert steps[0].rewards == {"plain": reward}
    assert asked[0]["task"]["metadata"] == {"level": 1}
    assert asked[0]["messages"] == [{"role": "user", "content": "2 + 3?"}, says("5")]


def test_rows_and_arguments_are_checked_and_named(tmp_path: Path) -> None:
    good = written(tmp_path, row(1, 2))
    for args, expected in (
        ({"url": "localhost", "path": good}, r"env\.args\.url = 'localhost'"),
        ({"url": "http://x", "path": good, "protocol": "http"}, r"env\.args\.protocol = 'http'"),
        ({"url": "http://x", "path": good, "max_turns": 0}, r"env\.args\.max_turns = 0"),
        ({"url": "http://x", "path": good, "timeout_s": -1}, r"env\.args\.timeout_s = -1"),
    ):
        with pytest.raises(PluginError, match=expected):
            load("nemo-gym", args)
    image = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    for wrong in ({"question": "?"}, {"responses_create_params": {}}, {"responses_create_params": image}):
        path = written(tmp_path, row(1, 2), wrong)
        with pytest.raises(
            PluginError, match=r"rows\.jsonl, line 2: no row of NeMo-Gym's.*responses_create_params"
        ):
            load("nemo-gym", {"url": "http://x", "path": path})


def test_a_rows_conversation_may_begin_with_calls_and_their_outputs() -> None:
    from asyncrl.envs.adapters.responses import prompt_of

    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    system, asked, answered = prompt_of({"instructions": "Be brief.", "input": [call, output]})
    assert system == {"role": "system", "content": "Be brief."}
    assert asked["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert answered == {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "1"}
