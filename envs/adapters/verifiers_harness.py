"""A harness for verifiers that runs in this process: a chat loop with the task's tools, and nothing to install.

The harnesses that verifiers brings along run scripts of their own, whose packages they download when an episode
begins. This one needs no network. verifiers loads it (`asyncrl.envs.adapters.verifiers` names it), so it may
import verifiers; nothing else imports it.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcessHarness"]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for a completion, calls the tools that it names, and so on until it names none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Runs the loop to its end."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            headers = {"Authorization": f"Bearer {secret}"}
            messages = _opening(*self.resolve_prompt(data))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code >= 400:
                    return _ended(response.text, trace)
                message = response.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await _called(connections, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def _opening(system: str | None, prompt: str | vf.Messages | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages += [message.model_dump(exclude_none=True) for message in prompt or []]
    return messages


def _ended(text: str, trace: vf.Trace) -> vf.ProgramResult:
    """A full context and a stop condition of the task end the episode in order; it is scored as it stands."""
    in_order = "context_length_exceeded" in text or "context is full" in text or trace.stop_condition is not None
    return vf.ProgramResult(0, "", "") if in_order else vf.ProgramResult(1, "", text)


async def _called(connections: Any, dispatch: dict[str, tuple[str, str]], function: dict[str, str]) -> Any:
    """What a tool answered; an error is an answer that the model sees."""
    try:
        return await call_mcp(connections, dispatch, function["name"], json.loads(function["arguments"] or "{}"))
    except KeyError:
        return f"error: there is no tool {function['name']!r}; there are {', '.join(dispatch)}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
