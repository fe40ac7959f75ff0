"""`asyncrl train`: makes the run, supervises it, shows it, and sums it up.

It owns no training logic: settings are checked in `asyncrl.launch`, processes run under
`asyncrl.supervisor`, and what is shown comes from run.db. Called by the command line.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl import keys, launch
from asyncrl.config import Config
from asyncrl.journal import Journal, JournalError
from asyncrl.process import hold_run
from asyncrl.resume import Changes, changed, store, told
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


def resume(
    run_dir: Path, files: Sequence[str], flags: dict[str, str | None], *, dry_run: bool, plain: bool
) -> int:
    """Goes on with a run that was stopped or failed, or that shall have more steps; returns the exit code.

    Args:
        run_dir: the run's folder.
        files: settings files, and
        flags: typed settings, for the run from now on; see `asyncrl.resume` for those that may change.
        dry_run: explain, and start and change nothing.
        plain: lines instead of the live view.

    Raises:
        UsageError: there is nothing to go on with, or a setting cannot be used.
    """
    stored = launch.stored(run_dir)
    _check_whole(run_dir)
    config, changes = changed(stored, files, flags)
    _check_unfinished(run_dir, config)
    if keys.needed(stored.hub):
        keys.of_run(run_dir, config.hub)  # They must be there; `store` only makes those that are needed anew.
    config = launch.resumable(config)
    port = launch.hub_port(config)
    print("\n".join(told(changes)) or "settings as before", flush=True)
    if dry_run:
        print(launch.explain(config))
        return 0
    _take_over(run_dir, stored, config, changes)
    keys.use_run(run_dir, config.hub)
    return _follow(with_endpoint_again(config, run_dir, port), run_dir, port, plain)


def _take_over(run_dir: Path, stored: Config, config: Config, changes: Changes) -> None:
    """Makes changed settings the run's own; without any, only sees that nobody else is running it."""
    try:
        if changes:
            store(run_dir, stored, config, changes)
        else:
            hold_run(run_dir).close()
    except JournalError as error:
        raise UsageError(str(error)) from error


def _check_whole(run_dir: Path) -> None:
    """A journal with a damaged page anywhere takes no new rows: nothing is started on it."""
    try:
        journal = Journal.open(run_dir / "run.db")
        try:
            journal.check()
        finally:
            journal.close()
    except JournalError as error:
        raise UsageError(str(error)) from error


def _check_unfinished(run_dir: Path, config: Config) -> None:
    """A run that was killed between its last step and the export has only the export left to do."""
    from asyncrl.metrics.reader import RunReader

    with RunReader(run_dir) as reader:
        done, finished = reader.last_step(), reader.status == "finished"
    if finished and (run_dir / "model").is_dir() and config.train.steps <= done:
        raise UsageError(
            f"{run_dir} is finished after {done} steps; give it more of them with --train.steps, or start another "
            f"run, from its model: --model {run_dir}/model"
        )


def _follow(config: Config, run_dir: Path, port: int, plain: bool) -> int:
    from asyncrl.metrics.watch import Watcher
    from asyncrl.supervisor import Supervisor

    print(f"run folder {run_dir}", flush=True)

    async def supervise() -> tuple[str, str]:
        outcome = await Supervisor(config, run_dir, port).run()
        return outcome.status, outcome.reason

    with Watcher(config, run_dir, plain=plain or not sys.stdout.isatty()):
        status, reason = asyncio.run(supervise())
    print(_summary(run_dir))
    if status == "failed":
        print(f"asyncrl train: the run failed: {reason}. Go on with: asyncrl train --resume {run_dir}")
    elif status == "stopped":
        print(f"{reason}; go on with: asyncrl train --resume {run_dir}")
    return EXIT[status]


def _summary(run_dir: Path) -> str:
    """What the run did; a journal that was damaged meanwhile must not hide how the run ended."""
    from asyncrl.metrics.summary import run_summary

    try:
        return run_summary(run_dir)
    except (sqlite3.Error, UsageError) as error:
        return f"{run_dir}/run.db cannot be read: {error}; `asyncrl doctor {run_dir}` says what is damaged"
