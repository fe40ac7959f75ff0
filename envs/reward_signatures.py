"""What a reward function is given, and the three signatures in which it may ask for it.

| signature | told by | returns |
|---|---|---|
| `reward(episode)`, or any of `task, messages, completion, final, answer` | anything else | number, None, dict |
| verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)` | `solution_str` | number, dict |
| TRL: `reward(prompts, completions, **columns)` | `completions` | list of one number or None |

None means that the reward is missing, which is not a reward of 0; a dict holds several rewards by name. The names
of the parameters decide, and nothing else. `answer` is the task's, `final` the assistant's. For verl's functions
`solution_str` is what the assistant said without the tools' output, and of a returned dict only `score` counts.
This module calls nothing; `asyncrl.envs.rewards` does. Free of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.envs.base import Message
from asyncrl.envs.registry import PluginError
from asyncrl.envs.threads import is_async
from asyncrl.messages import Task

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode that has ended and not failed. It is the functions' to read, not to change."""

    task: Task
    prompt: list[Message]
    """What the environment's `reset` gave."""
    turns: list[Message]
    """Everything after it: the assistant's messages, and the environment's answers between them."""
    status: str
    """`completed`, or one of the `truncated_...` values of `asyncrl.messages.EpisodeStatus`."""
    environment: str = ""
    """Its name, as in `env.name`."""

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [*self.prompt, *self.turns]

    @property
    def completion(self) -> str:
        """What the assistant said in all its turns, one below the other."""
        return "\n".join(_said(message) for message in self.turns if message.get("role") == "assistant")

    @property
    def final(self) -> str:
        """What the assistant said last."""
        said = [message for message in self.turns if message.get("role") == "assistant"]
        return _said(said[-1]) if said else ""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A reward function of any signature, to be called with `arguments(view)`."""

    function: RewardFunction
    arguments: Callable[[EpisodeView], dict[str, Any]]
    result: Callable[[Any], Any]
    """From what it returned to a number, None or a dict; raises ValueError if that is none of them."""
    is_async: bool


def adapt(function: Any, what: str) -> Adapted:
    """Finds a function's signature by the names of its parameters.

    Args:
        function: a function, sync or async, or an object that can be called like one.
        what: what it is called in messages, for example `reward function 'length'`.

    Raises:
        PluginError: it cannot be called, or asks for what no signature offers.
    """
    if not callable(function) or isinstance(function, type):
        raise PluginError(f"{what} is of type {type(function).__name__}, and not a function. {_OFFER}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PluginError(f"{what} does not tell its parameters: {error}. {_OFFER}") from error
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in keywords}
    signature = next((each for each in (_TRL, _VERL) if each.sign in names), _NATIVE)
    positional = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
    missing = positional | {p.name for p in keywords if p.default is p.empty and not signature.offers(p.name)}
    if missing or not any(signature.offers(name) for name in names):
        shown = f"({', '.join(str(p) for p in parameters)})"
        lacking = f", and nothing is given for {', '.join(sorted(missing))}" if missing else ""
        raise PluginError(f"{what} takes {shown}{lacking}. {_OFFER}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def arguments(view: EpisodeView) -> dict[str, Any]:
        given = signature.arguments(view)
        return given if takes_all else {name: value for name, value in given.items() if name in names}

    return Adapted(function, arguments, signature.result, is_async(function))


# ---- the signatures ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Signature:
    sign: str
    """The parameter that gives it away."""
    offers: Callable[[str], bool]
    arguments: Callable[[EpisodeView], dict[str, Any]]
    result: Callable[[Any], Any]


def _native(view: EpisodeView) -> dict[str, Any]:
    return {
        "episode": view,
        "task": view.task,
        "messages": view.messages,
        "completion": view.completion,
        "final": view.final,
        "answer": view.task.answer,
    }


def _verl(view: EpisodeView) -> dict[str, Any]:
    metadata = view.task.metadata
    return {
        "data_source": metadata.get("data_source", view.environment),
        "solution_str": view.completion,
        "ground_truth": view.task.answer,
        "extra_info": metadata.get("extra_info", metadata),
    }


def _verl_result(returned: Any) -> Any:
    """verl's further keys are metrics, often of another scale than the score, and so no rewards."""
    if not isinstance(returned, Mapping):
        return returned
    if "score" not in returned:
        raise ValueError(f"it returned a dict without 'score' (keys: {', '.join(map(str, returned)) or 'none'})")
    return returned["score"]


def _trl(view: EpisodeView) -> dict[str, Any]:
    columns = {"answer": view.task.answer} | view.task.metadata
    return {name: [value] for name, value in columns.items()} | {
        "prompts": [view.prompt],
        "completions": [view.turns],
    }


def _trl_result(returned: Any) -> Any:
    try:
        (reward,) = returned
    except (TypeError, ValueError):
        raise ValueError(f"it returned {returned!r}, not a list with the reward of its one completion") from None
    return reward


_NATIVE_NAMES = {"episode", "task", "messages", "completion", "final", "answer"}
_VERL_NAMES = {"data_source", "solution_str", "ground_truth", "extra_info"}
_TRL_ABSENT = {"prompt_ids", "completion_ids", "trainer_state", "environments", "log_extra", "log_metric"}
"""What TRL's trainer passes and an episode does not have; every other name is that of a dataset column."""

_NATIVE = _Signature("", lambda name: name in _NATIVE_NAMES, _native, lambda returned: returned)
_VERL = _Signature("solution_str", lambda name: name in _VERL_NAMES, _verl, _verl_result)
_TRL = _Signature("completions", lambda name: name not in _TRL_ABSENT, _trl, _trl_result)

_OFFER = (
    "Write reward(episode), or name any of task, messages, completion, final, answer; or use verl's "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) or TRL's "
    "reward(prompts, completions, **kwargs) -> list"
)


def _said(message: Message) -> str:
    """The text of a message, whose content may be text, nothing, or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
