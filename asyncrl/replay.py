"""`asyncrl replay`: trains steps of a run once more and compares, on a CPU bit for bit.

    asyncrl replay ─┬─ one rank: trains in this process
                    └─ N ranks: N processes of the same command, in the torchrun convention; rank 0 prints

    | waits for       | unblocked by                    | limit                                               |
    |-----------------|---------------------------------|-----------------------------------------------------|
    | its N processes | their end; one's failure ends   | supervise.start_timeout_s + learner.stall_s for each |
    |                 | all                             | step                                                |

Here are the plan (which steps, from which checkpoint, which settings) and the processes; the updates are
`asyncrl.learner.replaying`'s, what is said of them `asyncrl.replay_report`'s. Nothing of the run is written, so it
may be going on. Called by the command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.algo_launch import fitted
from asyncrl.config import Algo, Checkpoint, Config
from asyncrl.journal import Journal, JournalError
from asyncrl.learner.checkpoint_folder import CheckpointFolder
from asyncrl.process import EXIT_STOP_RUN, EXIT_USAGE
from asyncrl.reclaim import reclaimed_step
from asyncrl.resume import Changed, as_of, history
from asyncrl.settings import UsageError, from_json
from asyncrl.supervisor import rank_environment
from asyncrl.trainers.presets import KINDS, resolve
from asyncrl.transport import free_port_pair

SETTINGS = ("algo.", "learner.ranks")
"""Keys of the settings that a replay may change."""
SEALED = ("filter", "filter_args", "greedy_baseline")
"""Keys of `[algo]` that decided what was sampled and sealed."""
UPDATES = ("learner.ranks", "learner.device", "learner.threads")
"""Settings that may change when a run goes on and decide on an update's bits; `train.steps` does by a schedule."""
END_S = 10.0
"""Longest wait for the other ranks once one has ended."""


@dataclass(frozen=True)
class Plan:
    """What is replayed."""

    run_dir: Path
    config: Config
    """The run's own, with the number of ranks of the replay."""
    other: Config | None
    """The same with another algorithm, if one was asked for."""
    first: int
    last: int
    exact: bool
    """Whether every bit must be the recorded one: on a CPU, with as many ranks as the run had then."""
    note: str = ""
    """Which settings changed between the steps that are trained again; they are replayed with the last ones."""


def plan(run_dir: Path, steps: str, asked: Config) -> Plan:
    """Checks what is asked for against the run.

    Args:
        run_dir: the run's folder.
        steps: `a..b` or `a`.
        asked: settings that were typed; all others are the run's.

    Raises:
        UsageError: these steps cannot be replayed, or not with these settings.
    """
    try:
        journal = Journal.open(run_dir / "run.db", read_only=True)
    except JournalError as error:
        raise UsageError(str(error)) from error
    try:
        config, past = from_json(journal.get("config_json")), history(journal)
        first, last = _range(steps, journal.rows("SELECT coalesce(max(step), 0) FROM step")[0][0])
        start = _check_tokens(run_dir, journal, first)
    finally:
        journal.close()
    config = as_of(config, past, last)
    note = _changes_between(config, past, start, last)
    ranks = asked.learner.ranks if "learner" in asked.model_fields_set else config.learner.ranks
    if config.learner.gpus and len(config.learner.gpus) < ranks:
        raise UsageError(f"--learner.ranks {ranks}: the run's learner.gpus = {config.learner.gpus} are fewer")
    exact = ranks == config.learner.ranks and config.learner.device == "cpu" and not note
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": ranks})})
    return Plan(run_dir, config, with_algo(config, asked.algo), first, last, exact, note)


def _changes_between(config: Config, past: Sequence[Changed], start: int, last: int) -> str:
    """What changed of the settings that an update depends on, while steps `start + 1` to `last` were recorded."""
    keys = UPDATES if config.learner.schedule == "constant" else (*UPDATES, "train.steps")
    found = [
        f"{key} was changed from {before} to {now} after step {change.after}"
        for change in past
        if start < change.after < last
        for key, (before, now) in change.changes.items()
        if key in keys
    ]
    return "; ".join(found)


