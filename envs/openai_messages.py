"""Chat messages as the OpenAI chat-completions API has them, and as environments have them.

    agent's request  ──from_openai──▶ what the policy sees    texts instead of parts, arguments as objects
    agent's response ◀──to_openai──── what the policy said    arguments as JSON text, ids unique in the episode

Called by `asyncrl.envs.agent_endpoint`. Pure functions of dictionaries.
"""

from __future__ import annotations

import json
import time
from typing import Any

from asyncrl.envs.base import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

Calls = dict[str, tuple[str, str]]
"""Call id as the agent knows it: the policy's own id, and the tool's name."""


class Refused(ValueError):
    """A request cannot be answered; the text says why and goes to the agent and into the episode's failure."""


def text_of(content: Any) -> str:
    """The text of a message's content, whose parts may be given one by one.

    Raises:
        Refused: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(f"a message's content is a {type(content).__name__}, not a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(f"a message has a part of type {kind!r}; only text can be shown to the policy")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def from_openai(message: dict[str, Any], calls: Calls) -> Message:
    """A message of an agent's request, as the policy sees it.

    Args:
        message: with `role`, `content`, and `tool_calls` or `tool_call_id`.
        calls: the calls that the agent was given so far; a tool's answer names one of them.

    Raises:
        Refused: it cannot be shown to the policy.
    """
    if not isinstance(message, dict):
        raise Refused(f"a message is a {type(message).__name__}, not an object with a role")
    if message.get("role") not in ROLES:
        raise Refused(f"a message has the role {message.get('role')!r}; there are {', '.join(ROLES)}")
    seen: Message = {"role": ROLES[message["role"]], "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        seen["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if seen["role"] == "tool":
        known = str(message.get("tool_call_id"))
        seen["tool_call_id"], seen["name"] = calls.get(known, (known, str(message.get("name") or "tool")))
    return seen


def to_openai(message: Message, turn: int, calls: Calls) -> dict[str, Any]:
    """What the policy said, as an assistant message of the API; its calls are added to `calls`.

    A call that cannot be read stays text, as an inference server would leave it.
    """
    text = text_of(message.get("content"))
    unread = [call for call in message.get("malformed_calls", []) if call not in text]
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join([*([text] if text else []), *unread])}
    if message.get("reasoning_content"):
        said["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        said["content"] = said["content"] or None
        said["tool_calls"] = []
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        # The policy counts its calls anew in each turn, and agents tell answers apart by the id.
        identity = f"{call['id']}_{turn}"
        calls[identity] = (call["id"], name)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": written}
        said["tool_calls"].append({"id": identity, "type": "function", "function": function})
    return said


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages of the API say the same, however they are written."""
    return _essence(one) == _essence(other)


def completion(said: dict[str, Any], model: str, turn: int) -> dict[str, Any]:
    """The response to a request. Token counts are the run's business and are given as 0."""
    finish = "tool_calls" if said.get("tool_calls") else "stop"
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": said, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def chunk(response: dict[str, Any]) -> dict[str, Any]:
    """The same response as the one chunk of a stream."""
    choice = response["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    choices = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": None}]
    return {**response, "object": "chat.completion.chunk", "choices": choices}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call.get("id", ""), "type": "function", "function": {**function, "arguments": _read(function)}}


def _read(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        raise Refused(
            f"a call of {function.get('name')!r} has arguments that are no JSON: {arguments!r:.200}"
        ) from None


def _essence(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        calls.append((call.get("id"), function.get("name"), _loose(arguments)))
    role = ROLES.get(str(message.get("role")))
    return role, text_of(message.get("content")), calls, message.get("tool_call_id")


def _loose(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
