"""What is special to SGLang, against the fake server; what every engine promises is in test_conformance.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp, which the SGLang engine needs, is not installed")

import torch

from asyncrl.config import Config
from asyncrl.generator.engines.base import Delta, EngineDead, SamplingParams, StagedWeights
from asyncrl.generator.engines.sglang import open_sglang
from asyncrl.generator.engines.sglang_client import Client, RequestRefused, ServerFailed

FAKE = Path(__file__).with_name("fake_sglang.py")
PAUSE_TO_RESUME = [
    "/pause_generation", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update",
    "/continue_generation",
]  # fmt: skip


class Fake:
    """A fake server process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-P", str(FAKE), "--model-path", str(folder), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def trouble(self, **what: Any) -> None:
        request = urllib.request.Request(f"{self.url}/fake", json.dumps(what).encode())
        urllib.request.urlopen(request, timeout=10).close()

    def asked(self) -> dict[str, list[Any]]:
        with urllib.request.urlopen(f"{self.url}/fake", timeout=10) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Any:
    """The folder with model `a`, and weights of `a` and `b` as StagedWeights of a version."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    shape: dict[str, Any] = dict(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = {}
    for seed, key in enumerate("ab"):
        torch.manual_seed(seed)
        made[key] = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    made["a"].save_pretrained(folder)

    def staged(key: str, version: int, **changed: torch.Tensor) -> StagedWeights:
        named = {name: p.detach() for name, p in made[key].named_parameters()}
        return StagedWeights(version, list((named | changed).items()))

    return folder, made, staged


@pytest.fixture(scope="module")
def server(models: Any) -> Iterator[Fake]:
    """A server that the tests share: every engine takes it over anew."""
    fake = Fake(models[0], "--context-length", "1006")
    yield fake
    fake.close()


@pytest.fixture
def own(models: Any) -> Iterator[Fake]:
    """A server for a test that breaks it."""
    fake = Fake(models[0], "--context-length", "1006")
    yield fake
    fake.close()


def config_for(url: str, stall_s: float = 30.0, **weights: Any) -> Config:
    return Config.model_validate(
        {
            "generator": {
                "count": 1,
                "slots": 8,
                "max_model_len": 1000,
                "chunk_tokens": 8,
                "stall_s": stall_s,
            },
            "sglang": {"urls": [url], "start_timeout_s": 30.0},
            "weights": {"timeout_s": 10.0, "bucket_mb": 0.05} | weights,
        }
    )


def with_engine(folder: Path, config: Config, scenario: Any) -> Any:
    """Runs `scenario(engine)` on an open engine."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        engine: Any = await asyncio.to_thread(open_sglang, config, str(folder), loop, 0, 0)
        try:
            async with asyncio.timeout(60):
                return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def ask(engine: Any, rid: str, prompt: list[int], max_tokens: int, **params: Any) -> Any:
    return engine.generate(rid, prompt, SamplingParams(max_tokens, **params))


async def rest(stream: Any, *first: Delta) -> list[Delta]:
    return [*first, *[delta async for delta in stream]]


def labels(deltas: list[Delta]) -> list[int]:
    return [delta.version for delta in deltas for _ in delta.token_ids]


