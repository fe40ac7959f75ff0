"""What is special to vLLM: the traps of its CPU backend, adapters, and processes that must not outlive us.

The traps are shown to be real here, so that a version of vLLM which no longer has one makes its test fail, and the
repair can go. What every engine promises is in `test_conformance.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from asyncrl.config import Config, Vllm
from asyncrl.generator.engines import vllm_request, vllm_worker
from asyncrl.generator.engines.base import EngineDead, SamplingParams, StagedWeights
from asyncrl.generator.engines.vllm import VllmEngine, open_vllm
from asyncrl.generator.engines.vllm_settings import environment, set_environment

PROMPT = [(7 * i) % 97 for i in range(150)]


@pytest.fixture
def open_engine(tmp_path: Path, model_of):
    """An in-process engine over `model_of(**changes)`, and that model."""
    opened = []

    def go(vllm: dict[str, Any] | None = None, **changes: Any):
        model = model_of(architectures=["Qwen3ForCausalLM"], **changes)
        model.save_pretrained(tmp_path / "model")
        generator = {"engine": "vllm", "slots": 8, "max_model_len": 256, "chunk_tokens": 8}
        config = Config.model_validate({"generator": generator, "vllm": vllm or {}})
        set_environment(environment(config, inprocess=True))
        engine = VllmEngine(config, str(tmp_path / "model"), 0)
        opened.append(engine)
        return engine, model

    yield go
    for engine in opened:
        engine.close()


def finish(engine: VllmEngine, prompt: list[int], **params: Any) -> tuple[list[int], list[float]]:
    """Runs one request to its end beside those that run."""
    engine.add("it", prompt, SamplingParams(**params))
    tokens, logprobs, ended = [], [], False
    while not ended:
        for rid, delta in engine.step():
            if rid == "it":
                tokens += delta.token_ids
                logprobs += delta.logprobs
                ended = delta.finish_reason is not None
    return tokens, logprobs


def error(plain, model: Any, prompt: list[int], answer: tuple[list[int], list[float]]) -> float:
    tokens, logprobs = answer
    expected = plain(model, prompt + tokens)[len(prompt) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((expected - torch.tensor(logprobs)).abs().max())


def staged(model: Any, version: int) -> StagedWeights:
    return StagedWeights(version, [(name, p.detach().clone()) for name, p in model.named_parameters()])


def test_a_tied_head_stays_stale_unless_it_is_packed_anew(open_engine, model_of, plain, monkeypatch):
    engine, _ = open_engine(tie_word_embeddings=True)
    other = model_of(1, tie_word_embeddings=True)
    with monkeypatch.context() as without:
        without.setattr(vllm_worker, "repack_tied_head", lambda *_: None)
        engine.load_weights(staged(other, 1), "recompute")
        assert error(plain, other, [1, 2, 3], finish(engine, [1, 2, 3], max_tokens=20)) > 1.0
    engine.load_weights(staged(other, 2), "recompute")
    assert error(plain, other, [1, 2, 3], finish(engine, [1, 2, 3], max_tokens=20)) < 1e-4


def test_loading_weights_into_a_packed_model_without_the_reload_fails(open_engine, model_of):
    engine, _ = open_engine()
    named = staged(model_of(1), 1).tensors
    with pytest.raises(AttributeError, match="weight_loader"):
        engine._engine.apply_model(lambda model: model.load_weights(iter(named)))


def test_without_a_salt_the_prefix_cache_serves_keys_of_the_old_weights(open_engine, model_of, plain, monkeypatch):
    engine, _ = open_engine()
    other = model_of(1)

    def ask_again_after_an_update(version: int) -> float:
        finish(engine, PROMPT, max_tokens=2)
        engine.add(f"running-{version}", [1], SamplingParams(max_tokens=100))
        engine.step()
        engine.load_weights(staged(other if version % 2 else model_of(), version), "keep")
        model = other if version % 2 else model_of()
        return error(plain, model, PROMPT, finish(engine, PROMPT, max_tokens=10))

    with monkeypatch.context() as without:
        original = vllm_request._prompt
        unsalted = Vllm(prefix_cache=False)
        without.setattr(vllm_request, "_prompt", lambda ids, version, _: original(ids, version, unsalted))
        assert ask_again_after_an_update(1) > 0.1
    assert ask_again_after_an_update(2) < 1e-4


def test_vllm_s_default_length_and_the_model_folder_s_defaults_are_overridden(open_engine, tmp_path, plain):
    open_engine()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.1}))
    engine, model = open_engine()
    answer = finish(engine, [3, 4], max_tokens=40)
    assert len(answer[0]) == 40
    assert answer[0] != plain(model, [3, 4, *answer[0]])[1:].argmax(-1).tolist()
    assert error(plain, model, [3, 4], answer) < 1e-4


def test_an_update_that_leaves_a_parameter_out_is_an_error_that_names_it(open_engine, model_of):
    engine, _ = open_engine()
    left_out = "model.layers.1.mlp.down_proj.weight"
    named = [pair for pair in staged(model_of(1), 1).tensors if pair[0] != left_out]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj"):
        engine.load_weights(StagedWeights(1, named), "keep")
    _forget_rotary_tables()


def test_a_scale_that_quantisation_adds_to_the_engine_s_model_is_not_asked_of_the_learner(
    open_engine, model_of, plain
):
    engine, _ = open_engine()

    def quantise(model) -> None:
        """What vLLM's quantisation methods do after each load: they add scales that no checkpoint has."""
        layer = model.model.layers[0].mlp.down_proj
        method = copy.copy(layer.quant_method)
        plain_processing = method.process_weights_after_loading

        def processing(layer) -> None:
            plain_processing(layer)
            layer.weight_scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

        method.process_weights_after_loading = processing
        layer.quant_method = method
        layer.weight_scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    engine._engine.apply_model(quantise)
    other = model_of(1)
    engine.load_weights(staged(other, 1), "recompute")
    assert error(plain, other, [1, 2, 3], finish(engine, [1, 2, 3], max_tokens=20)) < 1e-4


