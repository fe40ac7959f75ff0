"""Reward functions: found by name, called once for each episode that has ended, within a time limit.

    episode ended ──▶ Rewards.of(view, environment's own) ─┬─ async function: awaited
                                                           ├─ sync function: in a thread of its own
                                                           └─ `model`: the scorer, through its client
                  ◀── all rewards by name ─────────────────┘        total = sum of weight * reward

A function that raises, returns what is no reward, or does not answer in time raises `RewardFault`, which fails its
own episode. Functions may be of three signatures (`asyncrl.envs.reward_signatures`). `Rewards` is called by the
generators' episode loop; `asyncrl.launch` loads all functions before anything starts. Environments that are made
of a reward function call it through `own_reward`. Free of torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl.envs.registry import PluginError, load_plugin
from asyncrl.envs.reward_signatures import Adapted, EpisodeView, RewardFunction, adapt
from asyncrl.envs.threads import outcome_of
from asyncrl.messages import EpisodeStatus

if TYPE_CHECKING:  # It takes longer to import than all else that environments need.
    from asyncrl.config import Reward

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


class RewardCall:
    """One reward function, and the limit that each of its calls is given.

    Args:
        name: the reward's name, unless the function returns several by name.
        adapted: the function.
        limit_s: time limit in seconds.
        key: the setting that the limit is from, for messages.
        where: what else a time-out should say of it, for example its address.
    """

    def __init__(self, name: str, adapted: Adapted, limit_s: float, key: str, where: str = "") -> None:
        self._name, self._adapted, self._limit_s, self._key, self._where = name, adapted, limit_s, key, where
        self._room = asyncio.Semaphore(THREADS)

    async def of(self, view: EpisodeView) -> dict[str, float]:
        """The function's rewards of an episode by name, without missing ones.

        Raises:
            RewardFault: it raised, did not answer in time, or returned what is no reward.
        """
        adapted, limit = self._adapted, self._limit_s
        try:
            returned, error = await outcome_of(partial(_call, adapted, view), adapted.is_async, limit, self._room)
        except TimeoutError:
            full = f"; {THREADS} calls of it are still running" if self._room.locked() else ""
            detail = f"{_what(self._name)}{self._where} did not answer within {self._key} = {limit:g} s{full}"
            raise RewardFault(EpisodeStatus.FAILED_TIME, detail) from None
        if error is not None:
            raise _fault(f"{_what(self._name)} raised {type(error).__name__}: {error}") from error
        try:
            reward = adapted.result(returned)
        except ValueError as wrong:
            raise _fault(f"{_what(self._name)}: {wrong}") from None
        return named(reward if isinstance(reward, Mapping) else {self._name: reward})


def own_reward(function: RewardFunction, limit_s: float, name: str | None = None) -> RewardCall:
    """The reward function of an environment itself, of any signature.

    Args:
        function: the function.
        limit_s: time limit of each call, in seconds.
        name: the reward's. Default: the function's.

    Raises:
        PluginError: it cannot be called, or has none of the signatures.
    """
    title = name or str(getattr(function, "__name__", type(function).__name__))
    return RewardCall(title, adapt(function, _what(title)), limit_s, "the environment's reward_timeout_s")


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
        limit, key = settings.timeout_s, "reward.timeout_s"
        self._calls: dict[str, RewardCall] = {}
        for plugin in settings.functions:
            name = plugin.rpartition(":")[2]
            if name in self._calls or name == MODEL:
                taken = "the reward model's" if name == MODEL else "that of two of them"
                raise PluginError(
                    f"reward.functions: the name {name!r} of {plugin!r} is {taken}; rename the function"
                )
            adapted = adapt(load_plugin(GROUP, plugin, "reward function"), _what(plugin))
            self._calls[name] = RewardCall(name, adapted, limit, key)
        if model is not None:
            where = f" (scorer at {settings.endpoint})"
            self._calls[MODEL] = RewardCall(MODEL, adapt(model, _what(MODEL)), limit, key, where)

    async def of(self, view: EpisodeView, own: Mapping[str, float]) -> dict[str, float]:
        """All rewards of an episode by name: its environment's own, and those of all functions.

        Raises:
            RewardFault: a function raised or did not answer in time, or two rewards have the same name.
        """
        rewards = dict(own)
        calls = [call.of(view) for call in self._calls.values()]
        for given in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(given, BaseException):
                raise given
            twice = sorted(rewards.keys() & given.keys())
            if twice:
                raise _fault(f"two rewards are named {twice[0]!r}; rename one, so that they can be told apart")
            rewards |= given
        return rewards


def named(rewards: Mapping[Any, Any]) -> dict[str, float]:
    """Rewards as plain text and floats, for functions give NumPy's and others', and messages carry only ours.

    Missing ones (None) are left out.

    Raises:
        RewardFault: a name is no plain text, or a reward is no finite number.
    """
    plain: dict[str, float] = {}
    for name, value in rewards.items():
        if not isinstance(name, str) or not name.isprintable():
            raise _fault(f"a reward has the name {name!r}, which is no plain text")
        if value is not None:
            plain[str(name)] = _number(name, value)
    return plain


def total(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The episode's reward: the sum of weight times reward, where a weight that is not given is 1.

    None, not 0, for an episode without any reward.
    """
    return sum(weights.get(name, 1.0) * value for name, value in rewards.items()) if rewards else None


# ---- machinery -----------------------------------------------------------------------------------


def _call(adapted: Adapted, view: EpisodeView) -> Any:
    return adapted.function(**adapted.arguments(view))


def _fault(detail: str) -> RewardFault:
    return RewardFault(EpisodeStatus.FAILED_REWARD, detail)


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
