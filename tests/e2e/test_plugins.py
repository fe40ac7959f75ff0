"""Packages with nothing but entry points, really installed: their own tests pass, and they train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sources of a package that `asyncrl envs new` wrote, and of the example."""
    pytest.importorskip("setuptools", reason="it builds the packages; pip install setuptools")
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([*ASYNCRL, "envs", "new", "my-env"], cwd=folder, check=True, timeout=60)
    # A copy, because a build leaves folders behind.
    left = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(EXAMPLE, folder / "example", ignore=left)
    return [folder / "my-env", folder / "example"]


@pytest.fixture(scope="module")
def installed(packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed both, without asking any index."""
    target = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    pip += ["--no-deps", "--no-build-isolation", "--target", str(target), *map(str, packages)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_the_packages_own_tests_pass(packages: list[Path], installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    for package in packages:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_new_environment_and_anothers_reward_train_by_name(
    start, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    run = start(
        "--env", "my-env", "--env.args.length", "4", "--reward.functions", '["terse"]', "--steps", "2",
        "--model", "null", "--toy.warm_steps", "5", "--toy.cache_dir", str(tmp_path / "toys"),
        "--sampling.max_tokens", "8",
    )  # fmt: skip
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        assert reader.status == "finished"
        episodes = reader.episodes(state="trained", limit=1000)
    assert {"reversed", "terse"} == {name for episode in episodes for name in episode.rewards}
    assert {1, 2} >= {episode.turns for episode in episodes}


@pytest.mark.slow
def test_a_third_partys_environment_with_a_tool_trains_by_name(
    start, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    run = start("--env", "phonebook", "--steps", "2", "--generator.max_model_len", "256")
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        assert reader.status == "finished"
        assert {name for episode in reader.episodes(state="trained") for name in episode.rewards} == {"number"}