def _forget_rotary_tables() -> None:
    """vLLM shares them among a process's engines, and a failed update leaves them without data."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    _ROPE_DICT.clear()


def test_an_adapter_samples_as_the_merged_model_does_after_an_update_too(open_engine, model_of, plain, tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(5)
    low, high = 0.3 * torch.randn(4, 64), 0.3 * torch.randn(128, 4)
    name = "model.layers.0.self_attn.q_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    parts = {f"base_model.model.{name}.lora_A.weight": low, f"base_model.model.{name}.lora_B.weight": high}
    save_file(parts, adapter / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    engine, model = open_engine(vllm={"args": {"enable_lora": True, "max_lora_rank": 8}})
    assert error(plain, model, [1, 2], finish(engine, [1, 2], max_tokens=20)) < 1e-4
    with torch.no_grad():
        model.get_submodule(name).weight += high @ low
    answer = finish(engine, [1, 2], max_tokens=20, adapter=str(adapter))
    assert error(plain, model, [1, 2], answer) < 1e-4
    other = model_of(1)
    engine.load_weights(staged(other, 1), "recompute")
    with torch.no_grad():
        other.get_submodule(name).weight += high @ low
    answer = finish(engine, [1, 2], max_tokens=20, adapter=str(adapter))
    assert error(plain, other, [1, 2], answer) < 1e-4


def test_an_engine_core_that_hangs_is_given_up(model_of, tmp_path):
    model_of(architectures=["Qwen3ForCausalLM"], max_position_embeddings=2000).save_pretrained(tmp_path / "model")
    generator = {"engine": "vllm", "max_model_len": 2000, "stall_s": 3.0}
    config = Config.model_validate({"generator": generator, "vllm": {"driver": "async"}})

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        engine: Any = await asyncio.to_thread(open_vllm, config, str(tmp_path / "model"), loop, 0)
        stream = engine.generate("r", [1], SamplingParams(max_tokens=1900))
        await anext(stream)
        (core,) = engine._engine.engine_core.resources.engine_manager.processes
        os.kill(core.pid, signal.SIGSTOP)
        with pytest.raises(EngineDead, match="3 s"):
            [_ async for _ in stream]
        await engine.close()
        core.join(10)
        assert not core.is_alive()

    asyncio.run(scenario())


OWNER = """
import asyncio, sys
from asyncrl.config import Config, Vllm
from asyncrl.generator.engines.base import SamplingParams
from asyncrl.generator.engines.select import open_engine

async def main(folder):
    settings = {"generator": {"engine": "vllm", "max_model_len": 64}, "vllm": {"driver": "async"}}
    config, loop = Config.model_validate(settings), asyncio.get_running_loop()
    engine = await asyncio.to_thread(open_engine, config, folder, loop)
    async for _ in engine.generate("r", [1], SamplingParams(max_tokens=3)):
        pass
    print("ready", flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


def test_vllm_s_processes_end_with_a_killed_generator(model_of, tmp_path):
    model_of(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path / "model")
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, "-P", str(script), str(tmp_path / "model")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    while (line := owner.stdout.readline()) != "ready\n":
        assert line, "the engine did not start"
    others = _session(owner.pid) - {owner.pid}
    assert len(others) >= 2
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 20
    while (left := _session(owner.pid) & others) and time.monotonic() < deadline:
        time.sleep(0.1)  # They are not our children, so nobody tells us when they end.
    assert not left


def _session(number: int) -> set[int]:
    """Living processes of a session."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(state[3]) == number and state[0] != "Z":
                found.add(int(folder.name))
    return found
