"""Checkpoints: resumed bit for bit, on other ranks, or passed over; full and slow disks; the exported folder."""

import os
import resource
import shutil
import threading

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.config import Checkpoint, Config
from asyncrl.learner import dist
from asyncrl.learner.checkpoint import CheckpointBroken, Checkpointer
from asyncrl.learner.export import export
from asyncrl.learner.update import Trainer

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
"""Rows of the synthetic batch, two for each half of its groups."""


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(trainer, folder, step):
    checkpointer = Checkpointer(folder, Checkpoint())
    checkpointer.save(trainer, step)
    assert checkpointer.wait().error == ""


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(alone, make_config, model_folder, batches, tmp_path):
    trainer = Trainer(make_config(), model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    for step in (1, 2, 3):
        trainer.train(*batches.share(step), step)
    checkpointer.save(trainer, 3)
    # Training goes on while the checkpoint is written: it must hold the state of step 3.
    metrics = [trainer.train(*batches.share(step), step) for step in (4, 5)]
    assert checkpointer.wait() == (3, tmp_path / "step_000003", [3], "")

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
        {
            "algo": {"name": "ppo", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01, "reference_every": 2},
            "critic": {"warmup_steps": 4},
            "learner": {"schedule": "cosine", "warmup_steps": 2, "minibatches": 2},
            "train": {"steps": 6},
        },
    ],
    ids=["critic", "shared critic", "process reward", "reference and coefficient", "all that moves"],
)
def test_the_models_beside_the_policy_resume_too(alone, make_config, model_folder, batches, tmp_path, sections):
    config = make_config(**sections)
    trainer = Trainer(config, model_folder)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    for step in (1, 2, 3):
        trainer.train(*batches.share(step, rows=HALVES), step)
    checkpointer.save(trainer, 3)
    metrics = [trainer.train(*batches.share(step, rows=HALVES), step) for step in (4, 5, 6)]
    checkpointer.wait()
    resumed = Trainer(config, model_folder)
    assert Checkpointer(tmp_path, Checkpoint()).load_latest(resumed) == 3
    assert [resumed.train(*batches.share(step, rows=HALVES), step) for step in (4, 5, 6)] == metrics
    # Not the policy alone: moments, critic, reference, coefficient.
    straight = trainer.state()
    assert all(torch.equal(local(tensor), local(straight[name])) for name, tensor in resumed.state().items())


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_of_one_on_two(
    run_ranks, alone, make_config, model_folder, batches, tmp_path
):
    config, of_two, of_one = make_config(learner={"lr": 1e-3}), tmp_path / "of two", tmp_path / "of one"
    first = Trainer(config, model_folder)
    checkpointer = Checkpointer(of_one, Checkpoint())
    for step in (1, 2):
        first.train(*batches.share(step), step)
        checkpointer.save(first, step)
    checkpointer.wait()
    next((of_one / "step_000002").glob("*.distcp")).write_bytes(b"")  # Both ranks must fall back to the other one.
    base = {"config": config.model_dump(), "model": str(model_folder), "steps": 4}
    jobs = [base | {"folder": str(of_two), "save": 2}, base | {"folder": str(of_one), "load": True}]
    [(straight, weights), (resumed, resumed_weights)] = run_ranks(2, jobs)
    assert len(resumed) == 3
    for a, b in zip(straight[1:], resumed, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    trainer = Trainer(config, model_folder)
    assert Checkpointer(of_two, Checkpoint()).load_latest(trainer) == 2
    metrics = [trainer.train(*batches.share(step), step) for step in (3, 4)]
    for a, b in zip(straight[2:], metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    for name, tensor in whole(trainer).items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights[name], resumed_weights[name], atol=1e-5, rtol=1e-5)


def test_the_newest_regular_and_best_checkpoints_are_kept_across_restarts(
    alone, make_config, model_folder, tmp_path
):
    trainer, policy = Trainer(make_config(), model_folder), Checkpoint(keep=2, keep_every=4, keep_best=1)
    rewards = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.8, 6: 0.4, 7: 0.5}
    told = []
    for step, reward in rewards.items():
        checkpointer = Checkpointer(tmp_path, policy)  # Each time as a new process would.
        checkpointer.observe(step, reward)
        checkpointer.save(trainer, step)
        told.append(checkpointer.wait().kept)
        assert checkpointer.complete() == told[-1]
    assert told == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 5, 6], [2, 4, 6, 7]]


def test_halves_that_a_crash_left_are_neither_loaded_nor_left(alone, make_config, model_folder, tmp_path):
    trainer = Trainer(make_config(), model_folder)
    save(trainer, tmp_path, 3)
    for half in ("step_000009.tmp", "step_000001.gone"):
        (tmp_path / half).mkdir()
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    assert checkpointer.load_latest(trainer) == 3
    assert len(list(tmp_path.iterdir())) == 3  # To load changes nothing: it may be another run's folder.
    checkpointer.tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_without_a_checkpoint_the_run_starts_at_zero(alone, make_config, model_folder, tmp_path):
    trainer = Trainer(make_config(), model_folder)
    checkpointer = Checkpointer(tmp_path / "none", Checkpoint())
    assert checkpointer.load_latest(trainer) == 0
    checkpointer.tidy()
    assert checkpointer.wait() is None


def flip(path):
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 4
    path.write_bytes(held)


