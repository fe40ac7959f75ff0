"""`asyncrl train`: makes the run, supervises it, shows it, and sums it up.

It owns no training logic: settings are checked in `asyncrl.launch`, processes run under
`asyncrl.supervisor`, and what is shown comes from run.db. Called by the command line.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asyncrl import launch
from asyncrl.config import Config
from asyncrl.scorer_launch import with_endpoint, with_endpoint_again
from asyncrl.settings import UsageError

EXIT = {"finished": 0, "stopped": 130, "failed": 1}


def train(config: Config, *, dry_run: bool, plain: bool) -> int:
    """Starts a new run and follows it to its end; returns the exit code.

    Raises:
        UsageError: the configuration cannot be used; nothing has been started or written.
    """
    config = launch.resolved(config)
    if dry_run:
        print(launch.explain(config))
        return 0
    run_dir = launch.new_run_dir(config)
    port = launch.hub_port(config)
    config = with_endpoint(config, port)
    toy = config.model.path is None
    if toy:
        from asyncrl.toy import default_model

        path = default_model(config, lambda line: print(line, flush=True))
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
    launch.create(config, run_dir)
    return _follow(config, run_dir, port, plain)


def resume(run_dir: Path, plain: bool) -> int:
    """Goes on with a run that was stopped or failed; returns the exit code.

    Raises:
        UsageError: there is nothing to go on with.
    """
    from asyncrl.metrics.reader import RunReader

    config = launch.on_this_machine(launch.stored(run_dir))
    with RunReader(run_dir) as reader:
        # A run that was killed between its last step and the export has only the export left to do.
        if reader.status == "finished" and (run_dir / "model").is_dir():
            raise UsageError(f"{run_dir} is finished; start another run, from its model: --model {run_dir}/model")
    port = launch.hub_port(config)
    return _follow(with_endpoint_again(config, run_dir, port), run_dir, port, plain)


def _follow(config: Config, run_dir: Path, port: int, plain: bool) -> int:
    from asyncrl.metrics.summary import run_summary
    from asyncrl.metrics.watch import Watcher
    from asyncrl.supervisor import Supervisor

    print(f"run folder {run_dir}", flush=True)

    async def supervise() -> tuple[str, str]:
        outcome = await Supervisor(config, run_dir, port).run()
        return outcome.status, outcome.reason

    with Watcher(config, run_dir, plain=plain or not sys.stdout.isatty()):
        status, reason = asyncio.run(supervise())
    print(run_summary(run_dir))
    if status == "failed":
        print(f"asyncrl train: the run failed: {reason}. Go on with: asyncrl train --resume {run_dir}")
    elif status == "stopped":
        print(f"{reason}; go on with: asyncrl train --resume {run_dir}")
    return EXIT[status]
