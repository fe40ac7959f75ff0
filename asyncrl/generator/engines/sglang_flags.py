"""The command line of an SGLang server, made from a run's configuration; pure, and without SGLang.

The flags were read in the source of SGLang 0.5.23, not run. Called by `sglang_server` when it starts one, and by
`select.choose`, which refuses what must not be set before anything starts.
"""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config

CONTEXT_MARGIN = 6
"""SGLang takes prompts of less than its context length minus 6 tokens (`managers/tp_worker.py`)."""


def flags(config: Config, model_path: str, port: int, tag: str, index: int) -> list[str]:
    """The server's command line.

    Raises:
        ValueError: `sglang.args` names a flag that another setting, or the engine itself, decides.
    """
    settings, own = config.generator, config.sglang
    chosen: dict[str, Any] = {
        "model-path": model_path,
        "host": "127.0.0.1",
        "port": port,
        "dtype": config.model.dtype,
        "tp-size": own.tensor_parallel,
        "mem-fraction-static": own.memory_fraction,
        "max-running-requests": settings.slots,
        "context-length": settings.max_model_len + CONTEXT_MARGIN,
        # Without per-request seeds (--enable-deterministic-inference) two servers must not draw the same numbers.
        "random-seed": config.run.seed + index,
        "weight-version": tag,
        # Token ids in and out.
        "skip-tokenizer-init": True,
        "incremental-streaming-output": True,
        # Every step sends its tokens, so that none from before an update comes in a chunk from after it.
        "stream-interval": 1,
        # See `check`: with the overlap scheduler a token cannot be told from its successor's version.
        "disable-overlap-schedule": config.weights.kv == "keep",
    }
    given = {name.lstrip("-").replace("_", "-"): value for name, value in own.args.items()}
    aliases = {"model", "tensor-parallel-size"}
    if clash := sorted(given.keys() & (chosen.keys() | aliases)):
        raise ValueError(
            f"sglang.args sets {', '.join(clash)}, which other settings decide (model, generator, sglang and run "
            "sections) or which the weight updates depend on; remove it there"
        )
    line: list[str] = []
    for name, value in ({"log-level": "warning"} | given | chosen).items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        line += [f"--{name}", *map(str, values)]
    return line
