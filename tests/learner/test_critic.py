"""The critic, with its own backbone and on the policy's: values, gradients, metrics, and what stays out."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner import model
from asyncrl.learner.critic import Critic, SharedCritic
from asyncrl.learner.errors import NotFinite

SETTINGS = {"critic": {"lr": 1e-3, "clip": 0.3}, "learner": {"grad_clip": 1e9}}


def slow_model(tensors):
    """A float64 model with these weights (as `model_jobs.whole` names them) and its value head."""

    def make(folder):
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        weights = {name.removeprefix("hf."): t for name, t in tensors.items() if name.startswith("hf.")}
        hf.load_state_dict(weights, strict=False)
        head = tensors["value.weight"].double().requires_grad_()
        return hf, head

    return make


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_values_equal_a_slow_forward_of_each_sequence(alone, make_config, folder, request, batches, model_jobs):
    path = request.getfixturevalue(folder)
    critic = Critic(make_config(**SETTINGS), path, alone)
    rows, _ = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    assert not any(critic.values(row).any() for row in rows), "a new head says 0"
    model_jobs.wake(critic.state())
    hf, head = slow_model(model_jobs.whole(critic.state(), "model."))(path)
    for row in rows:
        values = critic.values(row)
        slow = model_jobs.slow_states(hf, row)[0] @ head[0]
        assert values.dtype == torch.float32
        assert not values.requires_grad
        assert values.double().numpy() == pytest.approx(slow.detach().numpy(), abs=1e-4, rel=1e-5)


def slow_loss(hf, head, rows, fits, clip, model_jobs):
    """Clipped value loss by its definition, and what the metrics should say."""
    v, old, target, weight = [], [], [], []
    for row, fit in zip(rows, fits, strict=True):
        v.append(model_jobs.slow_states(hf, row)[0] @ head[0])
        for values, found in zip((old, target, weight), fit, strict=True):
            values.append(found.double())
    v, old, target, weight = (torch.cat(values) for values in (v, old, target, weight))
    near = torch.maximum(torch.minimum(v, old + clip), old - clip)
    plain, other = (v - target).square(), (near - target).square()
    loss = (weight * 0.5 * torch.maximum(plain, other)).sum()
    error = (target - v).detach()
    metrics = {
        "value_loss": loss.item(),
        "value_clipped": (other > plain + 1e-9).double().mean().item(),
        "explained_variance": 1 - (error.var() / target.var()).item(),
    }
    return loss, metrics


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_loss_metrics_and_every_gradient_equal_float64_autograd(
    alone, make_config, folder, request, batches, model_jobs
):
    path = request.getfixturevalue(folder)
    config = make_config(**SETTINGS)
    critic = Critic(config, path, alone)
    model_jobs.wake(critic.state())
    hf, head = slow_model(model_jobs.whole(critic.state(), "model."))(path)
    rows, _ = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    fits = model_jobs.fits_of(critic, rows)
    metrics = critic.fit(rows, fits, 1, 1)
    loss, expected = slow_loss(hf, head, rows, fits, 0.3, model_jobs)
    loss.backward()
    slow = {f"hf.{name}": p.grad for name, p in hf.named_parameters() if p.grad is not None}
    slow["value.weight"] = head.grad
    expected["critic_grad_norm"] = sum(g.square().sum() for g in slow.values()).sqrt().item()
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert 0 < metrics["value_clipped"] < 1
    moments = model_jobs.whole(critic.state(), "optimizer.")
    assert {name.removesuffix(".exp_avg") for name in moments if name.endswith(".exp_avg")} == slow.keys()
    for name, gradient in slow.items():
        ours = moments[f"{name}.exp_avg"] / (1 - config.learner.betas[0])
        torch.testing.assert_close(ours.double(), gradient, atol=2e-5, rtol=1e-3, msg=name)


def test_a_critic_learns_its_targets(alone, make_config, model_folder, batches, model_jobs):
    critic = Critic(make_config(critic={"lr": 3e-3, "clip": 0.0}), model_folder, alone)
    rows, _ = model_jobs.rows_of(batches.share(1))
    first, *_, last = [critic.fit(rows, model_jobs.fits_of(critic, rows), step, step) for step in range(1, 41)]
    assert abs(first["explained_variance"]) < 1e-5, "a head that says 0 explains nothing"
    assert last["explained_variance"] > 0.9
    assert last["value_loss"] < 0.1 * first["value_loss"]


def test_a_critic_keeps_no_lm_head_of_an_untied_model(alone, make_config, untied_folder):
    policy, critic = model.load(untied_folder, "float32", alone), Critic(make_config(), untied_folder, alone)
    ours = {name.removeprefix("model.") for name in critic.state() if name.startswith("model.")}
    assert dict(policy.named_parameters()).keys() - ours == {"hf.lm_head.weight"}
    assert ours - dict(policy.named_parameters()).keys() == {"value.weight"}


def test_labels_of_weight_0_are_in_no_metric_and_no_gradient(
    alone, make_config, model_folder, batches, model_jobs
):
    results = []
    for wrong in (0.0, 1e3):
        critic = Critic(make_config(**SETTINGS), model_folder, alone)
        model_jobs.wake(critic.state())
        rows, _ = model_jobs.rows_of(batches.share(1))
        fits = []
        for old, target, weight in model_jobs.fits_of(critic, rows):
            kept = torch.arange(len(target)) % 3 > 0
            fits.append((old, torch.where(kept, target, wrong), weight * kept))
        results.append(critic.fit(rows, fits, 1, 1))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_target_that_is_not_finite_leaves_the_critic_untouched(
    alone, make_config, model_folder, batches, model_jobs
):
    critic = Critic(make_config(**SETTINGS), model_folder, alone)
    rows, _ = model_jobs.rows_of(batches.share(1))
    fits = model_jobs.fits_of(critic, rows)
    critic.fit(rows, fits, 1, 1)
    before = model_jobs.whole(critic.state())
    poisoned = [(old, target * torch.nan, weight) for old, target, weight in fits]
    with pytest.raises(NotFinite, match="step 2: the critic's loss is not finite on batch 7"):
        critic.fit(rows, poisoned, 2, 7)
    after = model_jobs.whole(critic.state())
    assert all(torch.equal(before[name], after[name]) for name in before)


def joint_step(policy, critic, rows, fits, zero_loss):
    """Gradients of the value term alone, through `head_loss`; the losses by row."""
    terms = [critic.term(*fit) for fit in fits]
    outs = [
        policy(model.head_loss, row, zero_loss, 1.0, None, False, t) for row, t in zip(rows, terms, strict=True)
    ]
    for out in outs:
        out.loss.backward()
    return sum(out.loss.item() for out in outs)


def test_a_shared_head_trains_the_policys_backbone_by_its_coefficient(
    alone, make_config, model_folder, batches, model_jobs
):
    config = make_config(critic={"coef": 0.25, "clip": 0.3, "shared": True})
    policy = model.load(model_folder, "float32", alone, value_head=True)
    shards = {f"model.{name}": p for name, p in policy.named_parameters()}
    model_jobs.wake(shards)
    critic = SharedCritic(config, policy)
    rows, _ = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    fits = model_jobs.fits_of(critic, rows)
    hf, head = slow_model(model_jobs.whole(shards, "model."))(model_folder)
    loss, expected = slow_loss(hf, head, rows, fits, 0.3, model_jobs)
    (0.25 * loss).backward()
    assert joint_step(policy, critic, rows, fits, model_jobs.zero_loss) == pytest.approx(
        0.25 * loss.item(), rel=1e-5
    )
    slow = {f"hf.{name}": p.grad for name, p in hf.named_parameters()} | {"value.weight": head.grad}
    model.release(policy)
    for name, p in policy.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor().double(), slow[name], atol=2e-5, rtol=1e-3, msg=name)
    assert critic.fit(rows, fits, 1, 1) == pytest.approx(expected, rel=1e-4)


def test_metrics_of_a_shared_head_forget_a_step_that_failed(alone, make_config, model_folder, batches, model_jobs):
    policy = model.load(model_folder, "float32", alone, value_head=True)
    critic = SharedCritic(make_config(critic={"shared": True}), policy)
    rows, _ = model_jobs.rows_of(batches.share(1))
    fits = model_jobs.fits_of(critic, rows)
    joint_step(policy, critic, rows, fits, model_jobs.zero_loss)
    joint_step(policy, critic, rows, fits, model_jobs.zero_loss)
    twice = critic.fit(rows, fits, 1, 1)
    joint_step(policy, critic, rows, fits, model_jobs.zero_loss)
    assert critic.fit(rows, fits, 2, 2) == twice


def test_a_shared_head_is_no_published_weight_but_is_a_parameter(alone, untied_folder):
    plain = model.load(untied_folder, "float32", alone)
    valued = model.load(untied_folder, "float32", alone, value_head=True)
    walks = [{name: t.clone() for name, t in model.weights(policy)} for policy in (plain, valued)]
    assert list(walks[0]) == list(walks[1])
    assert all(torch.equal(walks[0][name], walks[1][name]) for name in walks[0])
    assert model.manifest(plain, "float32") == model.manifest(valued, "float32")
    extra = dict(valued.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    assert extra == {"value.weight"}
    assert not valued.value.weight.full_tensor().any()


def test_asking_a_model_without_a_value_head_for_values_is_refused(alone, model_folder, batches, model_jobs):
    rows, _ = model_jobs.rows_of(batches.share(1))
    with pytest.raises(ValueError, match="no value head"):
        model.values_of(model.load(model_folder, "float32", alone), rows[0])
