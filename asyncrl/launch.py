"""From settings to a run folder: resolve, check, explain, create. Everything that can be refused is refused here.

No process is started and no model is loaded. Called by the `train` and `hub` commands before anything else
happens, so that bad input leaves nothing half done.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.journal import Journal, JournalError
from asyncrl.settings import UsageError
from asyncrl.trainers.presets import resolve
from asyncrl.transport import check_port_pair, free_port_pair

MIN_FREE_BYTES = 256 << 20
"""A run is refused when its disk has less room than this at the start."""


def resolved(config: Config) -> Config:
    """Fills in what the algorithm's preset decides, and checks what can be checked without loading a model.

    Raises:
        UsageError: the environment, the algorithm or the model folder cannot be used.
    """
    try:
        config = config.model_copy(update={"algo": resolve(config.algo)})
        load(config.env.name, config.env.args)
    except (ValueError, LookupError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
    if config.model.path is not None:
        path = Path(config.model.path).expanduser().resolve()
        check_model(path)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
    return config


def check_model(path: Path) -> None:
    """Refuses a folder that holds no Hugging Face model.

    Raises:
        UsageError: what is missing and how to get it.
    """
    how = "give a Hugging Face model folder, or make a tiny one with `asyncrl init-model FOLDER`"
    if not path.is_dir():
        raise UsageError(f"model.path = {path}: no such folder; {how}")
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise UsageError(f"model.path = {path}: it has no {name}; {how}")
    if not list(path.glob("*.safetensors")):
        raise UsageError(f"model.path = {path}: it has no *.safetensors weights; {how}")


def hub_port(config: Config) -> int:
    """The configured port if it is free, or a free one.

    Raises:
        UsageError: the port is taken.
    """
    try:
        if config.hub.port:
            check_port_pair(config.hub.host, config.hub.port)
            return config.hub.port
        return free_port_pair(config.hub.host)
    except OSError as error:
        raise UsageError(str(error)) from error


def new_run_dir(config: Config) -> Path:
    """The folder that the run will get; it does not exist yet.

    Raises:
        UsageError: it exists, or its place cannot be written or is full.
    """
    name = config.run.name or f"{config.algo.name}-{config.env.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = Path(config.run.dir).expanduser().resolve()
    run_dir = parent / name.replace("/", "-")
    if run_dir.exists():
        text = f"run folder {run_dir} exists; choose another --run.name, or go on with it: asyncrl train --resume"
        raise UsageError(f"{text} {run_dir}")
    place = parent
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        raise UsageError(f"run.dir = {parent}: {place} cannot be written; choose another --run.dir")
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        need = f"{MIN_FREE_BYTES >> 20} MiB are needed to start"
        raise UsageError(f"run.dir = {parent}: only {free >> 20} MiB are free there; {need}")
    return run_dir


def create(config: Config, run_dir: Path) -> None:
    """Makes the run folder and its journal, which holds the resolved configuration, in one rename.

    Raises:
        UsageError: the folder cannot be written.
    """
    fresh = run_dir.with_name(f".{run_dir.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        Journal.create(fresh / "run.db", run_dir.name, config.model_dump_json()).close()
        fresh.rename(run_dir)
    except (OSError, JournalError) as error:
        raise UsageError(f"run folder {run_dir} cannot be made: {error}; choose another --run.dir") from error


def stored(run_dir: Path) -> Config:
    """The configuration of an existing run.

    Raises:
        UsageError: there is no run in that folder.
    """
    try:
        journal = Journal.open(run_dir / "run.db")
    except JournalError as error:
        raise UsageError(f"{error}. `asyncrl runs` lists the runs") from error
    try:
        return Config.model_validate_json(journal.get("config_json"))
    finally:
        journal.close()


def explain(config: Config) -> str:
    """What a run with this configuration would be: the process graph with derived numbers, and all settings."""
    episodes, lag = config.episodes_per_step, config.staleness.max_lag
    tokens = episodes * config.sampling.max_tokens
    held = config.generator.count * config.capacity
    mode = "synchronous, on-policy" if lag == 0 else f"tokens up to {lag} versions old at admission"
    if config.staleness.over_age == "train":
        mode += f"; older ones corrected, masked above {config.staleness.max_token_age}"
    graph = f"""\
supervisor
├─ hub            {config.hub.host}, journal run.db (sync={config.hub.sync})
├─ learner        {config.learner.ranks} rank(s) on {config.learner.device}, \
rows of {config.learner.token_budget} tokens
└─ generator      {config.generator.count} x {config.generator.engine} on {config.generator.device}, \
{config.generator.slots} slots + {config.generator.ahead} ahead

batch             {config.train.groups_per_step} groups x {config.train.group_size} = {episodes} episodes per step
tokens per step   at most {tokens:,} sampled; journal at most {tokens * 8:,} bytes of them
staleness         max_lag = {lag}: {mode}
ahead             at most {config.max_groups_ahead} groups admitted and not yet trained
in flight         at most {held} episodes in generators
length            {config.train.steps} steps, {config.train.steps * episodes:,} episodes trained
model             {config.model.path or "the toy model, made on first use"}"""
    return f"{graph}\n\n{json.dumps(config.model_dump(mode='json'), indent=2)}"
