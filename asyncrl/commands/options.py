"""What the commands share: the parser, options that several of them have, folders, the event loop.

Called by the modules beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl.process import EXIT_USAGE, die_with_parent
from asyncrl.watchdog import watchdog

if TYPE_CHECKING:
    from asyncrl.config import Config


END_S = 60.0
"""Longest wait for threads at the end of an event loop, which closes only after them."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one paragraph and exit code 2."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"asyncrl {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Prints the message and where to look, then exits."""
        print(f"{self.prog}: {message}\nSee {self.prog} --help.", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def options_of(parser: Parser, arguments: list[str], process: str = "") -> argparse.Namespace:
    """Parses a command's own options; settings are left as text. `process`: see `settings_of`."""
    from asyncrl import settings

    settings.add_files(parser)
    settings.add_flags(parser)
    rest, entries = settings.split_entries(arguments)
    options, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        raise settings.UsageError(settings.unknown_flag(unknown[0]))
    vars(options).update(entries)
    adopt(options, process)
    return options


def settings_of(parser: Parser, arguments: list[str], process: str = "") -> tuple[argparse.Namespace, Config]:
    """Parses a command's own options and the settings; returns both. `process`: the name of one of a run's."""
    from asyncrl import settings

    options = options_of(parser, arguments, process)
    return options, settings.read(options.files, typed(options))


def made_from(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, Config, Path, Path]:
    """Options and settings of a command that makes a model folder from another one, and both folders."""
    parser.add_argument("model", help="folder of the model to start from")
    parser.add_argument("out", help="folder to make; must not exist")
    options, config = settings_of(parser, arguments)
    from asyncrl.launch import check_model
    from asyncrl.settings import UsageError

    model, out = Path(options.model).expanduser(), Path(options.out).expanduser()
    check_model(model)
    if out.exists():
        raise UsageError(f"{out} exists; choose a folder that does not")
    return options, config, model, out


def add_passes(parser: Parser) -> None:
    """The options of commands that go over a file's lines several times."""
    parser.add_argument("--epochs", type=int, metavar="INT", help="how often each line is trained on [1]")
    parser.add_argument("--batch", type=int, metavar="INT", help="lines in a step; --learner.lr is its rate [32]")


def passes(parser: Parser, options: argparse.Namespace) -> tuple[int, int]:
    """Epochs, and lines in a step."""
    epochs, batch = 1 if options.epochs is None else options.epochs, 32 if options.batch is None else options.batch
    if epochs < 1 or batch < 1:
        parser.error(f"--epochs {epochs} --batch {batch}: both must be at least 1")
    return epochs, batch


def typed(options: argparse.Namespace) -> dict[str, str | None]:
    """The settings that were typed as flags."""
    return {key: value for key, value in vars(options).items() if "." in key and value is not None}


def run_folder(run: str) -> Path:
    """The folder of a run that is given by folder or name.

    Raises:
        UsageError: there is no such run.
    """
    from asyncrl.settings import UsageError

    for candidate in (Path(run).expanduser(), Path("runs") / run):
        if (candidate / "run.db").is_file():
            return candidate.resolve()
    raise UsageError(f"{run} is no run: there is no run.db in it. `asyncrl runs` lists the runs")


def add_wait(parser: Parser) -> None:
    """The option of processes that begin by asking the hub."""
    parser.add_argument("--wait", type=float, default=120.0, metavar="S", help="longest wait for the hub [120]")


def add_key(parser: Parser) -> None:
    """The option that gives a process its keys; without it the environment variable ASYNCRL_KEY does."""
    parser.add_argument("--key", metavar="FILE", help="key file of the run (run.key in its folder) [$ASYNCRL_KEY]")


def take_key(parser: Parser, options: argparse.Namespace) -> None:
    """Takes the key file, and refuses an address (`--hub`, `--endpoint`) that needs one without it."""
    from asyncrl import keys

    if options.key is not None:
        keys.use(Path(options.key))
    keys.of_process()
    if "hub" in options:
        keys.for_hub(options.hub)
    if "endpoint" in options:
        if options.key is not None and keys.is_loopback(options.endpoint):
            # A client on loopback would not know of it.
            parser.error(f"--key {options.key} --endpoint {options.endpoint}: an address on loopback has no key")
        keys.for_endpoint(options.endpoint)


def add_parent(parser: Parser) -> None:
    """The options by which the supervisor names itself, and where it takes signs of life and wants stacks."""
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--watched", nargs=2, default=(None, None), help=argparse.SUPPRESS)


def adopt(options: argparse.Namespace, name: str = "") -> None:
    """Ties this process to the supervisor that started it, if one did, and has it watched under `name`."""
    if getattr(options, "parent", None) is not None:
        die_with_parent(options.parent)
    if name:
        link, stacks = options.watched
        watchdog.start(name, int(link) if link else None, Path(stacks) if stacks else None)


def at_once(work: Callable[[], int]) -> NoReturn:
    """Runs a process of a run and ends it as soon as `work` is over, with its status, or 1 after an error.

    Python would first wait for its threads, and one that hangs (a collective, a checkpoint's writer) keep it alive
    for ever, while the watchdog, a thread as well, goes on to give signs of life.
    """
    from asyncrl.settings import UsageError

    status = 1
    try:
        status = work()
    except UsageError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        status = EXIT_USAGE
    except Exception:  # The fault boundary of the process: what nobody expected is told, and ends it.
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_loop(serve: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a coroutine function on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    runner = asyncio.Runner(loop_factory=new_event_loop)
    try:
        return runner.run(serve())
    finally:
        with watchdog.waiting("its threads to end, for it has nothing else to do", END_S, "options.END_S"):
            runner.close()
