"""The account of a run: it adds up when it should, and says so when it does not."""

from pathlib import Path

import pytest

from asyncrl.chat import ChatFormat
from asyncrl.metrics.summary import episodes_summary, find_problems, list_episodes, run_summary
from asyncrl.toy import write_tokenizer


def _whole_run(new_run, **sections):
    run = new_run(**sections)
    first = run.group(0, [("trained", ""), ("trained", "")])
    run.group(1, [("filtered", "same reward"), ("filtered", "same reward")])
    run.group(2, [("failed", "time: 3 s"), ("filtered", "too few episodes")])
    second = run.group(3, [("trained", ""), ("trained", "")])
    run.group(4, [("leased", ""), ("queued", "")])
    run.step(1, first, reward=0.25, **{"lag_hist/0": 10})
    run.step(2, second, reward=0.75, **{"lag_hist/1": 30})
    return run


def test_every_admitted_episode_is_accounted_for(new_run) -> None:
    text = episodes_summary(_whole_run(new_run).run_dir)
    lines = [" ".join(row.split()) for row in text.splitlines()]
    assert lines == [
        "admitted 10 (5 groups of 2)",
        "trained 4",
        "failed: time 1",
        "filtered: same reward 2",
        "filtered: too few episodes 1",
        "live 2 (1 queued, 1 leased, 0 done)",
        "adds up: 4 trained + 4 dropped + 2 live = 10 admitted, and every trained episode was in a trained batch",
    ]


def _greedy_run(new_run):
    run = new_run(train={"groups_per_step": 1, "group_size": 2, "steps": 2})
    first = run.group(0, [("trained", "")] * 3, greedy=True)
    run.group(1, [("filtered", "same reward")] * 3, greedy=True)
    second = run.group(2, [("trained", ""), ("trained", ""), ("failed", "time: 3 s")], greedy=True)
    run.group(3, [("leased", "")] * 3, greedy=True)
    run.step(1, first)
    run.step(2, second[:2])
    return run


def test_greedy_baselines_are_counted_and_add_up(new_run) -> None:
    run = _greedy_run(new_run)
    text = episodes_summary(run.run_dir)
    assert [" ".join(row.split()) for row in text.splitlines()] == [
        "admitted 12 (4 groups of 2 and a greedy baseline)",
        "trained 5 (1 as greedy baselines)",
        "failed: time 1",
        "filtered: same reward 3",
        "live 3 (0 queued, 3 leased, 0 done)",
        "adds up: 5 trained + 4 dropped + 3 live = 12 admitted, and every trained episode was in a trained batch",
    ]
    assert "5 trained (1 as greedy baselines), 4 dropped" in run_summary(run.run_dir)


def test_a_lost_greedy_baseline_is_noticed(new_run) -> None:
    run = _greedy_run(new_run)
    run.db.execute("DELETE FROM episode WHERE episode_id = 5")
    assert "DOES NOT ADD UP: 11 episodes are recorded, 12 were admitted" in episodes_summary(run.run_dir)


def test_a_list_marks_greedy_episodes_and_names_the_parts_of_a_reward(new_run) -> None:
    rows = list_episodes(_greedy_run(new_run).run_dir, group=0).splitlines()
    assert ["(greedy)" in row for row in rows] == [False, True, False, False]
    assert all("1 (polite 0.25, right 0.75)" in row for row in rows[1:])


def test_a_lost_episode_is_noticed(new_run) -> None:
    run = _whole_run(new_run)
    run.db.execute("DELETE FROM episode WHERE episode_id = 3")
    assert "DOES NOT ADD UP: 9 episodes are recorded, 10 were admitted" in episodes_summary(run.run_dir)


def test_an_episode_called_trained_that_no_step_trained_is_noticed(new_run) -> None:
    run = _whole_run(new_run)
    run.db.execute("UPDATE episode SET state = 'trained' WHERE episode_id = 5")
    assert "1 trained episodes were in no trained batch, e.g. 5" in episodes_summary(run.run_dir)


