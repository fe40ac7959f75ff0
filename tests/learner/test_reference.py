"""The frozen reference: its log-probs, its copies of the policy, and log-probs of the policy before an update."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner import model
from asyncrl.learner.reference import Reference
from asyncrl.learner.update import Trainer

TEMPERATURE = 0.7


def slow(folder, row, model_jobs):
    """Log-probs, entropies and sums of squared probabilities by the stock forward in float64."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        states, _ = model_jobs.slow_states(hf, row)
        logp = (hf.lm_head(states) / TEMPERATURE).log_softmax(-1)
    p = logp.exp()
    return logp.gather(1, row.labels[:, None])[:, 0], -(p * logp).sum(-1), p.square().sum(-1)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
@pytest.mark.parametrize("workspace", [None, 4096])
def test_log_probs_equal_a_slow_forward_of_each_sequence(alone, folder, workspace, request, batches, model_jobs):
    path = request.getfixturevalue(folder)
    rows, _ = model_jobs.rows_of(model_jobs.unshared(batches.share(1)))
    reference = Reference(path, "float32", alone)
    policy = model.load(path, "float32", alone)
    for row in rows:
        logp, entropy, squares = slow(path, row, model_jobs)
        assert reference.logp(row, TEMPERATURE, workspace).double().numpy() == pytest.approx(
            logp.numpy(), abs=1e-5
        )
        out = model.logp_of(policy, row, TEMPERATURE, workspace, squares=True)
        for ours, theirs in zip((out.logp, out.entropy, out.squares), (logp, entropy, squares), strict=True):
            assert ours.dtype == torch.float32
            assert not ours.requires_grad
            assert ours.double().numpy() == pytest.approx(theirs.numpy(), abs=1e-5)
        assert model.logp_of(policy, row, TEMPERATURE, workspace).squares is None


def test_a_copy_taken_after_a_step_has_the_policys_log_probs_and_its_checkpoint_names(
    alone, model_folder, make_config, batches, model_jobs
):
    trainer = Trainer(make_config(), model_folder)
    reference = Reference(model_folder, "float32", alone)
    rows, _ = model_jobs.rows_of(batches.share(1))

    def of(row):
        return model.logp_of(trainer.policy, row, 1.0, None).logp

    assert all(torch.equal(reference.logp(row, 1.0), of(row)) for row in rows)
    trainer.train(*batches.share(1), 1)
    assert not any(torch.equal(reference.logp(row, 1.0), of(row)) for row in rows)
    reference.copy_from(trainer.policy)
    assert all(torch.equal(reference.logp(row, 1.0), of(row)) for row in rows)
    assert reference.state().keys() == dict(trainer.policy.named_parameters()).keys()
    assert not any(shard.requires_grad for shard in reference.state().values())
    kept = {name: shard.full_tensor().clone() for name, shard in reference.state().items()}
    trainer.train(*batches.share(2), 2)
    assert all(torch.equal(kept[name], shard.full_tensor()) for name, shard in reference.state().items())


def test_a_forward_without_gradient_does_not_leave_old_weights_for_the_next_one(
    alone, model_folder, make_config, batches, model_jobs
):
    """FSDP keeps the root's weights after a forward until a backward, and would use them after the step."""
    asked, fresh = (Trainer(make_config(), model_folder) for _ in range(2))
    rows, _ = model_jobs.rows_of(batches.share(2))
    model.logp_of(asked.policy, rows[0], 1.0, None)
    for trainer in (asked, fresh):
        trainer.train(*batches.share(1), 1)
    model.logp_of(asked.policy, rows[0], 1.0, None)
    for row in rows:
        ours, theirs = (model.logp_of(trainer.policy, row, 1.0, None).logp for trainer in (asked, fresh))
        assert torch.equal(ours, theirs)


def test_the_hidden_states_and_the_head_of_a_row_give_its_log_probs(alone, untied_folder, batches, model_jobs):
    reference = Reference(untied_folder, "float32", alone)
    rows, _ = model_jobs.rows_of(batches.share(1))
    with reference.whole(rows[0]) as (hidden, head):
        logits = hidden @ head["weight"].t() / TEMPERATURE
        assert not hidden.requires_grad
    logp = logits.log_softmax(-1).gather(1, rows[0].labels[:, None])[:, 0]
    torch.testing.assert_close(logp, reference.logp(rows[0], TEMPERATURE), atol=1e-5, rtol=1e-5)
