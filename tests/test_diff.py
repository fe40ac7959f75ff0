"""`asyncrl diff` on journals written by hand: equal runs are equal, of unequal ones it finds the first cause."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from asyncrl import records
from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.messages import Chunk, Task

STEPS, GROUPS, MEMBERS = 3, 2, 2


def write(folder: Path, first_id: int = 0, config: Config | None = None) -> Path:
    """A run of three steps of two groups of two episodes, whose ids begin at `first_id`."""
    folder.mkdir()
    config = config or Config.model_validate({"run": {"name": folder.name}})
    journal = Journal.create(folder / "run.db", folder.name, config.model_dump_json())
    rows = []
    for step in range(1, STEPS + 1):
        groups = [first_id + GROUPS * step + i for i in range(GROUPS)]
        episodes = [MEMBERS * group + member for group in groups for member in range(MEMBERS)]
        for group in groups:
            number = group - first_id
            rows += [records.task(group, number, Task(f"t{number}", [])), records.group(group, group, 0, 1.0)]
        for place, episode in enumerate(episodes):
            tokens = np.arange(8, dtype="<i4") + 100 * step + 10 * place
            prompt, answer = tokens[:3].tobytes(), tokens[3:].tobytes()
            logprobs = (-tokens[3:] / 64).astype("<f4").tobytes()
            rows += [
                records.episode(episode, groups[place // MEMBERS], episode),
                records.episode_ended(
                    episode, state="done", reason="", status="completed", reward=place / 4, rewards={}, turns=1,
                    info={}, next_seq=2, length=8, sampled=5, min_version=0, max_version=0, ended=float(first_id),
                ),
                records.chunk(Chunk(0, episode, 0, 3, -1, False), prompt),
                records.chunk(Chunk(0, episode, 1, 5, step - 1, True), answer, logprobs),
            ]  # fmt: skip
        metrics = {"loss": step / 3, "reward_batch": 0.375, "reward": first_id / 7, "train_s": first_id + 0.1}
        rows.append(records.batch(step, groups, episodes, [[[0, 1, 2, 3]]], first_id, 1.0))
        rows.append(records.step(step, step, 1.0 + first_id, metrics, f"{step:016x}"))
    journal.write(rows)
    journal.close()
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "one"), write(tmp_path / "two", first_id=30)


def change(run: Path, sql: str, *values: object) -> None:
    with sqlite3.connect(run / "run.db") as db:
        assert db.execute(sql, values).rowcount


def new_chunk(run: Path, column: str, at: int, value: float) -> None:
    """Changes one number of the second episode of step 2's second group, and the checksum with it."""
    [episode] = sqlite3.connect(run / "run.db").execute(
        "SELECT json_extract(episode_ids_json, '$[3]') FROM batch WHERE batch_id = 2"
    ).fetchone()  # fmt: skip
    select = "SELECT tokens, logprobs FROM chunk WHERE episode_id = ? AND seq = 1"
    tokens, logprobs = sqlite3.connect(run / "run.db").execute(select, (episode,)).fetchone()
    arrays = {"tokens": np.frombuffer(tokens, "<i4").copy(), "logprobs": np.frombuffer(logprobs, "<f4").copy()}
    arrays[column][at] = value
    blobs = [array.tobytes() for array in arrays.values()]
    sql = "UPDATE chunk SET tokens = ?, logprobs = ?, crc = ? WHERE episode_id = ? AND seq = 1"
    change(run, sql, *blobs, records.checksum(*blobs), episode)


