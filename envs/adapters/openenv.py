"""Environments on a server of OpenEnv: a client of its WebSocket protocol, one session per episode.

Tasks are seeds: each reset is sent `{"seed": …}` and the arguments in `reset`. The assistant acts in one of two
ways: its text is put into a template (`action = {"message": "$text"}`), or, without a template, it calls a tool
whose parameters are the schema of the server's actions. An action that the server refuses is an error that the
model sees, counted as `refused_actions`; a server that is gone, full or silent fails the episode as `failed_tool`.

When a generator dies its sessions end on the server. Another generator resets a new session with the same seed and
does the finished turns' actions again; if that is answered otherwise, because the server's environment does not
follow the seed, the episode fails rather than go on in another state. Effects that outlive a session (of actions
that write somewhere else) are there twice.

Called through the entry point `openenv` (`asyncrl.envs.registry.load`). Needs the extra `asyncrl[http]`; openenv
itself is needed only where the server runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.adapters.openenv_session import Answer, Refused, Session, server_url
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import seed_task
from asyncrl.messages import Task

TEXT = "$text"
"""Stands for the assistant's text in a template of an action."""
REWARD = "openenv"


@dataclass(frozen=True, slots=True)
class OpenEnv:
    """The environment: a server's address, and how its actions and observations become messages."""

    url: str
    action: dict[str, Any] | None
    tool: str
    observation: str
    instructions: str
    reset: dict[str, Any]
    timeout_s: float
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th seed of a split; see `seed_task`."""
        return seed_task("openenv", self.seed, split, index)

    def make(self) -> OpenEnvEpisode:
        """A new, unused episode."""
        return OpenEnvEpisode(self, Session(self.url, self.timeout_s))


@dataclass(slots=True)
class OpenEnvEpisode:
    """One episode: one session on the server."""

    world: OpenEnv
    session: Session
    _rewarded: bool = field(default=False)

    async def reset(self, task: Task) -> Start:
        """Opens the session and shows the first observation."""
        tools = [await self._tool()] if self.world.action is None else []
        try:
            answer = await self.session.reset({**self.world.reset, "seed": task.metadata["seed"]})
        except Refused as error:
            raise RuntimeError(
                f"the OpenEnv server refused to reset with seed {task.metadata['seed']} and env.args.reset = "
                f"{self.world.reset!r}: {error}"
            ) from error
        text = "\n\n".join(part for part in (self.world.instructions, self._text(answer)) if part)
        return Start(messages=[{"role": "user", "content": text}], tools=tools)

    async def step(self, message: Message) -> Step:
        """Does the message's action, or each of its calls until the episode ends."""
        if self.world.action is not None:
            action = fill(self.world.action, str(message.get("content") or "").strip())
            return await self._act(action, {"role": "user"})
        calls = message.get("tool_calls") or []
        if not calls:
            unread = "".join(
                f" This could not be read: {text[:200]}" for text in message.get("malformed_calls") or []
            )
            told = f"Your answer calls no tool. Call {self.world.tool!r} to act.{unread}"
            return _refusal({"role": "user"}, told)
        step = Step(False)
        for call in calls:
            step = _both(step, await self._call(call))
            if step.done:
                break
        return step

    async def truncated(self, status: str) -> dict[str, float | None]:
        """0 for an episode that was cut off before the server gave any reward: stalling must not go unseen."""
        return {} if self._rewarded else {REWARD: 0.0}

    async def close(self) -> None:
        """Ends the session."""
        await self.session.close()

    async def _tool(self) -> dict[str, Any]:
        parameters = await self.session.action_schema()
        about = str(
            parameters.get("description") or "Acts in the environment; the answer is what you observe next."
        )
        return {
            "type": "function",
            "function": {"name": self.world.tool, "description": about, "parameters": parameters},
        }

    async def _call(self, call: dict[str, Any]) -> Step:
        function = call.get("function") or {}
        head = {"role": "tool", "name": str(function.get("name")), "tool_call_id": call.get("id")}
        if function.get("name") != self.world.tool:
            return _refusal(head, f"there is no tool {function.get('name')!r}; call {self.world.tool!r}")
        if not isinstance(function.get("arguments"), dict):
            return _refusal(head, "the arguments must be a JSON object")
        return await self._act(function["arguments"], head)

    async def _act(self, action: dict[str, Any], head: Message) -> Step:
        """Does one action; `head` is the message that the observation becomes the content of."""
        try:
            answer = await self.session.step(action)
        except Refused as error:
            return _refusal(head, str(error))
        self._rewarded = self._rewarded or answer.reward is not None
        # An episode that ends without a single reward has none: it is missing, not 0.
        given = answer.reward is not None or (answer.done and not self._rewarded)
        rewards = {REWARD: answer.reward} if given else {}
        return Step(answer.done, rewards, [] if answer.done else [{**head, "content": self._text(answer)}])

    def _text(self, answer: Answer) -> str:
        name = self.world.observation
        if not name:
            shown = {key: value for key, value in answer.observation.items() if key != "metadata" or value}
            return json.dumps(shown, ensure_ascii=False)
        if name not in answer.observation:
            raise KeyError(
                f"the observation has no field env.args.observation = {name!r}; "
                f"it has {sorted(answer.observation)}"
            )
        value = answer.observation[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def fill(template: Any, text: str) -> Any:
    """A template of an action with the assistant's text in the place of `$text`, in any string in it."""
    if isinstance(template, str):
        return template.replace(TEXT, text)
    if isinstance(template, dict):
        return {key: fill(value, text) for key, value in template.items()}
    if isinstance(template, list):
        return [fill(value, text) for value in template]
    return template


def _refusal(head: Message, why: str) -> Step:
    return Step(False, messages=[{**head, "content": f"Error: {why}"}], info={"refused_actions": 1.0})


def _both(first: Step, then: Step) -> Step:
    """Two actions of one turn as one. A missing reward can only be the last and only one, so none is lost."""
    given = [step.rewards[REWARD] for step in (first, then) if step.rewards]
    rewards = {REWARD: given[0] if len(given) == 1 else sum(value or 0.0 for value in given)} if given else {}
    refused = first.info.get("refused_actions", 0.0) + then.info.get("refused_actions", 0.0)
    messages = [] if then.done else [*first.messages, *then.messages]
    return Step(then.done, rewards, messages, {"refused_actions": refused} if refused else {})


def make(
    url: str,
    action: dict[str, Any] | None = None,
    tool: str = "act",
    observation: str = "",
    instructions: str = "",
    reset: dict[str, Any] | None = None,
    timeout_s: float = 20.0,
    seed: int = 0,
) -> OpenEnv:
    """The entry point. The server need not run yet.

    Args:
        url: the server's address, `http://host:port`.
        action: template of an action, in which `$text` stands for the assistant's text. Without it the assistant
            acts by calling a tool whose parameters are the server's schema of an action.
        tool: name of that tool.
        observation: name of the observation's field that the model is shown; without it, all of it as JSON.
        instructions: what the model is told before the first observation.
        reset: further arguments of each reset.
        timeout_s: limit of each answer of the server. Let it be less than the setting `env.timeout_s`.
        seed: another one gives other tasks.

    Raises:
        ValueError: an argument is out of its range.
        ModuleNotFoundError: aiohttp is not installed.
    """
    if action is not None and (not isinstance(action, dict) or TEXT not in json.dumps(action)):
        raise ValueError(f"env.args.action = {action!r}: must be a table with '{TEXT}' in it, or left out")
    for key, value in (("tool", tool), ("observation", observation), ("instructions", instructions)):
        if not isinstance(value, str) or (key == "tool" and not value.isidentifier()):
            raise ValueError(f"env.args.{key} = {value!r}: must be {'a name' if key == 'tool' else 'text'}")
    if reset is not None and not isinstance(reset, dict):
        raise ValueError(f"env.args.reset = {reset!r}: must be a table of arguments")
    check_seconds("timeout_s", timeout_s)
    check_whole("seed", seed)
    address = server_url(url)
    load_extra("aiohttp", "http", "openenv")
    return OpenEnv(
        address, action, tool, observation, instructions.strip(), dict(reset or {}), float(timeout_s), seed
    )
