"""A fake SGLang server: its documented HTTP interface over asyncrl's own embedded engine, as a process of its
own.

SGLang itself was never run for this: it was written from the source of SGLang 0.5.23
(`srt/entrypoints/http_server.py`, `srt/managers/{tokenizer_manager,tokenizer_control_mixin,scheduler}.py`,
`srt/managers/scheduler_components/`), and it is as true as that reading. Sampling, log-probs, recomputed KV
caches and weights over Gloo are real, on a real small model.

    HTTP ── front end, event loop (SGLang: tokenizer manager) ── commands, in order ──▶ scheduler, a thread
              states by rid, merging of late chunks         ◀── tokens, answers ──      TransformersEngine

What it does as SGLang does: `/pause_generation` answers before the scheduler has stopped; without a pause an
update waits for all requests and holds new ones back; updates fail outside a session; `flush_cache` fails while
requests are paused in place, although the weights have changed; abort goes by prefix, once per rid; chunks hold
new or all tokens; which weights sampled which tokens comes with the last chunk only; wrong shapes fail half-way;
prompts within 6 tokens of the context length are refused. What it leaves out: prefix cache, overlap scheduler,
tensor parallelism. Seeds always count, as with --enable-deterministic-inference.

`python fake_sglang.py --model-path FOLDER` prints `{"url": ..., "pid": ...}` when it is ready. GET /fake tells
what was asked of it; POST /fake makes trouble: {"late_output_s": 1} between scheduler and front end,
{"late_delivery_s": 1} after the front end, {"hang": true} of the scheduler, {"nan": true} log-probs. SIGSTOP and
SIGKILL do what they do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from aiohttp import web

from asyncrl.generator.engines.base import Delta, SamplingParams
from asyncrl.process import die_with_parent

sys.path.append(str(Path(__file__).parent))

from fake_sglang_scheduler import Scheduler


def options() -> argparse.Namespace:
    """The flags of `sglang.launch_server` that asyncrl uses; the defaults are those that asyncrl gives."""
    parser = argparse.ArgumentParser()
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--context-length", type=int, default=512 + 6)
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--log-level", default="warning")
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "disable-overlap-schedule"):
        parser.add_argument(f"--{name}", action=switch, default=True)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--fake-version", default="0.5.23")
    return parser.parse_args()


class State:
    """A request of the front end."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[list[Any]] = []
        self.out: list[dict[str, Any]] = []
        self.event = asyncio.Event()
        self.finished = self.abort_sent = False


