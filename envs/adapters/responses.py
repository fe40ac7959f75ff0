"""Chat messages as the OpenAI Responses API has them: items of an input, and of a response's output.

    a row's `input`, `instructions` and `tools`  ──prompt_of, tools_of──▶  chat messages and schemas
    what was said and answered                   ──output_of──▶            items of a response

A chat message with text and calls is several items, and a call's id must differ from all others of the episode.
Pure functions of dictionaries; called by `asyncrl.envs.adapters.nemo_gym`.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
from typing import Any

from asyncrl.envs.base import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def prompt_of(params: dict[str, Any]) -> list[Message]:
    """The chat messages of a request's `instructions` and `input`.

    Raises:
        ValueError: there is no input, or an item in it is neither a message with text, nor a call, nor its answer.
    """
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ValueError(f"'input' is {items!r:.60}; it must be a text or a list of items")
    messages: list[Message] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": str(params["instructions"])})
    names: dict[str, str] = {}
    for item in items:
        messages.append(_message(item, names))
    return messages


def tools_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of a request's `tools`, as chat templates take them.

    Raises:
        ValueError: one of them is no function.
    """
    return [_schema(tool) for tool in params.get("tools") or []]


def output_of(turns: list[Message]) -> list[dict[str, Any]]:
    """The items of what the assistant said and what its tools answered, in order."""
    items: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    for number, message in enumerate(turns):
        if message["role"] == "tool":
            known = ids.get(str(message.get("tool_call_id")), "")
            items.append({"type": "function_call_output", "call_id": known, "output": message["content"]})
        elif message["role"] == "assistant":
            items += _said(message, number, ids)
        else:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
    return items


def response_of(turns: list[Message], params: dict[str, Any], created: float) -> dict[str, Any]:
    """A whole response object with these items; the model's name is `policy`."""
    return {
        "id": "resp_episode",
        "object": "response",
        "created_at": created,
        "model": "policy",
        "status": "completed",
        "output": output_of(turns),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params.get("tools") or [],
    }


def _message(item: Any, names: dict[str, str]) -> Message:
    """One item of an input; `names` are the tools' by the ids of their calls so far."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "message" and item.get("role") in ROLES:
        return {"role": ROLES[item["role"]], "content": _text(item.get("content"))}
    if kind == "function_call":
        names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": json.loads(item.get("arguments") or "{}")}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        known = item["call_id"]
        return {
            "role": "tool",
            "name": names.get(known, ""),
            "tool_call_id": known,
            "content": str(item["output"]),
        }
    raise ValueError(
        f"'input' has an item of type {kind!r}; messages, function_call and function_call_output can be"
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"'input' has a message with the part {part!r:.60}; only text can be shown")
    return "".join(part["text"] for part in parts)


def _schema(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError(f"'tools' has {tool!r:.60}; each must be of type 'function' and have a name")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    told = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": told}


def _said(message: Message, number: int, ids: dict[str, str]) -> list[dict[str, Any]]:
    """An assistant's message; the chat's call ids begin anew in each turn, so `ids` gets the present ones."""
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    text = str(message.get("content") or "")
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        head = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": content})
    for call in calls:
        function, known = call["function"], f"{call['id']}_{number}"
        ids[call["id"]] = known
        arguments = json.dumps(function.get("arguments") or {})
        head = {"type": "function_call", "id": f"fc_{known}", "call_id": known, "status": "completed"}
        items.append({**head, "name": function.get("name"), "arguments": arguments})
    return items
