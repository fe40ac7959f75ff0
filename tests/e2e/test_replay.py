"""One real run, its learner killed once, replayed: bit for bit, in part, by another algorithm, by two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from asyncrl import records
from asyncrl.cli import main
from asyncrl.learner.checkpoint import Checkpointer
from asyncrl.metrics.reader import RunReader
from asyncrl.metrics.summary import run_summary

pytestmark = pytest.mark.slow
LIMIT_S = 240
REWARD = "def vowels(completion):\n    return sum(letter in 'aeiouAEIOU0123456789' for letter in completion) / 8\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Twelve steps; the learner is killed after the sixth and resumes from the fourth, if that is on disk."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "reward.py").write_text(REWARD)
    command = [
        sys.executable,
        "-P",
        "-m",
        "asyncrl",
        "train",
        "--plain",
        "--model",
        str(tiny_model),
        "--name",
        "run",
    ]
    command += ["--run.dir", str(folder), "--steps", "12", "--checkpoint.every", "4", "--checkpoint.keep", "3"]
    command += ["--algo.filter", "none", "--reward.functions", json.dumps([f"{folder / 'reward.py'}:vowels"])]
    command += ["--engine", "transformers", "--generator.count", "1", "--generator.max_model_len", "64"]
    command += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _kill_learner(folder / "run", process)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
    return folder / "run"


def _kill_learner(run: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "run.db").exists():
            with RunReader(run) as reader:
                if 6 <= reader.last_step() < 8:
                    [started] = [e for e in reader.events() if e.source == "learner-0" and "pid" in e.detail]
                    os.kill(int(started.detail.split()[-1]), signal.SIGKILL)
                    return
        time.sleep(0.02)  # Another process writes the journal; there is no event to wait for.
    raise AssertionError("the run did not come to step 6")


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    status = main(["replay", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_whole_run_is_replayed_bit_for_bit(run_dir, capsys) -> None:
    status, found = replay(capsys, run_dir, "--steps", "1..12")
    assert status == 0, found["sentence"]
    assert found["equal"]
    assert found["start"] == 0
    assert list(found["checkpoints"]) == ["4", "8", "12"]
    assert found["sentence"] == "12 steps replayed: bitwise equal; checkpoints compared: 4, 8, 12"
    assert all(step["digest"] == step["recorded_digest"] != "" for step in found["steps"])
    assert len({step["digest"] for step in found["steps"]}) == 12
    assert all(step["replayed"]["grad_norm"] > 0 for step in found["steps"])


def test_steps_that_a_restarted_learner_repeated_gave_the_same_state(run_dir) -> None:
    with RunReader(run_dir) as reader:
        repeated = [json.loads(event.detail)["step"] for event in reader.events() if event.what == "repeated"]
        assert not [event for event in reader.events() if event.what == "differs"]
    assert repeated[0] in (1, 5)  # The checkpoint of step 4 may not have been complete yet.
    assert set(range(repeated[0], 7)) <= set(repeated)
    assert "DIFFER" not in run_summary(run_dir)


def test_a_part_is_replayed_from_the_checkpoint_before_it_and_can_be_kept(run_dir, capsys, tmp_path) -> None:
    status, found = replay(capsys, run_dir, "--steps", "11..12", "--out", tmp_path / "model")
    assert (status, found["start"], found["equal"]) == (0, 8, True)
    kept, exported = (folder / "model.safetensors" for folder in (tmp_path / "model", run_dir / "model"))
    assert kept.read_bytes() == exported.read_bytes()
    assert main(["replay", str(run_dir), "--steps", "7"]) == 0
    text = capsys.readouterr().out
    assert "steps 7 to 7, from checkpoint step 4" in text
    assert "1 step replayed: bitwise equal" in text


@pytest.mark.parametrize("algo", [["--algo.loss", "cispo"], ["--algo", "ppo", "--algo.loss_args.clip_low", "0.1"]])
def test_another_algorithm_is_trained_on_the_same_batches(run_dir, capsys, algo) -> None:
    status, found = replay(capsys, run_dir, "--steps", "9..11", *algo)
    assert (status, found["equal"]) == (0, True)
    assert [step["step"] for step in found["other"]] == [9, 10, 11]
    assert 0 < found["weights_moved"]["relative"] < 1
    changed = found["other_algo"]
    assert changed["filter"] == "none"
    if "ppo" in algo:
        assert (changed["advantage"], changed["loss_args"]["clip_low"]) == ("gae", 0.1)
    else:
        assert (changed["name"], changed["loss"]) == ("dapo", "cispo")


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_compared(
    run_dir, capsys, tmp_path, monkeypatch
) -> None:
    copy, tensors = shutil.copytree(run_dir, tmp_path / "run"), Checkpointer.tensors

    def too_late(checkpointer, trainer, step):
        (copy / "checkpoints" / f"step_{step:06d}").rename(copy / "checkpoints" / f"step_{step:06d}.gone")
        return tensors(checkpointer, trainer, step)

    monkeypatch.setattr(Checkpointer, "tensors", too_late)
    status, found = replay(capsys, copy, "--steps", "7..8")
    assert (status, found["equal"], found["checkpoints"]) == (0, True, {})


def test_two_ranks_come_to_the_same_up_to_rounding(run_dir, tmp_path) -> None:
    command = [sys.executable, "-P", "-m", "asyncrl", "replay", str(run_dir), "--steps", "5..12", "--json"]
    done = subprocess.run([*command, "--learner.ranks", "2"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert (found["ranks"], found["exact"], found["start"]) == (2, False, 4)
    assert found["checkpoints"]["12"]["relative"] < 1e-5
    assert "equal to 1e-05; largest difference" in found["sentence"]


def test_a_flipped_bit_is_found_by_replay_and_by_diff(run_dir, capsys, tmp_path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    with sqlite3.connect(copy / "run.db") as db:
        [episode] = db.execute(
            "SELECT json_extract(episode_ids_json, '$[1]') FROM batch WHERE batch_id = 6"
        ).fetchone()
        select = "SELECT seq, tokens, logprobs FROM chunk WHERE episode_id = ? AND sampled ORDER BY seq DESC"
        seq, tokens, logprobs = db.execute(select, (episode,)).fetchone()
        ids = np.frombuffer(tokens, "<i4").copy()
        ids[0] ^= 1
        crc = records.checksum(ids.tobytes(), logprobs)
        sql = "UPDATE chunk SET tokens = ?, crc = ? WHERE episode_id = ? AND seq = ?"
        db.execute(sql, (ids.tobytes(), crc, episode, seq))
    assert main(["replay", str(copy), "--steps", "5..7"]) == 1
    assert "3 steps replayed: they DIFFER from step 6 on (" in capsys.readouterr().out
    assert main(["diff", str(run_dir), str(copy)]) == 1
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("equal up to step 5; the first difference is in step 6, in tokens: episode 1 of task")
    assert f"{ids[0] ^ 1} (sampled) and {ids[0]} (sampled)" in line


def test_a_run_does_not_differ_from_itself(run_dir, capsys) -> None:
    assert main(["diff", str(run_dir), str(run_dir)]) == 0
    assert "all 12 steps that both have are equal" in capsys.readouterr().out
