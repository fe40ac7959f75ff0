"""Environments whose rewards come over HTTP: a resources server of NeMo-Gym, or any URL that scores an episode.

    protocol "nemo-gym": rows with `responses_create_params`, messages and tools in the form of OpenAI's Responses
        reset   POST /seed_session   the row                            a session, kept by cookies
        call    POST /{tool}         the arguments                      the body is the tool's answer
        end     POST /verify         the row and the whole `response`   {"reward": 0.5}
    protocol "plain": rows as `asyncrl.envs.rows` has them; no tools
        end     POST the url         {"task": …, "messages": […]}       {"reward": 0.5}

The first message without a call ends the episode, and so does the one that reaches `max_turns`; an episode that is
cut off is scored as it stands. A call that the server refuses is an error that the model sees. A server that is
gone fails the episode as `failed_tool`, a score without a number as `failed_reward`; a reward that the server says
not to use (`mask_sample`) is missing. None of them is ever 0.

When a generator dies, another one seeds a session of its own and makes the finished turns' calls again; if they
are answered otherwise, the episode fails. Effects that outlive a session are there twice.

Called through the entry point `nemo-gym`. Needs the extra `asyncrl[http]`, and nothing of NeMo-Gym's.
Source: the simple agent and the base resources server of https://github.com/NVIDIA-NeMo/Gym (0.4).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.adapters.http_client import HttpClient
from asyncrl.envs.adapters.responses import prompt_of, response_of, tools_of
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.rows import JsonLines, read
from asyncrl.envs.sources import Rows, TaskSource
from asyncrl.envs.tools import Tool, Tools, calls_tools
from asyncrl.messages import EpisodeStatus, Task

PROTOCOLS = ("nemo-gym", "plain")
ROW = "row"
"""The metadata that holds a row of NeMo-Gym's as it stands in the file."""


