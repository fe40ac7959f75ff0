"""Reward functions: found by name, called once for each episode that has ended, within a time limit.

    episode ended ──▶ Rewards.of(view, environment's own) ─┬─ async function: awaited
                                                           ├─ sync function: in a thread of its own
                                                           └─ `model`: the scorer, through its client
                  ◀── all rewards by name ─────────────────┘        total = sum of weight * reward

A function that raises, returns what is no reward, or does not answer in time raises `RewardFault`, which fails its
own episode. Functions may be of three signatures (`asyncrl.envs.reward_signatures`). Called by the generators'
episode loop; `asyncrl.launch` loads all functions before anything starts. Free of torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.config import Reward
from asyncrl.envs.registry import PluginError, load_plugin
from asyncrl.envs.reward_signatures import Adapted, EpisodeView, RewardFunction, adapt
from asyncrl.envs.threads import Outcome, in_thread
from asyncrl.messages import EpisodeStatus

GROUP = "asyncrl.rewards"
MODEL = "model"
"""The name of the model-based reward."""
THREADS = 32
"""Most calls of one sync function at a time, hung ones included; further ones wait, within their limit."""


class RewardFault(Exception):
    """A reward is unusable, so its episode fails with `status` and this text."""

    def __init__(self, status: EpisodeStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Rewards:
    """The reward functions of a run, by the name of their reward.

    Args:
        settings: `[reward]`.
        model: the model-based reward, an async function of an episode; None where there is none.

    Raises:
        PluginError: a function does not exist, cannot be loaded, or has none of the signatures; or two rewards
            would have the same name.
    """

    def __init__(self, settings: Reward, model: RewardFunction | None = None) -> None:
        self._settings = settings
        self._functions: dict[str, Adapted] = {}
        for plugin in settings.functions:
            name = plugin.rpartition(":")[2]
            if name in self._functions or name == MODEL:
                taken = "the reward model's" if name == MODEL else "that of two of them"
                raise PluginError(
                    f"reward.functions: the name {name!r} of {plugin!r} is {taken}; rename the function"
                )
            self._functions[name] = adapt(load_plugin(GROUP, plugin, "reward function"), _what(plugin))
        if model is not None:
            self._functions[MODEL] = adapt(model, _what(MODEL))
        self._room = {name: asyncio.Semaphore(THREADS) for name in self._functions}

    async def of(self, view: EpisodeView, own: Mapping[str, float]) -> dict[str, float]:
        """All rewards of an episode by name: its environment's own, and those of all functions.

        Raises:
            RewardFault: a function raised or did not answer in time, or two rewards have the same name.
        """
        rewards = dict(own)
        calls = [self._call(name, adapted, view) for name, adapted in self._functions.items()]
        for given in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(given, BaseException):
                raise given
            twice = sorted(rewards.keys() & given.keys())
            if twice:
                raise _fault(f"two rewards are named {twice[0]!r}; rename one, so that they can be told apart")
            rewards |= given
        return rewards

    async def _call(self, name: str, adapted: Adapted, view: EpisodeView) -> dict[str, float]:
        limit, room = self._settings.timeout_s, self._room[name]

        def call() -> Any:
            return adapted.function(**adapted.arguments(view))

        try:
            async with asyncio.timeout(limit):
                returned, error = await (_awaited(call) if adapted.is_async else in_thread(call, room))
        except TimeoutError:
            where = f" (scorer at {self._settings.endpoint})" if name == MODEL else ""
            full = f"; {THREADS} calls of it are still running" if room.locked() else ""
            detail = f"{_what(name)}{where} did not answer within reward.timeout_s = {limit:g} s{full}"
            raise RewardFault(EpisodeStatus.FAILED_TIME, detail) from None
        if error is not None:
            raise _fault(f"{_what(name)} raised {type(error).__name__}: {error}") from error
        try:
            reward = adapted.result(returned)
        except ValueError as wrong:
            raise _fault(f"{_what(name)}: {wrong}") from None
        return named(reward if isinstance(reward, Mapping) else {name: reward})


def named(rewards: Mapping[Any, Any]) -> dict[str, float]:
    """Rewards as plain text and floats, for functions give NumPy's and others', and messages carry only ours.

    Missing ones (None) are left out.

    Raises:
        RewardFault: a name is no text, or a reward is no finite number.
    """
    plain: dict[str, float] = {}
    for name, value in rewards.items():
        if not isinstance(name, str):
            raise _fault(f"a reward has the name {name!r}, which is no text")
        if value is not None:
            plain[str(name)] = _number(name, value)
    return plain


def total(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The episode's reward: the sum of weight times reward, where a weight that is not given is 1.

    None, not 0, for an episode without any reward.
    """
    return sum(weights.get(name, 1.0) * value for name, value in rewards.items()) if rewards else None


# ---- machinery -----------------------------------------------------------------------------------


def _fault(detail: str) -> RewardFault:
    return RewardFault(EpisodeStatus.FAILED_ENVIRONMENT, detail)


def _what(name: str) -> str:
    return f"reward function {name!r}"


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except Exception:  # Another library's type may raise anything; it fails its episode, named below.
        number = math.nan
    if not math.isfinite(number):
        raise _fault(f"reward {name!r} = {value!r} is no number")
    return number


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return await call(), None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # The time limit, or a revoked lease. Otherwise the function itself raised it.
        return None, error
    except (Exception, SystemExit) as error:  # A function that calls exit() must not end the generator.
        return None, error
