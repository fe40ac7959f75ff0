"""Generalised advantage estimates of 8 sequences of 4096 tokens: the reverse scan against a loop over time steps.

The loop is the usual implementation: from the last time step to the first, a few operations on a column of the
[8, 4096] tensors each, then one stack. Ours takes the same numbers packed, with the edges of the sequences. Both
alternate in one process after a warm-up, and their results are compared; only the ratio means anything.

    python tests/benchmarks/scan.py [--device cpu|cuda] [--json FILE] [--repeats 9]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.triton_kernels.scan import gae

SEQUENCES, TOKENS = 8, 4096
GAMMA, LAM = 0.99, 0.95


def loop_gae(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [8, 4096] each, one time step after the other."""
    found, advantage = [], torch.zeros_like(values[:, 0])
    following = advantage
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        advantage = delta + GAMMA * LAM * advantage
        found.append(advantage)
        following = values[:, t]
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, until the device is done."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(device: torch.device, repeats: int) -> dict[str, object]:
    """Alternates the two; reports median seconds and the median ratio over the repeats."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(SEQUENCES, TOKENS, generator=generator).to(device) for _ in range(2))
    cu_seqlens = torch.arange(SEQUENCES + 1, device=device) * TOKENS
    packed = rewards.view(-1), values.view(-1)
    for ours, loop in zip(gae(*packed, cu_seqlens, GAMMA, LAM), loop_gae(rewards, values), strict=True):
        torch.testing.assert_close(ours.view(SEQUENCES, TOKENS), loop, rtol=1e-4, atol=1e-4)
    scan_s, loop_s = [], []
    for _ in range(repeats):
        loop_s.append(seconds_of(lambda: loop_gae(rewards, values), device))
        scan_s.append(seconds_of(lambda: gae(*packed, cu_seqlens, GAMMA, LAM), device))
    ratios = [loop / scan for loop, scan in zip(loop_s, scan_s, strict=True)]
    return {
        "scan_ms": round(statistics.median(scan_s) * 1e3, 3),
        "loop_ms": round(statistics.median(loop_s) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 1),
        "ratios": [round(ratio, 1) for ratio in ratios],
    }


def main() -> None:
    """Measures on one device and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    result = measure(device, args.repeats)
    print(
        f"GAE {SEQUENCES} x {TOKENS} on {name}: scan {result['scan_ms']} ms, loop {result['loop_ms']} ms, ", end=""
    )
    print(f"ratio {result['ratio']}   each: {result['ratios']}")
    if args.json:
        report = {
            "benchmark": "scan",
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "device": name,
            "shape": [SEQUENCES, TOKENS],
            "repeats": args.repeats,
            "results": result,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
