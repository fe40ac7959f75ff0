"""Plays whole episodes of an environment with scripted assistant messages: the fixture `play`."""

from collections.abc import Callable

import pytest

from asyncrl.envs.base import Environment, Message, Start, Step
from asyncrl.messages import Task

Script = list[Message] | Callable[[list[Message]], Message]


async def play_episode(environment: Environment, task: Task, messages: Script) -> tuple[list[Step], Start]:
    """Reset, a step for each message until the environment says done or the list ends, close.

    A callable is given the conversation so far and returns the next assistant message.
    """
    env = environment.make()
    try:
        start = await env.reset(task)
        conversation = [*start.messages]
        steps: list[Step] = []
        while not (steps and steps[-1].done):
            if not callable(messages) and len(steps) == len(messages):
                break
            message = messages(conversation) if callable(messages) else messages[len(steps)]
            steps.append(await env.step(message))
            conversation += [message, *steps[-1].messages]
        return steps, start
    finally:
        await env.close()


@pytest.fixture
def play() -> Callable[..., object]:
    """`await play(environment, task, messages) -> (steps, start)`: see `play_episode`."""
    return play_episode
