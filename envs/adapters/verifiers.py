"""Environments of verifiers (its API `verifiers.v1`), each a taskset and a harness that works on its tasks.

    taskset ─▶ rollout ─▶ harness ─▶ interception ─▶ client ──HTTP──▶ asyncrl.envs.agent_endpoint ─▶ policy
    rewards, metrics ◀─ scoring ◀──────────┘

The harness is an agent (`asyncrl.envs.agent`), so whatever it asks for is what the policy sees, and the rewards
and metrics that verifiers gives its trace are the episode's, by name. The default harness runs in this process,
with verifiers' subprocess runtime: its own default runtime needs a login, its own harnesses the network.

One episode is one conversation of one agent: environments of several agents are refused. Needs verifiers 0.4.0,
which does not go together with every version of vLLM: serve it from a Python of its own (`asyncrl env-worker`).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from asyncrl.envs.agent import AgentEnvironment, Outcome
from asyncrl.envs.agent_endpoint import AgentEndpoint
from asyncrl.envs.base import Environment, Split
from asyncrl.envs.drawn import check_task
from asyncrl.messages import Task

HARNESS = "asyncrl.envs.adapters.verifiers_harness"
HOST = "127.0.0.1"
EVAL_SHARE = 10
"""One task in this many is held out for evaluation, unless `eval_args` name a taskset of its own for it."""
NO_KEY = "ASYNCRL_NO_API_KEY"
"""Episodes are told apart by verifiers' session header, so that all of them share one HTTP client."""


class Tasks:
    """The tasks of a taskset by position, read as far as they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self._rest: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()

    def at(self, position: int) -> Any:
        """The task at a position.

        Raises:
            IndexError: there are not so many.
        """
        with self._lock:
            self._read += itertools.islice(self._rest, max(0, position + 1 - len(self._read)))
        return self._read[position]


class Verifiers:
    """A taskset and its harness."""

    def __init__(self, name: str, config: dict[str, Any], eval_config: dict[str, Any] | None) -> None:
        import verifiers.v1 as vf

        self._vf, self._name = vf, name
        self._config = vf.resolve_env_config(config)
        self._tasks = {"train": Tasks(vf.load_taskset(self._config.taskset))}
        self._shares = eval_config is None
        if eval_config is not None:
            self._tasks["eval"] = Tasks(vf.load_taskset(vf.resolve_env_config(eval_config).taskset))
        self._served: dict[asyncio.AbstractEventLoop, tuple[asyncio.Future[Any], asyncio.Task[None]]] = {}

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th task of a split.

        Raises:
            IndexError: the taskset has no more tasks.
            ValueError: there is no such split, or the index is negative.
        """
        check_task(split, index)
        position, source = index, split
        if self._shares:
            source = "train"
            position = index * EVAL_SHARE if split == "eval" else index + index // (EVAL_SHARE - 1) + 1
        task = self._tasks[source].at(position)
        metadata = {"taskset": source, "position": position, "key": task.key}
        return Task(f"verifiers/{self._name}/{split}/{index}", _prompt(task.data), metadata=metadata)

    async def run(self, task: Task, base_url: str, api_key: str) -> Outcome:
        """The agent: one rollout of verifiers.

        Raises:
            RuntimeError: verifiers says that the rollout failed, and why.
        """
        vf, endpoint = self._vf, await AgentEndpoint.here(HOST)
        env = await self._serving()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        episode = await env.run_slot(
            env.slots(self._found(task))[0],
            vf.ModelContext(model="policy", client=client),
            on_trace=lambda trace: endpoint.also(api_key, trace.id),
        )
        return _outcome(episode)

    def _found(self, task: Task) -> Any:
        where = task.metadata
        found = self._tasks[where["taskset"]].at(where["position"])
        if found.key != where["key"]:
            raise ValueError(
                f"task {task.id} is another one now: the taskset {self._name!r} must give the same tasks each time"
            )
        return found

    async def _serving(self) -> Any:
        """verifiers' environment with what its episodes share, for as long as the running event loop runs."""
        loop = asyncio.get_running_loop()
        if loop not in self._served or self._served[loop][1].done():
            ready = loop.create_future()
            self._served[loop] = ready, asyncio.create_task(self._serve(ready))
        ready, holding = self._served[loop]
        await asyncio.wait({ready, holding}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            holding.result()  # Raises why it cannot serve.
        return ready.result()

    async def _serve(self, ready: asyncio.Future[Any]) -> None:
        env = self._vf.load_environment(self._config)
        async with env.serving():
            ready.set_result(env)
            await asyncio.Event().wait()


def _prompt(data: Any) -> list[dict[str, Any]]:
    """What the task says at first, for people to read: what the policy sees is what the harness asks."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return system + [message.model_dump(mode="json", exclude_none=True) for message in data.prompt or []]


def _outcome(episode: Any) -> Outcome:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"verifiers' rollout failed: {reasons or 'it gives no reason'}")
    [trace] = episode.traces
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    return Outcome(rewards, {name: value for name, value in trace.metrics.items() if value is not None})


def _plugin(name: str) -> str:
    """The id by which verifiers finds a plug-in. It takes no dotted names, so their modules get another one."""
    if "." not in name:
        return name
    plain = name.replace(".", "_").lower()
    sys.modules.setdefault(plain, importlib.import_module(name))
    return plain


def make(
    taskset: str,
    taskset_args: dict[str, Any] | None = None,
    eval_args: dict[str, Any] | None = None,
    harness: str = HARNESS,
    harness_args: dict[str, Any] | None = None,
    agent_args: dict[str, Any] | None = None,
) -> Environment:
    """The entry point.

    Args:
        taskset: its id, or `pkg.mod`.
        taskset_args: settings of the taskset.
        eval_args: settings of the taskset that the evaluation split comes from, on top of those; without them one
            task in ten is held out.
        harness: its id, or `pkg.mod`; default: a chat loop with the task's tools, in this process.
        harness_args: settings of the harness.
        agent_args: further settings of verifiers' agent, for example `{"max_turns": 8}`.

    Raises:
        ModuleNotFoundError: verifiers, or the plug-in, is not installed.
        ValueError: the environment has several agents, or a setting is not allowed.
    """
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the environment 'verifiers' needs its library: pip install 'asyncrl[verifiers]', or serve it from "
            f"another Python with `asyncrl env-worker` ({error})"
        ) from error
    seat = {
        "runtime": {"type": "subprocess"},
        **(agent_args or {}),
        "harness": {**(harness_args or {}), "id": _plugin(harness)},
    }

    def config(args: dict[str, Any]) -> dict[str, Any]:
        return {"taskset": {**args, "id": _plugin(taskset)}, "agent": seat}

    kind = vf.environment_class(_plugin(taskset))
    if kind is not vf.SingleAgentEnv:
        raise ValueError(
            f"env.args.taskset = {taskset!r}: it brings the environment {kind.__name__}, and only verifiers' "
            "SingleAgentEnv, one agent with one conversation, can be trained here"
        )
    train = taskset_args or {}
    made = Verifiers(taskset, config(train), None if eval_args is None else config({**train, **eval_args}))
    return AgentEnvironment(made.task, made.run, HOST)
