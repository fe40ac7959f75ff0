"""What an episode of a task begins with, for those who only look at it: demonstrations and `asyncrl envs show`.

Called by `asyncrl.toy` and `asyncrl.envs_command`; the episode loop plays on.
"""

from __future__ import annotations

import asyncio

from asyncrl.envs.base import Environment, Start
from asyncrl.messages import Task


async def start_of(environment: Environment, task: Task, limit_s: float) -> Start:
    """Resets an episode and closes it again.

    Raises:
        TimeoutError: one of both took longer than `limit_s`.
        Exception: whatever the environment raises.
    """
    env = environment.make()
    try:
        async with asyncio.timeout(limit_s):
            return await env.reset(task)
    finally:
        async with asyncio.timeout(limit_s):
            await env.close()
