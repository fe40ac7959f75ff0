"""Every preset through the real update: blind to packing, workspace and ranks; and what the whole batch
decides."""

import math

import numpy as np
import pytest
import torch

from asyncrl.learner.model import logp_of
from asyncrl.learner.rows import build, read
from asyncrl.learner.update import Trainer
from asyncrl.trainers.presets import PRESETS

ROWS = [[13, 2, 7], [0, 1], [3, 4, 5, 6], [8, 9, 10, 11, 12]]


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def settings_of(name):
    """A preset, made to do something on a batch of 14 random episodes whose behaviour is far off."""
    algo = {"name": name, "filter": "none"}
    if name in ("clip-cov", "kl-cov"):
        algo["loss_args"] = {"share": 0.1} | ({"cov_low": 0.0, "cov_high": 9.0} if name == "clip-cov" else {})
    return algo


@pytest.fixture(scope="module")
def presets():
    return sorted(PRESETS)


def test_no_algorithm_depends_on_ranks_packing_or_workspace(
    run_ranks, alone, model_folder, make_config, batches, presets, tmp_path
):
    configs = {
        name: make_config(algo=settings_of(name), critic={"lr": 1e-3}, process_reward={"lr": 1e-3})
        for name in presets
    }
    configs["full KL"] = make_config(algo={"name": "grpo", "kl": "full", "kl_coef": 0.1})
    configs["shared critic"] = make_config(algo={"name": "ppo"}, critic={"shared": True})
    common = {"model": str(model_folder), "steps": 2, "folder": str(tmp_path / "unused")}
    on_two = run_ranks(2, [common | {"config": config.model_dump()} for config in configs.values()])
    for (name, config), (two, weights_of_two) in zip(configs.items(), on_two, strict=True):
        small = config.model_copy(update={"learner": config.learner.model_copy(update={"head_workspace_mb": 4})})
        trainer = Trainer(small, model_folder)
        metrics = [trainer.train(*batches.share(step, rows=ROWS), step) for step in (1, 2)]
        for mine, theirs in zip(metrics, two, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-5), name
        for key, tensor in whole(trainer).items():
            torch.testing.assert_close(tensor, weights_of_two[key], atol=2e-4, rtol=2e-4, msg=f"{name} {key}")
        assert all(math.isfinite(value) for row in metrics for value in row.values()), name


def test_sequences_that_a_rejection_empties_leave_the_baseline(alone, model_folder, make_config, batches):
    """A group whose other episodes are all rejected has no baseline left, so its last episode has no advantage."""
    algo = {"name": "dapo", "filter": "none", "rejection": "veto", "rejection_args": {"veto_floor": 0.02}}
    trainer = Trainer(make_config(algo=algo), model_folder)
    batch, tokens, logprobs = batches.share(1)
    seen = {}
    estimate = trainer.algorithm.advantage

    def spy(outcomes):
        seen["outcomes"] = outcomes
        return estimate(outcomes)

    object.__setattr__(trainer.algorithm, "advantage", spy)
    metrics = trainer.train(batch, tokens, logprobs, 1)
    outcomes = seen["outcomes"]
    rewarded = torch.tensor([e.reward is not None for e in batch.episodes])
    rejected = rewarded & ~outcomes.valid
    assert 0 < metrics["rejected_sequences"] == rejected.sum() < rewarded.sum()
    ratio = outcomes.columns["logp"] - outcomes.columns["behaviour"]
    owner = torch.arange(len(rewarded)).repeat_interleave(outcomes.lengths)
    smallest = torch.full((len(rewarded),), torch.inf, dtype=torch.float64).scatter_reduce(0, owner, ratio, "amin")
    assert torch.equal(rejected, rewarded & (smallest < math.log(0.02)))
    assert metrics["masked"] > 0


def test_denominators_are_counted_before_any_rejection(alone, model_folder, make_config, batches):
    """Half the tokens masked: the others keep their weight, so the learning rate does not rise."""
    losses = []
    for rejection in ("none", "token_k1"):
        algo = {
            "name": "dapo",
            "filter": "none",
            "advantage": "reinforce",
            "proximal": "current",
            "rejection": rejection,
        }
        trainer = Trainer(make_config(algo=algo), model_folder)
        metrics = trainer.train(*batches.share(1, reward=1.0), 1)
        losses.append(metrics)
    assert losses[0]["tokens_trained"] == losses[1]["tokens_trained"]
    assert losses[1]["masked"] > 0
    assert abs(losses[1]["loss"]) < abs(losses[0]["loss"])


