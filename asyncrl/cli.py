"""The `asyncrl` command: parses, dispatches, and turns errors into exit codes. Nothing heavy is imported here.

Exit codes: 0 done, 1 the run failed, 2 the input cannot be used, 3 the run had to stop (see
`asyncrl.process`), 130 stopped by Ctrl-C. Each command is a small function below; what it does lives in a
module of its own, imported when the command runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl import __version__
from asyncrl.process import EXIT_USAGE, die_with_parent

if TYPE_CHECKING:
    from asyncrl.config import Config

COMMANDS: dict[str, str] = {
    "train": "train a model: `asyncrl train --algo dapo` needs nothing else",
    "eval": "mean reward of a model or a run on held-out tasks",
    "runs": "list the runs",
    "episodes": "list a run's episodes, or account for all of them",
    "init-model": "make a tiny model with a character tokenizer",
    "sft": "supervised warm start on an environment's demonstrations",
    "hub": "run the hub (for schedulers; `train` starts it)",
    "generator": "run one generator, on any machine that reaches the hub",
    "learner": "run one learner rank, with the torchrun variables set",
    "doctor": "check this machine: versions, sockets, disk, plug-ins",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one paragraph and exit code 2."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"asyncrl {command}", description=COMMANDS[command], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Prints the message and where to look, then exits."""
        print(f"{self.prog}: {message}\nSee {self.prog} --help.", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print("usage: asyncrl COMMAND [options]\n\ncommands:")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()))
        print("\n`asyncrl COMMAND --help` lists a command's options.")
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"asyncrl {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        guess = f" Did you mean `asyncrl {near[0]}`?" if near else ""
        print(f"asyncrl: no command {arguments[0]!r}.{guess} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return EXIT_USAGE
    command = arguments[0]
    from asyncrl.settings import UsageError

    try:
        return _HANDLERS[command](Parser(command), arguments[1:])
    except UsageError as error:
        print(f"asyncrl {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"asyncrl {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; Python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ---- commands for people ---------------------------------------------------------------------------


def _train(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.train import resume, train

    parser.add_argument("--resume", metavar="RUN", help="go on with a run; its own settings apply")
    parser.add_argument("--dry-run", action="store_true", help="explain the run, start nothing")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    options, config = _settings(parser, arguments)
    if options.resume is not None:
        if _typed(options) or options.files:
            parser.error("--resume takes no settings: a run goes on with those it was started with")
        return resume(_run_dir(options.resume), options.plain)
    return train(config, dry_run=options.dry_run, plain=options.plain)


def _eval(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="a run's folder or name, or a model folder")
    parser.add_argument("--tasks", type=int, metavar="INT", help="held-out tasks [eval.tasks]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, config = _settings(parser, arguments)
    from asyncrl.evaluate import report
    from asyncrl.launch import check_model, resolved, stored

    target = Path(options.target).expanduser()
    if (target / "config.json").is_file():
        model = target
    else:
        if _typed(options) or options.files:
            parser.error("a run is evaluated with its own settings; to change them give its model folder instead")
        run_dir = _run_dir(options.target)
        config, model = stored(run_dir), run_dir / "model"
    check_model(model)
    tasks = config.eval.tasks if options.tasks is None else options.tasks
    if tasks < 1:
        parser.error(f"--tasks {tasks}: at least 1 task is needed")
    one = config.generator.model_copy(update={"count": 1, "gpus": []})
    config = resolved(config.model_copy(update={"generator": one}))
    print(report(config, str(model), tasks, as_json=options.json))
    return 0


def _runs(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.metrics.runs import list_runs

    parser.add_argument("--dir", default="runs", help="folder that holds the runs [runs]")
    print(list_runs(Path(parser.parse_args(arguments).dir)))
    return 0


def _episodes(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.metrics.summary import episodes_summary, list_episodes

    parser.add_argument("run", metavar="RUN", help="a run's folder or name")
    parser.add_argument("--summary", action="store_true", help="account for every admitted episode")
    parser.add_argument("--state", help="only episodes in this state, for example failed")
    parser.add_argument("--limit", type=int, default=20, metavar="INT", help="most rows [20]")
    options = parser.parse_args(arguments)
    run_dir = _run_dir(options.run)
    if options.summary:
        text = episodes_summary(run_dir)
        print(text)
        return 0 if "\nadds up" in text else 1
    else:
        print(list_episodes(run_dir, state=options.state, limit=options.limit))
    return 0


def _init_model(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("folder", help="folder to make; must not exist")
    parser.add_argument("--hidden", type=int, default=64, metavar="INT", help="width, a multiple of 32 [64]")
    parser.add_argument("--layers", type=int, default=2, metavar="INT", help="layers [2]")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="seed of the weights [0]")
    options = parser.parse_args(arguments)
    from asyncrl.settings import UsageError
    from asyncrl.toy import init_model

    folder = Path(options.folder).expanduser()
    if folder.exists():
        raise UsageError(f"{folder} exists; choose a folder that does not")
    try:
        init_model(folder, hidden=options.hidden, layers=options.layers, seed=options.seed)
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot make {folder}: {error}") from error
    print(f"made {folder}. Next: asyncrl sft {folder} {folder}-sft")
    return 0


def _sft(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("model", help="folder of the model to start from")
    parser.add_argument("out", help="folder to make; must not exist")
    options, config = _settings(parser, arguments)
    from asyncrl.launch import check_model, resolved
    from asyncrl.settings import UsageError
    from asyncrl.toy import warm_start

    model, out = Path(options.model).expanduser(), Path(options.out).expanduser()
    check_model(model)
    if out.exists():
        raise UsageError(f"{out} exists; choose a folder that does not")
    warm_start(resolved(config), model, out, print)
    print(f"made {out}. Next: asyncrl train --model {out}")
    return 0


def _doctor(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.doctor import doctor

    parser.add_argument("--dir", default="runs", help="folder that will hold the runs [runs]")
    text, status = doctor(Path(parser.parse_args(arguments).dir))
    print(text)
    return status


# ---- commands for schedulers -----------------------------------------------------------------------


def _hub(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--run", metavar="DIR", help="an existing run; without it the settings make a new one")
    parser.add_argument("--port", type=int, metavar="INT", help="control port; chunks use the next [hub.port]")
    _add_parent(parser)
    options, config = _settings(parser, arguments)
    from asyncrl.launch import create, hub_port, new_run_dir, resolved, stored
    from asyncrl.settings import UsageError

    if options.run is None:
        if config.model.path is None:
            raise UsageError("the hub needs --model.path: generators and learner load the model from there")
        config = resolved(config, here=False)
        run_dir = new_run_dir(config)
        port = options.port or hub_port(config)
        create(config, run_dir)
    else:
        if _typed(options) or options.files:
            parser.error("--run takes no settings: a run goes on with those it was started with")
        run_dir = _run_dir(options.run)
        config = stored(run_dir)
        port = options.port or hub_port(config)
    from asyncrl.hub import Hub

    print(f"hub of {run_dir} at tcp://{config.hub.host}:{port}", flush=True)

    async def serve() -> int:
        return await Hub(run_dir, port).run()

    return _loop(serve)


def _generator(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--hub", required=True, metavar="ADDRESS", help="tcp://host:port")
    parser.add_argument("--name", required=True, help="unique within the run, for example generator-7")
    _add_wait(parser)
    _add_parent(parser)
    options = parser.parse_args(arguments)
    _adopt(options)

    async def serve() -> int:
        from asyncrl.generator.process import GeneratorProcess

        return await GeneratorProcess(options.hub, options.name).run(options.wait)

    status = _loop(serve)
    # A collective that hangs in a thread must not keep a finished process alive.
    sys.stdout.flush()
    os._exit(status)


def _learner(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--hub", required=True, metavar="ADDRESS", help="tcp://host:port")
    _add_wait(parser)
    _add_parent(parser)
    options = parser.parse_args(arguments)
    _adopt(options)
    from asyncrl.learner.process import LearnerProcess

    return LearnerProcess(options.hub, options.wait).run()


_HANDLERS: dict[str, Callable[[Parser, list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "runs": _runs,
    "episodes": _episodes,
    "init-model": _init_model,
    "sft": _sft,
    "hub": _hub,
    "generator": _generator,
    "learner": _learner,
    "doctor": _doctor,
}


# ---- shared ----------------------------------------------------------------------------------------


def _settings(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, Config]:
    """Parses a command's own options and the settings; returns both."""
    from asyncrl import settings

    settings.add_flags(parser)
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise settings.UsageError(settings.unknown_flag(unknown[0]))
    _adopt(options)
    return options, settings.read(options.files, _typed(options))


def _typed(options: argparse.Namespace) -> dict[str, str | None]:
    """The settings that were typed as flags."""
    return {key: value for key, value in vars(options).items() if "." in key and value is not None}


def _run_dir(run: str) -> Path:
    from asyncrl.settings import UsageError

    for candidate in (Path(run).expanduser(), Path("runs") / run):
        if (candidate / "run.db").is_file():
            return candidate.resolve()
    raise UsageError(f"{run} is no run: there is no run.db in it. `asyncrl runs` lists the runs")


def _add_wait(parser: Parser) -> None:
    parser.add_argument("--wait", type=float, default=120.0, metavar="S", help="longest wait for the hub [120]")


def _add_parent(parser: Parser) -> None:
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def _adopt(options: argparse.Namespace) -> None:
    if getattr(options, "parent", None) is not None:
        die_with_parent(options.parent)


def _loop(serve: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs a coroutine function on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve())
