"""Deterministic runs: killed again and again, or not at all, they sample and train the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.journal import Journal

pytestmark = pytest.mark.slow

REWARDS = """
def parity(completion):
    return float(sum(map(ord, completion)) % 2)
"""
"""Says yes or no at random, so that groups are filtered and replaced."""


def _trained(run_dir: Path) -> dict[int, tuple[int, bytes, bytes]]:
    """Of every trained episode: its batch, tokens and behaviour log-probs. Chunk boundaries are left out."""
    journal = Journal.open(run_dir / "run.db")
    rows = journal.rows(
        "SELECT batch_id, value FROM batch, json_each(episode_ids_json) ORDER BY batch_id, json_each.key"
    )
    held = journal.episode_tokens([episode for _, episode in rows])
    journal.close()
    return {
        episode: (batch, held[episode].tokens.tobytes(), held[episode].logprobs.tobytes())
        for batch, episode in rows
    }


def test_a_run_that_is_killed_everywhere_has_the_bits_of_one_that_is_not(start, account, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    settings = ("--deterministic", "--staleness.max_lag", "0", "--algo.filter", "equal_rewards")
    settings += ("--reward.functions", f'["{rewards}:parity"]', "--generator.chunk_tokens", "4")
    # At the same time, so that each disturbs the other's timing.
    whole, broken = start(*settings, name="whole"), start(*settings, name="broken")
    for step, victim in ((2, "generator-0"), (4, "hub"), (6, "learner-0")):
        broken.wait_for_step(step)
        broken.kill(victim)
    broken.wait_for_step(9)
    broken.process.kill()
    broken.process.wait()
    broken = start(resume=broken.dir, name="broken")
    for run in (whole, broken):
        assert run.wait() == 0, run.output()
        with run.reader() as reader:
            account(reader, 12, 16)
            assert set(reader.lag_histogram()) == {0}
            assert any(state == "filtered" for state, _ in reader.episode_states())
    assert list(_trained(broken.dir).items()) == list(_trained(whole.dir).items())
    weights = [(run.dir / "model" / "model.safetensors").read_bytes() for run in (whole, broken)]
    assert weights[0] == weights[1]
