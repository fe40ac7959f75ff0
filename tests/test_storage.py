"""Disks that are full or read-only, files that are damaged: nothing acked is lost, nothing wrong is trained.

What a disk does is done to a real one: a small tmpfs in a mount namespace of its own, which an ordinary user may
make where the kernel lets him.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import records
from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.groups import Rules
from asyncrl.journal import PAGE_BYTES, Journal, JournalError
from asyncrl.messages import Chunk, Hello, NextBatch, Welcome
from asyncrl.metrics.reader import RunReader
from asyncrl.process import EXIT_STOP_RUN
from asyncrl.recovery import restore
from asyncrl.scheduler import Scheduler
from asyncrl.toy import init_model
from asyncrl.transport import Client, free_port_pair

ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]
LIMIT_S = 240
SIZE = "300m"
FRAME_BYTES = PAGE_BYTES + 24


class Disk:
    """A tmpfs at `path` that only commands started through `on` see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size={SIZE} none {path} && echo made && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self.answer = self._holder.stdout.readline().strip()

    def on(self, *command: str) -> list[str]:
        """The command, to be run where the disk is seen."""
        return ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials", *command]

    def sh(self, command: str) -> str:
        """Runs a shell command there; returns what it printed."""
        done = subprocess.run(self.on("sh", "-c", command), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def python(self, statement: str) -> str:
        """Runs Python there; returns what it printed."""
        names = "from asyncrl.metrics.reader import RunReader; from pathlib import Path; from time import sleep"
        command = self.on(sys.executable, "-P", "-c", f"{names}\n{statement}")
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout

    def fill(self) -> None:
        """Leaves no room but for the pages that are partly used."""
        for size in ("64k", "4k"):  # It ends when nothing more of that size fits.
            self.sh(f"dd if=/dev/zero bs={size} >> {self.path}/ballast 2> /dev/null || true")

    def free(self) -> None:
        """Gives back what `fill` took."""
        self.sh(f"rm {self.path}/ballast")

    def close(self) -> None:
        """Takes the disk away."""
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("needs unshare and nsenter (util-linux) to make a small disk")
    made = Disk(tmp_path / "disk")
    if made.answer != "made":
        made.close()
        pytest.skip(f"this kernel does not let this user mount a small disk: {made.answer}")
    yield made
    made.close()


@pytest.mark.slow
def test_a_run_on_a_full_disk_says_why_it_stops_and_goes_on_when_there_is_room(disk: Disk, tmp_path: Path) -> None:
    run_dir, model = disk.path / "run", init_model(tmp_path / "tiny", hidden=64, layers=2)
    command = ["train", "--plain", "--model", str(model), "--run.dir", str(disk.path), "--name", "run"]
    command += ["--engine", "transformers", "--algo.filter", "none", "--steps", "400", "--checkpoint.every", "400"]
    command += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "24"]
    command += ["--generator.max_model_len", "64", "--generator.slots", "16"]
    run = subprocess.Popen(
        disk.on(*ASYNCRL, *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    two_steps = f"Path('{run_dir}/run.db').exists() and RunReader('{run_dir}').last_step() >= 2"
    disk.python(f"while not ({two_steps}): sleep(0.1)")
    disk.fill()
    told, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, told
    assert f"the run failed: hub: exit status {EXIT_STOP_RUN}" in told
    assert f"the disk of {run_dir} is full" in told
    assert "asyncrl train --resume" in told
    assert "Traceback" not in told

    disk.free()
    assert "this run is sound" in disk.sh(f"{' '.join(ASYNCRL)} doctor {run_dir}")
    steps = int(disk.python(f"print(RunReader('{run_dir}').last_step())")) + 2
    again = disk.sh(f"{' '.join(ASYNCRL)} train --plain --resume {run_dir} --train.steps {steps}")
    assert f"{steps} of {steps}" in again
    assert "\nadds up" in disk.sh(f"{' '.join(ASYNCRL)} episodes {run_dir} --summary")

    disk.sh(f"mount -o remount,ro {disk.path}")
    assert "this run is sound" in disk.sh(f"{' '.join(ASYNCRL)} doctor {run_dir}")
    assert "finished" in disk.sh(f"{' '.join(ASYNCRL)} runs --dir {disk.path}")
    for refused in (["train", "--resume"], ["hub", "--run"]):
        done = subprocess.run(disk.on(*ASYNCRL, *refused, str(run_dir)), capture_output=True, text=True)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        assert str(run_dir) in done.stderr


# ---- damaged files -------------------------------------------------------------------------------

CONFIG = Config.model_validate(
    {"train": {"steps": 6, "groups_per_step": 2, "group_size": 2}, "learner": {"token_budget": 512}}
)


def restored(folder: Path) -> Scheduler:
    """What a hub would go on with."""
    journal = Journal.open(folder / "run.db")
    try:
        scheduler = restore(Rules.from_config(CONFIG, greedy=False), lambda rewards: None, journal, 0.0)
        scheduler.check()
        return scheduler
    finally:
        journal.close()


def damage_of(folder: Path) -> JournalError | Scheduler:
    """What a hub would stop with, or else go on with."""
    try:
        return restored(folder)
    except JournalError as error:
        return error


def copy(run: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(run, to))


def overwrite(path: Path, at: int, with_: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(with_)


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_torn_log_loses_the_last_commits_as_a_whole_and_nothing_else(
    stopped_run: Path, tmp_path: Path, damage: str
) -> None:
    run, commits = copy(stopped_run, tmp_path / "run"), 12
    journal = Journal.open(run / "run.db")
    for number in range(commits):
        journal.write([records.run_key("status", f"{number}"), records.event(1.0, "test", f"{number}")])
    torn = copy(run, tmp_path / "torn")  # As it is when the machine goes down.
    journal.close()
    size = (torn / "run.db-wal").stat().st_size
    seen = set()
    for at in range(size - 1, 32, -FRAME_BYTES // 3):
        here = copy(torn, tmp_path / "here")
        (here / "run.db-shm").unlink()
        if damage == "cut":
            with (here / "run.db-wal").open("r+b") as file:
                file.truncate(at)
        else:
            overwrite(here / "run.db-wal", at, b"\x5a" * 64)
        restored(here)
        again = Journal.open(here / "run.db")
        events = [row[0] for row in again.rows("SELECT what FROM event WHERE source = 'test' ORDER BY id")]
        assert events == [f"{number}" for number in range(len(events))]
        assert again.get("status") == (events[-1] if events else "stopped")
        again.check()
        again.close()
        seen.add(len(events))
    assert {0, commits - 1} <= seen


@pytest.mark.parametrize("content", [bytes(PAGE_BYTES), b"\xa5" * PAGE_BYTES, bytes(200)])
def test_a_damaged_page_is_found_before_anything_is_trained(
    stopped_run: Path, tmp_path: Path, content: bytes
) -> None:
    sound, silent = restored(stopped_run), 0
    for page in range((stopped_run / "run.db").stat().st_size // PAGE_BYTES):
        run = copy(stopped_run, tmp_path / "run")
        overwrite(run / "run.db", page * PAGE_BYTES, content)
        found = damage_of(run)
        if isinstance(found, JournalError):
            assert "damaged" in str(found) or "not an asyncrl journal" in str(found)
            assert main(["train", "--resume", str(run)]) == 2
        else:
            silent += 1  # A page that holds nothing which training needs.
            assert found.counts() == sound.counts()
            assert sorted(found.episodes) == sorted(sound.episodes)
            with contextlib.closing(Journal.open(run / "run.db")) as journal, pytest.raises(JournalError):
                journal.check()
    assert silent <= 4  # Metrics and events.


def test_damaged_tokens_of_a_live_episode_stop_the_hub_before_it_serves(stopped_run: Path, tmp_path: Path) -> None:
    run = copy(stopped_run, tmp_path / "run")
    journal = Journal.open(run / "run.db")
    episode_id = journal.rows("SELECT min(episode_id) FROM episode WHERE state = 'leased'")[0][0]
    lease_id = journal.rows("SELECT max(lease_id) FROM lease WHERE episode_id = ?", episode_id)[0][0]
    chunk = records.chunk(Chunk(lease_id, episode_id, 0, 5, 0, True), b"\x5a" * 20, b"\xa5" * 20)
    journal.write([chunk])
    journal.close()
    content = (run / "run.db").read_bytes()
    overwrite(run / "run.db", content.index(b"\x5a" * 20), b"\x5b")
    hub = subprocess.run(
        [*ASYNCRL, "hub", "--run", str(run), "--port", str(free_port_pair("127.0.0.1"))],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert hub.returncode == EXIT_STOP_RUN, hub.stderr
    told = hub.stdout.splitlines()[-1]
    assert f"chunk 0 of episode {episode_id} does not fit its checksum; `asyncrl doctor {run}`" in told
    assert "Traceback" not in hub.stderr


def test_a_learner_that_needs_reclaimed_tokens_fails_the_run_with_what_would_do(
    stopped_run: Path, tmp_path: Path
) -> None:
    run = copy(stopped_run, tmp_path / "run")
    journal = Journal.open(run / "run.db")
    first = [
        row[0] for row in journal.rows("SELECT value FROM batch, json_each(episode_ids_json) WHERE batch_id < 3")
    ]
    gone = [record for episode_id in first for record in records.tokens_removed(episode_id)]
    journal.write([*gone, records.run_key("reclaimed", "2")])
    journal.close()
    port = free_port_pair("127.0.0.1")
    hub = subprocess.Popen(
        [*ASYNCRL, "hub", "--run", str(run), "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    learner = Client(f"tcp://127.0.0.1:{port}", "learner-0/test", lambda: None)
    learner.send(Hello("learner", "learner-0", "test", 0))
    received = learner.receive(LIMIT_S)
    assert received is not None
    assert isinstance(received[0], Welcome)
    learner.send(NextBatch(1, 0, 1))
    assert hub.wait(LIMIT_S) == EXIT_STOP_RUN
    learner.close()
    with RunReader(run) as reader:
        assert reader.status == "failed"
        assert "the batch of step 1, but the tokens of steps 1 to 2 were removed" in reader.reason
        assert (
            "it must start from a checkpoint of step 2 or later; the journal knows of these: 2, 4" in reader.reason
        )
