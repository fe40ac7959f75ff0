"""The command `asyncrl envs`: which environments there are, what one is, whether it is sound, how to begin one.

Texts only: plug-ins are found by `asyncrl.envs.registry` and judged by `asyncrl.envs.check`; a new package's files
are those of `asyncrl.env_template`. Exit codes: 0 fine, 1 a check failed, 2 unusable input. Called by the command
line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import inspect
import json
import keyword
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl import settings
from asyncrl.config import Env
from asyncrl.env_template import files
from asyncrl.envs.base import Demonstrates, Environment, Interruptible, Replays, Snapshots, Truncates
from asyncrl.envs.opening import start_of
from asyncrl.envs.registry import GROUP, PluginError, entries, load, load_plugin, names, owner

WIDTH = 110
SHOWN = 2000
"""Most characters of a task that are shown."""
ACTIONS = ("list", "show", "check", "new")
NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
ABILITIES = {
    "snapshots": (Snapshots, "its state is kept, and restored elsewhere"),
    "replay": (Replays, "it takes recorded answers for finished turns"),
    "interrupted": (Interruptible, "it knows what to do with a message that may have had its effect already"),
    "truncated": (Truncates, "it has rewards for an episode that was cut off"),
}
"""What an episode may have beside `reset`, `step` and `close`."""


def run(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: the environment, its arguments, the name or the folder cannot be used.
    """
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="what to do [list]")
    parser.add_argument("name", nargs="?", metavar="NAME", help="as for `train --env`; for `new` a new name")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="new: the folder to make [NAME]")
    parser.add_argument("--env.args", metavar="JSON", help="show, check: arguments of the environment [{}]")
    parser.add_argument("--env.timeout_s", metavar="S", help="show, check: time limit of each call [30]")
    parser.add_argument("--tasks", type=int, metavar="INT", help="check: tasks whose episodes are played [4]")
    rest, entries_of_args = settings.split_entries(arguments)
    options = parser.parse_args(rest)
    _check_usage(parser, options)
    typed = {key: value for key, value in vars(options).items() if key.startswith("env.")}
    env = settings.read([], typed | entries_of_args).env
    try:
        match options.action:
            case "list":
                print(list_text())
                return 0
            case "show":
                print(show_text(options.name, env))
                return 0
            case "check":
                return _check(options.name, env, 4 if options.tasks is None else options.tasks)
            case _:
                print(new(options.name, options.folder))
                return 0
    except ValueError as error:
        raise settings.UsageError(str(error)) from error


