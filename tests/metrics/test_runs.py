"""The list of runs."""

from pathlib import Path

from asyncrl.metrics.runs import find_runs, list_runs


def test_runs_are_listed_newest_first_with_state_and_reward(new_run) -> None:
    old, new = new_run("old"), new_run("new", algo={"name": "grpo"})
    old.set("status", "failed")
    old.set("reason", "port in use")
    new.set("created", 2_000_000.0)
    for step, reward in ((1, 0.25), (2, 0.75)):
        new.step(step, [], reward=reward)
    lines = find_runs(old.run_dir.parent)
    assert [line.path.name for line in lines] == ["new", "old"]
    assert (lines[0].algo, lines[0].step, lines[0].steps, lines[0].reward) == ("grpo", 2, 5, 0.5)
    assert lines[1].reward is None
    text = list_runs(old.run_dir.parent)
    assert "failed (port in use)" in text
    assert "0.500" in text


def test_an_unreadable_run_does_not_hide_the_others(new_run) -> None:
    run = new_run()
    broken = run.run_dir.parent / "broken"
    broken.mkdir()
    (broken / "run.db").write_bytes(b"x" * 5000)
    text = list_runs(run.run_dir.parent)
    assert "unreadable" in text
    assert str(run.run_dir) in text


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert find_runs(tmp_path) == []


def test_without_a_run_the_list_says_how_to_make_one(tmp_path: Path) -> None:
    assert "`asyncrl train` makes one" in list_runs(tmp_path / "nowhere")
