"""What an algorithm is made of: the kinds of parts, the parts that exist, and their parameters.

A part is a named plain function; its parameters are keyword-only arguments, whose defaults and ranges are
declared in `asyncrl.trainers.parts`. Free of torch: the hub and the command line check names and parameters with
it, and only the learner imports the functions. Part names that are not declared there are plug-ins: entry points
of the kind's group, `package.module:function` or `file.py:function`; their parameters are the keyword-only
arguments of the function.

Called by `asyncrl.trainers.presets` (checks), `asyncrl.trainers.algorithm` (functions) and `asyncrl algos`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.envs.registry import load_plugin, names

Kind = Literal["advantage", "loss", "aggregation", "correction", "rejection", "filter", "shaping", "kl"]
Level = Literal["token", "sequence", "batch"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a part: a number in a closed range, a bool, or a table of numbers."""

    default: Any
    low: float = -math.inf
    high: float = math.inf

    def check(self, value: Any) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else "must be true or false"
        if isinstance(self.default, dict):
            numbers = isinstance(value, dict) and all(
                isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
                for v in value.values()
            )
            return None if numbers else "must be a table of numbers"
        whole = isinstance(self.default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            return f"must be {'a whole' if whole else 'a'} number"
        inside = math.isfinite(value) and self.low <= value <= self.high
        return None if inside else f"must be from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Part:
    """One part of a kind.

    `level` says what the function must see at once: a `token` part any chunk of tokens, a `sequence` part whole
    sequences, a `batch` part the whole batch before the update, for which the learner runs a forward pass of its
    own. Of an advantage estimator, which always sees the whole batch, it says what it returns one number for.
    `needs` names what the learner must compute for it: `logp`, `squares`, `reference`, `value`, `process`,
    `greedy`.
    """

    line: str
    paper: str
    where: str
    """`module:function` below `asyncrl.trainers`."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    level: Level = "token"
    needs: tuple[str, ...] = ()

    def function(self) -> Callable[..., Any]:
        """Imports the function; it needs torch."""
        module, name = self.where.split(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"asyncrl.trainers.{module}"), name)
        return found


GROUPS: dict[Kind, str] = {
    "advantage": "asyncrl.advantages",
    "loss": "asyncrl.losses",
    "aggregation": "asyncrl.aggregations",
    "correction": "asyncrl.corrections",
    "rejection": "asyncrl.rejections",
    "filter": "asyncrl.filters",
    "shaping": "asyncrl.shapings",
    "kl": "asyncrl.kls",
}
"""Entry-point group of each kind."""
SEVERAL: frozenset[Kind] = frozenset({"rejection", "shaping"})
"""Kinds of which an algorithm may name several, separated by commas; they apply in that order."""
SIDES = ("clip_", "delta_")
"""Parameters whose `low` and `high` are distances to either side, and not the ends of a range."""


def find(kind: Kind, name: str) -> Part:
    """The part called `name`; a plug-in is imported.

    Raises:
        ValueError: there is none (the nearest name is given), or the plug-in cannot be used.
    """
    from asyncrl.trainers.parts import PARTS

    known = PARTS[kind]
    if name in known:
        return known[name]
    installed = names(GROUPS[kind])
    if ":" in name or name in installed:
        return _plugin(load_plugin(GROUPS[kind], name, kind), kind, name)
    allowed = sorted({*known, *installed})
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"algo.{kind} = {name!r} is unknown; {hint}allowed: {', '.join(allowed)}")


def split(kind: Kind, value: str) -> list[str]:
    """The names in a setting: one, or several where the kind allows it; `none` is nobody.

    Raises:
        ValueError: a name comes twice.
    """
    found = [name.strip() for name in value.split(",")] if kind in SEVERAL else [value]
    if len(set(found)) < len(found):
        raise ValueError(f"algo.{kind} = {value!r} names a part twice; name each once")
    return [name for name in found if name != "none"] if kind in SEVERAL else found


def complete(kind: Kind, value: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the parts named by a setting: the given ones over the defaults.

    Raises:
        ValueError: a part or a parameter is unknown, or a value is out of its range.
    """
    allowed: dict[str, Parameter] = {}
    for name in split(kind, value):
        allowed |= find(kind, name).parameters
    for name, number in given.items():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            takes = ", ".join(f"{key} [{p.default}]" for key, p in allowed.items()) or "no parameters"
            raise ValueError(f"algo.{kind}_args has {name!r}; {hint}algo.{kind} = {value!r} takes {takes}")
        wrong = allowed[name].check(number)
        if wrong:
            raise ValueError(f"algo.{kind}_args: {name} = {number!r} {wrong} (algo.{kind} = {value!r})")
    arguments = {name: parameter.default for name, parameter in allowed.items()} | dict(given)
    for high in (name for name in arguments if name.endswith("high") and not name.startswith(SIDES)):
        low = high.removesuffix("high") + "low"
        if arguments.get(low, arguments[high]) > arguments[high]:
            raise ValueError(
                f"algo.{kind}_args: {low} = {arguments[low]} is above {high} = {arguments[high]}, so nothing lies "
                f"between them (algo.{kind} = {value!r}); give a range"
            )
    return arguments


def own(part: Part, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that belong to one part, where several share a table."""
    return {name: arguments[name] for name in part.parameters}


def _plugin(function: Callable[..., Any], kind: Kind, name: str) -> Part:
    """A plug-in as a part; it may say its `level`, `needs` and `targets` as attributes of the function.

    Raises:
        ValueError: it is no function, a parameter has no default, or an attribute is missing.
    """
    if not callable(function):
        raise ValueError(f"algo.{kind} = {name!r} is a {type(function).__name__}, not a function")
    parameters = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                raise ValueError(f"algo.{kind} = {name!r}: its parameter {key!r} needs a default")
            parameters[key] = Parameter(parameter.default)
    line = (inspect.getdoc(function) or "").split("\n")[0]

    class Plugin(Part):
        def function(self) -> Callable[..., Any]:
            return function

    level: Level = getattr(function, "level", "sequence" if kind == "advantage" else "token")
    usual = ("reference",) if kind == "kl" else ("logp",) if level == "batch" else ()
    needs = tuple(getattr(function, "needs", usual))
    if kind == "kl" and parameters:
        raise ValueError(f"algo.kl = {name!r}: a divergence takes no parameters, got {', '.join(parameters)}")
    if kind == "advantage" and "value" in needs and not callable(getattr(function, "targets", None)):
        raise ValueError(
            f"algo.advantage = {name!r} needs a critic; give the function an attribute `targets`, "
            "(outcomes) -> [N] what the critic is fitted to"
        )
    return Plugin(line or "a plug-in", "", name, parameters, level, needs)
