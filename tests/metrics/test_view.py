"""The live view: what it shows follows from rows, and drawing never fails on what is missing or unknown."""

import pytest

from asyncrl.metrics.format import as_text
from asyncrl.metrics.reader import MetricRow, RunReader, StepRow
from asyncrl.metrics.view import (
    Feed,
    fold_states,
    generator_shares,
    lag_of,
    learner_share,
    line,
    render,
    steps_per_min,
)

NOW = 1_000_060.0


def _heartbeat(time: float, source: str = "generator-0", **metrics: float) -> MetricRow:
    return MetricRow(1, time, 1, source, metrics)


def test_shares_of_a_generator_add_up_over_its_heartbeats() -> None:
    rows = [
        _heartbeat(1, busy_s=0.8, waiting_s=0.2, paused_s=0.0, sampled_tokens=100, live=3, queued=1),
        _heartbeat(2, busy_s=0.4, waiting_s=0.4, paused_s=0.2, sampled_tokens=300, live=7, queued=0),
    ]
    (share,) = generator_shares(rows)
    assert (share.busy, share.waiting, share.paused) == pytest.approx((0.6, 0.3, 0.1))
    assert share.tokens_per_s == pytest.approx(200)
    assert share.note == "live 7, queued 0", "gauges are the latest, not a sum"


def test_generators_are_kept_apart_and_silent_ones_left_out() -> None:
    rows = [
        _heartbeat(1, "generator-1", busy_s=1.0),
        _heartbeat(1, "generator-0", waiting_s=1.0),
        _heartbeat(1, "generator-2", unknown=3.0),
    ]
    assert [(share.name, share.busy) for share in generator_shares(rows)] == [
        ("generator-0", 0.0),
        ("generator-1", 1.0),
    ]


def test_the_learner_trains_waits_or_gathers() -> None:
    steps = [
        StepRow(1, 1.0, {"train_s": 1.0, "wait_s": 3.0}),
        StepRow(2, 5.0, {"train_s": 1.0, "wait_s": 2.0, "gather_s": 1.0}),
    ]
    (share,) = learner_share(steps)
    assert (share.busy, share.waiting, share.paused) == pytest.approx((0.25, 0.625, 0.125))
    assert learner_share([StepRow(1, 1.0, {})]) == []


def test_lag_is_summed_and_other_metrics_ignored() -> None:
    steps = [
        StepRow(1, 1.0, {"lag_hist/0": 5, "lag_hist/2": 1, "lag_mean": 0.3}),
        StepRow(2, 2.0, {"lag_hist/10": 4, "lag_hist/2": 1}),
    ]
    assert lag_of(steps) == {0: 5, 2: 2, 10: 4}
    assert list(lag_of(steps)) == [0, 2, 10]


def test_the_rate_of_steps_is_that_between_first_and_last() -> None:
    assert steps_per_min([StepRow(1, 10.0, {}), StepRow(2, 11.0, {}), StepRow(3, 14.0, {})]) == 30.0
    assert steps_per_min([StepRow(1, 10.0, {})]) == 0.0


def test_reasons_are_counted_by_their_kind() -> None:
    states = {("failed", "time: 3 s"): 2, ("failed", "time: 4 s"): 1, ("filtered", ""): 1, ("trained", ""): 5}
    assert fold_states(states) == (
        {"failed": 3, "filtered": 1, "trained": 5},
        {"failed: time": 3, "filtered: no reason": 1},
    )


def _busy_run(new_run):
    run = new_run("alpha", algo={"name": "dapo"})
    run.group(0, [("trained", ""), ("trained", "")])
    run.group(1, [("filtered", "same reward"), ("failed", "time: 3 s")])
    with RunReader(run.run_dir) as reader:
        feed = Feed(reader)
        for step in range(1, 4):
            metrics = {"reward": step / 4, "loss": 0.125, "lag_mean": 0.5, "lag_hist/0": 3, "lag_hist/1": 1}
            run.step(step, [0, 1], train_s=1.0, wait_s=1.0, **metrics)
        run.metric("hub", time=NOW - 1, queued=4, commit_ms=2.5, chunks=40)
        run.metric("generator-0", time=NOW - 60, busy_s=1.0, waiting_s=0.0, sampled_tokens=9e9)
        run.metric("generator-0", time=NOW - 1, busy_s=0.5, waiting_s=0.5, sampled_tokens=5000)
        run.version(2, 0.010, 480_000)
        run.event("generator-0", "died", "signal 9")
        return feed.snapshot(NOW)


def test_a_snapshot_holds_what_the_journal_says(new_run) -> None:
    snapshot = _busy_run(new_run)
    assert (snapshot.step, snapshot.steps, snapshot.elapsed_s) == (3, 5, 60.0)
    assert snapshot.rewards == [0.25, 0.5, 0.75]
    assert snapshot.reward == 0.5
    assert snapshot.tokens_per_s == 5000, "a heartbeat that is older than the window does not count"
    assert snapshot.lag == {0: 9, 1: 3}
    assert snapshot.drops == {"filtered: same reward": 1, "failed: time": 1}
    assert snapshot.deaths == {"generator-0": 1}
    assert snapshot.steps_per_min == 30.0


def test_the_view_shows_every_figure(new_run) -> None:
    text = as_text(render(_busy_run(new_run), 110), 120)
    for part in (
        "alpha", "dapo on arithmetic", "0.500", "3/5", "30 steps/min", "5000 tokens/s", "0: 75 %  1: 25 %",
        "mean 0.50", "1 filtered: same reward", "1 failed: time", "version 2, 480kB in 10 ms", "commit 2.5 ms",
        "1 generator-0", "generator-0 died signal 9", "50 %", "loss 0.125",
    ):  # fmt: skip
        assert part in text, part


def test_a_line_shows_the_essentials(new_run) -> None:
    text = line(_busy_run(new_run))
    assert text.startswith("step 3/5  1 min 00 s  reward 0.500  loss 0.1250  lag 0.50  5000 tokens/s")
    assert "generator-0 50/50/0 %" in text
    assert "learner 50/50/0 %" in text
    assert text.endswith("dropped 2  deaths 1")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_an_empty_run_can_be_drawn_at_any_width(new_run, width: int) -> None:
    with RunReader(new_run().run_dir) as reader:
        snapshot = Feed(reader).snapshot(NOW)
    text = as_text(render(snapshot, width), width)
    assert "none yet" in text
    assert max(map(len, text.splitlines())) <= width
    assert "reward -" in line(snapshot)


def test_text_in_brackets_is_shown_as_it_is(new_run) -> None:
    run = new_run()
    run.group(0, [("failed", "[bold]odd[/]: x"), ("failed", "[/red]")])
    run.event("hub", "failed", "[/no] such [tag]")
    with RunReader(run.run_dir) as reader:
        text = as_text(render(Feed(reader).snapshot(NOW), 120), 120)
    assert "[/no] such [tag]" in text
    assert "[bold]odd[/]" in text


def test_a_feed_reads_each_step_once(new_run) -> None:
    run = new_run()
    with RunReader(run.run_dir) as reader:
        feed = Feed(reader)
        for step in range(1, 6):
            run.step(step, [], reward=float(step))
            assert feed.snapshot(NOW).rewards == [float(s) for s in range(1, step + 1)]
