"""Who may import whom (design: ground to roof), read from the source and checked in real processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import Algo, Config
from asyncrl.launch import create
from asyncrl.trainers.presets import resolve

ROOT = Path(__file__).parents[1]
FOLDERS = {"asyncrl": "asyncrl", "trainers": "asyncrl.trainers", "envs": "asyncrl.envs"}
FOLDERS["triton_kernels"] = "asyncrl.triton_kernels"

LAYERS = [
    {
        "messages",
        "config",
        "contradictions",
        "deterministic",
        "schema",
        "packing",
        "process",
        "watchdog",
        "triton_kernels",
        "settings",
        "groups",
        "records",
        "env_template",
    },
    {"journal", "scheduler", "leases", "transport", "roster", "rounds", "recovery", "commit", "batches"}
    | {"harvest", "curriculum", "chat", "chat_template", "chat_probe", "chat_renderers", "tool_calls", "neutral"}
    | {"keys", "peers", "reclaim", "datasets"},
    {"trainers", "envs"},
    {"hub", "generator", "learner", "weights", "evaluate", "toy", "metrics"}
    | {"scorer", "scorer_client", "scorer_model", "algos", "envs_command", "tasks", "intake", "overdue"}
    | {"doctor", "doctor_run", "doctor_journal"},
    {"supervisor", "lifesigns", "launch", "algo_launch", "scorer_launch", "resume"}
    | {"replay", "replay_report", "diff"},
    {"train", "cli", "commands", "__main__"},
]


def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _layer(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "asyncrl" or len(parts) < 2:
        return None
    return next((level for level, names in enumerate(LAYERS) if parts[1] in names), None)


def test_every_module_has_a_layer() -> None:
    homeless = [name for name in _modules() if name != "asyncrl" and _layer(name) is None]
    assert not homeless


def test_no_module_imports_one_above_it() -> None:
    upwards = []
    for name, path in _modules().items():
        own = _layer(name)
        for imported in _imports(path):
            level = _layer(imported)
            if own is not None and level is not None and level > own:
                upwards.append(f"{name} imports {imported}")
    assert not upwards


def test_the_learner_never_imports_an_engine() -> None:
    guilty = [
        name
        for name, path in _modules().items()
        if name.startswith("asyncrl.learner")
        and any(".engines" in imported or "vllm" in imported for imported in _imports(path))
    ]
    assert not guilty


@pytest.mark.parametrize("module", ["asyncrl.hub", "asyncrl.cli", "asyncrl.supervisor", "asyncrl.launch"])
def test_it_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


BUILD_A_HUB = """
import asyncio, os, sys
from pathlib import Path
from asyncrl.hub import Hub

async def build():
    Hub(Path(sys.argv[1]), 5555)
    os._exit('torch' in sys.modules)

asyncio.run(build())
"""


def test_a_hub_does_not_load_the_learners_plugins_and_with_them_torch(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import torch\n\ndef mine(outcomes):\n    return outcomes.reward\n\nmine.needs = ('greedy',)\n"
    )
    config = Config(algo=resolve(Algo(name="grpo", advantage=f"{plugin}:mine")))
    assert config.algo.greedy_baseline is True
    create(config, tmp_path / "run")
    command = [sys.executable, "-P", "-c", BUILD_A_HUB, str(tmp_path / "run")]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_the_bare_name_of_the_kernels_folder_cannot_be_imported() -> None:
    code = "import triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode != 0
    assert "asyncrl.triton_kernels" in done.stderr
