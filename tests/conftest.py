"""Shared by all tests: coroutine tests run on a fresh event loop, as the processes do; examples are not timed."""

import asyncio
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from asyncrl import records
from asyncrl.config import Config
from asyncrl.groups import Rules
from asyncrl.journal import Journal
from asyncrl.learner import manifest
from asyncrl.messages import Checkpointed, Chunk, EpisodeEnd, Task, Turn
from asyncrl.scheduler import Grant, Scheduler

# Tests run side by side: threads of one would only take the cores of another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


STEPS = 4
CONFIG = Config.model_validate(
    {"train": {"steps": 6, "groups_per_step": 2, "group_size": 2}, "learner": {"token_budget": 512}}
)


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was stopped after four, by the real scheduler; groups 1, 5, 9 ... are filtered.

    Its checkpoints are of steps 2 and 4, and hold nothing that a learner could load. Copy it before changing it.
    """
    folder = tmp_path_factory.mktemp("run")
    journal = Journal.create(folder / "run.db", "a-run", CONFIG.model_dump_json())
    equal = "equal rewards"
    rules = Rules.from_config(CONFIG, greedy=False)
    scheduler = Scheduler(rules, lambda rewards: equal if len(set(rewards)) == 1 else None)
    scheduler.generator_joined("g", "first", 64, 0, [], 0.0)
    for step in range(1, STEPS + 1):
        while scheduler.may_admit():
            scheduler.admit(Task(f"t{scheduler.next_task_index}", []), 1.0)
        for grant in scheduler.grant(1.0):
            if grant.group_id < 4 * step:
                _play(scheduler, journal, grant)
        if scheduler.seal(1.0):
            journal.write(scheduler.take_records())
            scheduler.step_done(step)
            scheduler.published(step)
            done = [records.step(step, step, 1.0, {}), records.version(step, 1.0)]
            journal.write([*scheduler.take_records(), *done])
            scheduler.generator_version("g", step)
    assert scheduler.step == STEPS
    while scheduler.may_admit():
        scheduler.admit(Task("t", []), 1.0)
    assert scheduler.grant(1.0)
    journal.write([records.run_key("status", "stopped"), *scheduler.take_records()])
    for step in (2, 4):
        _checkpoint(folder, step)
    journal.write(records.checkpoints(1.0, Checkpointed(4, "", [2, 4])))
    journal.close()
    return folder


@pytest.fixture
def write_checkpoint() -> Callable[[Path, int], Path]:
    """Writes a checkpoint of a step into a run's folder, manifest and all."""
    return _checkpoint


def _play(scheduler: Scheduler, journal: Journal, grant: Grant) -> None:
    reward = 0.0 if grant.group_id % 4 == 1 else float(grant.episode_id % 2)
    for seq in range(3):
        tokens = np.arange(20, dtype="<i4").tobytes()
        header = Chunk(grant.lease_id, grant.episode_id, seq, 20, 0, seq > 0)
        scheduler.chunk(header)
        journal.write([records.chunk(header, tokens, tokens)])
    journal.write(records.turn(Turn(grant.lease_id, grant.episode_id, 0, 1, [])))
    scheduler.end(EpisodeEnd(grant.lease_id, grant.episode_id, 3, "completed", reward, 1), 1.0)


def _checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "part").write_bytes(os.urandom(100))
    manifest.write(path, step, None)
    return path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What stays together: real runs, for they use all cores and have time limits; elsewhere a file, and in the
    engines' one suite what an open engine serves, for they share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            engine = re.search(r"\[(vllm-async|[a-z]+)(-tied|-untied)?", test)
            if path.startswith("tests/e2e/") or path == "tests/test_storage.py":
                return "runs"
            return f"{path} {engine.group()}" if engine and path.endswith("test_conformance.py") else path

    return Together(config, log)
