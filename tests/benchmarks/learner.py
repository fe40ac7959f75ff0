"""One learner update on synthetic episodes: tokens per second, the RL head's share of the time, peak memory.

A rank of its own trains a randomly initialised Qwen3 with the default algorithm, through `Trainer.train`: packing,
forward, RL head, backward, AdamW. No hub, no generators. The share is the time of the head alone, on random
states of the same shapes, over the time of the update. Medians over the updates after the first two. On a CPU:
8 M parameters, float32, one thread; on a GPU: 0.5 B, 151,936 labels, bfloat16.

    python tests/benchmarks/learner.py [--device cpu|cuda] [--json FILE] [--updates 5]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.learner import dist
from asyncrl.learner.update import Trainer
from asyncrl.messages import Batch, EpisodeMeta, Span
from asyncrl.packing import plan
from asyncrl.triton_kernels.rl_head import rl_head

WARM_UP = 2


class Preset(NamedTuple):
    """A model and a batch of episodes of equal length."""

    dtype: str
    model: dict[str, Any]
    episodes: int
    prompt: int
    sampled: int


PRESETS = {
    "cpu": Preset(
        "float32",
        {"vocab_size": 16384, "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 640,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
        episodes=32, prompt=32, sampled=96,
    ),
    "cuda": Preset(
        "bfloat16",
        {"vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3072,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        episodes=64, prompt=128, sampled=896,
    ),
}  # fmt: skip


def make_config(device: str, preset: Preset) -> Config:
    """The defaults, but for device, dtype and lengths."""
    return Config.model_validate(
        {
            "model": {"dtype": preset.dtype},
            "learner": {"device": device, "lr": 1e-6},
            "generator": {"max_model_len": preset.prompt + preset.sampled},
            "sampling": {"max_tokens": preset.sampled},
        }
    )


def write_model(preset: Preset, folder: Path) -> None:
    """A random Qwen3 with tied embeddings."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**preset.model, tie_word_embeddings=True)).save_pretrained(folder)


def make_batch(config: Config, preset: Preset, step: int) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Groups of eight episodes, sampled by the version before; the policy is near uniform, as a random model's."""
    rng = np.random.default_rng(step)
    length, vocabulary = preset.prompt + preset.sampled, preset.model["vocab_size"]
    episodes = [
        EpisodeMeta(i, i // 8, float(rng.integers(0, 2)), "completed", length, preset.sampled)
        for i in range(preset.episodes)
    ]
    (rows,) = plan([length] * preset.episodes, 1, config.learner.token_budget)
    spans = [[Span(preset.prompt, -1, False), Span(preset.sampled, step - 1, True)] for _ in episodes]
    tokens = rng.integers(0, vocabulary, length * preset.episodes).astype(np.int32)
    logprobs = rng.normal(-math.log(vocabulary), 0.1, len(tokens)).astype(np.float32)
    return Batch(step, step, episodes, rows, spans), tokens, logprobs


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Wall-clock seconds of one call, until the device is done."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def head_seconds(device: str, preset: Preset, rows: list[list[int]], repeats: int) -> float:
    """The head alone, forward and backward, on all rows of a batch; median."""
    vocabulary, size = preset.model["vocab_size"], preset.model["hidden_size"]
    make: dict[str, Any] = {"device": device, "dtype": getattr(torch, preset.dtype)}
    weight = torch.randn(vocabulary, size, **make).mul_(0.02).requires_grad_()

    def step(n: int) -> None:
        labels = torch.randint(0, vocabulary, (n,), device=device)
        states = torch.randn(n, size, **make).requires_grad_()
        rl_head(states, weight, labels, token_loss=lambda logp, entropy, part: (-logp / n, {})).loss.backward()
        weight.grad = None

    def all_rows() -> None:
        for row in rows:
            step(len(row) * preset.sampled)

    return statistics.median([seconds_of(all_rows, device) for _ in range(repeats + 1)][1:])


def measure(device: str, updates: int) -> dict[str, Any]:
    """Trains; the figures of one update."""
    preset = PRESETS[device]
    config = make_config(device, preset)
    with tempfile.TemporaryDirectory() as name, dist.alone(device):
        write_model(preset, Path(name))
        trainer = Trainer(config, name)
        spent = []
        for step in range(1, WARM_UP + updates + 1):
            batch = make_batch(config, preset, step)
            spent.append(seconds_of(lambda: trainer.train(*batch, step), device))  # noqa: B023 - called at once
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * maximum_resident_kb()
        parameters = sum(p.numel() for p in trainer.policy.parameters())
        head = head_seconds(device, preset, batch[0].rows, updates)
    update = statistics.median(spent[WARM_UP:])
    tokens = preset.episodes * (preset.prompt + preset.sampled)
    return {
        "parameters": parameters,
        "tokens": tokens,
        "trained_tokens": preset.episodes * preset.sampled,
        "rows": len(batch[0].rows),
        "update_s": round(update, 4),
        "tokens_s": round(tokens / update),
        "head_s": round(head, 4),
        "head_share": round(head / update, 3),
        "peak_mb": round(peak / 1e6),
        "each_s": [round(s, 4) for s in spent[WARM_UP:]],
    }


def maximum_resident_kb() -> int:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measures on one device and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(PRESETS), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--updates", type=int, default=5)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
    r = measure(args.device, args.updates)
    cells = {
        "M params": f"{r['parameters'] / 1e6:.1f}", "tokens": r["tokens"], "rows": r["rows"],
        "update ms": f"{1e3 * r['update_s']:.1f}", "tokens/s": r["tokens_s"], "head": f"{r['head_share']:.0%}",
        "peak MB": r["peak_mb"],
    }  # fmt: skip
    print(name)
    print("".join(f"{column:>11}" for column in cells))
    print("".join(f"{cell:>11}" for cell in cells.values()))
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        report = {
            "benchmark": "learner",
            "date": date.today().isoformat(),
            "versions": versions | {"transformers": transformers.__version__},
            "device": name,
            "dtype": PRESETS[args.device].dtype,
            "updates": args.updates,
            "results": r,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
