"""The implicit process reward model: loss and gradients by hand, and that it learns."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner.errors import NotFinite
from asyncrl.learner.process_reward import ProcessReward

BETA, TEMPERATURE = 0.3, 0.8


@pytest.fixture
def config(make_config):
    def make(lr=1e-3, workspace=None, **learner):
        return make_config(
            process_reward={"lr": lr, "beta": BETA},
            sampling={"temperature": TEMPERATURE},
            learner={"head_workspace_mb": workspace} | learner,
        )

    return make


def slow_logp(hf, row, model_jobs):
    states, owner = model_jobs.slow_states(hf, row)
    logp = (hf.lm_head(states) / TEMPERATURE).log_softmax(-1)
    return logp.gather(1, row.labels[:, None])[:, 0], owner


def slow_loss(phi, reference, rows, outcomes, model_jobs):
    """Cross-entropy of each sequence by a loop; which were judged rightly; rewards of all labels."""
    losses, right, rewards = [], [], []
    for row, of_row in zip(rows, outcomes, strict=True):
        logp, owner = slow_logp(phi, row, model_jobs)
        with torch.no_grad():
            old, _ = slow_logp(reference, row, model_jobs)
        rewards.append(BETA * (logp - old))
        for i, outcome in enumerate(of_row.tolist()):
            mine = owner == i
            if math.isnan(outcome) or not mine.any():
                continue
            p = torch.sigmoid(rewards[-1][mine].sum())
            losses.append(-torch.log(p if outcome else 1 - p))
            right.append((p.item() > 0.5) == bool(outcome))
    return torch.stack(losses).mean(), np.mean(right), torch.cat(rewards)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
@pytest.mark.parametrize("workspace", [None, 1])
def test_loss_gradients_and_rewards_equal_float64_autograd(
    alone, config, folder, workspace, request, batches, model_jobs
):
    """The second step is compared, because phi is its own reference in the first."""
    path, settings = request.getfixturevalue(folder), config(lr=1e-2, workspace=workspace, grad_clip=1e9)
    found = ProcessReward(settings, path, alone)
    rows, outcomes = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    first = found.update(rows, outcomes, 1, 1)
    assert first["process_loss"] == pytest.approx(math.log(2), rel=1e-6)
    before = model_jobs.whole(found.state())
    phi, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for _ in range(2))
    phi.load_state_dict(
        {n.removeprefix("model.hf."): t for n, t in before.items() if n.startswith("model.")}, strict=False
    )
    loss, right, rewards = slow_loss(phi, reference, rows, outcomes, model_jobs)
    ours = torch.cat([found.rewards(row) for row in rows])
    assert ours.dtype == torch.float32
    assert not ours.requires_grad
    assert ours.double().numpy() == pytest.approx(rewards.detach().numpy(), abs=1e-5)
    loss.backward()
    metrics = found.update(rows, outcomes, 2, 2)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in phi.parameters()))
    expected = {"process_loss": loss.item(), "process_accuracy": right, "process_grad_norm": norm}
    assert metrics == pytest.approx(expected, rel=1e-4)
    after, beta1 = model_jobs.whole(found.state()), settings.learner.betas[0]
    for name, p in phi.named_parameters():
        key = f"optimizer.hf.{name}.exp_avg"
        gradient = (after[key] - beta1 * before[key]) / (1 - beta1)
        torch.testing.assert_close(gradient.double(), p.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_it_learns_to_tell_good_sequences_from_bad_ones(alone, config, model_folder, batches, model_jobs):
    found = ProcessReward(config(lr=3e-3), model_folder, alone)
    metrics = []
    for step in range(1, 25):
        rows, outcomes = model_jobs.rows_of(model_jobs.separable(batches.share(step)))
        metrics.append(found.update(rows, outcomes, step, step))
    assert metrics[0]["process_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert [row["process_accuracy"] for row in metrics[-4:]] == [1.0] * 4
    assert metrics[-1]["process_loss"] < 0.2
    rows, outcomes = model_jobs.rows_of(model_jobs.separable(batches.share(99)))
    for row, of_row in zip(rows, outcomes, strict=True):
        lengths = list(row.tokens.lengths)
        for rewards, outcome in zip(found.rewards(row).split(lengths), of_row.tolist(), strict=True):
            assert math.isnan(outcome) or (rewards.sum() > 0) == bool(outcome)


def test_sequences_without_an_outcome_are_not_trained_on(alone, config, model_folder, batches, model_jobs):
    found = ProcessReward(config(), model_folder, alone)
    before = model_jobs.whole(found.state(), "model.")
    rows, outcomes = model_jobs.rows_of(batches.share(1))
    metrics = found.update(rows, [torch.full_like(of_row, torch.nan) for of_row in outcomes], 1, 1)
    assert metrics == {"process_loss": 0, "process_accuracy": 0, "process_grad_norm": 0}
    after = model_jobs.whole(found.state(), "model.")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_loss_that_is_not_finite_leaves_the_model_untouched(alone, config, model_folder, batches, model_jobs):
    found = ProcessReward(config(), model_folder, alone)
    before = model_jobs.whole(found.state())
    rows, outcomes = model_jobs.rows_of(batches.share(1))
    outcomes[0][0] = torch.inf
    with pytest.raises(NotFinite, match="step 1: the process reward model's loss is not finite on batch 3"):
        found.update(rows, outcomes, 1, 3)
    after = model_jobs.whole(found.state())
    assert all(torch.equal(before[name], after[name]) for name in before)