def errors(model: Any, prompt: list[int], deltas: list[Delta]) -> torch.Tensor:
    tokens = [token for delta in deltas for token in delta.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    plain = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (plain - torch.tensor([lp for delta in deltas for lp in delta.logprobs])).abs()


# ---- the order of calls -------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "mode"), [("keep", "in_place"), ("recompute", "retract")])
def test_an_update_pauses_first_and_flushes_only_with_the_last_bucket_of_a_retracting_one(
    server, models, kv, mode
):
    folder, _, staged = models

    async def scenario(engine):
        before = len(server.asked()["calls"])
        await engine.update(staged("b", 1), kv)
        return server.asked()["calls"][before:]

    calls = with_engine(folder, config_for(server.url), scenario)
    paths = [path for path, _ in calls]
    assert list(dict.fromkeys(paths)) == PAUSE_TO_RESUME
    buckets = [body for path, body in calls if path == "/update_weights_from_distributed"]
    assert len(buckets) > 3  # of 0.05 MiB
    assert calls[0][1] == {"mode": mode}
    assert [body["flush_cache"] for body in buckets] == [False] * (len(buckets) - 1) + [kv == "recompute"]
    assert ["weight_version" in body for body in buckets] == [False] * (len(buckets) - 1) + [True]


def test_every_version_has_a_cache_of_its_own_and_no_id_is_the_prefix_of_another(server, models):
    folder, _, staged = models

    async def scenario(engine):
        before = len(server.asked()["requests"])
        for version in (1, 2, 1):  # a learner that starts again from a checkpoint repeats versions
            await asyncio.gather(*(rest(ask(engine, f"r{i}", [1, 2], 3)) for i in range(12)))
            await engine.update(staged("ab"[version % 2], version), "keep")
        return server.asked()["requests"][before:]

    requests = with_engine(folder, config_for(server.url), scenario)
    assert len({request["cache_salt"] for request in requests}) == 3
    ids = [request["rid"] for request in requests]
    assert len(set(ids)) == 36
    assert not [(a, b) for a in ids for b in ids if a != b and a.startswith(b)]


def test_the_fake_fails_as_sglang_is_documented_to_fail(server):
    """The failures that the engine's order of calls avoids are really there."""

    async def scenario() -> None:
        client = Client(server.url, 5.0)

        def call(path: str, **body: Any) -> Any:
            return client.call(path, body, limit_s=60.0)

        with pytest.raises(ServerFailed, match="must run between begin"):
            await call("/update_weights_from_distributed", names=[], dtypes=[], shapes=[])
        with pytest.raises(ServerFailed, match="no weight-update session is open"):
            await call("/end_weight_update")
        sampling = {"max_new_tokens": 400, "temperature": 1.0, "stop_token_ids": [], "sampling_seed": 1}
        body = {"rid": "one", "input_ids": [1], "sampling_params": sampling, "stream": True}
        stream = client.generate(body, True)
        await anext(stream)
        await call("/pause_generation", mode="in_place")
        await call("/begin_weight_update")
        with pytest.raises(ServerFailed, match="already open"):
            await call("/begin_weight_update")
        await call("/end_weight_update")
        await call("/continue_generation")
        # Without a pause the update waits for the request to end, and gets no answer before.
        draining = asyncio.create_task(call("/begin_weight_update"))
        seen = 0
        async for chunk in stream:
            seen = chunk.total
            assert chunk.reason is not None or not draining.done()
        assert seen == 400
        await draining
        await call("/end_weight_update")
        with pytest.raises(RequestRefused, match="longer than the model's context"):
            await anext(client.generate(body | {"rid": "two", "input_ids": [1] * 1000}, True))
        # One abort reaches every request whose id begins so.
        streams = [client.generate(body | {"rid": rid}, True) for rid in ("x", "xy", "y")]
        for open_stream in streams:
            await anext(open_stream)
        await call("/abort_request", rid="x")
        ends = [[chunk async for chunk in open_stream][-1].reason for open_stream in streams]
        assert ends == ["abort", "abort", "length"]
        await client.close()

    asyncio.run(scenario())


def test_flushing_while_paused_in_place_fails_although_the_weights_have_changed(server, models, monkeypatch):
    folder, _, staged = models

    async def scenario(engine):
        stream = ask(engine, "r", [1, 2], 900)
        first = await anext(stream)
        send = engine._updater._send

        async def always_flush(bucket, options):
            await send(bucket, options | {"flush_cache": True})

        monkeypatch.setattr(engine._updater, "_send", always_flush)
        with pytest.raises(EngineDead, match="cache was not flushed"):
            await engine.update(staged("b", 1), "keep")
        with pytest.raises(EngineDead, match="cache was not flushed"):
            await rest(stream, first)

    with_engine(folder, config_for(server.url), scenario)


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_that_were_long_on_their_way_carry_the_version_that_sampled_them(server, models, kv):
    folder, made, staged = models

    async def scenario(engine):
        server.trouble(late_delivery_s=0.2)  # longer than a whole update
        streams = [ask(engine, f"r{i}", [i, 2], 900) for i in range(4)]
        firsts = await asyncio.gather(*map(anext, streams))
        await engine.update(staged("b", 1), kv)
        answers = await asyncio.gather(*(rest(s, f) for s, f in zip(streams, firsts, strict=True)))
        server.trouble()
        return answers

    answers = with_engine(folder, config_for(server.url), scenario)
    for i, answer in enumerate(answers):
        old = labels(answer).count(0)
        assert labels(answer) == [0] * old + [1] * (900 - old)
        assert 0 < old < 900
        # An exact boundary: the last old token is the old model's, the first new one is not.
        assert errors(made["a"], [i, 2], answer)[:old].max() < 1e-4
        if kv == "recompute":
            assert errors(made["b"], [i, 2], answer)[old:].max() < 1e-4


def test_a_label_that_the_servers_account_contradicts_ends_the_engine(server, models):
    folder, _, staged = models

    async def scenario(engine):
        stream = ask(engine, "r", [1, 2], 900)
        reader = asyncio.create_task(rest(stream, await anext(stream)))
        # Tokens that reach the front end only after the update look new to both witnesses.
        server.trouble(late_output_s=0.4)
        await asyncio.sleep(0.02)
        await engine.update(staged("b", 1), "keep")
        try:
            with pytest.raises(EngineDead, match="versions of a request's 900 tokens are in doubt"):
                await reader
        finally:
            server.trouble()

    with_engine(folder, config_for(server.url), scenario)


def test_a_server_that_streams_all_tokens_each_time_gives_the_same_answer(models):
    folder, made, _ = models
    fake = Fake(folder, "--context-length", "1006", "--no-incremental-streaming-output")

    async def scenario(engine):
        return await rest(ask(engine, "r", [1, 2], 100))

    try:
        answer = with_engine(folder, config_for(fake.url), scenario)
    finally:
        fake.close()
    assert len(labels(answer)) == 100
    assert len(answer) > 5
    assert errors(made["a"], [1, 2], answer).max() < 1e-4


# ---- faults -------------------------------------------------------------------------------------


def test_a_server_with_half_an_update_is_taken_over_by_the_next_engine(server, models):
    folder, made, staged = models
    wrong = {"model.layers.1.mlp.down_proj.weight": torch.zeros(3, 5)}

    async def poison(engine):
        stream = ask(engine, "r", [1, 2], 900)
        await anext(stream)
        with pytest.raises(EngineDead, match=r"down_proj.weight \[3, 5\]"):
            await engine.update(staged("b", 1, **wrong), "keep")
        with pytest.raises(EngineDead):
            await engine.update(staged("b", 1), "keep")

    async def use(engine):
        return await rest(ask(engine, "r", [1, 2], 50))

    with_engine(folder, config_for(server.url), poison)
    answer = with_engine(folder, config_for(server.url), use)
    assert errors(made["a"], [1, 2], answer).max() < 1e-4
    assert set(labels(answer)) == {0}


def test_an_update_that_is_cancelled_ends_the_engine(server, models):
    folder, _, staged = models

    async def scenario(engine):
        update = asyncio.create_task(engine.update(staged("b", 1), "keep"))
        await asyncio.sleep(0.002)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        with pytest.raises(EngineDead, match="cut short"):
            await rest(ask(engine, "r", [1], 5))

    with_engine(folder, config_for(server.url), scenario)


def test_a_server_that_stops_in_an_update_is_found_out_within_the_time_limit(server, models):
    folder, _, staged = models

    async def scenario(engine):
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDead, match="no answer within 1 s"):
                await engine.update(staged("b", 1), "keep")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

    with_engine(folder, config_for(server.url, timeout_s=1.0), scenario)


