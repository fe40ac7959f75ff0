"""Which GPU goes to which process, which settings are refused, which deaths count, and a start that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.launch import check_gpus
from asyncrl.settings import UsageError
from asyncrl.supervisor import Child, Supervisor, gpu_share, gpus_each, still_counted
from asyncrl.transport import free_port_pair


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


def _survived(deaths: list[float], hung_s: float, most: int = 5) -> int:
    """How many deaths, at these times, a process is started again after."""
    restarts: list[float] = []
    for survived, now in enumerate(deaths):
        restarts = still_counted(restarts, now, 120.0, hung_s)
        if len(restarts) >= most:
            return survived
        restarts.append(now)
    return len(deaths)


@pytest.mark.parametrize(
    ("apart_s", "hung_s", "survived"),
    [
        (10.0, 0.0, 5),
        (200.0, 0.0, 100),  # It crashes now and then: each time it had lived for longer than the window.
        (615.0, 600.0, 5),  # It hangs in its first step, always: 600 of these seconds were no life.
        (3600.0, 600.0, 100),  # It hangs once in an hour.
    ],
)
def test_the_time_in_which_a_process_hung_does_not_count_as_its_life(
    apart_s: float, hung_s: float, survived: int
) -> None:
    assert _survived([number * apart_s for number in range(100)], hung_s) == survived


async def test_a_process_that_cannot_be_started_again_fails_the_run_with_the_reason(tmp_path: Path) -> None:
    supervisor = Supervisor(Config(), tmp_path, free_port_pair("127.0.0.1"))
    supervisor._logs.mkdir()
    child = Child("generator-0", ["--version"])
    await supervisor._start(child)
    supervisor._logs.rename(tmp_path / "away")
    assert child.process is not None
    child.process.kill()
    async with asyncio.timeout(30):
        outcome = await supervisor._outcome
    assert outcome.status == "failed"
    assert outcome.reason.startswith("the supervisor's task watch-generator-0 failed: FileNotFoundError: ")
    await supervisor._kill_all()
    supervisor._link.close()


async def test_a_process_that_no_kill_ends_fails_the_run_instead_of_being_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.supervisor.KILLED_S", 0.1)
    supervisor = Supervisor(Config(), tmp_path, free_port_pair("127.0.0.1"))
    process = await asyncio.create_subprocess_exec("sleep", "60")
    with monkeypatch.context() as kernel:
        kernel.setattr(process, "kill", lambda: None)  # As where a disk does not answer.
        await supervisor._kill(Child("learner-0", []), process)
    assert f"learner-0 (pid {process.pid}) was killed and did not end" in supervisor._outcome.result().reason
    process.kill()
    await process.wait()
    supervisor._link.close()