def _check_usage(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what does not belong to the action."""
    if options.action == "list" and options.name is not None:
        parser.error(f"list takes no NAME; `asyncrl envs show {options.name}` explains one")
    if options.action != "list" and options.name is None:
        parser.error(f"{options.action} needs a NAME; `asyncrl envs list` lists the installed ones")
    if options.action != "new" and options.folder is not None:
        parser.error(f"{options.folder!r} is too much: only `new` takes a FOLDER")
    if options.action != "check" and options.tasks is not None:
        parser.error("--tasks is for `check`")


# ---- list ------------------------------------------------------------------------------------------


def list_text() -> str:
    """All installed environments: what each is, whose, and where; broken ones with the reason."""
    rows = [row for name in names() for row in _rows(name)]
    width = max(len(name) for name, _ in rows) + 4 if rows else 0
    lines = ["environments: --env NAME; `asyncrl envs show NAME` explains one"]
    for name, text in rows:
        first, *more = textwrap.wrap(text, WIDTH - width, break_long_words=False)
        lines += [f"  {name}".ljust(width) + first, *(" " * width + line for line in more)]
    return "\n".join(
        [*lines, "", "Your own: `asyncrl envs new NAME`, `--env pkg.mod:make` or `--env file.py:make`"]
    )


def _rows(name: str) -> Iterator[tuple[str, str]]:
    """What an environment is, or why it cannot be used; then each distribution that provides it."""
    try:
        yield name, _documentation(load_plugin(GROUP, name, "environment"))[0].partition("\n\n")[0]
    except PluginError as error:
        # A broken plug-in must not hide the others; its own line says what is wrong with it.
        yield name, f"cannot be used: {error}"
    for entry in entries(GROUP)[name]:
        yield "", f"{owner(entry)}, {entry.value}"


def _documentation(make: Any) -> list[str]:
    """The docstrings of a plug-in's module, which says what the environment is, and of its function."""
    module = inspect.getmodule(make)
    texts = [inspect.cleandoc(module.__doc__ or "")] if module else []
    return [text for text in (*texts, inspect.getdoc(make)) if text] or ["(no docstring)"]


# ---- show ------------------------------------------------------------------------------------------


def show_text(name: str, env: Env) -> str:
    """What an environment is: its documentation, its arguments, and what a first episode begins with.

    Raises:
        PluginError: there is no such environment, or it cannot be made with arguments that were given.
    """
    make = load_plugin(GROUP, name, "environment")
    blocks = [f"{name}{inspect.signature(make) if callable(make) else ''}"]
    blocks += [f"from {owner(entry)}, {entry.value}" for entry in entries(GROUP).get(name, [])]
    blocks += ["", "\n\n".join(_documentation(make))]
    try:
        environment = load(name, env.args)
    except PluginError as error:
        if env.args:
            raise
        return "\n".join([*blocks, "", f"Not made: {error}", "Arguments: --env.args JSON"])
    return "\n".join([*blocks, "", *_abilities(environment), "", *_sample(environment, env.timeout_s)])


def _abilities(environment: Environment) -> list[str]:
    episode = environment.make()
    lines = [f"  {what:<14} {text}" for what, (kind, text) in ABILITIES.items() if isinstance(episode, kind)]
    if isinstance(environment, Demonstrates):
        lines.append(f"  {'demonstration':<14} it shows ideal episodes, for a warm start")
    return ["beside reset, step and close it has:", *(lines or ["  nothing"])]


def _sample(environment: Environment, timeout_s: float) -> list[str]:
    """The first task, the ideal answer to it, and the tools that a real reset gives."""
    try:
        task = environment.task("train", 0)
        start = asyncio.run(start_of(environment, task, timeout_s))
        shown = environment.demonstration(task) if isinstance(environment, Demonstrates) else None
    except (Exception, SystemExit) as error:  # The plug-in's own code: its failure is what there is to show.
        return [f"its first episode failed: {type(error).__name__}: {error}"]
    parts = {"id": task.id, "prompt": task.prompt, "answer": task.answer, "metadata": task.metadata}
    lines = [f"task('train', 0): {_json(parts)}", f"reset: {_json(start.messages)}"]
    lines += [f"demonstration: {_json(shown)}"] if shown is not None else []
    return [*lines, "tools: " + ("none" if not start.tools else ""), *(_json(tool) for tool in start.tools)]


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


# ---- check and new -----------------------------------------------------------------------------------


def _check(name: str, env: Env, tasks: int) -> int:
    from asyncrl.envs.check import check_env

    report = check_env(name, env.args, tasks=tasks, timeout_s=env.timeout_s)
    print(report.text())
    return int(bool(report.problems))


def new(name: str, folder: str | None) -> str:
    """Writes the package of a new environment; returns what to do next.

    Raises:
        ValueError: the name cannot be a package's or is taken, or the folder exists.
        UsageError: the folder cannot be written.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(NAME, name) or keyword.iskeyword(module):
        raise ValueError(
            f"{name!r} cannot be an environment's name; use lower-case words and dashes, as in my-env"
        )
    if name in names() or importlib.util.find_spec(module) is not None:
        what = "an environment" if name in names() else "a Python module"
        raise ValueError(f"{name!r}: there is {what} of this name already; choose another name")
    target = Path(folder or name).expanduser()
    if target.exists():
        raise ValueError(f"{target} exists; choose a folder that does not")
    try:
        for path, text in files(name).items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text)
    except OSError as error:
        raise settings.UsageError(f"{target} cannot be written: {error}") from error
    return (
        f"made {target}. Next:\n"
        f"  pip install -e {target}\n"
        f"  asyncrl envs check {name}\n"
        f"  asyncrl train --env {name}"
    )
