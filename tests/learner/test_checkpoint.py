"""Checkpoints: resumed bit for bit, on another number of ranks, or not at all; and the exported folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Checkpoint
from asyncrl.learner.checkpoint import CheckpointBroken, Checkpointer
from asyncrl.learner.export import export
from asyncrl.learner.update import Trainer

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
"""Rows of the synthetic batch, two for each half of its groups."""


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(alone, make_config, model_folder, batches, tmp_path):
    trainer = Trainer(make_config(), model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    for step in (1, 2, 3):
        trainer.train(*batches.share(step), step)
    checkpointer.save(trainer, 3)
    # Training goes on while the checkpoint is written: it must hold the state of step 3.
    metrics = [trainer.train(*batches.share(step), step) for step in (4, 5)]
    done = checkpointer.wait()
    assert done == (3, tmp_path / "step_000003")

    resumed = Trainer(make_config(), model_folder)
    assert Checkpointer(tmp_path, Checkpoint()).load_latest(resumed) == 3
    assert [resumed.train(*batches.share(step), step) for step in (4, 5)] == metrics
    assert all(torch.equal(tensor, whole(trainer)[name]) for name, tensor in whole(resumed).items())


@pytest.mark.parametrize(
    "sections",
    [
        {"algo": {"name": "ppo", "filter": "none"}},
        {"algo": {"name": "ppo"}, "critic": {"shared": True}, "learner": {"minibatches": 2}},
        {"algo": {"name": "prime", "filter": "none"}},
        {"algo": {"name": "grpo", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01, "reference_every": 2}},
    ],
    ids=["critic", "shared critic", "process reward", "reference and coefficient"],
)
def test_the_models_beside_the_policy_resume_too(alone, make_config, model_folder, batches, tmp_path, sections):
    config = make_config(**sections)
    trainer = Trainer(config, model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    for step in (1, 2, 3):
        trainer.train(*batches.share(step, rows=HALVES), step)
    checkpointer.save(trainer, 3)
    metrics = [trainer.train(*batches.share(step, rows=HALVES), step) for step in (4, 5)]
    checkpointer.wait()
    resumed = Trainer(config, model_folder)
    assert Checkpointer(tmp_path, Checkpoint()).load_latest(resumed) == 3
    assert [resumed.train(*batches.share(step, rows=HALVES), step) for step in (4, 5)] == metrics
    assert all(torch.equal(tensor, whole(trainer)[name]) for name, tensor in whole(resumed).items())


def test_a_checkpoint_of_two_ranks_resumes_on_one(run_ranks, alone, make_config, model_folder, batches, tmp_path):
    config, folder = make_config(learner={"lr": 1e-3}), tmp_path / "checkpoints"
    job = {"config": config.model_dump(), "model": str(model_folder), "folder": str(folder), "steps": 4, "save": 2}
    [(straight, weights)] = run_ranks(2, [job])
    trainer = Trainer(config, model_folder)
    assert Checkpointer(folder, Checkpoint()).load_latest(trainer) == 2
    resumed = [trainer.train(*batches.share(step), step) for step in (3, 4)]
    for a, b in zip(straight[2:], resumed, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    for name, tensor in whole(trainer).items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5)


def test_only_the_newest_checkpoints_are_kept_and_unfinished_ones_ignored(
    alone, make_config, model_folder, tmp_path
):
    trainer = Trainer(make_config(), model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint(keep=2))
    for step in (1, 2, 3):
        checkpointer.save(trainer, step)
    checkpointer.wait()
    (tmp_path / "step_000009.tmp").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003", "step_000009.tmp"]
    assert Checkpointer(tmp_path, Checkpoint()).load_latest(trainer) == 3


def test_without_a_checkpoint_the_run_starts_at_zero(alone, make_config, model_folder, tmp_path):
    trainer = Trainer(make_config(), model_folder)
    assert Checkpointer(tmp_path / "none", Checkpoint()).load_latest(trainer) == 0
    assert Checkpointer(tmp_path / "none", Checkpoint()).wait() is None


@pytest.mark.parametrize("damage", ["metadata", "data", "other model"])
def test_a_broken_checkpoint_is_named(alone, make_config, model_folder, untied_folder, tmp_path, damage):
    trainer = Trainer(make_config(), model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    checkpointer.save(trainer, 7)
    checkpointer.wait()
    folder = tmp_path / "step_000007"
    if damage == "metadata":
        (folder / ".metadata").unlink()
    elif damage == "data":
        for path in folder.glob("*.distcp"):
            path.write_bytes(b"")
    else:
        trainer = Trainer(make_config(), untied_folder)
    with pytest.raises(CheckpointBroken, match="step_000007 cannot be loaded"):
        Checkpointer(tmp_path, Checkpoint()).load_latest(trainer)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_an_export_loads_in_transformers_with_the_same_weights(
    alone, make_config, folder, request, tmp_path, batches
):
    source = request.getfixturevalue(folder)
    trainer = Trainer(make_config(), source)
    trainer.train(*batches.share(1), 1)
    for _ in range(2):  # the second export replaces the first
        export(trainer, source, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "tokenizer_config.json").read_text() == '{"note": "copied"}'
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = trainer.policy(lambda hf: hf.set_attn_implementation("sdpa") or hf(ids, use_cache=False).logits)
        torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-5, rtol=1e-5)
    original = AutoModelForCausalLM.from_pretrained(source)
    assert not torch.allclose(original(ids).logits, expected, atol=1e-3)
