"""Episodes of several turns with a tool, whose generator is killed in mid-turn and while the tool runs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.metrics.reader import RunReader
from asyncrl.toy import END_ID, init_model, warm_start

pytestmark = pytest.mark.slow

CHATTER = Path(__file__).parents[1] / "generator" / "chatter.py"
CHUNKS = "SELECT sampled, hex(tokens) FROM chunk WHERE episode_id = ? ORDER BY seq"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its turns and calls the tool."""
    folder = tmp_path_factory.mktemp("talker")
    config = Config.model_validate(
        {"env": {"name": f"{CHATTER}:make"}, "toy": {"warm_steps": 120, "warm_rows": 24, "warm_loss": 0.0}}
    )
    warm_start(config, init_model(folder / "raw", hidden=64, layers=1), folder / "model", lambda line: None)
    return folder / "model"


Held = dict[int, list[tuple[int, str]]]


def _held(reader: RunReader, generator: str) -> Held:
    """What is durable of the episodes that a generator runs: whether each chunk was sampled, and its tokens."""
    leased = reader._db.execute(
        "SELECT episode_id FROM lease WHERE state = 'active' AND generator = ?", (generator,)
    )
    return {episode: reader._db.execute(CHUNKS, (episode,)).fetchall() for (episode,) in leased.fetchall()}


def _ended_turn(chunks: list[tuple[int, str]]) -> bool:
    """Whether the last token is the one that ends a turn."""
    return (
        bool(chunks) and bool(chunks[-1][0]) and chunks[-1][1].endswith(END_ID.to_bytes(4, "little").hex().upper())
    )


def _mid_turn(chunks: list[tuple[int, str]]) -> bool:
    return bool(chunks) and bool(chunks[-1][0]) and not _ended_turn(chunks)


def test_a_generator_killed_mid_turn_and_while_tools_run_loses_no_episode(start, account, talker: Path) -> None:
    run = start(
        "--model", str(talker), "--env", f"{CHATTER}:make", "--env.args", '{"sleep_s": 0.7}',
        "--sampling.max_tokens", "72", "--generator.max_model_len", "320", "--steps", "8",
    )  # fmt: skip
    run.wait_for_step(1)
    for _ in range(60):
        # Stopped, it holds what it holds: kill it only in the middle of turns and of tool calls.
        run.kill("generator-1", signal.SIGSTOP)
        time.sleep(0.3)  # What it had sent before reaches the journal.
        with run.reader() as reader:
            held = _held(reader, "generator-1")
        mid_turn = {episode for episode, chunks in held.items() if _mid_turn(chunks)}
        in_tool = {episode for episode, chunks in held.items() if _ended_turn(chunks)}
        if mid_turn and in_tool:
            break
        run.kill("generator-1", signal.SIGCONT)
        time.sleep(0.1)  # It goes on for a while; there is no event to wait for.
    assert mid_turn, run.output()
    assert in_tool, run.output()
    run.kill("generator-1")

    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 8, 16)
        for episode in mid_turn | in_tool:
            final = reader._db.execute(CHUNKS, (episode,)).fetchall()
            # The same tokens before, and after them what was sampled elsewhere: no turn is there twice.
            assert final[: len(held[episode])] == held[episode]
            status, turns, sampled = reader._db.execute(
                "SELECT status, turns, sampled FROM episode WHERE episode_id = ?", (episode,)
            ).fetchone()
            assert status in ("completed", "truncated_length", "truncated_context", "")
            if status == "completed":
                assert sum(_ended_turn([chunk]) for chunk in final) == turns
            assert status == "" or sampled == sum(len(tokens) // 8 for was_sampled, tokens in final if was_sampled)
        finished = sum(
            reader._one(f"SELECT count(*) FROM episode WHERE episode_id = {episode} AND state = 'trained'")
            for episode in mid_turn | in_tool
        )
        assert finished > 0
        turns = reader._one("SELECT count(*) FROM turn WHERE turn > 0")
        assert turns > 0
