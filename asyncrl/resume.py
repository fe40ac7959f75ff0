"""Settings that may change when a run goes on: where it runs and for how long, never what is trained.

    stored settings ─▶ with files and flags on top ─▶ only what may change? ─▶ checked as at a start ─▶ stored

The change is one write: the run's configuration, and an event `settings` that says what was and what is now. Until
then nothing has changed. Batches, episodes and checkpoints are not touched: a learner of other ranks gets its
shares of the same batches, and its checkpoints are cut anew. With more `train.steps` a linear or cosine schedule
is stretched, from the loaded checkpoint on. Called by `asyncrl.train`; and by `asyncrl.replay`, which trains steps
with the settings that they were recorded with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl import keys, records, settings
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.process import hold_run
from asyncrl.settings import UsageError

MAY_CHANGE: dict[str, tuple[str, ...]] = {
    "train": ("steps",),
    "learner": ("ranks", "device", "gpus", "threads", "cores", "stall_s", "batch_s"),
    "generator": ("count", "slots", "ahead", "device", "gpus", "threads", "cores", "stall_s"),
    "vllm": ("driver", "tensor_parallel", "data_parallel", "memory_fraction", "kv_cache_mb"),
    "sglang": ("urls", "python", "tensor_parallel", "memory_fraction", "start_timeout_s"),
    "reward": ("model_device", "model_batch"),
    **dict.fromkeys(("hub", "weights", "checkpoint", "supervise", "track"), ()),
}
"""By section: the settings that do not say what is trained. Empty: all of the section."""

Changes = dict[str, tuple[Any, Any]]
"""Dotted key to the value before and after."""


class Changed(NamedTuple):
    """Settings that changed when a run went on."""

    after: int
    """The last step that was recorded before."""
    changes: Changes


def changed(stored: Config, files: Sequence[str], flags: dict[str, str | None]) -> tuple[Config, Changes]:
    """A run's settings with files and flags on top (`settings.read`), and what differs.

    What is given again as it was is no change.

    Raises:
        UsageError: a value is not allowed, or a setting must stay as it is.
    """
    config = settings.read(files, flags, stored.model_dump())
    before, after = (_flat(each) for each in (stored, config))
    changes = {key: (before[key], value) for key, value in after.items() if before[key] != value}
    fixed = [f"{key} = {now!r} (the run has {was!r})" for key, (was, now) in changes.items() if not _may(key)]
    if fixed:
        allowed = "; ".join(f"[{section}] {', '.join(names) or 'all'}" for section, names in MAY_CHANGE.items())
        raise UsageError(
            f"{', '.join(fixed)} cannot change: a run goes on with what it was started to train. Where and how "
            f"long it runs may change: {allowed}. To train otherwise start another run, from this one's model"
        )
    return config, changes


def store(run_dir: Path, stored: Config, config: Config, changes: Changes) -> None:
    """Makes the changed settings the run's own, in one write; makes keys if its hub needs them only now.

    Raises:
        UsageError: the run is being run, or has more steps than it shall have.
        JournalError: nothing was written.
    """
    lock = hold_run(run_dir)
    try:
        journal = Journal.open(run_dir / "run.db")
        try:
            sealed = int(journal.rows("SELECT coalesce(max(batch_id), 0) FROM batch")[0][0])
            if "train.steps" in changes and config.train.steps <= sealed:
                raise UsageError(
                    f"train.steps = {config.train.steps}: the run has come to step {sealed} already; give more"
                )
            if keys.needed(config.hub) and not keys.needed(stored.hub) and not (run_dir / keys.NAME).exists():
                keys.write(keys.make(), run_dir / keys.NAME)
            event = records.event(time.time(), "train", "settings", json.dumps(changes))
            journal.write([records.run_key("config_json", config.model_dump_json()), event])
        finally:
            journal.close()
    finally:
        lock.close()


def history(journal: Journal) -> list[Changed]:
    """All changes of a run's settings, oldest first."""
    found = journal.rows(
        "SELECT (SELECT coalesce(max(step), 0) FROM step WHERE ended < event.time), detail FROM event"
        " WHERE source = 'train' AND what = 'settings' ORDER BY id"
    )
    return [Changed(after, json.loads(detail)) for after, detail in found]


def as_of(config: Config, changes: Sequence[Changed], step: int) -> Config:
    """The settings with which a step was recorded: those of now (`config`), with later changes taken back."""
    held = config.model_dump()
    for change in reversed(changes):
        for key, (before, _) in change.changes.items() if step <= change.after else ():
            section, name = key.split(".")
            held[section][name] = before
    return Config.model_validate(held)


def told(changes: Changes) -> list[str]:
    """A line for each change."""
    return [f"{key}: {json.dumps(before)} -> {json.dumps(after)}" for key, (before, after) in changes.items()]


def _may(key: str) -> bool:
    section, name = key.split(".")
    return section in MAY_CHANGE and (not MAY_CHANGE[section] or name in MAY_CHANGE[section])


def _flat(config: Config) -> dict[str, Any]:
    held = config.model_dump(mode="json")
    return {key: held[key.split(".")[0]][key.split(".")[1]] for key, _ in settings.leaves()}
