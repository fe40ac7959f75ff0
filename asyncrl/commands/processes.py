"""Commands that are the processes of a run: the supervisor starts them, or a scheduler, or a person by hand.

Nothing heavy is imported before the command runs. Called by `asyncrl.cli`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from asyncrl.commands.options import Parser, add_parent, add_wait, adopt, on_loop, run_folder, settings_of, typed


def hub(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl hub`."""
    parser.add_argument("--run", metavar="DIR", help="an existing run; without it the settings make a new one")
    parser.add_argument("--port", type=int, metavar="INT", help="control port; chunks use the next [hub.port]")
    add_parent(parser)
    options, config = settings_of(parser, arguments)
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
        if typed(options) or options.files:
            parser.error("--run takes no settings: a run goes on with those it was started with")
        run_dir = run_folder(options.run)
        config = stored(run_dir)
        port = options.port or hub_port(config)
    from asyncrl.hub import Hub

    print(f"hub of {run_dir} at tcp://{config.hub.host}:{port}", flush=True)

    async def serve() -> int:
        return await Hub(run_dir, port).run()

    return on_loop(serve)


def generator(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl generator`."""
    parser.add_argument("--hub", required=True, metavar="ADDRESS", help="tcp://host:port")
    parser.add_argument("--name", required=True, help="unique within the run, for example generator-7")
    add_wait(parser)
    add_parent(parser)
    options = parser.parse_args(arguments)
    adopt(options)

    async def serve() -> int:
        from asyncrl.generator.process import GeneratorProcess

        return await GeneratorProcess(options.hub, options.name).run(options.wait)

    status = on_loop(serve)
    # A collective that hangs in a thread must not keep a finished process alive.
    sys.stdout.flush()
    os._exit(status)


def scorer(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl scorer`."""
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a sequence classifier with one output")
    parser.add_argument("--endpoint", required=True, metavar="ADDRESS", help="where to listen: tcp://host:port")
    parser.add_argument("--device", default="cpu", help="torch device [cpu]")
    parser.add_argument("--batch", type=int, default=16, metavar="INT", help="most conversations at once [16]")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="the run's reward.timeout_s [60]")
    add_parent(parser)
    options = parser.parse_args(arguments)
    if options.batch < 1 or not 0 < options.timeout < float("inf"):
        parser.error(f"--batch {options.batch} --timeout {options.timeout:g}: at least 1, and more than 0 s")
    adopt(options)
    from asyncrl.scorer_launch import check_reward_model

    path = Path(options.model).expanduser()
    check_reward_model(path)

    async def serve() -> NoReturn:
        from asyncrl.scorer import serve

        status = await serve(str(path), options.endpoint, options.device, options.batch, options.timeout)
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
    adopt(options)

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
    add_wait(parser)
    add_parent(parser)
    options = parser.parse_args(arguments)
    adopt(options)
    from asyncrl.learner.process import LearnerProcess

    return LearnerProcess(options.hub, options.wait).run()
