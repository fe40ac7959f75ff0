"""The doctor finds what is wrong, says what to do, and is not stopped by a check that fails."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import doctor as module
from asyncrl.doctor import check_folder, check_packages, check_plugins, check_sockets, doctor


def _levels(findings) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    text, status = doctor(tmp_path / "runs")
    assert status == 0, text
    assert text.endswith("everything that is needed works")
    for part in ("torch", "pyzmq", "loopback round trip works", "write-ahead log", "GB free", "env arithmetic"):
        assert part in text, part
    assert list((tmp_path / "runs").iterdir()) == [], "it leaves nothing behind"


def test_a_run_folder_that_is_a_file_is_a_problem_with_advice(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    text, status = doctor(tmp_path / "runs")
    assert status == 1
    assert "FAIL  run folder" in text
    assert "choose another with --run.dir" in text
    assert text.endswith("1 problem")


def test_a_folder_without_a_write_ahead_log_is_a_problem(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_sqlite_round_trip", lambda path: ("delete", 1))
    finding = next(iter(check_folder(tmp_path)))
    assert finding.level == "problem"
    assert "use a local disk" in finding.text


def test_too_little_room_is_a_problem_with_advice(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "DISK_GB", 1e9)
    assert _levels(check_folder(tmp_path)) == {"run folder": "ok", "disk": "problem"}


def test_a_package_that_is_missing_or_too_old_is_named_with_the_command(monkeypatch) -> None:
    versions = {"torch": "1.0", "rich": None}
    real = module._version
    monkeypatch.setattr(module, "_version", lambda name: versions[name] if name in versions else real(name))
    found = {finding.what: finding for finding in check_packages()}
    assert found["torch"].level == found["rich"].level == "problem"
    assert "1.0 is too old; pip install 'torch>=2" in found["torch"].text
    assert "is not installed; pip install 'rich>=" in found["rich"].text
    assert found["numpy"].level == "ok"


def test_versions_are_compared_as_numbers(monkeypatch) -> None:
    monkeypatch.setattr(module, "_requirements", lambda: iter([("a", "2.9"), ("b", "2.9")]))
    monkeypatch.setattr(module, "_version", lambda name: {"a": "2.13.0+cpu", "b": "2.8.9rc1"}.get(name))
    assert {k: v for k, v in _levels(check_packages()).items() if k in "ab"} == {"a": "ok", "b": "problem"}


def test_a_broken_plug_in_is_found_and_blamed(tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "some_envs-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-envs\nVersion: 3.1\n")
    groups = ("asyncrl.envs", "asyncrl.engines", "asyncrl.trackers")
    entries = "".join(f"[{group}]\nodd = not_there_at_all:make\n" for group in groups)
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {finding.what: finding for finding in check_plugins()}
    assert found["env arithmetic"].level == "ok"
    for what in ("env odd", "engine odd", "tracker odd"):
        assert found[what].level == "problem"
        assert "some-envs 3.1" in found[what].text


def test_loopback_that_does_not_answer_is_a_problem(monkeypatch) -> None:
    import zmq

    monkeypatch.setattr(module, "ZMQ_MS", 50)
    monkeypatch.setattr(zmq.Socket, "connect", lambda self, address: None)
    (finding,) = check_sockets()
    assert finding.level == "problem"
    assert "allow it" in finding.text


def test_a_check_that_crashes_is_a_finding_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    def crash():
        raise sqlite3.OperationalError("odd")
        yield

    monkeypatch.setattr(module, "check_memory", crash)
    text, status = doctor(tmp_path)
    assert status == 1
    assert "the check failed with OperationalError: odd" in text
    assert "env arithmetic" in text


@pytest.mark.parametrize("heavy", ["torch", "transformers"])
def test_it_imports_nothing_heavy(tmp_path: Path, heavy: str) -> None:
    code = f"import sys, asyncrl.doctor as d; d.doctor({str(tmp_path)!r}); sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=120).returncode == 0
