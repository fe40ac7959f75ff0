"""Checks one run: whether its journal is whole and adds up, which checkpoints are sound, and how to go on.

    run.db ──▶ pages ─▶ tokens ─▶ episodes, groups, batches, leases ─┐     (`asyncrl.doctor_journal`)
    checkpoints ──▶ manifests ──────────────────────────────────────┴─▶ what can be replayed ─▶ how to go on

It only reads, also while the run goes on. It repairs nothing: what is damaged comes back from a copy. No torch.
Called by `asyncrl doctor RUN`; `asyncrl.doctor` looks at the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.doctor import Finding, guarded, told
from asyncrl.doctor_journal import (
    StoredRun,
    check_account,
    check_batches,
    check_pages,
    check_rules,
    check_schema,
    check_tokens,
)
from asyncrl.learner.checkpoint_folder import NAME
from asyncrl.learner.manifest import Damaged, verify

LIVE_S = 15.0
"""A run whose hub reported within this time is going on; it reports every second."""


def doctor_run(run_dir: Path) -> tuple[str, int]:
    """Runs every check; returns the report and the exit code: 0 if the run is sound, 1 if not.

    Args:
        run_dir: a folder that holds a `run.db`.
    """
    findings: list[Finding] = []
    run = StoredRun(run_dir)
    for name, check in _CHECKS:
        findings += guarded(name, partial(check, run))
        if name == "schema" and findings[-1].level == "problem":
            break  # Without it nothing else can be read.
    return told(findings, "this run is sound")


def check_checkpoints(run: StoredRun) -> Iterator[Finding]:
    """What lies in the checkpoints folder, whether each is what was written, and what can be done with them."""
    faults = _faults(run)
    for step, fault in faults.items():
        what = f"checkpoint {step}"
        if fault:
            text = f"{fault}; the learner passes it over: restore it from a copy, or delete the folder"
            yield Finding("problem", what, text)
        elif step > run.step and not _goes_on(run):
            yield Finding("note", what, f"sound, but run.db ends at step {run.step}: it will be passed over")
        else:
            yield Finding("ok", what, "sound")
    folder = run.folder / "checkpoints"
    others = [path.name for path in folder.iterdir() if path.suffix] if folder.is_dir() else []
    if others:
        yield Finding("note", "checkpoints", f"not used, unless one is being written: {', '.join(sorted(others))}")
    listed = set(json.loads(run.get("checkpoints") or "[]"))
    if missing := sorted(listed - faults.keys()):
        yield Finding("note", "checkpoints", f"run.db knows of steps {missing}, which are no longer in the folder")
    yield _replay(run, [step for step, fault in faults.items() if not fault and step <= run.step])


def _replay(run: StoredRun, sound: list[int]) -> Finding:
    """From where training can go on, and which steps can be done again."""
    starts = ([0] if run.gone <= 0 else []) + [step for step in sound if step >= run.gone]
    if not starts:
        text = f"tokens up to step {run.gone} were reclaimed, and no sound checkpoint is of that step or later"
        return Finding("problem", "replay", f"{text}: restore one from a copy, or start a new run")
    first = f"the checkpoint of step {min(starts)}" if min(starts) else "the initial model"
    resumed = f"the checkpoint of step {max(sound)}" if sound else "the initial model"
    again = f"steps {min(starts) + 1} to {run.step} from {first}" if run.step > min(starts) else "none"
    return Finding("ok", "replay", f"training goes on from {resumed}; can be replayed: {again}")


def check_status(run: StoredRun) -> Iterator[Finding]:
    """How the run stands and how to go on; what was written when a process hung."""
    status, reason = run.get("status") or "unknown", run.get("reason")
    how = f"go on with: asyncrl train --resume {run.folder}"
    if _goes_on(run):
        how = f"its hub reported {_silence(run):.0f} s before run.db was read"
    elif status == "running":
        how = f"but no hub has reported for {LIVE_S:g} s: it was killed; {how}"
    elif status == "finished":
        how = f"nothing is left to do; asyncrl eval {run.folder}"
    text = f"{status}{f' ({reason})' if reason else ''}, step {run.step} of {run.config['train']['steps']}"
    yield Finding("ok" if status in ("running", "finished") else "note", "status", f"{text}; {how}")
    stacks = sorted(path.name for path in (run.folder / "stacks").glob("*"))
    if stacks:
        where = run.folder / "stacks"
        yield Finding("note", "stacks", f"a process hung; where it was: {where}: {', '.join(stacks)}")


_CHECKS: tuple[tuple[str, Callable[[StoredRun], Iterator[Finding]]], ...] = (
    ("schema", check_schema),
    ("pages", check_pages),
    ("tokens", check_tokens),
    ("rules", check_rules),
    ("batches", check_batches),
    ("account", check_account),
    ("checkpoints", check_checkpoints),
    ("status", check_status),
)


def _goes_on(run: StoredRun) -> bool:
    return run.get("status") == "running" and _silence(run) < LIVE_S


def _silence(run: StoredRun) -> float:
    """Seconds from the hub's last report to the snapshot."""
    last = run.rows("SELECT max(time) FROM metric WHERE source = 'hub'")[0][0]
    return float("inf") if last is None else run.read_at - float(last)


def _faults(run: StoredRun) -> dict[int, str]:
    """Complete checkpoints by step: what is wrong with them, or nothing."""
    folder, found = run.folder / "checkpoints", {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := NAME.fullmatch(path.name):
            fault = _fault(path, int(match[1]))
            if not fault or path.is_dir():  # Else it was deleted meanwhile: the run goes on.
                found[int(match[1])] = fault
    return found


def _fault(path: Path, step: int) -> str:
    try:
        verify(path, step)
    except Damaged as error:
        return str(error)
    return ""
