"""The fault boundary between an episode and its environment, whose faults fail this episode and no other.

Called by `asyncrl.generator.episode`, `resume` and `turns`, where an `EpisodeFault` ends the episode with its
status. What is not asked through here is the generator's own, and its exceptions propagate.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.envs.base import ToolFault
from asyncrl.envs.rewards import RewardFault
from asyncrl.messages import EpisodeStatus

T = TypeVar("T")
DETAIL_CHARS = 2000
"""Most of an error's text that is recorded: it is journalled for each episode that fails."""


class EpisodeFault(Exception):
    """The episode fails with `status`; the text is the reason that is recorded."""

    def __init__(self, status: EpisodeStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Boundary:
    """Asks an environment, within a time limit.

    Args:
        limit_s: `env.timeout_s`.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    async def ask(self, what: str, question: Callable[[], Awaitable[T]], kind: type[T]) -> T:
        """Calls a method of the environment, awaits its answer, and checks its type.

        Raises:
            EpisodeFault: it raised, took too long, or answered with something else.
            RewardFault: its reward function failed.
        """
        pending = self.guard(what, question)
        if not inspect.isawaitable(pending):
            detail = (
                f"{what} returned {type(pending).__name__} instead of something to await; "
                f"write it as `async def {what}`"
            )
            raise EpisodeFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                answer = await pending
        except RewardFault:
            raise
        except Exception as error:
            if limit.expired():
                detail = f"{what} did not answer within env.timeout_s = {self._limit_s:g} s"
                raise EpisodeFault(EpisodeStatus.FAILED_TIME, detail) from None
            raise raised(what, error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody has cancelled this episode: the environment let the end of a task of its own come through.
            raise raised(what, error) from error
        if not isinstance(answer, kind):
            detail = f"{what} returned {type(answer).__name__}, not {kind.__name__}"
            raise EpisodeFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)
        return answer

    @staticmethod
    def guard(what: str, call: Callable[[], T], status: EpisodeStatus = EpisodeStatus.FAILED_ENVIRONMENT) -> T:
        """Runs what depends on the environment's own code or data and awaits nothing.

        Raises:
            EpisodeFault: with `status`, whatever it raised.
            RewardFault: one of its rewards is no number.
        """
        try:
            return call()
        except RewardFault:
            raise
        except Exception as error:
            raise raised(what, error, status) from error


def raised(
    what: str, error: BaseException, status: EpisodeStatus = EpisodeStatus.FAILED_ENVIRONMENT
) -> EpisodeFault:
    """The fault that an exception becomes."""
    try:
        told = str(error)
    except Exception:  # Its own text is the environment's code too.
        told = "no text"
    told = told if len(told) <= DETAIL_CHARS else f"{told[:DETAIL_CHARS]} ..."
    if isinstance(error, ToolFault):
        return EpisodeFault(EpisodeStatus.FAILED_TOOL, f"{what}: {told}")
    return EpisodeFault(status, f"{what} raised {type(error).__name__}: {told}")
