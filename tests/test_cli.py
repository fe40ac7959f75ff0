"""The command line: exit codes, errors of one paragraph, and nothing left behind by a refused run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.learner.errors import NotFinite


def _asyncrl(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "asyncrl", *arguments]
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=env)


def test_help_lists_every_command_without_importing_anything_heavy(tmp_path: Path) -> None:
    done = _asyncrl("--help", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert all(command in done.stdout for command in cli.COMMANDS)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "import time" in line}
    assert not imported & {"torch", "transformers", "numpy", "pydantic", "zmq", "rich"}


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: asyncrl {command}" in capsys.readouterr().out


REFUSED = {
    "bad key": (["--learner.lrr", "1"], "Did you mean --learner.lr?"),
    "bad value": (["--staleness.over_age", "masq"], "Did you mean mask?"),
    "unknown algorithm": (["--algo", "dappo"], "dapo"),
    "unknown environment": (["--env", "arithmetik"], "arithmetic"),
    "bad argument of the environment": (["--env.args", '{"digitz": 3}'], "digitz"),
    "unknown reward function": (["--reward.functions", '["nobody"]'], "no reward function named 'nobody'"),
    "ill-shaped reward function": (["--reward.functions", '["json:dumps"]'], "nothing is given for obj"),
    "no reward model": (["--reward.model", "nowhere"], "nowhere: it has no config.json"),
    "bad address of the scorer": (["--reward.endpoint", "10.0.0.7"], "tcp://host:port"),
    "missing model folder": (["--model", "nowhere"], "nowhere: no such folder"),
    "missing folder of the critic": (["--algo", "ppo", "--critic.path", "nope"], "nope: no such folder"),
    "missing folder of the process reward": (["--process_reward.path", "nope"], "process_reward.path = "),
    "a group of one that is compared": (["--train.group_size", "1"], "algo.advantage = 'grpo', which compares"),
    "pairs in minibatches": (["--algo", "online-dpo", "--learner.minibatches", "2"], "learner.minibatches = 2"),
    "a flag in place of a value": (["--algo.loss_args.clip_high", "--steps", "5"], "and --steps follows"),
    "a baseline that is not needed": (["--algo.greedy_baseline", "true"], "has no use for greedy episodes"),
    "contradiction": (["--sampling.max_tokens", "4000"], "generator.max_model_len"),
    "missing file": (["@nowhere.toml"], "nowhere.toml does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_paragraph_exit_code_2_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    arguments, expected = REFUSED[name]
    done = _asyncrl("train", *arguments, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _asyncrl("train", "--hub.port", str(port), cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _asyncrl("train", "--run.dir", str(tmp_path / "file" / "runs"), cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 2
    assert "choose another --run.dir" in done.stderr


def test_a_dry_run_explains_the_run_and_writes_nothing(tmp_path: Path) -> None:
    done = _asyncrl("train", "--algo", "dapo", "--dry-run", "--staleness.max_lag", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    graph, settings = done.stdout.split("\n\n{", 1)
    config = json.loads("{" + settings)
    ahead = 4 * config["train"]["groups_per_step"]
    assert f"at most {ahead} groups admitted" in graph
    assert config["algo"]["loss_args"]["clip_high"] == 0.28
    assert not any(value is None for value in config["algo"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_greedy_episodes_and_a_group_of_one_has_a_baseline_in_its(tmp_path: Path) -> None:
    line = ["--algo", "remax", "--sampling.max_tokens", "10", "--train.steps", "3"]
    whole = _asyncrl("train", *line, "--dry-run", cwd=tmp_path)
    assert "32 groups x (8 + 1 greedy) = 288 episodes per step" in whole.stdout, whole.stderr
    assert "at most 2,880 sampled; journal at most 23,040 bytes" in whole.stdout
    assert "3 steps, 768 episodes trained" in whole.stdout
    alone = _asyncrl("train", *line, "--dry-run", "--train.group_size", "1", cwd=tmp_path)
    assert "32 groups x (1 + 1 greedy) = 64 episodes per step" in alone.stdout, alone.stderr


def test_an_update_that_is_not_finite_ends_a_command_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_parser: cli.Parser, _arguments: list[str]) -> int:
        raise NotFinite(3, 3, "the loss")

    monkeypatch.setitem(cli._HANDLERS, "sft", fail)
    assert cli.main(["sft"]) == 1
    printed = capsys.readouterr().err
    assert printed == f"asyncrl sft: {NotFinite(3, 3, 'the loss')}\n"


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "Did you mean `asyncrl train`?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["episodes"], ["eval"], ["train", "--resume"]], ids=" ".join)
def test_a_run_that_does_not_exist_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "nowhere"]) == 2
    assert "nowhere is no run" in capsys.readouterr().err
