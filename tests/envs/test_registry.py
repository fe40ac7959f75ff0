"""Plug-ins: what is found, and what is said when it is not."""

import sys
from pathlib import Path

import pytest

from asyncrl.envs import registry
from asyncrl.envs.arithmetic import Arithmetic
from asyncrl.envs.registry import PluginError, load, load_plugin, names

GOOD = """
from asyncrl.messages import Task

class World:
    def __init__(self, size): self.size = size
    def task(self, split, index): return Task(id=str(index), prompt=[])
    def make(self): return self.size

def make(size=3): return World(size)
def refuses(): raise RuntimeError("no data set")
def not_one(): return 3
number = 7
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs distributions: real metadata folders and modules on `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, entry: str, source: str | None = None, module: str = "") -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[asyncrl.envs]\n{entry}\n")
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def test_the_built_in_environment_is_found_by_name() -> None:
    environment = load("arithmetic", {"digits": 3})
    assert isinstance(environment, Arithmetic)
    assert environment.digits == 3
    assert "arithmetic" in names()


def test_an_installed_distribution_adds_an_environment(install) -> None:
    install("asyncrl-world", "world = world_mod:make", GOOD, "world_mod")
    assert load("world", {"size": 5}).size == 5
    assert names() == sorted(names())
    assert {"arithmetic", "world"} <= set(names())


def test_an_unknown_name_is_answered_with_the_nearest_the_list_and_what_to_do() -> None:
    with pytest.raises(PluginError) as caught:
        load("arithmetics", {})
    text = str(caught.value)
    assert "no environment named 'arithmetics'" in text
    assert "Did you mean 'arithmetic'?" in text
    assert f"Installed: {', '.join(names())}" in text
    assert "entry-point group 'asyncrl.envs'" in text


def test_two_distributions_with_one_name_are_both_named(install) -> None:
    install("first-one", "twice = a_mod:make")
    install("second-one", "twice = b_mod:make")
    with pytest.raises(PluginError, match=r"first-one 1\.2 \(a_mod:make\) and second-one 1\.2 \(b_mod:make\)"):
        load("twice", {})


def test_a_distribution_that_is_seen_twice_is_no_conflict(install, monkeypatch, tmp_path: Path) -> None:
    install("asyncrl-world", "world = world_mod:make", GOOD, "world_mod")
    copy = tmp_path / "again"
    copy.mkdir()
    (tmp_path / "asyncrl_world-1.2.dist-info").rename(copy / "asyncrl_world-1.2.dist-info")
    install("asyncrl-world", "world = world_mod:make")
    monkeypatch.syspath_prepend(str(copy))
    assert load("world", {}).size == 3


def test_a_broken_plug_in_is_blamed_on_its_distribution_and_harms_no_other(install) -> None:
    install("asyncrl-broken", "broken = broken_mod:make", "import a_module_that_is_not_there", "broken_mod")
    with pytest.raises(PluginError) as caught:
        load("broken", {})
    assert "distribution asyncrl-broken 1.2" in str(caught.value)
    assert "No module named 'a_module_that_is_not_there'" in str(caught.value)
    assert isinstance(load("arithmetic", {}), Arithmetic)


def test_only_the_requested_plug_in_is_imported(install) -> None:
    install("asyncrl-world", "world = world_mod:make", GOOD, "world_mod")
    load("arithmetic", {})
    assert "world_mod" not in sys.modules


def test_arguments_that_do_not_fit_are_answered_with_the_signature() -> None:
    with pytest.raises(PluginError) as caught:
        load("arithmetic", {"digit": 2})
    assert "unexpected keyword argument 'digit'" in str(caught.value)
    assert "arithmetic(digits: 'int' = 2" in str(caught.value)


def test_an_argument_that_the_environment_refuses_keeps_its_reason() -> None:
    with pytest.raises(PluginError, match=r"digits = 0: must be a whole number from 1 to 18"):
        load("arithmetic", {"digits": 0})


def test_an_object_can_be_named_by_file(tmp_path: Path) -> None:
    path = tmp_path / "my_env.py"
    path.write_text(GOOD)
    assert load(f"{path}:make", {"size": 9}).size == 9


def test_an_object_can_be_named_by_module() -> None:
    assert isinstance(load("asyncrl.envs.arithmetic:make", {}), Arithmetic)


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        ("mak", "did you mean 'make'"),
        ("number", "is a int, not a function"),
        ("refuses", "RuntimeError: no data set"),
        ("not_one", "returned a int, which lacks"),
    ],
)
def test_what_a_file_provides_is_checked(tmp_path: Path, attribute: str, what: str) -> None:
    path = tmp_path / "my_env.py"
    path.write_text(GOOD)
    with pytest.raises(PluginError, match=what):
        load(f"{path}:{attribute}", {})


def test_a_file_or_module_that_is_not_there_is_named() -> None:
    with pytest.raises(PluginError, match=r"no file nowhere/env\.py"):
        load("nowhere/env.py:make", {})
    with pytest.raises(PluginError, match="No module named 'nowhere_at_all'"):
        load("nowhere_at_all:make", {})


def test_a_file_that_fails_half_way_leaves_no_module_behind(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("x = 1\n1 / 0\n")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        load(f"{path}:make", {})
    assert "asyncrl_plugin_half" not in sys.modules


def test_a_plug_in_that_exits_while_it_is_imported_ends_nothing(install, tmp_path: Path) -> None:
    install("asyncrl-exits", "exits = exits_mod:make", "raise SystemExit(3)", "exits_mod")
    with pytest.raises(PluginError, match=r"distribution asyncrl-exits 1\.2 cannot be loaded .* SystemExit: 3"):
        load("exits", {})
    with pytest.raises(PluginError, match=r"importing .* failed with SystemExit: 3"):
        load(f"{tmp_path}/exits_mod.py:make", {})


def test_names_that_the_caller_knows_itself_are_offered_too() -> None:
    with pytest.raises(PluginError, match=r"Did you mean 'vllm'\? Installed: vllm, sglang"):
        load_plugin("asyncrl.no_such_group", "vlm", "engine", ("vllm", "sglang"))


def test_other_kinds_of_plug_ins_use_the_same_words() -> None:
    with pytest.raises(PluginError, match=r"no tracker named 'x'.* Installed: none"):
        load_plugin("asyncrl.no_such_group", "x", "tracker")
    assert registry.names("asyncrl.no_such_group") == []