def told(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line."""
    status = main(["diff", *map(str, pair)])
    return status, capsys.readouterr().out.strip().splitlines()[-1]


def test_runs_that_did_the_same_are_equal_whatever_their_ids_and_clocks(pair, capsys) -> None:
    assert told(pair, capsys) == (0, "all 3 steps that both have are equal")


@pytest.mark.parametrize(
    ("column", "at", "value", "expected"),
    [
        ("tokens", 4, 9, "in tokens: episode 1 of task t5, token 7: 237 (sampled) and 9 (sampled)"),
        (
            "logprobs",
            0,
            -0.5,
            "in behaviour log-probs: episode 1 of task t5, token 3: -3.640625 (sampled) and -0.5",
        ),
    ],
)
def test_a_changed_token_or_log_prob_is_found_at_its_place(pair, capsys, column, at, value, expected) -> None:
    new_chunk(pair[1], column, at, value)
    status, line = told(pair, capsys)
    assert status == 1
    assert line.startswith("equal up to step 1; the first difference is in step 2, " + expected)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("UPDATE task SET task_id = 'x' WHERE task_id = 't5'", "tasks: group 1 is of task t5 and of task x"),
        ("UPDATE episode SET status = 'truncated_length' WHERE episode_id = 69", "episodes: episode 1 of group 0"),
        ("UPDATE chunk SET version = 0 WHERE version = 1", "versions: episode 0 of task t4, token 3: 1 (samp"),
        ("UPDATE episode SET reward = 0.5 WHERE episode_id = 68", "rewards: episode 0 of task t4: 0.0 {} and 0.5"),
        (
            "UPDATE step SET metrics_json = json_set(metrics_json, '$.loss', 0.5) WHERE step = 2",
            "metrics: loss 0.6666666666666666 and 0.5",
        ),
        ("UPDATE step SET digest = 'abc' WHERE step = 2", "digest: 0000000000000002 and abc"),
    ],
)  # fmt: skip
def test_whatever_differs_first_is_named(pair, capsys, sql: str, expected: str) -> None:
    change(pair[1], sql)
    status, line = told(pair, capsys)
    assert status == 1
    assert line.startswith("equal up to step 1; the first difference is in step 2, in " + expected)


def test_the_cause_is_named_before_its_effects(pair, capsys) -> None:
    new_chunk(pair[1], "tokens", 2, 9)
    change(pair[1], "UPDATE step SET digest = 'abc', metrics_json = '{}' WHERE step >= 2")
    assert main(["diff", *map(str, pair)]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:20].strip(): line[20:].strip() for line in lines[2:10]}
    assert {name: text == "equal" for name, text in rows.items()} == {
        "tasks": True, "episodes": True, "tokens": False, "versions": True, "behaviour log-probs": True,
        "rewards": True, "metrics": False, "digest": False,
    }  # fmt: skip
    assert "in step 2, in tokens:" in lines[-1]


def test_settings_that_differ_are_listed_and_are_no_difference_by_themselves(tmp_path, capsys) -> None:
    other = Config.model_validate({"learner": {"ranks": 2}, "algo": {"name": "grpo"}, "run": {"name": "b"}})
    runs = write(tmp_path / "a"), write(tmp_path / "b", config=other)
    assert main(["diff", *map(str, runs)]) == 0
    assert "settings that differ: algo.name, learner.ranks\n" in capsys.readouterr().out


def test_a_run_that_goes_on_further_is_no_equal_one(pair, capsys) -> None:
    change(pair[0], "DELETE FROM batch WHERE batch_id = 3")
    assert told(pair, capsys) == (1, f"all 2 steps that both have are equal; {pair[1]} goes on to step 3")


def test_removed_tokens_are_not_compared_and_the_rest_is(pair, capsys) -> None:
    change(pair[1], "DELETE FROM chunk WHERE episode_id < 72")
    change(pair[1], "INSERT INTO run VALUES ('reclaimed', '2')")
    assert main(["diff", *map(str, pair)]) == 0
    assert "tokens of steps 1 to 2 were removed" in capsys.readouterr().out
    change(pair[1], "UPDATE step SET metrics_json = ? WHERE step = 1", json.dumps({"loss": 7.0}))
    status, line = told(pair, capsys)
    assert status == 1
    assert line.startswith("the first difference is in step 1, in metrics: loss")


def test_damage_and_missing_runs_are_unusable_input(pair, capsys) -> None:
    change(pair[1], "UPDATE chunk SET crc = crc + 1 WHERE episode_id = 70")
    assert main(["diff", *map(str, pair)]) == 2
    assert "does not fit its checksum" in capsys.readouterr().err
    assert main(["diff", str(pair[0]), "nowhere"]) == 2
