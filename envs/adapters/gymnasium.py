"""Gymnasium environments as text: observations are printed, actions are read from the last line.

The first message describes the spaces and shows the first observation; each answer must end with a line that
holds an action. One that cannot be read is an error that the model sees, counted as `unreadable_actions`, and does
not step the environment. Tasks are seeds. It is a plain wrapper, made for environments whose observations are
small; it shows no images.

The library's calls block, so each episode has a thread of its own. There are no snapshots: an episode that another
generator began is brought back by doing its actions again from the same seed, so the environment must follow it.

Called through the entry point `gymnasium` (`asyncrl.envs.registry.load`). Needs the extra `asyncrl[gymnasium]`.
Source: https://gymnasium.farama.org (Gymnasium 1.x).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.adapters.gymnasium_text import ActionError, compact, describe, read_action, readable
from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import seed_task
from asyncrl.envs.own_thread import OwnThread
from asyncrl.messages import Task


@dataclass(frozen=True, slots=True)
class Gymnasium:
    """The environment: one Gymnasium id, its tasks the seeds of its resets."""

    id: str
    kwargs: dict[str, Any]
    rules: str
    """What the first message says before the first observation."""
    digits: int
    seed: int

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th seed of a split; see `seed_task`."""
        return seed_task("gymnasium", self.seed, split, index)

    def make(self) -> GymnasiumEnv:
        """A new, unused episode."""
        return GymnasiumEnv(self)


@dataclass(slots=True)
class GymnasiumEnv:
    """One episode: an environment of the library, and the thread in which all of its code runs."""

    world: Gymnasium
    _thread: OwnThread = field(default_factory=lambda: OwnThread("gymnasium episode"))
    _env: Any = None

    async def reset(self, task: Task) -> Start:
        """Makes the library's environment, seeds it and shows the first observation."""
        self._env, observation = await self._thread.call(self._open, int(task.metadata["seed"]))
        text = f"{self.world.rules}\n\n{compact(observation, self.world.digits)}"
        return Start(messages=[{"role": "user", "content": text}])

    async def step(self, message: Message) -> Step:
        """Does the action in the message's last line."""
        if self._env is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        try:
            action = read_action(self._env.action_space, str(message.get("content") or ""))
        except ActionError as error:
            return Step(
                False, messages=[{"role": "user", "content": str(error)}], info={"unreadable_actions": 1.0}
            )
        observation, reward, terminated, truncated, _ = await self._thread.call(self._env.step, action)
        done = bool(terminated or truncated)
        text = compact(observation, self.world.digits)
        return Step(
            done=done,
            rewards={"gymnasium": float(reward)},
            messages=[] if done else [{"role": "user", "content": text}],
            info={"truncated": 1.0} if truncated and not terminated else {},
        )

    async def truncated(self, status: str) -> dict[str, float | None]:
        """Nothing more than the steps gave: 0, so that an episode without one readable action has a return too."""
        return {"gymnasium": 0.0}

    async def close(self) -> None:
        """Closes the library's environment, unless a call of it hangs."""
        env, self._env = self._env, None
        try:
            if env is not None and not self._thread.lost:
                await self._thread.call(env.close)
        finally:
            self._thread.end()

    def _open(self, seed: int) -> tuple[Any, Any]:
        gymnasium = load_extra("gymnasium", "gymnasium", "gymnasium")
        env = gymnasium.make(self.world.id, **self.world.kwargs)
        observation, _ = env.reset(seed=seed)
        return env, observation


def make(
    id: str, kwargs: dict[str, Any] | None = None, instructions: str = "", digits: int = 4, seed: int = 0
) -> Gymnasium:
    """The entry point. The environment is made once to see whether it can be, and to describe its spaces.

    Args:
        id: of an environment that is registered with Gymnasium, or `package.module:Id-v0` of one that the package
            registers when it is imported.
        kwargs: arguments of `gymnasium.make`, for example `{"is_slippery": false}`.
        instructions: what the model is told before the description of the spaces: the rules of the game.
        digits: digits after the point of printed numbers, 0 to 16.
        seed: another one gives other tasks.

    Raises:
        ValueError: an argument is out of its range, there is no such id, it cannot be made, or its actions cannot
            be written as text.
        ModuleNotFoundError: Gymnasium is not installed.
    """
    if not isinstance(id, str) or not id:
        raise ValueError(
            f"env.args.id = {id!r}: must be the id of a Gymnasium environment, such as 'FrozenLake-v1'"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(f"env.args.kwargs = {kwargs!r}: must be a table of arguments for gymnasium.make")
    if not isinstance(instructions, str):
        raise ValueError(f"env.args.instructions = {instructions!r}: must be text")
    check_whole("digits", digits, 0, 16)
    check_whole("seed", seed)
    rules = _rules(id, kwargs or {}, instructions)
    return Gymnasium(id=id, kwargs=dict(kwargs or {}), rules=rules, digits=digits, seed=seed)


def _rules(id: str, kwargs: dict[str, Any], instructions: str) -> str:
    """Makes the environment once; returns the first message without its observation."""
    gymnasium = load_extra("gymnasium", "gymnasium", "gymnasium")
    try:
        probe = gymnasium.make(id, **kwargs)
    except Exception as error:
        raise ValueError(
            f"env.args.id = {id!r} with env.args.kwargs = {kwargs!r}: gymnasium.make raised "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        if not readable(probe.action_space):
            raise ValueError(
                f"env.args.id = {id!r}: its actions are {probe.action_space}, which cannot be read from text; "
                f"Discrete, MultiDiscrete, MultiBinary, Box and Text spaces can"
            )
        told = (
            f"You see {describe(probe.observation_space)}. End each answer with a line that holds your action "
            f"alone: {describe(probe.action_space)}."
        )
    finally:
        probe.close()
    return f"{instructions.strip()}\n\n{told}" if instructions.strip() else told