def _range(steps: str, recorded: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", steps)
    if match is None:
        raise UsageError(f"--steps {steps}: write one step, or the first and the last: --steps 5..12")
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last <= recorded:
        there = f"steps 1 to {recorded}" if recorded else "no step"
        raise UsageError(
            f"--steps {steps}: the run has recorded {there}, and the first must not be after the last"
        )
    return first, last


def _check_tokens(run_dir: Path, journal: Journal, first: int) -> int:
    """The step of the checkpoint to begin with. The batches between it and `first` are trained again too."""
    gone = reclaimed_step(journal) or 0
    complete = [0, *CheckpointFolder(run_dir / "checkpoints", Checkpoint()).complete()]
    start = max(step for step in complete if step < first)
    if start < gone:
        after = [step for step in complete if step >= gone]
        can = f"steps from {after[0] + 1} on can be replayed" if after else "no step can be replayed"
        raise UsageError(
            f"--steps {first}…: a replay of step {first} begins after step {start}, the newest checkpoint before "
            f"it, and the tokens of steps 1 to {gone} were removed from run.db (hub.journal_mb); {can}"
        )
    return start


def with_algo(config: Config, asked: Algo) -> Config | None:
    """The configuration with another algorithm, resolved again; None if that is the run's own.

    `--algo NAME` takes that preset; without it the run's own algorithm is changed where something was typed.

    Raises:
        UsageError: it cannot be trained on batches that are sampled and sealed.
    """
    own, typed = config.algo, {key: getattr(asked, key) for key in asked.model_fields_set}
    for key in SEALED:
        if key in typed:
            raise UsageError(
                f"--algo.{key}: it decides what is sampled and sealed, and a replay trains on the batches that "
                "were sealed; leave it out, or start a run with it"
            )
    kept = {key: getattr(own, key) for key in ("filter", "filter_args")}
    try:
        base = Algo() if "name" in typed else _as_typed(own)
        algo = resolve(base.model_copy(update=_merged(base, own, typed) | kept))
        other = fitted(config.model_copy(update={"algo": algo}))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if other.algo.greedy_baseline and not own.greedy_baseline:
        raise UsageError(
            f"algo.advantage = {other.algo.advantage!r} compares with a greedy episode of each group, and this "
            "run sampled none; choose another estimator"
        )
    return None if other.algo == own else other


def _as_typed(algo: Algo) -> Algo:
    """The same algorithm in as few keys as say it, so that what follows from a key that is changed changes too."""
    for key, info in Algo.model_fields.items():
        if key != "name":
            shorter = algo.model_copy(update={key: info.default})
            try:
                algo = shorter if resolve(shorter) == resolve(algo) else algo
            except ValueError:
                continue  # Without this key it would contradict itself: the key was typed.
    return algo


def _merged(base: Algo, own: Algo, typed: dict[str, Any]) -> dict[str, Any]:
    """What was typed; parameters are added to those there were, unless they were another part's."""
    merged = dict(typed)
    for kind in KINDS:
        key = f"{kind}_args"
        if kind != "kl":
            same = "name" not in typed and typed.get(kind, getattr(own, kind)) == getattr(own, kind)
            merged[key] = (getattr(base, key) if same else {}) | typed.get(key, {})
    return merged


def run(plan: Plan, out: Path | None, as_json: bool, arguments: Sequence[str]) -> int:
    """Replays and prints; returns the exit code: 0 equal, or another algorithm; 1 different.

    `arguments`: of the command, for the processes of further ranks.

    Raises:
        UsageError: tokens, a checkpoint or a model cannot be used.
    """
    if "RANK" not in os.environ and plan.config.learner.ranks > 1:
        return _spread(plan, arguments)
    from asyncrl.learner import dist
    from asyncrl.learner.checkpoint import CheckpointBroken
    from asyncrl.learner.replaying import replay
    from asyncrl.replay_report import report

    learner = plan.config.learner
    ranks = dist.init(learner.device, learner.threads, deterministic=plan.config.run.deterministic)
    try:
        found = replay(plan.run_dir, plan.config, plan.other, plan.first, plan.last, out)
    except (JournalError, CheckpointBroken, FileNotFoundError, ValueError) as error:
        raise UsageError(f"{type(error).__name__}: {error}") from error
    finally:
        dist.shutdown()
    text, status = report(plan, found, as_json)
    if ranks.rank == 0:
        print(text)
    return status


def _spread(plan: Plan, arguments: Sequence[str]) -> int:
    """One process for each rank; returns rank 0's exit code, or that of one which failed."""
    learner, settings = plan.config.learner, plan.config.supervise
    port, visible = free_port_pair("127.0.0.1"), os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [sys.executable, "-P", "-m", "asyncrl", "replay", *arguments, "--parent", str(os.getpid())]
    deadline = time.monotonic() + settings.start_timeout_s + plan.last * learner.stall_s
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / f"{rank}.err" for rank in range(learner.ranks)]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(errors):
                where = rank_environment(rank, learner.ranks, port, learner.gpus, visible)
                with path.open("wb") as stderr:
                    children.append(subprocess.Popen(command, env=os.environ | where, stderr=stderr))
            failed = _first_to_fail(children, deadline)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if failed is None:
            return children[0].returncode
        words = errors[failed].read_text(errors="replace").strip()
        status = children[failed].returncode
        if status != 1 or words:
            print(words or f"asyncrl replay: rank {failed} ended with status {status}", file=sys.stderr)
        return status if status == EXIT_USAGE or (status == 1 and not words) else EXIT_STOP_RUN


def _first_to_fail(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Waits for all to end, or for one to fail and then a little for the others; which one failed."""
    failed = None
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if failed is None and (bad := [i for i, child in enumerate(children) if child.poll()]):
            failed, deadline = bad[0], min(deadline, time.monotonic() + END_S)
        time.sleep(0.05)  # The end of any of several processes is no event that the standard library waits for.
    bad = [i for i, child in enumerate(children) if child.poll() != 0]
    return failed if failed is not None else next(iter(bad), None)