class FrontEnd:
    """SGLang's HTTP server and tokenizer manager."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.tag = args, args.weight_version
        self.states: dict[str, State] = {}
        self.paused = self.writing = False
        self.reading = 0
        self.changed = asyncio.Condition()
        self.trouble: dict[str, Any] = {}
        self.asked: dict[str, list[Any]] = {"calls": [], "requests": []}
        self.loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(args, self._emit)

    def _emit(self, rid: str, delta: Delta, spans: Any) -> None:
        delay = self.trouble.get("late_output_s", 0)
        self.loop.call_soon_threadsafe(self.loop.call_later, delay, self._output, rid, delta, spans)

    def _output(self, rid: str, delta: Delta, spans: Any) -> None:
        if (state := self.states.get(rid)) is None:
            return
        nan = self.trouble.get("nan")
        logprobs = [[None if nan else lp, t, None] for lp, t in zip(delta.logprobs, delta.token_ids, strict=True)]
        state.ids += delta.token_ids
        state.logprobs += logprobs
        meta = {"id": rid, "completion_tokens": len(state.ids), "weight_version": self.tag, "finish_reason": None}
        if delta.finish_reason is not None:
            meta["finish_reason"] = {"type": delta.finish_reason}
            meta |= {"weight_versions": spans, "weight_version": spans[-1]["version"]}
            state.finished = True
        whole = not self.args.incremental_streaming_output
        meta["output_token_logprobs"] = list(state.logprobs) if whole else logprobs
        state.out.append({"output_ids": list(state.ids) if whole else delta.token_ids, "meta_info": meta})
        state.event.set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid, ids, sampling = body["rid"], body["input_ids"], body["sampling_params"]
        self.asked["requests"].append({k: v for k, v in body.items() if k != "input_ids"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ready: asyncio.Queue[Any] = asyncio.Queue()
        work = asyncio.ensure_future(self._generate(rid, ids, sampling, ready))
        try:
            while (event := await ready.get()) is not None:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            pass  # The client is gone.
        finally:
            work.cancel()
            if self.states.pop(rid, None) is not None:
                self.scheduler.post(lambda: self.scheduler.abort(rid, False))
        return response

    async def _generate(self, rid: str, ids: list[int], sampling: Any, ready: asyncio.Queue[Any]) -> None:
        if len(ids) >= self.args.context_length - 6:
            message = f"The input ({len(ids)} tokens) is longer than the model's context length"
            ready.put_nowait({"error": {"message": message, "code": 400}})
            return ready.put_nowait(None)
        state = self.states[rid] = State()
        async with self.changed:
            await self.changed.wait_for(lambda: not self.paused)
            await self.changed.wait_for(lambda: not self.writing)
            self.reading += 1
        try:
            await self.scheduler.post(lambda: self.scheduler.add(rid, ids, self._params(len(ids), sampling)))
            finished = False
            while not finished:
                await state.event.wait()
                state.event.clear()
                out, state.out, finished = state.out, [], state.finished
                event = out[-1]
                if self.args.incremental_streaming_output:
                    event["output_ids"] = [t for o in out for t in o["output_ids"]]
                    rows = [row for o in out for row in o["meta_info"]["output_token_logprobs"]]
                    event["meta_info"]["output_token_logprobs"] = rows
                self.loop.call_later(self.trouble.get("late_delivery_s", 0), ready.put_nowait, event)
            self.loop.call_later(self.trouble.get("late_delivery_s", 0), ready.put_nowait, None)
            self.states.pop(rid, None)
        finally:
            self.reading -= 1
            async with self.changed:
                self.changed.notify_all()

    def _params(self, length: int, sampling: dict[str, Any]) -> SamplingParams:
        eos = self.scheduler.model.config.eos_token_id
        stops = {*sampling["stop_token_ids"], *([] if eos is None else [eos])}
        return SamplingParams(
            min(sampling.get("max_new_tokens", 128), self.args.context_length - 2 - length),
            () if sampling.get("ignore_eos") else tuple(stops),
            sampling["temperature"],
            sampling["sampling_seed"],
        )

    # ---- control

    async def control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked["calls"].append([request.path, {k: v for k, v in body.items() if k not in ("names", "shapes")}])
        scheduler, name = self.scheduler, request.path.removeprefix("/")
        if name == "abort_request":
            rid, everything = body.get("rid", ""), bool(body.get("abort_all"))
            state = self.states.get(rid)
            if everything or (state is not None and not state.abort_sent):
                if state is not None:
                    state.abort_sent = True
                scheduler.post(lambda: scheduler.abort(rid, everything))
        elif name in ("pause_generation", "continue_generation"):
            mode = body["mode"] if name == "pause_generation" else None
            async with self.changed:
                self.paused = mode is not None
                scheduler.post(lambda: scheduler.pause(mode))  # not awaited
                self.changed.notify_all()
        elif name in ("init_weights_update_group", "destroy_weights_update_group"):
            join = scheduler.init_group if name.startswith("init") else scheduler.destroy_group
            return self._answer(await scheduler.post(lambda: join(body)))
        else:
            return self._answer(await self._update(name, body))
        return web.json_response({"status": "ok"})

    async def _update(self, name: str, body: dict[str, Any]) -> tuple[bool, str]:
        scheduler = self.scheduler
        work = {
            "begin_weight_update": scheduler.begin,
            "end_weight_update": scheduler.end,
            "update_weights_from_distributed": lambda: scheduler.update(body),
            "update_weights_from_disk": lambda: scheduler.load(body),
        }[name]
        if body.get("abort_all_requests"):
            scheduler.post(lambda: scheduler.abort("", True))
        if self.paused:
            answer = await scheduler.post(work)
        else:
            async with self.changed:
                self.writing = True
                await self.changed.wait_for(lambda: not self.reading)
            answer = await scheduler.post(work)
            async with self.changed:
                self.writing = False
                self.changed.notify_all()
        if answer[0] and body.get("weight_version") is not None:
            self.tag = body["weight_version"]
        return answer

    def _answer(self, answer: tuple[bool, str]) -> web.Response:
        return web.json_response({"success": answer[0], "message": answer[1]}, status=200 if answer[0] else 400)

    async def server_info(self, request: web.Request) -> web.Response:
        extra = {"version": self.args.fake_version, "max_req_input_len": self.args.context_length - 6}
        return web.json_response(vars(self.args) | extra)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def fake(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.trouble = await request.json()
            if self.trouble.get("hang"):
                self.scheduler.post(lambda: time.sleep(3600))  # The fault; the test kills it.
        return web.json_response(self.asked)


async def serve(args: argparse.Namespace) -> None:
    """Serves until it is killed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # SGLang has a default group
    front = FrontEnd(args)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/server_info", front.server_info)
    app.router.add_get("/health", front.health)
    app.router.add_route("*", "/fake", front.fake)
    app.router.add_post("/generate", front.generate)
    app.router.add_post("/{control}", front.control)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"url": f"http://{args.host}:{port}", "pid": os.getpid()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    asyncio.run(serve(options()))
