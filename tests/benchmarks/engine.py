"""The embedded engine against `model.generate()`: useful tokens per second, 64 requests in flight, one core.

Both decode the same requests with the same 3 M-parameter Qwen3 in float32, alternating in one process that is
pinned to one core; only the ratio means anything. `generate()` is used at its best: batches of 64, the faster of
its attention implementations, no log-probs, and on equal lengths prompts that need no padding; a batch runs to its
longest request. The engine runs as a generator runs it, behind `EngineDriver` with its thread and one asynchronous
consumer for each request, and reports a log-prob for every token. Only tokens that a request asked for count.

Ratios are given in wall-clock time and in the process's CPU time, which other load on the core disturbs less.

    python tests/benchmarks/engine.py [--json FILE] [--repeats 3] [--batches 4]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.generator.engines.base import SamplingParams
from asyncrl.generator.engines.driver import EngineDriver
from asyncrl.generator.engines.transformers import TransformersEngine

IN_FLIGHT = 64
LONGEST = 256
REQUIRED = {"equal": 1.0, "long-tailed": 3.0}
Request = tuple[list[int], int]
"""Prompt and number of tokens to sample."""


def make_model() -> Any:
    """A Qwen3 of 2.9 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def make_requests(case: str, batches: int) -> list[Request]:
    """`equal`: one batch, prompts of 16 tokens, 128 sampled. `long-tailed`: prompts of 8 to 24 tokens, and a
    log-normal number of sampled ones (median 32, sigma 1) in 8..256."""
    rng = random.Random(0)

    def prompt(n: int) -> list[int]:
        return [rng.randrange(1, 512) for _ in range(n)]

    if case == "equal":
        return [(prompt(16), 128) for _ in range(IN_FLIGHT)]
    lengths = [min(LONGEST, max(8, int(rng.lognormvariate(3.47, 1.0)))) for _ in range(batches * IN_FLIGHT)]
    return [(prompt(rng.randint(8, 24)), n) for n in lengths]


def run_generate(model: Any, requests: list[Request]) -> None:
    """Batches of 64 in the order of the requests, each decoded to its longest."""
    for start in range(0, len(requests), IN_FLIGHT):
        batch = requests[start : start + IN_FLIGHT]
        width, steps = max(len(prompt) for prompt, _ in batch), max(n for _, n in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=steps, pad_token_id=0
        )  # fmt: skip
        assert out.shape == (len(batch), width + steps)


def run_engine(engine: TransformersEngine, requests: list[Request]) -> None:
    """All requests at once to an engine of 64 slots, behind its driver."""

    async def consume(driver: EngineDriver, i: int) -> int:
        prompt, n = requests[i]
        params = SamplingParams(max_tokens=n, seed=i)
        return sum([len(delta.token_ids) async for delta in driver.generate(str(i), prompt, params)])

    async def main() -> None:
        driver = EngineDriver(engine)
        counts = await asyncio.gather(*(consume(driver, i) for i in range(len(requests))))
        assert counts == [n for _, n in requests]
        await driver.close()

    asyncio.run(main())


def seconds_of(run: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def choose_attention(model: Any, requests: list[Request]) -> str:
    """Sets the attention implementation that is faster for `generate()` on one batch; returns its name."""
    spent = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        spent[name] = seconds_of(lambda: run_generate(model, requests[:IN_FLIGHT]))[1]
    best = min(spent, key=lambda name: spent[name])
    model.set_attn_implementation(best)
    return best


def measure(case: str, model: Any, requests: list[Request], repeats: int) -> dict[str, Any]:
    """Alternates the two; reports median useful tokens per second and the median ratio over the repeats."""
    attention = choose_attention(model, requests)
    useful = sum(n for _, n in requests)
    engine_s, generate_s = [], []
    # An equal batch is short, so it is measured more often.
    for _ in range(repeats * 3 if case == "equal" else repeats):
        generate_s.append(seconds_of(lambda: run_generate(model, requests)))
        engine = TransformersEngine(copy.deepcopy(model), slots=IN_FLIGHT, max_model_len=24 + LONGEST)
        engine_s.append(seconds_of(lambda: run_engine(engine, requests)))  # noqa: B023 - called at once
    wall, cpu = ([g[i] / e[i] for g, e in zip(generate_s, engine_s, strict=True)] for i in (0, 1))
    return {
        "case": case,
        "requests": len(requests),
        "useful_tokens": useful,
        "generate_attention": attention,
        "engine_tokens_s": round(useful / statistics.median(e[0] for e in engine_s)),
        "generate_tokens_s": round(useful / statistics.median(g[0] for g in generate_s)),
        "ratio_wall": round(statistics.median(wall), 2),
        "ratio_cpu": round(statistics.median(cpu), 2),
        "ratios_wall": [round(r, 2) for r in wall],
        "ratios_cpu": [round(r, 2) for r in cpu],
        "required": REQUIRED[case],
    }


def main() -> None:
    """Runs both cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="batches of 64 long-tailed requests")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model()
    results = []
    print(f"{'lengths':<12}{'engine':>9}{'generate()':>12}{'wall ratio':>12}{'CPU ratio':>11}{'required':>10}")
    for case in REQUIRED:
        r = measure(case, model, make_requests(case, args.batches), args.repeats)
        results.append(r)
        print(
            f"{case:<12}{r['engine_tokens_s']:>9,}{r['generate_tokens_s']:>12,}{r['ratio_wall']:>12}"
            f"{r['ratio_cpu']:>11}{r['required']:>10}   each: {r['ratios_cpu']}",
            flush=True,
        )
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        report = {
            "benchmark": "engine",
            "date": date.today().isoformat(),
            "versions": versions | {"transformers": transformers.__version__},
            "parameters": sum(p.numel() for p in model.parameters()),
            "in_flight": IN_FLIGHT,
            "repeats": args.repeats,
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
