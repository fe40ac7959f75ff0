"""What vLLM is told: its arguments and its environment, made from a run's configuration.

Pure functions of the configuration and the model's `config.json`; vLLM is not imported here, because the
environment must be set before it is. Called by both vLLM engines.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from pathlib import Path
from typing import Any

from asyncrl.config import Config, Vllm

BACKEND = "asyncrl"
"""Name under which `vllm_worker` registers its weight transfer engine."""
OWN = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "enable_prefix_caching",
        "seed",
        "tensor_parallel_size",
        "data_parallel_size",
        "logprobs_mode",
        "skip_tokenizer_init",
        "generation_config",
        "disable_log_stats",
        "use_tqdm_on_load",
        "worker_extension_cls",
        "async_scheduling",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "weight_transfer_config",
        "stream_interval",
        # These change how many devices there are, or hold weights that no update reaches.
        "pipeline_parallel_size",
        "distributed_executor_backend",
        "speculative_config",
    }
)
"""Arguments that `vllm.args` must leave alone."""
_BLOCK = 128
"""Positions of one KV block of vLLM's CPU backend."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def environment(config: Config, *, inprocess: bool) -> dict[str, str]:
    """Variables that vLLM reads at its import; a variable that the user has set stays as it is."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inprocess else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # The processes that vLLM starts end with this one: see vllm_worker.
        "ASYNCRL_ENGINE_OWNER": str(os.getpid()),
    }
    if not config.generator.device.startswith("cuda"):
        # vLLM's own binding takes whole NUMA nodes for itself; generator.cores is ours.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["OMP_NUM_THREADS"] = str(config.generator.threads)
        if eager(config):
            # Without this the sampler's rank count is compiled at the first step, for 15 seconds.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def set_environment(variables: dict[str, str]) -> None:
    """Sets what is not set; the two that decide which processes there are, always."""
    for name, value in variables.items():
        if name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "ASYNCRL_ENGINE_OWNER"):
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def eager(config: Config) -> bool:
    """Whether vLLM neither compiles nor captures graphs."""
    if config.vllm.eager is not None:
        return config.vllm.eager
    return not config.generator.device.startswith("cuda")


def arguments(config: Config, model_path: str, *, inprocess: bool) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` and `AsyncEngineArgs`; raises what `check_args` raises."""
    settings, own = config.generator, config.vllm
    chosen: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.slots,
        "max_num_batched_tokens": max(own.batched_tokens, settings.slots, settings.max_model_len),
        "enforce_eager": eager(config),
        "enable_prefix_caching": own.prefix_cache,
        "tensor_parallel_size": own.tensor_parallel,
        "data_parallel_size": own.data_parallel,
        # The log-probs of what was really sampled: after the temperature (reference: vLLM, config/model.py).
        "logprobs_mode": "processed_logprobs",
        # Token ids in and out; so vLLM knows no end of sequence, and the stop tokens are given with each request.
        "skip_tokenizer_init": True,
        # Sampling defaults of the model's folder would be applied silently.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": config.run.seed,
        "worker_extension_cls": "asyncrl.generator.engines.vllm_worker.WorkerExtension",
    }
    if inprocess:
        # With a step in flight while the weights change, a token could not be told from its successor's version.
        chosen["async_scheduling"] = False
    if bytes_ := _kv_bytes(config, model_path):
        chosen["kv_cache_memory_bytes"] = bytes_
    else:
        chosen["gpu_memory_utilization"] = own.memory_fraction
    check_args(config)
    return chosen | own.args


def check_args(config: Config) -> None:
    """Refuses what `vllm.args` must not set.

    Raises:
        ValueError: it names an argument that another setting, or the engine itself, decides.
    """
    if clash := sorted(set(config.vllm.args) & OWN):
        raise ValueError(
            f"vllm.args sets {', '.join(clash)}, which other settings decide (model, sampling, generator and vllm "
            "sections) or which the weight updates depend on; remove it there"
        )


def check_names(chosen: dict[str, Any], arguments_class: Any) -> None:
    """Refuses an argument that the installed vLLM does not have.

    Raises:
        ValueError: its name, and the nearest one.
    """
    known = [field.name for field in dataclasses.fields(arguments_class)]
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"vllm.args: this vLLM has no argument {name!r}.{guess}")


def check_adapter(adapter: str, settings: Vllm) -> None:
    """Refuses a LoRA adapter that vLLM would fail on in the middle of a step, with all other requests.

    Raises:
        ValueError: there is none, vLLM has not been told to expect one, or it is too large.
    """
    if not adapter:
        return
    if not settings.args.get("enable_lora"):
        raise ValueError(f"adapter {adapter!r}: adapters are off; set vllm.args to {{'enable_lora': true}}")
    about = Path(adapter) / "adapter_config.json"
    if not about.is_file():
        raise ValueError(f"adapter {adapter!r}: there is no {about}; name a folder that peft has saved")
    rank, most = json.loads(about.read_text()).get("r", 0), settings.args.get("max_lora_rank", 16)
    if rank > most:
        raise ValueError(f"adapter {adapter!r} has rank {rank}, above {most}: raise max_lora_rank in vllm.args")


def _kv_bytes(config: Config, model_path: str) -> int:
    """Size of the KV cache; 0: vLLM takes what `memory_fraction` leaves on the GPU."""
    if config.vllm.kv_cache_mb:
        return int(config.vllm.kv_cache_mb * 2**20)
    if config.generator.device.startswith("cuda"):
        return 0
    model = json.loads((Path(model_path) / "config.json").read_text())
    model = model.get("text_config", model)
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    per_token = (2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * head_dim) * _BYTES[
        config.model.dtype
    ]
    blocks = config.generator.slots * -(-config.generator.max_model_len // _BLOCK) + 1
    return blocks * _BLOCK * per_token