@dataclass(frozen=True, slots=True)
class HttpEnv:
    """The environment: a server's address, tasks, and the protocol."""

    url: str
    protocol: str
    tasks: TaskSource
    max_turns: int
    timeout_s: float
    tool_timeout_s: float

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: there are no more.
        """
        return self.tasks.task(split, index)

    def make(self) -> HttpEpisode:
        """A new, unused episode."""
        return HttpEpisode(self)


class HttpEpisode:
    """One episode: the cookies of its session, and what was said so far."""

    def __init__(self, world: HttpEnv) -> None:
        self._world = world
        self._client = HttpClient(world.url, world.timeout_s)
        self._task: Task | None = None
        self._tools = Tools([])
        self._turns: list[Message] = []
        self._said = 0

    async def reset(self, task: Task) -> Start:
        """Seeds the session, if the protocol has sessions, and shows the task.

        Raises:
            ToolFault: the server is gone.
            RuntimeError: it refused the row.
        """
        self._task = task
        if self._world.protocol == "plain":
            return Start(list(task.prompt))
        row = task.metadata[ROW]
        self._tools = Tools(
            [self._tool(schema) for schema in tools_of(row["responses_create_params"])],
            self._world.tool_timeout_s,
            one_at_a_time=True,
        )
        status, body = await self._client.post("/seed_session", row)
        if status >= 300:
            raise RuntimeError(f"POST {self._world.url}/seed_session answered {status}: {body[:200]}")
        return Start(list(task.prompt), self._tools.schemas)

    async def step(self, message: Message) -> Step:
        """Answers the calls of the message; without any, or at `max_turns`, has the episode scored.

        Raises:
            RewardFault: the server gave no reward.
            ToolFault: the server is gone.
        """
        if self._task is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        self._turns.append(message)
        self._said += 1
        if not calls_tools(message) or self._said >= self._world.max_turns:
            return Step(True, await self._score(self._task))
        step = await self._tools.answer(message)
        self._turns += step.messages
        return step

    async def truncated(self, status: str) -> dict[str, float | None]:
        """Scores an episode that was cut off; see `step`."""
        return await self._score(self._task) if self._task is not None and self._said else {}

    async def close(self) -> None:
        """Forgets the session."""
        await self._client.close()

    def _tool(self, schema: dict[str, Any]) -> Tool:
        name = schema["function"]["name"]

        async def call(**arguments: Any) -> str:
            # `Tools` ends it at its limit, with an error that the model sees.
            status, body = await self._client.post(f"/{name}", arguments, self._world.tool_timeout_s + 1.0)
            if status >= 300:
                raise CallError(f"{status} {body}")
            return body

        return Tool(schema, call, lambda given: msgspec.convert(given, dict[str, Any]))

    async def _score(self, task: Task) -> dict[str, float | None]:
        if self._world.protocol == "plain":
            asked = {"task": msgspec.to_builtins(task), "messages": [*task.prompt, *self._turns]}
            status, body = await self._client.post("", asked)
        else:
            row = task.metadata[ROW]
            response = response_of(self._turns, row["responses_create_params"], time.time())
            status, body = await self._client.post("/verify", {**row, "response": response})
        return {self._world.protocol.replace("-", "_"): _reward(status, body, self._world.url)}


class CallError(Exception):
    """The server answered a call with a status that is no success; its body is for the model."""


def _reward(status: int, body: str, url: str) -> float | None:
    """The reward of an answer; None: the server says that it does not measure the episode.

    Raises:
        RewardFault: the answer is no success, or has no number in it.
    """
    try:
        verdict = msgspec.json.decode(body) if status < 300 else None
        if verdict is not None and verdict.get("mask_sample"):
            return None
        return float(msgspec.convert(verdict["reward"], int | float))  # type: ignore[index]
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
        detail = f'{url} gave no reward: it answered {status}: {body[:200]}; it must answer {{"reward": a number}}'
        raise RewardFault(EpisodeStatus.FAILED_REWARD, detail) from None


def make(
    url: str,
    path: str,
    eval_path: str = "",
    protocol: str = "nemo-gym",
    max_turns: int = 8,
    timeout_s: float = 20.0,
    tool_timeout_s: float = 10.0,
    seed: int = 0,
    epochs: int | None = None,
    share: float = 0.1,
) -> HttpEnv:
    """The entry point. The server need not run yet.

    Args:
        url: `http://host:port` of a resources server; with the plain protocol, the whole address that scores.
        path: file of the tasks: NeMo-Gym's `.jsonl`; with the plain protocol, `.jsonl` or `.parquet` with the
            columns of `asyncrl.envs.rows`.
        eval_path: file of the evaluation split; without it, `share` of the tasks are held out.
        protocol: `nemo-gym` or `plain`.
        max_turns: the assistant's message with this number is the last one; at most `env.max_turns`.
        timeout_s: limit of each answer that is not a tool's. Let it be less than the setting `env.timeout_s`.
        tool_timeout_s: limit of each call; one that takes longer is an error that the model sees.
        seed, epochs, share: as those of `asyncrl.envs.sources.Rows`.

    Raises:
        ValueError: an argument is out of its range, or a row is no task.
        ModuleNotFoundError: aiohttp is not installed.
    """
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"env.args.url = {url!r}: must be an address, such as 'http://localhost:8000'")
    if protocol not in PROTOCOLS:
        raise ValueError(f"env.args.protocol = {protocol!r}: must be {' or '.join(map(repr, PROTOCOLS))}")
    for key, value in (("timeout_s", timeout_s), ("tool_timeout_s", tool_timeout_s)):
        check_seconds(key, value)
    check_whole("max_turns", max_turns, 1)
    load = read if protocol == "plain" else _rows
    rows = Rows(load(path), load(eval_path) if eval_path else None, seed=seed, epochs=epochs, share=share)
    load_extra("aiohttp", "http", "nemo-gym")
    return HttpEnv(url.rstrip("/"), protocol, rows, max_turns, float(timeout_s), float(tool_timeout_s))


def _rows(path: str) -> list[dict[str, Any]]:
    """The rows of a file of NeMo-Gym's as rows of ours, which keep the original.

    Raises:
        ValueError: the file cannot be read, or a row in it is none of NeMo-Gym's.
    """
    file = JsonLines(Path(path))
    rows = []
    for index, row in enumerate(file):
        try:
            params = row["responses_create_params"]
            tools_of(params)
            rows.append({"messages": prompt_of(params), ROW: row})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file.where(index)}: no row of NeMo-Gym's: {type(error).__name__}: {error}; it must have "
                f'"responses_create_params" with "input"'
            ) from error
    return rows