def test_an_episode_that_was_trained_twice_is_noticed(new_run) -> None:
    run = _whole_run(new_run)
    run.step(3, [0, 1])
    assert "2 episodes were trained more than replay.reuse = 1 times" in episodes_summary(run.run_dir)


def test_replay_may_train_an_episode_as_often_as_it_says(new_run) -> None:
    run = _whole_run(new_run, replay={"reuse": 2})
    run.step(3, [0, 1])
    assert "adds up" in episodes_summary(run.run_dir)


def test_an_unknown_state_is_noticed() -> None:
    assert find_problems(2, {"trained": 1, "lost": 1}, {7: 1}, {7}, 1) == ["unknown states lost"]


def test_a_run_without_an_episode_adds_up(new_run) -> None:
    assert "adds up: 0 trained + 0 dropped + 0 live = 0 admitted" in episodes_summary(new_run().run_dir)


def test_the_end_of_a_run_says_what_was_learned_dropped_and_what_to_type(new_run) -> None:
    run = _whole_run(new_run)
    run.set("status", "finished")
    run.event("generator-0", "died", "signal 9")
    (run.run_dir / "model").mkdir()
    text = run_summary(run.run_dir)
    flat = [" ".join(row.split()) for row in text.splitlines()]
    assert flat[0] == "run run (finished)"
    assert flat[1].startswith("reward 0.500 (first 2 steps) → 0.500 (last 2)")
    assert "steps 2 of 5 in 4 s" in flat
    assert "tokens 40 sampled, 100 in all" in flat
    assert "episodes 4 trained, 4 dropped" in flat
    assert "dropped 2 filtered: same reward, 1 failed: time, 1 filtered: too few episodes" in flat
    assert "token lag 0: 25 % 1: 75 %" in flat
    assert "restarts 1 generator-0" in flat
    assert f"model {run.run_dir}/model" in flat
    assert f"next asyncrl eval {run.run_dir}" in flat


def test_first_and_last_reward_are_means_over_ten_steps(new_run) -> None:
    run = new_run()
    for step in range(1, 31):
        run.step(step, [], reward=step / 30)
    assert "0.183 (first 10 steps) → 0.850 (last 10)" in run_summary(run.run_dir)


def test_a_run_that_died_before_its_first_step_is_summed_up_too(new_run) -> None:
    text = run_summary(new_run().run_dir)
    assert "no step was trained" in text
    assert "0 trained, 0 dropped" in text


def test_episodes_are_listed_with_their_text(new_run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tokenizer(model)
    run = new_run(model={"path": str(model)})
    (episode, _) = run.group(0, [("trained", ""), ("failed", "time: 3 s")], reward=0.5)
    chat = ChatFormat(model)
    run.chunk(episode, 1, chat.encode("46"), True)
    run.chunk(episode, 0, chat.prompt_ids([{"role": "user", "content": "12+34="}]), False)
    text = list_episodes(run.run_dir, state="trained")
    assert "12+34=46" in text, "chunks are in the order of their sequence numbers"
    assert "0.5" in text
    assert "2-3" in text
    assert "failed" not in text
    assert "time: 3 s" in list_episodes(run.run_dir)


def test_episodes_are_listed_without_text_when_the_model_is_gone(new_run) -> None:
    run = new_run(model={"path": "/nowhere"})
    run.group(0, [("trained", ""), ("trained", "")])
    assert "text" not in list_episodes(run.run_dir).splitlines()[0]


def test_a_filter_that_matches_nothing_names_the_states(new_run) -> None:
    run = _whole_run(new_run)
    text = list_episodes(run.run_dir, state="done")
    assert text == "no episode matches; the states in this run are: failed, filtered, leased, queued, trained"


@pytest.mark.parametrize("limit", [1, 3])
def test_the_list_is_as_long_as_asked(new_run, limit: int) -> None:
    assert len(list_episodes(_whole_run(new_run).run_dir, limit=limit).splitlines()) == limit + 1
