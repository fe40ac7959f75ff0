"""Real runs on vLLM, in the generator's process and beside it: weights change in flight, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")]


def _children(pid: int, name: str) -> list[int]:
    """Living processes below `pid` whose title holds `name`."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join([*child.cmdline(), child.name()]):
                found.append(child.pid)
    return found


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_run_on_vllm_updates_its_weights_in_flight_and_loses_nothing(start, account, applied, kv: str) -> None:
    run = start("--engine", "vllm", "--steps", "30", "--weights.kv", kv)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 30, 16)
        # The generator whose vLLM starts first sees nearly all versions, the other those that are left.
        updates = sorted(len(versions) for versions in applied(reader).values())
        assert len(updates) == 2
        assert updates[1] >= 20
        assert not [state for state, _ in reader.episode_states() if state == "failed"]
        lags = reader.lag_histogram()
        assert sum(count for lag, count in lags.items() if lag > 0) > 0
        # In fp32 with recomputed keys an engine's log-probs are the learner's, so only the lag moves the ratio.
        largest = max(row.metrics["ratio_max"] for row in reader.steps())
    assert 1.0 < largest < 20.0
    if kv == "keep":
        # From a plain shell, which does not say how many threads a kernel takes.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = [*ASYNCRL, "eval", str(run.dir), "--tasks", "64", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["rewarded"] == 64


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_killed_process_of_vllm_is_found_out_and_its_episodes_continue(start, account, victim: str) -> None:
    run = start("--engine", "vllm", "--vllm.driver", "async", "--generator.count", "1", "--steps", "14")
    run.wait_for_step(4)
    (killed,) = _children(run.pid("generator-0"), victim)
    os.kill(killed, signal.SIGKILL)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 14, 16)
        started = [event for event in reader.events() if event.source == "generator-0" and event.what == "started"]
        assert len(started) == 2
    assert "engine died" in (run.dir / "logs" / "generator-0.log").read_text()
