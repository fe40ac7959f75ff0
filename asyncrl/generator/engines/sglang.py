"""Opens an SGLang engine: starts a server, or takes over one that runs already (`sglang.urls`), and checks it.

`asyncrl.generator.engines.select` calls it. SGLang (0.5.21 and later) runs on GPUs only and was **not run** when
this was written: what these modules say of it was read in the source of 0.5.23, and they were tested against
`tests/generator/engines/fake_sglang.py`, which speaks the same interface over a real small model.

    sglang_engine    the `Engine`: requests, abort, update, death
    sglang_stream    a running request: which version sampled which token (pure)
    sglang_update    the order of calls of a weight update
    sglang_group     the Gloo group that carries the weights
    sglang_server    a server's command line, process and checks
    sglang_client    HTTP
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from asyncrl.config import Config
from asyncrl.generator.engines.base import Engine, EngineDead
from asyncrl.generator.engines.sglang_client import Client, ServerFailed
from asyncrl.generator.engines.sglang_engine import SglangEngine
from asyncrl.generator.engines.sglang_server import Server, check, take_over
from asyncrl.generator.engines.sglang_stream import tag_of
from asyncrl.generator.engines.sglang_update import Updater


def open_sglang(
    config: Config, model_path: str, loop: asyncio.AbstractEventLoop, version: int, index: int
) -> Engine:
    """Starts a server, or takes over the one at `sglang.urls[index]`, with the weights of `model_path`.

    Blocks until it is ready. To be called on any thread but that of `loop`, to which the engine then belongs.

    Raises:
        ValueError: the settings or the server do not fit.
        EngineDead: the server did not start, or cannot be reached.
    """
    return asyncio.run_coroutine_threadsafe(_open(config, model_path, version, index), loop).result()


async def _open(config: Config, model_path: str, version: int, index: int) -> SglangEngine:
    own, tag = config.sglang, tag_of(version, 0)
    server = None if own.urls else await Server.start(config, model_path, tag, index)
    client = Client(server.url if server else own.urls[index], config.generator.stall_s)
    try:
        if server:
            await server.ready(client, own.start_timeout_s)
        else:
            await take_over(client, model_path, tag, own.start_timeout_s)
        info = await client.call("/server_info", limit_s=config.generator.stall_s)
        check(info, config)
        updater = await Updater.join(client, int(info["tp_size"]), config)
    except BaseException as error:
        await client.close()
        if server:
            await server.stop()
        if isinstance(error, ServerFailed):
            raise EngineDead(f"the SGLang server cannot be used: {error}") from error
        raise
    return SglangEngine(config, _vocabulary(model_path), version, client, updater, info, server)


def _vocabulary(model_path: str) -> int:
    model = json.loads((Path(model_path) / "config.json").read_text())
    return int(model.get("text_config", model)["vocab_size"])
