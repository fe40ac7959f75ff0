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
    "sft": "supervised training on an environment's demonstrations, or on a file of conversations",
    "dpo": "train a model on a file of preference pairs (DPO)",
    "reward-model": "make a reward model from a file of preference pairs",
    "hub": "run the hub (for schedulers; `train` starts it)",
    "generator": "run one generator, on any machine that reaches the hub",
    "scorer": "serve a reward model to generators (`train` starts it)",
    "env-worker": "serve an environment from a Python of its own, for `--env worker`",
    "learner": "run one learner rank, with the torchrun variables set",
    "doctor": "check this machine: versions, sockets, disk, plug-ins",
    "algos": "list algorithms and their parts; `algos show NAME` explains one",
    "envs": "list environments; show, check or begin one: `envs show|check|new NAME`",
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
    from asyncrl.learner.errors import NotFinite
    from asyncrl.settings import UsageError

    try:
        return _HANDLERS[command](Parser(command), arguments[1:])
    except UsageError as error:
        print(f"asyncrl {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except NotFinite as error:
        print(f"asyncrl {command}: {error}", file=sys.stderr)
        return 1
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
    text, status = report(config, str(model), tasks, as_json=options.json)
    print(text)
    return status


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
    parser.add_argument("--data", metavar="FILE.jsonl", help="conversations; default: the environment's answers")
    parser.add_argument("--loss", choices=("all", "assistant", "last"), help="what is trained of them [assistant]")
    _add_passes(parser)
    options, config, model, out = _made_from(parser, arguments)
    if options.data is not None:
        from asyncrl.learner.examples import Loss
        from asyncrl.learner.sft import train_file

        data = Path(options.data).expanduser()
        loss: Loss = options.loss or "assistant"
        train_file(config, model, out, data, loss, *_passes(parser, options), print)
    else:
        if (options.loss, options.epochs, options.batch) != (None, None, None):
            parser.error("--loss, --epochs and --batch are for --data; without it the settings of [toy] apply")
        from asyncrl.launch import resolved
        from asyncrl.toy import warm_start

        warm_start(resolved(config), model, out, print)
    print(f"made {out}. Next: asyncrl train --model {out}")
    return 0


def _dpo(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--pairs", required=True, metavar="FILE.jsonl", help="chosen and rejected answers")
    parser.add_argument("--beta", type=float, default=0.1, metavar="FLOAT", help="pull to the initial model [0.1]")
    _add_passes(parser)
    options, config, model, out = _made_from(parser, arguments)
    if not 0 < options.beta < float("inf"):
        parser.error(f"--beta {options.beta}: a number above 0 is needed")
    from asyncrl.learner.dpo import train_file

    data = Path(options.pairs).expanduser()
    train_file(config, model, out, data, options.beta, *_passes(parser, options), print)
    print(f"made {out}. Next: asyncrl eval {out}")
    return 0


def _reward_model(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--pairs", required=True, metavar="FILE.jsonl", help="chosen and rejected answers")
    parser.add_argument(
        "--held-out", type=float, default=0.1, metavar="FLOAT", help="share of the pairs to test on [0.1]"
    )
    _add_passes(parser)
    options, config, model, out = _made_from(parser, arguments)
    if not 0 <= options.held_out < 1:
        parser.error(f"--held-out {options.held_out}: a share from 0 to below 1 is needed")
    from asyncrl.learner.reward_model import train_file

    data = Path(options.pairs).expanduser()
    train_file(config, model, out, data, options.held_out, *_passes(parser, options), print)
    print(f"made {out}")
    return 0


def _doctor(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.doctor import doctor

    parser.add_argument("--dir", default="runs", help="folder that will hold the runs [runs]")
    text, status = doctor(Path(parser.parse_args(arguments).dir))
    print(text)
    return status


def _algos(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("show", nargs="?", metavar="show", help="explain one algorithm instead of listing all")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset, or a plug-in as for --algo")
    options = parser.parse_args(arguments)
    if options.show not in (None, "show"):
        parser.error(f"{options.show!r} is not `show`; did you mean `asyncrl algos show {options.show}`?")
    if options.show and options.name is None:
        parser.error("show needs a NAME; `asyncrl algos` lists them")
    from asyncrl.algos import algos_text, show_text
    from asyncrl.settings import UsageError

    try:
        print(show_text(options.name) if options.show else algos_text())
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _envs(parser: Parser, arguments: list[str]) -> int:
    from asyncrl.envs_command import run

    return run(parser, arguments)


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
        if config.reward.model is not None:
            raise UsageError(
                "reward.model is for `asyncrl train`, which starts the scorer; start `asyncrl scorer` by hand and "
                "give its address as --reward.endpoint"
            )
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


def _scorer(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a sequence classifier with one output")
    parser.add_argument("--endpoint", required=True, metavar="ADDRESS", help="where to listen: tcp://host:port")
    parser.add_argument("--device", default="cpu", help="torch device [cpu]")
    parser.add_argument("--batch", type=int, default=16, metavar="INT", help="most conversations at once [16]")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="the run's reward.timeout_s [60]")
    _add_parent(parser)
    options = parser.parse_args(arguments)
    if options.batch < 1 or not 0 < options.timeout < float("inf"):
        parser.error(f"--batch {options.batch} --timeout {options.timeout:g}: at least 1, and more than 0 s")
    _adopt(options)
    from asyncrl.scorer_launch import check_reward_model

    path = Path(options.model).expanduser()
    check_reward_model(path)

    async def serve() -> NoReturn:
        from asyncrl.scorer import serve

        status = await serve(str(path), options.endpoint, options.device, options.batch, options.timeout)
        sys.stdout.flush()
        # A batch that hangs in a thread must not keep a finished process alive.
        os._exit(status)

    return _loop(serve)


def _env_worker(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--env", required=True, metavar="NAME", help="the environment, as for `train`")
    parser.add_argument("--env.args", dest="args", metavar="JSON", help="its keyword arguments [{}]")
    parser.add_argument("--endpoint", required=True, metavar="ADDRESS", help="where to listen: tcp://host:port")
    parser.add_argument("--threads", type=int, default=1, metavar="INT", help="for environments that block [1]")
    parser.add_argument(
        "--silence", type=float, default=60.0, metavar="S", help="closes a silent client's episodes"
    )
    _add_parent(parser)
    from asyncrl import settings

    rest, entries = settings.split_entries(arguments)
    options = parser.parse_args(rest)
    if options.threads < 1 or not 0 < options.silence < float("inf"):
        parser.error(f"--threads {options.threads} --silence {options.silence:g}: at least 1, and more than 0 s")
    env = settings.read([], {"env.name": options.env, "env.args": options.args, **entries}).env
    _adopt(options)

    async def serve() -> NoReturn:
        from asyncrl.envs.worker import serve

        status = await serve(env.name, env.args, options.endpoint, options.threads, options.silence)
        sys.stdout.flush()
        # An episode that hangs in a thread must not keep a finished process alive.
        os._exit(status)

    return _loop(serve)


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
    "dpo": _dpo,
    "reward-model": _reward_model,
    "hub": _hub,
    "generator": _generator,
    "scorer": _scorer,
    "env-worker": _env_worker,
    "learner": _learner,
    "doctor": _doctor,
    "algos": _algos,
    "envs": _envs,
}


# ---- shared ----------------------------------------------------------------------------------------


def _settings(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, Config]:
    """Parses a command's own options and the settings; returns both."""
    from asyncrl import settings

    settings.add_flags(parser)
    rest, entries = settings.split_entries(arguments)
    options, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        raise settings.UsageError(settings.unknown_flag(unknown[0]))
    vars(options).update(entries)
    _adopt(options)
    return options, settings.read(options.files, _typed(options))


def _made_from(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, Config, Path, Path]:
    """Options and settings of a command that makes a model folder from another one, and both folders."""
    parser.add_argument("model", help="folder of the model to start from")
    parser.add_argument("out", help="folder to make; must not exist")
    options, config = _settings(parser, arguments)
    from asyncrl.launch import check_model
    from asyncrl.settings import UsageError

    model, out = Path(options.model).expanduser(), Path(options.out).expanduser()
    check_model(model)
    if out.exists():
        raise UsageError(f"{out} exists; choose a folder that does not")
    return options, config, model, out


def _add_passes(parser: Parser) -> None:
    parser.add_argument("--epochs", type=int, metavar="INT", help="how often each line is trained on [1]")
    parser.add_argument("--batch", type=int, metavar="INT", help="lines in a step; --learner.lr is its rate [32]")


def _passes(parser: Parser, options: argparse.Namespace) -> tuple[int, int]:
    """Epochs, and lines in a step."""
    epochs, batch = 1 if options.epochs is None else options.epochs, 32 if options.batch is None else options.batch
    if epochs < 1 or batch < 1:
        parser.error(f"--epochs {epochs} --batch {batch}: both must be at least 1")
    return epochs, batch


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
