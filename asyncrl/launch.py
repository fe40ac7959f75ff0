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

from asyncrl import keys
from asyncrl.algo_launch import fitted
from asyncrl.config import Config
from asyncrl.deterministic import settled
from asyncrl.envs.registry import load
from asyncrl.envs.rewards import Rewards
from asyncrl.generator.engines.select import check_arguments, choose
from asyncrl.journal import Journal, JournalError
from asyncrl.scorer_launch import check_device, check_reward_model
from asyncrl.settings import UsageError
from asyncrl.supervisor import gpus_each
from asyncrl.trainers.presets import resolve
from asyncrl.transport import check_port_pair, free_port_pair

MIN_FREE_BYTES = 256 << 20
"""A run is refused when its disk has less room than this at the start."""


def resolved(config: Config, *, here: bool = True) -> Config:
    """Fills in what the algorithm's preset decides, and checks what can be checked without loading a model.

    `here`: whether the generators run on this machine, so that their engine can be chosen and checked.

    Raises:
        UsageError: the environment, the algorithm, a reward or a model folder cannot be used.
    """
    try:
        config = fitted(settled(config).model_copy(update={"algo": resolve(config.algo)}))
        load(config.env.name, config.env.args)
        Rewards(config.reward)
        check_arguments(config)
    except (ValueError, LookupError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
    if here:
        config = on_this_machine(config)
    if config.reward.endpoint is not None and not keys.needed(config.hub):
        keys.for_endpoint(config.reward.endpoint)
    if config.reward.model is not None:
        scored_by = Path(config.reward.model).expanduser().resolve()
        check_reward_model(scored_by)
        check_device(config.reward.model_device)
        reward = config.reward.model_copy(update={"model": str(scored_by)})
        config = config.model_copy(update={"reward": reward})
    for name in ("model", "critic", "process_reward"):
        section = getattr(config, name)
        if section.path is not None:
            path = Path(section.path).expanduser().resolve()
            check_model(path, f"{name}.path")
            check_length(config, path)
            config = config.model_copy(update={name: section.model_copy(update={"path": str(path)})})
    return config


def resumable(config: Config) -> Config:
    """Checks what may have changed since a run was started: its settings (`asyncrl.resume`), and this machine.

    Raises:
        UsageError: as `resolved`.
    """
    try:
        config = settled(config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if config.reward.model is not None:
        check_device(config.reward.model_device)
    return on_this_machine(config)


def on_this_machine(config: Config) -> Config:
    """Chooses the engine among those that are installed here, and checks the GPUs.

    Raises:
        UsageError: what is missing, or does not fit.
    """
    try:
        generator = config.generator.model_copy(update={"engine": choose(config)})
    except ValueError as error:
        raise UsageError(str(error)) from error
    config = config.model_copy(update={"generator": generator})
    check_gpus(config)
    return config


def check_length(config: Config, path: Path) -> None:
    """Refuses sequences that are longer than the model has positions for.

    Raises:
        UsageError: both numbers.
    """
    model = json.loads((path / "config.json").read_text())
    model = model.get("text_config", model)
    positions, asked = model.get("max_position_embeddings"), config.generator.max_model_len
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    stretched = rope.get("rope_type", rope.get("type", "default")) != "default"
    if positions is not None and asked > positions and not stretched:
        raise UsageError(
            f"generator.max_model_len = {asked}, and {path} has {positions} positions "
            "(max_position_embeddings in its config.json); lower the former"
        )


def check_model(path: Path, setting: str = "model.path") -> None:
    """Refuses a folder, given as `setting`, that holds no Hugging Face model.

    Raises:
        UsageError: what is missing and how to get it.
    """
    how = "give a Hugging Face model folder, or make a tiny one with `asyncrl init-model FOLDER`"
    if not path.is_dir():
        raise UsageError(f"{setting} = {path}: no such folder; {how}")
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise UsageError(f"{setting} = {path}: it has no {name}; {how}")
    if not list(path.glob("*.safetensors")):
        raise UsageError(f"{setting} = {path}: it has no *.safetensors weights; {how}")


def check_gpus(config: Config) -> None:
    """Refuses GPU settings that contradict each other or this process's CUDA_VISIBLE_DEVICES.

    Raises:
        UsageError: the setting, its value, and what fits.
    """
    sides = (
        ("generator", config.generator.device, config.generator.gpus, config.generator.count * gpus_each(config)),
        ("learner", config.learner.device, config.learner.gpus, config.learner.ranks),
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for name, device, gpus, needed in sides:
        setting = f"{name}.gpus = {gpus}"
        if gpus and not device.startswith("cuda"):
            raise UsageError(f"{setting}, but {name}.device = {device!r}; set --{name}.device cuda")
        if len(set(gpus)) < len(gpus) or any(gpu < 0 for gpu in gpus):
            raise UsageError(f"{setting}: name each GPU once, counting from 0")
        if gpus and len(gpus) < needed:
            raise UsageError(f"{setting}: {_needed(name, config)} need {needed} GPUs; name as many, or use fewer")
        seen = len(visible.split(",")) if visible else None
        if gpus and seen is not None and max(gpus) >= seen:
            raise UsageError(
                f"{setting}, but CUDA_VISIBLE_DEVICES = {visible!r} leaves 0..{seen - 1} to choose from"
            )
    if config.weights_backend == "nccl":
        _check_nccl(config)
    if config.generator.device.startswith("cuda"):
        _check_memory(config)


def _needed(name: str, config: Config) -> str:
    if name == "learner":
        return f"learner.ranks = {config.learner.ranks}"
    return f"generator.count = {config.generator.count} generators of {gpus_each(config)} each"


def _check_nccl(config: Config) -> None:
    devices = (config.learner.device, config.generator.device)
    if not all(device.startswith("cuda") for device in devices):
        raise UsageError(
            f"weights.backend = 'nccl' needs learner and generators on GPUs, and their devices are {devices[0]!r} "
            f"and {devices[1]!r}; set --weights.backend auto"
        )
    for name, gpus in (("learner", config.learner.gpus), ("generator", config.generator.gpus)):
        if not gpus:
            raise UsageError(
                f"weights.backend = 'nccl', but {name}.gpus is empty, so both sides may take one GPU, which "
                f"cannot be two ranks of an NCCL group; set --weights.backend auto, or give --{name}.gpus too"
            )
    shared = sorted(set(config.learner.gpus) & set(config.generator.gpus))
    if shared:
        raise UsageError(
            f"weights.backend = 'nccl', but GPUs {shared} are in learner.gpus and in generator.gpus, and one GPU "
            "cannot be two ranks of an NCCL group; set --weights.backend shm, or give each side its own"
        )


def _check_memory(config: Config) -> None:
    """vLLM and SGLang each take their share of a GPU's memory as a whole, at their start."""
    generator, engine = config.generator, config.generator.engine
    if engine not in ("vllm", "sglang") or (engine == "sglang" and config.sglang.urls):
        return
    if not generator.gpus and generator.count > 1:
        needed = generator.count * gpus_each(config)
        raise UsageError(
            f"generator.count = {generator.count} without generator.gpus: every {engine} engine would take the "
            f"same GPUs; name {needed} with --generator.gpus, or set --generator.count 1"
        )
    if not config.learner.device.startswith("cuda") or (engine == "vllm" and config.vllm.kv_cache_mb):
        return
    shared = set(generator.gpus or range(gpus_each(config))) & set(
        config.learner.gpus or range(config.learner.ranks)
    )
    fraction = config.vllm.memory_fraction if engine == "vllm" else config.sglang.memory_fraction
    if shared and fraction >= 1:
        raise UsageError(
            f"{engine}.memory_fraction = {fraction:g} leaves nothing for the learner on GPUs {sorted(shared)}, "
            f"which both use; lower it, for example --{engine}.memory_fraction 0.4, or give each side its own"
        )


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

    With keys, where its hub needs them (`asyncrl.keys`), or a copy of those that this process was given.

    Raises:
        UsageError: the folder cannot be written.
    """
    fresh = run_dir.with_name(f".{run_dir.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        Journal.create(fresh / "run.db", run_dir.name, config.model_dump_json()).close()
        held = keys.of_process() or (keys.make() if keys.needed(config.hub) else None)
        if held is not None:
            keys.write(held, fresh / keys.NAME)
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
    groups, group, extra = config.train.groups_per_step, str(config.train.group_size), 0
    if config.algo.greedy_baseline:
        group, extra = f"({group} + 1 greedy)", groups
    tokens = (episodes + extra) * config.sampling.max_tokens
    held = config.generator.count * config.capacity
    mode = "synchronous, on-policy" if lag == 0 else f"tokens up to {lag} versions old at admission"
    if config.run.deterministic:
        mode += "; deterministic: bitwise the same each time, interrupted or not"
    elif config.staleness.over_age == "train":
        mode += f"; older ones corrected, masked above {config.staleness.max_token_age}"
    reward = config.reward
    scorer = f"├─ scorer         {reward.model} on {reward.model_device}\n" if reward.model else ""
    rewards = ["the environment's", *reward.functions, *(["model"] if reward.model or reward.endpoint else [])]
    graph = f"""\
supervisor
├─ hub            {config.hub.host}, journal run.db (sync={config.hub.sync})
├─ learner        {config.learner.ranks} rank(s) on {config.learner.device}, \
rows of {config.learner.token_budget} tokens
{scorer}└─ generator      {config.generator.count} x {config.generator.engine} on {config.generator.device}, \
{config.generator.slots} slots + {config.generator.ahead} ahead

weights           {config.weights_backend}, one broadcast for all generators; KV cache of running requests: \
{config.weights.kv}
batch             {groups} groups x {group} = {episodes + extra} episodes per step
tokens per step   at most {tokens:,} sampled; journal at most {tokens * 8:,} bytes of them
staleness         max_lag = {lag}: {mode}
ahead             at most {config.max_groups_ahead} groups admitted and not yet trained
in flight         at most {held} episodes in generators
reward            {" + ".join(rewards)}
length            {config.train.steps} steps, {config.train.steps * episodes:,} episodes trained
model             {config.model.path or "the toy model, made on first use"}"""
    return f"{graph}\n\n{json.dumps(config.model_dump(mode='json'), indent=2)}"