@pytest.mark.parametrize("how", ["stopped", "scheduler"])
def test_silence_while_an_answer_is_owed_is_death(own, models, how):
    async def scenario(engine):
        streams = [ask(engine, f"r{i}", [1], 900) for i in range(2)]
        firsts = [await anext(stream) for stream in streams]
        if how == "stopped":
            os.kill(own.process.pid, signal.SIGSTOP)
        else:
            own.trouble(hang=True)
        for stream, first in zip(streams, firsts, strict=True):
            with pytest.raises(EngineDead, match="silent for 1 s"):
                await rest(stream, first)

    with_engine(models[0], config_for(own.url, stall_s=1.0), scenario)


def test_logprobs_that_are_no_numbers_are_named(server, models):
    async def scenario(engine):
        server.trouble(nan=True)
        try:
            with pytest.raises(EngineDead, match="not finite"):
                await rest(ask(engine, "r", [1], 5))
        finally:
            server.trouble()

    with_engine(models[0], config_for(server.url), scenario)


def test_a_consumer_that_leaves_frees_the_servers_slot(server, models):
    async def scenario(engine):
        stream = ask(engine, "r", [1], 900)
        await anext(stream)
        await stream.aclose()
        other = await rest(ask(engine, "other", [1], 20))
        return len(labels(other)), server.asked()

    count, asked = with_engine(models[0], config_for(server.url), scenario)
    assert count == 20
    aborted = [body["rid"] for path, body in asked["calls"] if path == "/abort_request" and "rid" in body]
    assert asked["requests"][-2]["rid"] in aborted


def test_nothing_listening_at_the_url_is_explained(models):
    with pytest.raises(EngineDead, match=r"sglang.urls.*could not be taken over.*is it up"):
        with_engine(models[0], config_for("http://127.0.0.1:9"), None)
