"""Reading a journal while it is written: every answer against rows that were put there."""

import sqlite3
from pathlib import Path

import pytest

from asyncrl.metrics.reader import RunNotFound, RunReader


def test_it_answers_with_what_was_written(new_run) -> None:
    run = new_run("alpha", algo={"name": "grpo"})
    run.set("status", "stopped")
    run.set("reason", "Ctrl-C")
    run.version(1, 0.25, 4000)
    run.event("generator-0", "died", "signal 9")
    with RunReader(run.run_dir) as reader:
        assert (reader.name, reader.status, reader.reason) == ("alpha", "stopped", "Ctrl-C")
        assert reader.config() == run.config.model_dump(mode="json")
        assert reader.created == 1_000_000.0
        assert reader.last_step() == 0
        assert [tuple(row) for row in reader.versions()] == [(1, 1_000_000.0, 0.25, 4000)]
        assert [tuple(row)[2:] for row in reader.events()] == [("generator-0", "died", "signal 9")]
        assert reader.event_counts() == {("generator-0", "died"): 1}


def test_it_sees_what_is_committed_while_it_is_open(new_run) -> None:
    run = new_run()
    with RunReader(run.run_dir) as reader:
        assert reader.steps() == []
        run.step(1, [], reward=0.5)
        assert [row.metrics for row in reader.steps()] == [{"reward": 0.5}]
        run.db.execute("BEGIN")
        run.step(2, [], reward=0.7)
        assert reader.last_step() == 1, "what is not committed is not seen, and reading does not wait for it"
        run.db.execute("COMMIT")
        assert [row.step for row in reader.steps(after=1)] == [2]


def test_it_cannot_write(new_run) -> None:
    run = new_run()
    with RunReader(run.run_dir) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM run")


def test_rewards_are_in_order_and_may_be_limited(new_run) -> None:
    run = new_run()
    for step, reward in enumerate([0.1, 0.2, 0.3], 1):
        run.step(step, [], reward=reward)
    run.step(4, [], loss=1.0)
    with RunReader(run.run_dir) as reader:
        assert reader.rewards() == [(1, 0.1), (2, 0.2), (3, 0.3)]
        assert reader.rewards(last=2) == [(3, 0.3)], "step 4 has no reward"


def test_the_lag_histogram_sums_tokens_over_steps(new_run) -> None:
    run = new_run()
    run.step(1, [], **{"lag_hist/0": 30, "lag_hist/1": 5, "lag_mean": 0.1, "lagXhist/3": 9})
    run.step(2, [], **{"lag_hist/1": 10, "lag_hist/12": 1})
    with RunReader(run.run_dir) as reader:
        assert reader.lag_histogram() == {0: 30, 1: 15, 12: 1}


def test_metrics_and_events_are_read_from_an_id_on(new_run) -> None:
    run = new_run()
    for value in range(5):
        run.metric("hub", queued=value)
    with RunReader(run.run_dir) as reader:
        assert [row.metrics["queued"] for row in reader.metrics(after_id=3)] == [3, 4]
        assert [row.metrics["queued"] for row in reader.metrics(limit=2)] == [0, 1]
        assert reader.last_metric_id() == 5


def test_episodes_are_filtered_by_state_reason_and_group(new_run) -> None:
    run = new_run()
    run.group(0, [("trained", ""), ("failed", "time: 3 s")])
    run.group(1, [("filtered", "same reward"), ("filtered", "same reward")])
    with RunReader(run.run_dir) as reader:
        assert [row.episode_id for row in reader.episodes()] == [3, 2, 1, 0]
        assert [row.episode_id for row in reader.episodes(state="filtered", limit=1)] == [3]
        assert [row.episode_id for row in reader.episodes(reason="time: 3 s")] == [1]
        assert [row.episode_id for row in reader.episodes(group=0, state="trained")] == [0]
        assert reader.episodes(state="trained")[0].task_id == "t0"
        assert reader.episode_states() == {
            ("trained", ""): 1,
            ("failed", "time: 3 s"): 1,
            ("filtered", "same reward"): 2,
        }
        assert reader.token_counts() == (40, 16)


def test_greedy_episodes_and_named_rewards_are_seen(new_run) -> None:
    run = new_run()
    run.group(0, [("trained", ""), ("trained", ""), ("trained", "")], greedy=True)
    run.group(1, [("leased", ""), ("queued", ""), ("leased", "")], reward=0.5, greedy=True)
    with RunReader(run.run_dir) as reader:
        assert [row.greedy for row in reader.episodes()] == [True, False, False] * 2
        assert reader.episodes(group=1)[0].rewards == {"right": 0.25, "polite": 0.25}
        assert reader.greedy_states() == {"trained": 1, "leased": 1}


def test_uses_count_only_batches_whose_step_is_done(new_run) -> None:
    run = new_run()
    run.step(1, [3, 4])
    run.step(2, [4, 5])
    run.seal(3, [4, 6])
    with RunReader(run.run_dir) as reader:
        assert reader.uses() == {3: 1, 4: 2, 5: 1}


def test_a_folder_without_a_run_is_refused_with_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"no run in .*run\.db does not exist; `asyncrl runs`"):
        RunReader(tmp_path)
    assert list(tmp_path.iterdir()) == [], "asking must not make a journal"


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunNotFound, match="is not the journal of a run"):
        RunReader(tmp_path)


def test_a_journal_of_another_schema_is_refused(new_run) -> None:
    run = new_run()
    run.set("schema", 99)
    with pytest.raises(RunNotFound, match="schema version 99, this asyncrl reads 4"):
        RunReader(run.run_dir)