def test_truncated_episodes_can_leave_training_and_its_denominators(alone, model_folder, make_config, batches):
    batch, tokens, logprobs = batches.share(1)
    cut = [
        e if i % 3 else type(e)(e.episode_id, e.group_id, e.reward, "truncated_length", e.length, e.sampled)
        for i, e in enumerate(batch.episodes)
    ]
    batch = type(batch)(batch.step, batch.batch_id, cut, batch.rows, batch.spans)
    algo = {"name": "dapo", "filter": "none", "shaping": "drop_truncated"}
    metrics = Trainer(make_config(algo=algo), model_folder).train(batch, tokens, logprobs, 1)
    kept = sum(e.sampled for i, e in enumerate(cut) if i % 3 and e.reward is not None)
    assert metrics["tokens_trained"] == kept


def test_an_adaptive_kl_coefficient_moves_towards_its_target_and_is_in_the_checkpoint(
    alone, model_folder, make_config, batches
):
    algo = {"name": "grpo", "kl": "k3", "kl_coef": 0.1, "kl_target": 1e-6, "kl_horizon": 100.0}
    trainer = Trainer(make_config(algo=algo), model_folder)
    first = trainer.train(*batches.share(1), 1)
    assert first["kl_coef"] == pytest.approx(0.1)
    assert trainer.state()["kl_coef"].item() == pytest.approx(0.1 * (1 + 0.2 * 13 / 100))  # one has no reward


def test_a_reference_that_follows_the_policy_is_at_no_distance_after_its_step(
    alone, model_folder, make_config, batches
):
    algo = {"name": "grpo", "kl": "k3", "kl_coef": 0.1, "reference_every": 2}
    trainer = Trainer(make_config(algo=algo), model_folder)
    batch, tokens, logprobs = batches.share(1)
    share = read(batch, tokens, logprobs, 1, None)
    rows = build(share, share.candidate, np.ones(len(share.lengths)), {}, torch.device("cpu"))
    distances = []
    for step in (1, 2):
        trainer.train(*batches.share(step), step)
        reference = trainer.companions.reference
        apart = [reference.logp(row, 1.0) - logp_of(trainer.policy, row, 1.0, None).logp for row in rows]
        distances.append(torch.cat(apart).abs().max().item())
    assert distances[0] > 1e-3
    assert distances[1] < 1e-6
    assert any(name.startswith("companion.reference.") for name in trainer.state())


def test_while_the_critic_warms_up_the_policy_stays_and_its_schedule_waits(
    alone, model_folder, make_config, batches
):
    config = make_config(algo={"name": "ppo"}, critic={"warmup_steps": 2}, learner={"weight_decay": 0.1})
    trainer = Trainer(config, model_folder)
    before = whole(trainer)
    metrics = [trainer.train(*batches.share(step), step) for step in (1, 2)]
    assert all(torch.equal(before[name], tensor) for name, tensor in whole(trainer).items())
    assert [row["lr"] for row in metrics] == [0, 0]
    assert metrics[0]["value_loss"] != metrics[1]["value_loss"]
    third = trainer.train(*batches.share(3), 3)
    assert third["lr"] == pytest.approx(config.learner.lr / config.learner.warmup_steps)
    assert any(not torch.equal(before[name], tensor) for name, tensor in whole(trainer).items())


def test_marks_are_a_share_of_the_tokens_that_are_trained(alone, model_folder, make_config, batches):
    algo = {"name": "kl-cov", "loss_args": {"share": 0.2, "coef": 1.0}}
    trainer = Trainer(make_config(algo=algo, staleness={"over_age": "mask", "max_lag": 1}), model_folder)
    marked = []
    loss = trainer.algorithm.loss

    def spy(logp, tokens):
        marked.append(tokens.mark)
        return loss(logp, tokens)

    object.__setattr__(trainer.algorithm, "loss", spy)
    metrics = trainer.train(*batches.share(5), 5)
    assert 0 < metrics["tokens_trained"] < metrics["tokens_sampled"]
    assert torch.cat(marked).sum() == int(0.2 * metrics["tokens_trained"])
