"""`asyncrl envs`: lists what is installed whatever is broken, explains, checks, and begins a package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.env_template import files

WORLD = '''
"""Worlds of some size.

More of it.
"""
from asyncrl.envs.base import Start, Step
from asyncrl.messages import Task

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

class Episode:
    async def reset(self, task): return Start(task.prompt, [TOOL])
    async def step(self, message): return Step(True, {"right": 1.0})
    async def close(self): pass
    async def replay(self, message, step): pass

class World:
    def task(self, split, index): return Task(f"{split}/{index}", [{"role": "user", "content": "where?"}], "here")
    def make(self): return Episode()

def make(size: int = 3, *, hard: bool = False):
    """A world. `size` is its size."""
    if size > 9: raise ValueError(f"env.args.size = {size}: at most 9")
    return World()

def needs(file: str):
    """A world in a file."""
    return World()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs distributions: real metadata folders and modules on `sys.path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, entries: str, module: str = "", source: str = "") -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[asyncrl.envs]\n{entries}\n")
        if module:
            (tmp_path / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def _envs(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        status = cli.main(["envs", *arguments])
    except SystemExit as stopped:
        status = int(str(stopped.code))
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_list_shows_whose_and_where_each_is_and_survives_broken_and_duplicate_ones(install, capsys) -> None:
    install("asyncrl-world", "world = world_mod:make\nno-such = world_mod:nothing", "world_mod", WORLD)
    install("asyncrl-broken", "broken = broken_mod:make", "broken_mod", "import a_module_that_is_not_there")
    install("asyncrl-exits", "exits = exits_mod:make", "exits_mod", "raise SystemExit(3)")
    install("first-one", "twice = a_mod:make")
    install("second-one", "twice = b_mod:make")
    status, text = _envs(capsys, "list")
    flat = " ".join(text.split())
    assert status == 0
    assert "arithmetic Sums of small numbers" in flat
    assert "world Worlds of some size. asyncrl-world 1.2, world_mod:make" in flat
    assert "module 'world_mod' has no attribute 'nothing'" in flat
    assert "distribution asyncrl-broken 1.2 cannot be loaded from 'broken_mod:make': ModuleNotFoundError" in flat
    assert "exits cannot be used: environment 'exits' of the distribution asyncrl-exits 1.2" in flat
    assert "is provided by first-one 1.2 (a_mod:make) and second-one 1.2 (b_mod:make)" in flat


def test_without_a_word_it_lists(capsys) -> None:
    assert _envs(capsys) == _envs(capsys, "list")


def test_show_explains_with_a_real_reset(install, capsys) -> None:
    install("asyncrl-world", "world = world_mod:make", "world_mod", WORLD)
    status, text = _envs(capsys, "show", "world", "--env.args.size", "4")
    assert status == 0
    assert text.startswith("world(size: int = 3, *, hard: bool = False)\nfrom asyncrl-world 1.2, world_mod:make\n")
    assert "Worlds of some size.\n\nMore of it.\n\nA world. `size` is its size." in text
    assert "  replay         it takes recorded answers" in text
    assert "snapshots  " not in text
    assert '"id": "train/0", "prompt": [{"role": "user", "content": "where?"}], "answer": "here"' in text
    assert '"function": {"name": "look"' in text


def test_show_of_what_needs_arguments_says_so_and_refuses_bad_ones(install, capsys) -> None:
    install("asyncrl-world", "world = world_mod:make\nneedy = world_mod:needs", "world_mod", WORLD)
    status, text = _envs(capsys, "show", "needy")
    assert status == 0
    assert "A world in a file." in text
    assert "missing a required argument: 'file'" in text
    status, text = _envs(capsys, "show", "world", "--env.args", '{"size": 10}')
    assert status == 2
    assert "env.args.size = 10: at most 9" in text


def test_check_answers_with_its_exit_code(install, capsys, tmp_path: Path) -> None:
    (tmp_path / "world_mod.py").write_text(WORLD)
    status, text = _envs(capsys, "check", f"{tmp_path}/world_mod.py:make", "--tasks", "1")
    assert status == 1
    assert "are the same problem" in text
    assert "an empty answer earns 1 on each of 1 tasks" in text
    assert text.rstrip().endswith(" problems")
    status, text = _envs(capsys, "check", "arithmetic", "--env.args", '{"digits": 1}', "--tasks", "1")
    assert (status, text.splitlines()[-1]) == (0, "no problem found")


REFUSED = {
    "an unknown name": (["show", "arithmetik"], "Did you mean 'arithmetic'?"),
    "an unknown action": (["chekc", "arithmetic"], "invalid choice: 'chekc'"),
    "no name": (["check"], "check needs a NAME"),
    "a name to list": (["list", "arithmetic"], "asyncrl envs show arithmetic"),
    "a folder to check": (["check", "arithmetic", "folder"], "only `new` takes a FOLDER"),
    "tasks to show": (["show", "arithmetic", "--tasks", "3"], "--tasks is for `check`"),
    "no task": (["check", "arithmetic", "--tasks", "0"], "tasks = 0"),
    "no JSON": (["check", "arithmetic", "--env.args", "{digits"], "not valid JSON"),
    "no time": (["check", "arithmetic", "--env.timeout_s", "0"], "env.timeout_s"),
    "a bad name": (["new", "My_Env"], "lower-case words and dashes"),
    "a keyword": (["new", "class"], "lower-case words and dashes"),
    "a taken name": (["new", "arithmetic"], "there is an environment of this name already"),
    "a module's name": (["new", "json"], "there is a Python module of this name already"),
    "a folder that exists": (["new", "my-env", "."], "exists; choose a folder that does not"),
    "a folder that cannot be": (["new", "my-env", "/dev/null/x"], "cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_what_to_do(capsys, tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = REFUSED[name]
    status, text = _envs(capsys, *arguments)
    assert status == 2
    assert expected in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_new_package_is_written_with_its_name_filled_in(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = _envs(capsys, "new", "my-env")
    assert status == 0
    assert "pip install -e my-env" in text
    paths = [path for path in Path("my-env").rglob("*") if path.is_file()]
    written = {str(path.relative_to("my-env")): path.read_text() for path in paths}
    assert written == files("my-env")
    assert {"pyproject.toml", "src/my_env/__init__.py", "tests/test_my_env.py"} <= set(written)
    assert not any("NAME" in text or "MODULE" in text for text in written.values())
    status, text = _envs(capsys, "new", "my-env")
    assert status == 2
    assert "my-env exists" in text
