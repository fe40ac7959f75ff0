"""`asyncrl doctor RUN`: a sound run is called sound, and each kind of damage is found and named."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import doctor_run as doctor_module
from asyncrl import records
from asyncrl.cli import main
from asyncrl.doctor_run import doctor_run
from asyncrl.journal import Journal
from asyncrl.reclaim import Reclaimer


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def test_a_sound_run_is_called_sound_and_how_to_go_on_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["doctor", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("this run is sound")
    assert "training goes on from the checkpoint of step 4; can be replayed: steps 1 to 4 from the initial" in text
    assert f"stopped, step 4 of 6; go on with: asyncrl train --resume {run}" in text
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_goes_on_is_checked_in_one_snapshot(run: Path) -> None:
    journal = Journal.open(run / "run.db")
    journal.write([records.run_key("status", "running"), records.metric(2e10, 4, "hub", {})])
    text, status = doctor_run(run)
    assert status == 0, text
    assert "running, step 4 of 6; its hub reported" in text
    journal.close()


def test_a_run_that_goes_on_while_it_is_checked_is_no_false_alarm(
    run: Path, write_checkpoint: Callable[[Path, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(run / "run.db")
    now = time.time()
    journal.write([records.run_key("status", "running"), records.metric(now, 4, "hub", {})])
    journal.close()
    really, oldest = doctor_module.verify, run / "checkpoints" / "step_000002"

    def meanwhile(path: Path, step: int) -> None:
        """The learner completes a checkpoint and deletes the oldest; reading so far took a minute."""
        if path == oldest:
            path.rename(path.with_suffix(".gone"))
        monkeypatch.setattr(time, "time", lambda: now + 60)
        really(path, step)

    write_checkpoint(run, 6)
    monkeypatch.setattr(doctor_module, "verify", meanwhile)
    text, status = doctor_run(run)
    assert status == 0, text
    assert "ok    checkpoint 6" in text
    assert "running, step 4 of 6; its hub reported" in text


def test_a_reclaimed_run_is_sound_until_its_checkpoints_are_gone(run: Path) -> None:
    journal = Journal.open(run / "run.db")
    reclaimer = Reclaimer(journal, 1e-6)
    for _ in range(20):
        reclaimer.piece(0)
    journal.close()
    text, status = doctor_run(run)
    assert status == 0, text
    assert "can be replayed: steps 3 to 4 from the checkpoint of step 2" in text
    shutil.rmtree(run / "checkpoints")
    text, status = doctor_run(run)
    assert status == 1
    assert "tokens up to step 2 were reclaimed, and no sound checkpoint is of that step or later" in text


DAMAGES = {
    "UPDATE chunk SET tokens = zeroblob(80) WHERE episode_id = 0 AND seq = 1": "chunk 1 of episode 0 does not fit",
    "UPDATE chunk SET n = 21 WHERE episode_id = 0 AND seq = 1": "chunk 1 of episode 0 does not hold the 21 tokens",
    "DELETE FROM chunk WHERE episode_id = 0 AND seq = 1": "episode 0 has 2 chunks, numbered from 0 to 2",
    "DELETE FROM chunk WHERE episode_id = 0 AND seq = 2": "episode 0 has 40 tokens, and its row says 60",
    "DELETE FROM chunk WHERE episode_id = 0": "episode 0 has 0 tokens, and its row says 60",
    "UPDATE chunk SET episode_id = 999 WHERE episode_id = 0": "chunks of episode 999, which does not exist",
    "UPDATE episode SET state = 'lost' WHERE episode_id = 0": "episode 0 has a state that does not fit",
    "UPDATE episode SET state = 'queued' WHERE episode_id = 0": "episode 0 has a state that does not fit",
    "UPDATE episode SET reason = '' WHERE episode_id = 2": "episode 2 was dropped without a reason",
    "UPDATE episode SET reward = NULL WHERE episode_id = 0": "episode 0 has ended and has no reward",
    "DELETE FROM episode WHERE episode_id = 2": "episodes are recorded, ",
    "DELETE FROM task WHERE task_index = 0": "group 0 has no task",
    "UPDATE grp SET reason = '' WHERE group_id = 1": "group 1 was filtered without a reason",
    "UPDATE grp SET uses = 2 WHERE group_id = 0": "group 0 is not in as many batches as it says",
    "UPDATE step SET step = 9 WHERE step = 4": "step 8 is missing, step 9 was done without its batch",
    "DELETE FROM batch WHERE batch_id = 2": "batch 2 is missing",
    "DELETE FROM batch WHERE batch_id = 4": "step 4 was done without its batch",
    "UPDATE batch SET episode_ids_json = '[0,999,4,5]' WHERE batch_id = 1": "batch 1 has episode 999",
    "UPDATE batch SET episode_ids_json = '[0,0,4,5]' WHERE batch_id = 1": "batch 1 has an episode twice",
    "UPDATE batch SET plan_json = '[[[0,1,2]]]' WHERE batch_id = 1": "plan of batch 1 does not have each episode",
    "UPDATE batch SET episode_ids_json = '[0,1,4,5]' WHERE batch_id = 2":
        "trained more than replay.reuse = 1 times",
    "INSERT INTO lease VALUES (900, 0, 'g', 1.0, 'active')": "lease 900 is active, and its episode is not leased",
    "INSERT INTO lease SELECT 900, max(episode_id), 'g', 1.0, 'active' FROM episode WHERE state = 'leased'":
        "has several active leases",
    "UPDATE lease SET state = 'lapsed' WHERE state = 'active'": "is leased and has no active lease",
    "UPDATE run SET value = '3' WHERE key = 'schema'": "3, this asyncrl reads",
}  # fmt: skip


@pytest.mark.parametrize("sql", DAMAGES)
def test_a_damaged_table_is_found(run: Path, sql: str) -> None:
    journal = Journal.open(run / "run.db")
    journal.rows(sql)
    journal.close()
    text, status = doctor_run(run)
    assert status == 1, text
    problems = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert any(DAMAGES[sql] in line for line in problems), text


def test_a_damaged_page_is_found_and_stops_no_other_check(run: Path) -> None:
    content = bytearray((run / "run.db").read_bytes())
    content[3 * 16384 : 4 * 16384] = bytes(16384)
    (run / "run.db").write_bytes(content)
    text, status = doctor_run(run)
    assert status == 1
    assert "FAIL  pages" in text
    assert "ok    checkpoint 4" in text


def _cut(path: Path) -> None:
    (path / "part").write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray((path / "part").read_bytes())
    content[7] ^= 1
    (path / "part").write_bytes(content)


def _unlist(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_cut, "part has 0 bytes, 100 "),
        (_flip, "part is damaged"),
        (_unlist, "manifest.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_found(run: Path, damage: Callable[[Path], None], found: str) -> None:
    damage(run / "checkpoints" / "step_000004")
    text, status = doctor_run(run)
    assert status == 1
    assert found in text
    assert "training goes on from the checkpoint of step 2" in text


def test_leftovers_and_checkpoints_beyond_the_journal_are_told_and_are_no_problem(
    run: Path, write_checkpoint: Callable[[Path, int], Path]
) -> None:
    (run / "checkpoints" / "step_000005.tmp").mkdir()
    write_checkpoint(run, 6)
    shutil.rmtree(run / "checkpoints" / "step_000002")
    (run / "stacks").mkdir()
    (run / "stacks" / "learner-0.txt").write_text("")
    text, status = doctor_run(run)
    assert status == 0, text
    for part in (
        "step_000005.tmp",
        "run.db ends at step 4: it will be passed over",
        "run.db knows of steps [2], which are no longer in the folder",
        "a process hung",
    ):
        assert part in text, part
