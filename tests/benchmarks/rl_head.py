"""The RL head against plain autograd, torch.compile and the heads of other projects (`peers.py`).

All contenders compute the same PPO-clip loss and its gradients to hidden states and weight. Those without a
gradient of the entropy are compared without the bonus, those that compute a loss of their own on that one. They
take turns, round by round, in one process; the ratio to ours is the median over the rounds. Before that, each has
to give the gradients of float64 autograd on 64 tokens: `error` is the norm of the difference over the norm. Extra
memory is the peak beyond the inputs, gradients included; on a CPU of one call in a fresh process, after a warm-up.

On a CPU everything is measured twice: `ms` with an allocator that keeps freed memory, as torch does on a GPU, and
`fresh` with one that gives it back, as glibc does by itself: who allocates much then mostly waits for fresh pages.
A row of ours with a size has that `workspace_bytes`, the others the default.

    python tests/benchmarks/rl_head.py [--small | --full] [--json FILE] [--repeats 5] [--tasks ppo+entropy ...]

`--small`: CPU, V = 32000, D = 256, N = 4096, float32, two threads. `--full`: GPU, V = 151936, N = 8192, bfloat16,
D = 1536, 3584, 5120. Targets, in milliseconds with gradients and entropy bonus on an H200: 18.5, 38.5, 54.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import (
    CONTENDERS,
    FORWARD,
    PACKAGES,
    TASKS,
    Contender,
    Problem,
    Run,
    Unavailable,
    make_problem,
    ours,
)
from torch import Tensor

THREADS = 2
CHECKED_TOKENS, CHECKED_BONUS = 64, 1.0
"""A large bonus, so that a missing gradient of the entropy shows."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Logits that are rounded to bfloat16 move gradients by a few per cent."""
TARGET_MS = {1536: 18.5, 3584: 38.5, 5120: 54.0}
COLUMNS = ("ms", "/ ours", "fresh ms", "fresh / ours", "extra MB", "error")
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Of glibc's `mallopt`."""


class Preset(NamedTuple):
    """What is measured."""

    device: str
    tokens: int
    vocabulary: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    workspaces: tuple[int, ...]
    repeats: int


SMALL = Preset("cpu", 4096, 32000, (256,), torch.float32, (64 << 20, 1 << 30), 5)
FULL = Preset("cuda", 8192, 151936, (1536, 3584, 5120), torch.bfloat16, (1024, 2048, 4096), 15)
FULL = FULL._replace(workspaces=tuple(rows * 4 * FULL.vocabulary for rows in FULL.workspaces))


def contenders(preset: Preset) -> list[Contender]:
    """Ours first: with the default workspace, with others, and on a GPU with the row steps in torch."""

    def own(name: str, tasks: tuple[str, ...], run: Run) -> Contender:
        return Contender(name, "all of these", tasks, lambda device: run)

    found = [own("ours", TASKS, ours(None, "auto"))]
    found += [own(f"ours, {size / 1e6:.0f} MB", TASKS[:1], ours(size, "auto")) for size in preset.workspaces]
    if preset.device == "cuda":
        found.append(own("ours, torch rows", TASKS, ours(None, "torch")))
    return found + CONTENDERS


def call(run: Run, p: Problem, task: str) -> tuple[Tensor, ...]:
    """One step; the gradients to hidden states and weight, or the log-probs."""
    p.hidden.grad = p.weight.grad = None
    out = run(p, task)
    if task == FORWARD:
        return (out,)
    out.backward()
    assert p.hidden.grad is not None
    assert p.weight.grad is not None
    return p.hidden.grad, p.weight.grad


# ---- is it right? ------------------------------------------------------------------------------------


def float64(p: Problem, task: str) -> tuple[Tensor, ...]:
    """What `call` has to give, by plain autograd in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (p.hidden, p.weight))
    logits = hidden @ weight.t() / p.temperature
    log_q = logits.log_softmax(-1)
    logp, entropy = log_q.gather(1, p.labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1)
    if task == FORWARD:
        return (logp.detach(),)
    return torch.autograd.grad(p.loss(task, logp, entropy, slice(None)).sum(), (hidden, weight))


def error_of(run: Run, p: Problem, task: str, expected: tuple[Tensor, ...]) -> float:
    """The larger relative error of the two gradients."""
    found = call(run, p, task)
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def opened(
    entries: list[Contender], p: Problem, task: str, skipped: dict[str, str]
) -> dict[str, tuple[Run, float]]:
    """Those that can compute the task here and do it right, with their errors; why not goes to `skipped`."""
    sample = replace(p.cut(CHECKED_TOKENS), bonus=CHECKED_BONUS)
    expected = float64(sample, task)
    found = {}
    for entry in (entry for entry in entries if task in entry.tasks):
        try:
            run = entry.open(p.hidden.device)
            error = error_of(run, sample, task, expected)
        except Exception as problem:  # What a foreign package raises cannot be foreseen.
            skipped[entry.name] = reason(problem)
            continue
        if error < TOLERANCE[p.hidden.dtype]:
            found[entry.name] = (run, error)
        else:
            skipped[entry.name] = f"its gradients are wrong: relative error {error:.2g}"
    return found


def reason(problem: Exception) -> str:
    """The first line of an error."""
    name = "" if isinstance(problem, Unavailable) else f"{type(problem).__name__}: "
    return f"{name}{problem}".splitlines()[0][:150]


# ---- how fast, in how much memory? -------------------------------------------------------------------


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def timed(
    runs: dict[str, Run], p: Problem, task: str, repeats: int, skipped: dict[str, str]
) -> dict[str, list[float]]:
    """Seconds of each, round by round; a round before the first warms up. Who fails is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name in list(seconds):
            try:
                spent = seconds_of(lambda: call(runs[name], p, task), p.hidden.device)  # noqa: B023 - called at once
            except Exception as problem:  # Out of memory, mostly.
                skipped[name] = reason(problem)
                del seconds[name]
                continue
            if i:
                seconds[name].append(spent)
    p.hidden.grad = p.weight.grad = None
    return seconds


