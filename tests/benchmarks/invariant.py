"""What the engine of deterministic runs costs: sampled tokens per CPU second, beside the ordinary embedded engine.

Both decode the same requests, all asked for at once, in turns in one process with one thread; medians over the
repeats. Its step computes every slot over the whole capacity, and each token of a prompt is a step, so short
answers to long prompts, few live rows and a large `generator.max_model_len` are what it is slowest at.

    python tests/benchmarks/invariant.py [--json FILE] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.generator.engines.base import SamplingParams
from asyncrl.generator.engines.invariant import InvariantEngine
from asyncrl.generator.engines.transformers import TransformersEngine

SLOTS = 64
MODELS = {"toy": (64, 2, 4, 100), "3 M": (256, 4, 8, 512)}
"""Width, layers, heads, vocabulary."""
CASES = {"arithmetic": (20, 8, 256), "chat": (64, 64, 256), "long answers": (16, 192, 256)}
"""Tokens of a prompt, tokens sampled, `max_model_len`."""
Request = list[int]


def make_model(name: str) -> Any:
    """A random Qwen3 of one of `MODELS`."""
    width, layers, heads, vocabulary = MODELS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=5 * width // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def tokens_per_s(engine: TransformersEngine, prompts: list[Request], sampled: int) -> float:
    """Sampled tokens per second of CPU time."""
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(max_tokens=sampled, seed=index))
    started = time.process_time()
    while engine.has_work():
        engine.step()
    return len(prompts) * sampled / (time.process_time() - started)


def measure(name: str, case: str, repeats: int) -> dict[str, Any]:
    """Medians of both engines on one model and one case."""
    prompt, sampled, max_len = CASES[case]
    draw, vocabulary = random.Random(0), MODELS[name][3]
    prompts = [[draw.randrange(vocabulary) for _ in range(prompt)] for _ in range(2 * SLOTS)]
    kinds = {"ordinary": TransformersEngine, "invariant": InvariantEngine}
    engines = {key: kind(make_model(name), slots=SLOTS, max_model_len=max_len) for key, kind in kinds.items()}
    runs = [
        {key: tokens_per_s(engine, prompts, sampled) for key, engine in engines.items()} for _ in range(repeats)
    ]
    found: dict[str, Any] = {key: round(statistics.median(run[key] for run in runs)) for key in kinds}
    found["ratio"] = round(statistics.median(run["invariant"] / run["ordinary"] for run in runs), 3)
    return {"model": name, "case": case, "prompt": prompt, "sampled": sampled, **found}


def main() -> None:
    """Measures, prints a table, and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "invariant.json")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | prompt | sampled | ordinary tokens/s | deterministic tokens/s | ratio |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        for case in CASES:
            row = measure(name, case, options.repeats)
            rows.append(row)
            cells = (row[key] for key in ("model", "prompt", "sampled", "ordinary", "invariant", "ratio"))
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    about = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    about |= {"machine": platform.processor() or platform.machine(), "slots": SLOTS, "threads": 1}
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
