"""Which GPU goes to which process, and which settings are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.launch import check_gpus
from asyncrl.settings import UsageError
from asyncrl.supervisor import gpu_share, gpus_each


def make_config(**sections: dict[str, Any]) -> Config:
    for name in ("generator", "learner"):
        sections[name] = {"device": "cuda"} | sections.get(name, {})
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("gpus", "each", "visible", "shares"),
    [
        ([], 2, None, [None, None]),
        ([], 1, "3,4", [None, None]),
        ([1, 0], 1, None, ["1", "0"]),
        ([2, 3, 6, 7], 2, None, ["2,3", "6,7"]),
        ([0, 2], 1, "4,5,6", ["4", "6"]),
        ([1, 0], 1, "GPU-a,GPU-b", ["GPU-b", "GPU-a"]),
    ],
)
def test_every_process_sees_its_own_gpus_and_no_others(gpus, each, visible, shares) -> None:
    for index, share in enumerate(shares):
        expected = {} if share is None else {"CUDA_VISIBLE_DEVICES": share}
        assert gpu_share(gpus, index, each, visible) == expected


@pytest.mark.parametrize(("engine", "each"), [("transformers", 1), ("vllm", 6), ("sglang", 4)])
def test_a_generator_gets_as_many_gpus_as_its_engine_spreads_over(engine: str, each: int) -> None:
    config = make_config(
        generator={"engine": engine},
        vllm={"tensor_parallel": 2, "data_parallel": 3},
        sglang={"tensor_parallel": 4},
    )
    assert gpus_each(config) == each


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"generator": {"engine": "vllm", "count": 2, "gpus": [0, 1, 2]}, "vllm": {"tensor_parallel": 2}},
            r"generator.gpus = \[0, 1, 2\]: generator.count = 2 generators of 2 each need 4 GPUs",
        ),
        ({"learner": {"ranks": 2, "gpus": [0]}}, r"learner.gpus = \[0\]: learner.ranks = 2 need 2 GPUs"),
        ({"learner": {"device": "cpu", "gpus": [0]}}, "learner.device = 'cpu'; set --learner.device cuda"),
        ({"generator": {"count": 2, "gpus": [1, 1]}}, "name each GPU once"),
        ({"generator": {"count": 1, "gpus": [-1]}}, "counting from 0"),
        ({"generator": {"count": 1, "gpus": [2]}}, r"CUDA_VISIBLE_DEVICES = '4,5' leaves 0..1"),
        (
            {"generator": {"count": 1, "gpus": [0]}, "learner": {"gpus": [0]}, "weights": {"backend": "nccl"}},
            r"GPUs \[0\] are in learner.gpus and in generator.gpus.*weights.backend shm",
        ),
        (
            {"generator": {"device": "cpu"}, "weights": {"backend": "nccl"}},
            "'cuda' and 'cpu'; set --weights.backend",
        ),
        ({"weights": {"backend": "nccl"}}, "'nccl', but learner.gpus is empty.*weights.backend auto, or give"),
        (
            {"generator": {"count": 1, "gpus": [1]}, "weights": {"backend": "nccl"}},
            "'nccl', but learner.gpus is empty.*give --learner.gpus too",
        ),
        ({"learner": {"gpus": [1]}, "weights": {"backend": "nccl"}}, "generator.gpus is empty"),
        (
            {"generator": {"engine": "vllm", "count": 2}, "vllm": {"tensor_parallel": 2}},
            "generator.count = 2 without generator.gpus: every vllm engine .* name 4 with --generator.gpus, or",
        ),
        (
            {"generator": {"engine": "sglang", "count": 3}, "learner": {"device": "cpu"}},
            "every sglang engine would take the same GPUs; name 3 with .*--generator.count 1",
        ),
        (
            {"generator": {"engine": "vllm", "count": 1}, "vllm": {"memory_fraction": 1}},
            r"vllm.memory_fraction = 1 leaves nothing for the learner on GPUs \[0\]",
        ),
        (
            {
                "generator": {"engine": "sglang", "count": 2, "gpus": [2, 1]},
                "learner": {"ranks": 2},
                "sglang": {"memory_fraction": 1},
            },
            r"sglang.memory_fraction = 1 leaves nothing for the learner on GPUs \[1\].*memory_fraction 0.4",
        ),
    ],
)
def test_gpu_settings_that_do_not_fit_are_refused_with_what_would(sections, said, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5" if "VISIBLE" in said else "0,1,2,3")
    with pytest.raises(UsageError, match=said):
        check_gpus(make_config(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"generator": {"count": 2, "gpus": [1, 2]}, "learner": {"gpus": [0]}, "weights": {"backend": "nccl"}},
        {"generator": {"count": 1, "gpus": [0]}, "learner": {"gpus": [0]}},
        {"generator": {"device": "cpu"}, "learner": {"device": "cpu"}},
        {"generator": {"engine": "vllm", "device": "cpu", "count": 2}},
        {"generator": {"engine": "transformers", "count": 2}},
        {"generator": {"engine": "vllm", "count": 1}},
        {"generator": {"engine": "vllm", "count": 2, "gpus": [0, 1]}, "learner": {"ranks": 2}},
        {"generator": {"engine": "sglang", "count": 2}, "sglang": {"urls": ["http://a", "http://b"]}},
        {"generator": {"engine": "vllm", "count": 1}, "vllm": {"memory_fraction": 1, "kv_cache_mb": 100}},
        {"generator": {"engine": "vllm", "count": 1, "gpus": [1]}, "vllm": {"memory_fraction": 1}},
    ],
)
def test_gpu_settings_that_fit_are_accepted(sections, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_gpus(make_config(**sections))