def keep_freed_memory(keep: bool) -> None:
    """Sets what glibc's allocator does with memory that is freed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_MAX, 0 if keep else 65536)
    libc.mallopt(MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(TRIM_THRESHOLD, -1 if keep else 1 << 20)
    libc.malloc_trim(0)


def gpu_memory(run: Run, p: Problem, task: str) -> int:
    """Bytes at the peak of one call beyond what was allocated before."""
    p.hidden.grad = p.weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(run, p, task)
    p.hidden.grad = p.weight.grad = None
    return torch.cuda.max_memory_allocated() - before


def cpu_memory(name: str, task: str) -> int:
    """The same by the resident memory of a fresh process."""
    command = [sys.executable, __file__, "--memory", name, task]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def print_memory(name: str, task: str, preset: Preset) -> None:
    """What the fresh process does."""
    torch.set_num_threads(THREADS)
    keep_freed_memory(False)
    device = torch.device(preset.device)
    p = make_problem(preset.tokens, preset.sizes[0], preset.vocabulary, preset.dtype, device)
    (entry,) = (entry for entry in contenders(preset) if entry.name == name)
    run = entry.open(device)
    call(run, p.cut(preset.tokens // 4), task)
    p.hidden.grad = p.weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts again from here.
    before = resident("VmHWM")
    call(run, p, task)
    print(resident("VmHWM") - before)


def resident(what: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


# ---- the table ---------------------------------------------------------------------------------------


def measure(preset: Preset, size: int, task: str, repeats: int) -> dict[str, Any]:
    """One shape and task: a row for each contender that can run."""
    device, skipped = torch.device(preset.device), dict[str, str]()
    p = make_problem(preset.tokens, size, preset.vocabulary, preset.dtype, device)
    entries = contenders(preset)
    ready = opened(entries, p, task, skipped)
    runs = {name: run for name, (run, _) in ready.items()}
    seconds, fresh = timed(runs, p, task, repeats, skipped), dict[str, list[float]]()
    if device.type == "cpu":
        keep_freed_memory(False)
        fresh = timed(runs, p, task, repeats, skipped)
        keep_freed_memory(True)
    rows = []
    for entry in (entry for entry in entries if entry.name in ready and entry.name not in skipped):
        run, error = ready[entry.name]
        row = {"name": entry.name, "computes": entry.computes, **figures(seconds, entry.name)}
        if fresh:
            row |= {f"fresh {key}": value for key, value in figures(fresh, entry.name).items()}
        extra = gpu_memory(run, p, task) if device.type == "cuda" else cpu_memory(entry.name, task)
        rows.append(row | {"extra MB": round(extra / 1e6), "error": float(f"{error:.1e}")})
    return {"hidden_size": size, "task": task, "rows": rows, "skipped": skipped}


def figures(seconds: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Medians of a contender's rounds."""
    ratios = [a / b for a, b in zip(seconds[name], seconds["ours"], strict=True)]
    each = [round(1e3 * s, 2) for s in seconds[name]]
    return {"ms": statistics.median(each), "/ ours": round(statistics.median(ratios), 3), "each ms": each}


def show(result: dict[str, Any], preset: Preset) -> None:
    """Prints the table of one shape and task."""
    size, task = result["hidden_size"], result["task"]
    target = f", target {TARGET_MS[size]} ms on an H200" if task == TASKS[0] and size in TARGET_MS else ""
    print(f"\n{task}: N = {preset.tokens}, D = {size}, V = {preset.vocabulary}, {preset.dtype}{target}")
    columns = [column for column in COLUMNS if column in result["rows"][0]]
    print(f"{'':<24}{'computes':<24}" + "".join(f"{column:>13}" for column in columns))
    for row in result["rows"]:
        print(f"{row['name']:<24}{row['computes']:<24}" + "".join(f"{row[column]:>13}" for column in columns))
    for name, reason in result["skipped"].items():
        print(f"{name:<24}skipped: {reason}")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Of what matters and is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs one preset and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", dest="preset", action="store_const", const=SMALL, default=SMALL)
    which.add_argument("--full", dest="preset", action="store_const", const=FULL)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--repeats", type=int, help="rounds")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    preset: Preset = args.preset
    if args.memory:
        name, task = args.memory
        print_memory(name, task, preset)
        return
    gpu = preset.device == "cuda"
    if not gpu:
        keep_freed_memory(True)
    repeats = args.repeats or preset.repeats
    torch.set_num_threads(THREADS)
    results = []
    for size in preset.sizes:
        for task in args.tasks:
            results.append(measure(preset, size, task, repeats))
            show(results[-1], preset)
    if args.json:
        report = {
            "benchmark": "rl_head",
            "date": date.today().isoformat(),
            "versions": versions(),
            "device": torch.cuda.get_device_name() if gpu else f"CPU, {THREADS} threads",
            "tokens": preset.tokens,
            "vocabulary": preset.vocabulary,
            "dtype": str(preset.dtype).removeprefix("torch."),
            "repeats": repeats,
            "target_ms_h200": TARGET_MS if gpu else {},
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
