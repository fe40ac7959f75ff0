"""One SGLang server: its command line, its process, and the checks that it is one which the engine can drive.

A server that this module starts belongs to the generator: bound to 127.0.0.1, output into the generator's log,
killed with it. A server that runs already (`sglang.urls`) is brought into a known state first. Read from the
source of SGLang 0.5.23, not run against it. Called by `asyncrl.generator.engines.sglang`, on the event loop.

    generator ── exec ──▶ guard (asks Linux to be killed with the generator) ── exec ──▶ sglang.launch_server
        │                                                                                  ├─ schedulers
        └── awaits its exit; kills the whole process group at the end                      └─ detokenizer
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.generator.engines.base import EngineDead
from asyncrl.generator.engines.sglang_client import Client, ServerFailed
from asyncrl.generator.engines.sglang_flags import CONTEXT_MARGIN, flags

OLDEST = (0, 5, 21)
"""The first version with sessions for weight updates."""
_TERM_S = 10.0
"""Time that a server gets to end by itself."""
# The interpreter may be one that has no asyncrl. The request to be killed survives the second exec.
_GUARD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the generator is gone")
os.execv(sys.executable, [sys.executable, "-P", "-m", "sglang.launch_server", *sys.argv[2:]])
"""


def environment() -> dict[str, str]:
    """The server's environment."""
    variables = dict(os.environ)
    # It would make the server report log-probs from before the temperature.
    variables.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    # The context length gets a margin beyond the model's positions, which no request uses.
    variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if sys.platform == "linux":
        # All of its Gloo groups are on this machine, and so no socket needs to be open to others.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


class Server:
    """A server process of our own; `await Server.start(...)`, then `ready`, in the end `stop`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    @classmethod
    async def start(cls, config: Config, model_path: str, tag: str, index: int) -> Server:
        """Starts the process; it is not ready yet.

        It must be called on a thread that lives as long as the server may: Linux kills a process that asked for
        it when the *thread* that started it ends.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        line = [_python(config), "-c", _GUARD, str(os.getpid()), *flags(config, model_path, port, tag, index)]
        process = await asyncio.create_subprocess_exec(*line, env=environment(), start_new_session=True)
        return cls(process, port)

    async def ready(self, client: Client, limit_s: float) -> None:
        """Waits until the server answers.

        Raises:
            EngineDead: it ended, or took longer than `limit_s`.
        """
        exited = asyncio.ensure_future(self.exited())
        answers = asyncio.ensure_future(_healthy(client))
        try:
            await asyncio.wait({exited, answers}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                raise EngineDead(f"{exited.result()} while it started; its output above says why")
            if not answers.done():
                raise EngineDead(
                    f"the SGLang server at {self.url} was not ready within {limit_s:g} s "
                    "(sglang.start_timeout_s); its output above says what it waits for"
                )
            answers.result()
        finally:
            exited.cancel()
            answers.cancel()

    async def exited(self) -> str:
        """Waits for the process's end and says how it was."""
        status = await self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"the SGLang server (process {self._process.pid}) {how}"

    async def stop(self) -> None:
        """Ends the server with all processes it started. Idempotent."""
        group = self._process.pid
        for sign, limit_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
            # Killed anyway: a scheduler may outlive its server.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, sign)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._process.wait()


def _python(config: Config) -> str:
    return str(Path(config.sglang.python).expanduser()) if config.sglang.python else sys.executable


async def _healthy(client: Client) -> None:
    while True:
        try:
            # The server samples a token for this, which takes it one second at least.
            await client.call("/health", limit_s=30.0)
            return
        except ServerFailed:
            await asyncio.sleep(0.5)


async def take_over(client: Client, model_path: str, tag: str, limit_s: float) -> None:
    """Brings a server that runs already into a known state, whatever was left there: the weights of `model_path`.

    Raises:
        EngineDead: it cannot be reached or cannot load the folder.
    """
    try:
        await client.call("/abort_request", {"abort_all": True}, limit_s=limit_s)
        # Left open and paused by an update that failed half-way; a refusal says that it was not.
        await client.call("/end_weight_update", {}, limit_s=limit_s, tolerant=True)
        await client.call("/continue_generation", {"torch_empty_cache": False}, limit_s=limit_s)
        load = {"model_path": model_path, "weight_version": tag, "abort_all_requests": True, "flush_cache": True}
        await client.call("/update_weights_from_disk", load, limit_s=limit_s)
    except ServerFailed as error:
        raise EngineDead(
            f"the SGLang server at {client.url} (sglang.urls) could not be taken over: {error}; is it up, does it "
            f"serve this generator alone, and does it see the folder {model_path}?"
        ) from error


def check(info: dict[str, Any], config: Config) -> None:
    """Refuses a server that would give wrong versions, or that cannot be updated.

    With the overlap scheduler a step is still on the GPU when the server is paused in place. Its tokens are
    sampled by the old weights, or by half-loaded ones, but counted after the update, so that even the server's own
    `weight_versions` name the new weights for them. A retracting pause takes these tokens in first.

    Args:
        info: answer of `/server_info`.
        config: the run's configuration.

    Raises:
        ValueError: what is wrong, and which flag of the server changes it.
    """
    need, keep = config.generator.max_model_len, config.weights.kv == "keep"
    version = tuple(map(int, re.findall(r"\d+", str(info.get("version", "")))[:3]))
    wrong = []
    if version < OLDEST:
        wrong.append(f"its version is {info.get('version')}; weight updates need {'.'.join(map(str, OLDEST))}")
    if info.get("dp_size", 1) != 1 or info.get("pp_size", 1) != 1:
        wrong.append("--dp-size and --pp-size must be 1: SGLang updates the weights of no other server")
    if info.get("speculative_algorithm"):
        wrong.append("speculative decoding must be off: the draft model would get the policy's weights")
    if info.get("stream_interval", 1) != 1:
        wrong.append("--stream-interval must be 1: one chunk could hold tokens of two versions")
    if keep and not info.get("disable_overlap_schedule"):
        wrong.append(
            "--disable-overlap-schedule is missing: with weights.kv = keep the first token after an update would "
            "be labelled with the wrong version (or use --weights.kv recompute)"
        )
    if (room := int(info.get("max_req_input_len") or 0)) < need:
        wrong.append(
            f"it takes prompts of less than {room} tokens, and generator.max_model_len = {need}: raise "
            f"--context-length to {need + CONTEXT_MARGIN} and leave it enough memory (--mem-fraction-static)"
        )
    if wrong:
        raise ValueError("this SGLang server cannot be used: " + "; ".join(wrong))
