"""The `asyncrl` command: dispatches, and turns errors into exit codes. Nothing heavy is imported here.

Exit codes: 0 done, 1 the run failed, 2 the input cannot be used, 3 the run had to stop, 4 what a process
waited for did not come within its limit (3 and 4: see `asyncrl.process`), 130 stopped by Ctrl-C. Each command is a
small function in `asyncrl.commands`; what it does lives in a module of its own, imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from asyncrl import __version__
from asyncrl.commands import models, processes, runs
from asyncrl.commands.options import Parser
from asyncrl.process import EXIT_USAGE

COMMANDS: dict[str, str] = {
    "train": "train a model: `asyncrl train --algo dapo` needs nothing else",
    "eval": "mean reward of a model or a run on held-out tasks",
    "runs": "list the runs",
    "episodes": "list a run's episodes, or account for all of them",
    "replay": "train steps of a run once more and compare, bit for bit; or with another algorithm",
    "diff": "the first step at which two runs differ, and in what",
    "init-model": "make a tiny model with a character tokenizer",
    "sft": "supervised training on an environment's demonstrations, or on a file of conversations",
    "dpo": "train a model on a file of preference pairs (DPO)",
    "reward-model": "make a reward model from a file of preference pairs",
    "hub": "run the hub (for schedulers; `train` starts it)",
    "generator": "run one generator, on any machine that reaches the hub",
    "scorer": "serve a reward model to generators (`train` starts it)",
    "env-worker": "serve an environment from a Python of its own, for `--env worker`",
    "learner": "run one learner rank, with the torchrun variables set",
    "key": "make a key file, for a scorer or env-worker on another machine than the run",
    "doctor": "check this machine (versions, sockets, disk, plug-ins), or a run: `doctor RUN`",
    "algos": "list algorithms and their parts; `algos show NAME` explains one",
    "envs": "list environments; show, check or begin one: `envs show|check|new NAME`",
}


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
        return _HANDLERS[command](Parser(command, COMMANDS[command]), arguments[1:])
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


_HANDLERS: dict[str, Callable[[Parser, list[str]], int]] = {
    "train": runs.train,
    "eval": runs.evaluate,
    "runs": runs.runs,
    "episodes": runs.episodes,
    "replay": runs.replay,
    "diff": runs.diff,
    "init-model": models.init_model,
    "sft": models.sft,
    "dpo": models.dpo,
    "reward-model": models.reward_model,
    "hub": processes.hub,
    "generator": processes.generator,
    "scorer": processes.scorer,
    "env-worker": processes.env_worker,
    "learner": processes.learner,
    "key": processes.key,
    "doctor": runs.doctor,
    "algos": _algos,
    "envs": _envs,
}
