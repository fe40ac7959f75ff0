"""Commands that are the processes of a run: the supervisor starts them, or a scheduler, or a person by hand.

Nothing heavy is imported before the command runs. Called by `asyncrl.cli`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from asyncrl.commands.options import (
    Parser,
    add_key,
    add_parent,
    add_wait,
    adopt,
    at_once,
    on_loop,
    run_folder,
    settings_of,
    take_key,
    typed,
)
from asyncrl.process import EXIT_STOP_RUN


def hub(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl hub`."""
    parser.add_argument("--run", metavar="DIR", help="an existing run; without it the settings make a new one")
    parser.add_argument("--port", type=int, metavar="INT", help="control port; chunks use the next [hub.port]")
    add_key(parser)
    add_parent(parser)
    options, config = settings_of(parser, arguments, "hub")
    take_key(parser, options)
    from asyncrl import keys
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
        if typed(options) or options.files or options.key:
            parser.error("--run takes no settings: a run goes on with those it was started with, and with its key")
        run_dir = run_folder(options.run)
        config = stored(run_dir)
        port = options.port or hub_port(config)
    from asyncrl.hub import Hub
    from asyncrl.journal import JournalError

    keys.use_run(run_dir, config.hub)
    print(f"hub of {run_dir} at tcp://{config.hub.host}:{port}", flush=True)
    if (run_dir / keys.NAME).exists():
        print(f"it admits who has the key: --key {run_dir / keys.NAME}, a copy of it elsewhere", flush=True)

    async def serve() -> int:
        return await Hub(run_dir, port).run()

    try:
        return on_loop(serve)
    except JournalError as error:
        print(f"hub: {error}", flush=True)
        return EXIT_STOP_RUN


def generator(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl generator`."""
    parser.add_argument("--hub", required=True, metavar="ADDRESS", help="tcp://host:port")
    parser.add_argument("--name", required=True, help="unique within the run, for example generator-7")
    add_key(parser)
    add_wait(parser)
    add_parent(parser)
    options = parser.parse_args(arguments)
    from asyncrl.messages import Hello
    from asyncrl.peers import introduces

    if not introduces(f"{options.name}/".encode(), Hello("generator", options.name, "")):
        parser.error(f"--name {options.name}: not empty, without a slash, and no name of another kind of process")
    take_key(parser, options)
    adopt(options, options.name)

    async def serve() -> int:
        from asyncrl.generator.process import GeneratorProcess

        return await GeneratorProcess(options.hub, options.name).run(options.wait)

    at_once(lambda: on_loop(serve))


def scorer(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl scorer`."""
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a sequence classifier with one output")
    parser.add_argument("--endpoint", required=True, metavar="ADDRESS", help="where to listen: tcp://host:port")
    parser.add_argument("--device", default="cpu", help="torch device [cpu]")
    parser.add_argument("--batch", type=int, default=16, metavar="INT", help="most conversations at once [16]")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="the run's reward.timeout_s [60]")
    add_key(parser)
    parser.add_argument("--hang", type=float, default=30.0, metavar="S", help="the run's supervise.hang_s [30]")
    add_parent(parser)
    options = parser.parse_args(arguments)
    if options.batch < 1 or not all(0 < limit < float("inf") for limit in (options.timeout, options.hang)):
        given = f"--batch {options.batch} --timeout {options.timeout:g} --hang {options.hang:g}"
        parser.error(f"{given}: at least 1, and more than 0 s")
    take_key(parser, options)
    adopt(options, "scorer")
    from asyncrl.scorer_launch import check_reward_model

    path = Path(options.model).expanduser()
    check_reward_model(path)

    async def serve() -> NoReturn:
        from asyncrl.scorer import serve

        status = await serve(
            str(path), options.endpoint, options.device, options.batch, options.timeout, options.hang
        )
        sys.stdout.flush()
        # A batch that hangs in a thread must not keep a finished process alive.
        os._exit(status)

    return on_loop(serve)


def env_worker(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl env-worker`."""
    parser.add_argument("--env", required=True, metavar="NAME", help="the environment, as for `train`")
    parser.add_argument("--env.args", dest="args", metavar="JSON", help="its keyword arguments [{}]")
    parser.add_argument("--endpoint", required=True, metavar="ADDRESS", help="where to listen: tcp://host:port")
    parser.add_argument("--threads", type=int, default=1, metavar="INT", help="for environments that block [1]")
    add_key(parser)
    parser.add_argument(
        "--silence", type=float, default=60.0, metavar="S", help="closes a silent client's episodes"
    )
    add_parent(parser)
    from asyncrl import settings

    rest, entries = settings.split_entries(arguments)
    options = parser.parse_args(rest)
    if options.threads < 1 or not 0 < options.silence < float("inf"):
        parser.error(f"--threads {options.threads} --silence {options.silence:g}: at least 1, and more than 0 s")
    env = settings.read([], {"env.name": options.env, "env.args": options.args, **entries}).env
    take_key(parser, options)
    adopt(options, "env-worker")

    async def serve() -> NoReturn:
        from asyncrl.envs.worker import serve

        status = await serve(env.name, env.args, options.endpoint, options.threads, options.silence)
        sys.stdout.flush()
        # An episode that hangs in a thread must not keep a finished process alive.
        os._exit(status)

    return on_loop(serve)


def learner(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl learner`."""
    parser.add_argument("--hub", required=True, metavar="ADDRESS", help="tcp://host:port")
    add_key(parser)
    add_wait(parser)
    add_parent(parser)
    options = parser.parse_args(arguments)
    take_key(parser, options)
    adopt(options, f"learner-{os.environ.get('RANK', '0')}")
    from asyncrl.learner.process import LearnerProcess

    at_once(lambda: LearnerProcess(options.hub, options.wait).run())


def key(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl key`."""
    parser.add_argument("file", metavar="FILE", help="file to make; must not exist")
    path = Path(parser.parse_args(arguments).file).expanduser()
    from asyncrl import keys

    keys.write(keys.make(), path)
    print(f"{path}: copy it to the machines that need it; give it as --key FILE to the run and to each process")
    return 0