DAMAGE = {
    "truncated": (lambda at: os.truncate(at / "__0_0.distcp", 5000), "has 5000 bytes"),
    "a flipped bit": (lambda at: flip(at / "__0_0.distcp"), "__0_0.distcp is damaged"),
    "a file missing": (lambda at: (at / ".metadata").unlink(), ".metadata is missing"),
    "no manifest": (lambda at: (at / "manifest.json").unlink(), "manifest.json is missing"),
    "a damaged manifest": (lambda at: flip(at / "manifest.json"), "manifest.json"),
    "half a manifest": (lambda at: os.truncate(at / "manifest.json", 40), "manifest.json cannot be read"),
    "another's name": (lambda at: at.rename(at.with_name("step_000008")), "it holds step 7"),
    "beyond the journal": (lambda at: at.rename(at.with_name("step_000021")), "run.db ends at step 20"),
}


@pytest.fixture(scope="module")
def two_checkpoints(model_folder, tmp_path_factory):
    """A folder with checkpoints of steps 5 and 7."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = Config.model_validate({"generator": {"max_model_len": 48}, "learner": {"token_budget": 64}})
    with dist.alone():
        trainer = Trainer(config, model_folder)
        save(trainer, folder, 5)
        save(trainer, folder, 7)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_told_and_set_aside(
    alone, make_config, model_folder, two_checkpoints, tmp_path, damage
):
    folder = shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    harm, why = DAMAGE[damage]
    harm(folder / "step_000007")
    checkpointer = Checkpointer(folder, Checkpoint())
    assert checkpointer.load_latest(Trainer(make_config(), model_folder), at_most=20) == 5
    [(step, told)] = checkpointer.passed_over.items()
    assert why in told
    checkpointer.tidy()
    assert checkpointer.complete() == [5]
    assert (folder / f"step_{step:06d}.passed_over").is_dir()


def test_if_no_checkpoint_is_sound_training_starts_anew(
    alone, make_config, model_folder, two_checkpoints, tmp_path
):
    folder = shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    for path in folder.glob("*/.metadata"):
        flip(path)
    checkpointer = Checkpointer(folder, Checkpoint())
    assert checkpointer.load_latest(Trainer(make_config(), model_folder)) == 0
    assert sorted(checkpointer.passed_over) == [5, 7]


def test_a_sound_checkpoint_of_another_model_is_refused(alone, make_config, untied_folder, two_checkpoints):
    with pytest.raises(CheckpointBroken, match=r"step_000007 is whole.*Missing key.*another model.path"):
        Checkpointer(two_checkpoints, Checkpoint()).load_latest(Trainer(make_config(), untied_folder))


@pytest.mark.parametrize("collective", ["torch.distributed.broadcast", "torch.distributed.checkpoint.load"])
def test_a_rank_that_dies_while_the_others_load_is_no_broken_checkpoint(
    alone, make_config, model_folder, two_checkpoints, monkeypatch, collective
):
    def lost(*_args, **_options):
        raise RuntimeError("Connection closed by peer")  # What gloo says then; a restart of all ranks mends it.

    trainer, checkpointer = Trainer(make_config(), model_folder), Checkpointer(two_checkpoints, Checkpoint())
    monkeypatch.setattr(collective, lost)
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        checkpointer.load_latest(trainer)
    assert not isinstance(caught.value, CheckpointBroken | OSError)  # Those would stop the run.


@pytest.fixture
def file_limit():
    """Sets the size that a file of this process may have; None: as before. Stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("size", [0, 20_000], ids=["at once", "midway"])
def test_on_a_full_disk_training_goes_on_with_the_checkpoint_before(
    alone, make_config, model_folder, tmp_path, file_limit, size
):
    trainer = Trainer(make_config(), model_folder)
    save(trainer, tmp_path, 1)
    checkpointer = Checkpointer(tmp_path, Checkpoint())
    file_limit(size)
    checkpointer.save(trainer, 2)
    failed = checkpointer.wait()
    assert failed.kept == [1]
    assert "rank 0" in failed.error
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    file_limit(None)
    checkpointer.save(trainer, 3)
    assert checkpointer.wait() == (3, tmp_path / "step_000003", [1, 3], "")


def test_the_third_checkpoint_in_a_row_that_cannot_be_written_stops_the_run(
    alone, make_config, model_folder, tmp_path, file_limit
):
    trainer, checkpointer = Trainer(make_config(), model_folder), Checkpointer(tmp_path, Checkpoint())
    file_limit(0)
    assert checkpointer.save(trainer, 1) is None
    assert checkpointer.save(trainer, 2).error
    assert checkpointer.save(trainer, 3).error
    with pytest.raises(CheckpointBroken, match="step_000003 could not be written, the 3rd in a row"):
        checkpointer.wait()


def test_a_slow_disk_delays_only_the_next_checkpoint_and_only_so_long(
    alone, make_config, model_folder, tmp_path, monkeypatch
):
    answers, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: answers.wait(60) and sync(handle))
    trainer, checkpointer = Trainer(make_config(), model_folder), Checkpointer(tmp_path, Checkpoint(timeout_s=2))
    checkpointer.save(trainer, 1)
    assert checkpointer.poll() is None
    with pytest.raises(TimeoutError, match=r"learner-0 waited for its writer.*step_000001.*timeout_s = 2"):
        checkpointer.save(trainer, 2)
    answers.set()


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
