"""Finds plug-ins by name: environments here, and through `load_plugin` every other kind.

A name is that of an installed entry point, `package.module:object`, or `path/to/file.py:object`. Only the
requested plug-in is imported, so a broken one harms nobody else, and every failure says which distribution
to blame. Nothing is registered at import time and nothing is cached. Called by the hub, the generators and
the command line; `asyncrl doctor` lists what is installed, and `asyncrl envs` the environments.

Groups: `asyncrl.envs`, `asyncrl.rewards`, `asyncrl.algorithms` and those of an algorithm's parts
(`asyncrl.trainers.catalogue`), `asyncrl.engines`, `asyncrl.trackers`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.envs.base import Environment

GROUP = "asyncrl.envs"


class PluginError(ValueError):
    """A plug-in cannot be used; the text says why, whose it is, and what to do."""


def entries(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name; more than one under a name is a conflict."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        same = found.setdefault(entry.name, [])
        # A distribution can be seen twice, for example installed and on the path; that is no conflict.
        if all((entry.value, owner(entry)) != (other.value, owner(other)) for other in same):
            same.append(entry)
    return found


def names(group: str = GROUP) -> list[str]:
    """The names of the installed plug-ins of a group, sorted."""
    return sorted(entries(group))


def owner(entry: EntryPoint) -> str:
    """Name and version of the distribution that provides an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def load_plugin(group: str, name: str, what: str, built_in: Sequence[str] = ()) -> Any:
    """Imports one plug-in and returns its object.

    Args:
        group: entry-point group, for example `asyncrl.envs`.
        name: name of an entry point, `package.module:object` or `path/file.py:object`.
        what: what it is called in messages, for example `environment`.
        built_in: names that the caller knows itself, which an unknown name may have meant.

    Raises:
        PluginError: there is no such plug-in, two distributions provide it, or importing it failed.
    """
    if ":" in name:
        return _from_path(name, what)
    candidates = entries(group).get(name, [])
    if not candidates:
        raise PluginError(_unknown(group, name, what, built_in))
    if len(candidates) > 1:
        owners = " and ".join(sorted(f"{owner(entry)} ({entry.value})" for entry in candidates))
        raise PluginError(
            f"{what} {name!r} is provided by {owners}. Uninstall one of them, or say which you mean "
            f"with `package.module:object`."
        )
    entry = candidates[0]
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # A module that calls exit() must not end the command.
        raise PluginError(
            f"{what} {name!r} of the distribution {owner(entry)} cannot be loaded from {entry.value!r}: "
            f"{type(error).__name__}: {error}. Reinstall or repair that distribution."
        ) from error


def load(name: str, args: Mapping[str, Any]) -> Environment:
    """Makes an environment: the plug-in `name`, called with `args`.

    Raises:
        PluginError: see `load_plugin`; or the arguments do not fit, the plug-in refused them, or what it
            returned is no environment.
    """
    make = load_plugin(GROUP, name, "environment")
    if not callable(make):
        raise PluginError(f"environment {name!r} is a {type(make).__name__}, not a function that makes one")
    environment = _call(make, name, args)
    if not isinstance(environment, Environment):
        raise PluginError(
            f"environment {name!r} returned a {type(environment).__name__}, which lacks "
            f"task(split, index) or make(); see asyncrl.envs.base.Environment"
        )
    return environment


# ---- machinery -----------------------------------------------------------------------------------


def _unknown(group: str, name: str, what: str, built_in: Sequence[str]) -> str:
    known = [*built_in, *names(group)]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return (
        f"there is no {what} named {name!r}.{hint} Installed: {', '.join(known) or 'none'}. "
        f"Install a package that provides it (entry-point group {group!r}), or name an object directly: "
        f"`package.module:object` or `path/file.py:object`."
    )


def _from_path(name: str, what: str) -> Any:
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{what} {name!r}: importing {where!r} failed with {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        nearest = difflib.get_close_matches(attribute, public, n=1, cutoff=0.5)
        hint = (
            f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {', '.join(sorted(public)) or 'nothing'}"
        )
        raise PluginError(f"{what} {name!r}: {where!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (looked in {Path.cwd()})")
    title = f"asyncrl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(title, path.resolve())
    assert spec is not None  # a path that ends in .py always has a spec, and that a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and msgspec look their module up by name while it is being executed.
    sys.modules[title] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[title]
        raise
    return module


def _call(make: Callable[..., Any], name: str, args: Mapping[str, Any]) -> Any:
    signature = inspect.signature(make)
    try:
        signature.bind(**args)
    except TypeError as error:
        raise PluginError(
            f"env.args = {dict(args)!r} do not fit environment {name!r}: {error}. It takes {name}{signature}"
        ) from None
    try:
        return make(**args)
    except Exception as error:
        raise PluginError(
            f"environment {name!r} cannot be made with env.args = {dict(args)!r}: "
            f"{type(error).__name__}: {error}. It takes {name}{signature}"
        ) from error
