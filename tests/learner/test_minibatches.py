"""Several optimiser steps for each batch: the groups each trains on, and what the later ones' ratio is to."""

import pytest
import torch

from asyncrl.learner.update import Trainer

FIRST, SECOND = [[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13]]


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def test_two_minibatches_are_two_steps_on_the_halves_of_a_batch(alone, model_folder, make_config, batches):
    one = Trainer(make_config(), model_folder)
    halves = [one.train(*batches.share(1, rows=rows), 1) for rows in (FIRST, SECOND)]
    two = Trainer(make_config(learner={"minibatches": 2}), model_folder)
    metrics = two.train(*batches.share(1, rows=FIRST + SECOND), 1)
    for name, tensor in whole(two).items():
        torch.testing.assert_close(tensor, whole(one)[name], atol=1e-6, rtol=1e-6, msg=name)
    assert metrics["loss"] == pytest.approx(sum(half["loss"] for half in halves) / 2, rel=1e-5)
    assert metrics["tokens_trained"] == sum(half["tokens_trained"] for half in halves)


def test_the_recomputed_policy_is_the_one_before_the_first_minibatch(alone, model_folder, make_config, batches):
    """In the first minibatch its ratio is 1; in the second the policy has moved, and the clip cuts."""
    seen = []
    algo = {"proximal": "recomputed", "loss_args": {"clip_low": 1e-4, "clip_high": 1e-4}}
    trainer = Trainer(make_config(algo=algo, learner={"minibatches": 2, "lr": 1e-2}), model_folder)
    fit = trainer.fit

    def spy(*arguments):
        outputs, metrics = fit(*arguments)
        seen.append(torch.cat([out.metrics["clipped"] for out in outputs]).mean().item())
        return outputs, metrics

    trainer.fit = spy
    for step in (1, 2):
        trainer.train(*batches.share(step, rows=FIRST + SECOND), step)
    assert seen[0] == seen[2] == 0
    assert seen[1] > 0.1
    assert seen[3] > 0.1


def test_with_one_minibatch_the_recomputed_policy_is_the_current_one(alone, model_folder, make_config, batches):
    results = []
    for proximal in ("recomputed", "current"):
        trainer = Trainer(make_config(algo={"proximal": proximal}), model_folder)
        trainer.train(*batches.share(1), 1)
        results.append(whole(trainer))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-5, rtol=1e-5, msg=name)


def test_rows_that_were_not_planned_for_the_minibatches_are_refused(alone, model_folder, make_config, batches):
    trainer = Trainer(make_config(learner={"minibatches": 2}), model_folder)
    with pytest.raises(ValueError, match="3 rows, which are not 2 equal minibatches"):
        trainer.train(*batches.share(1, rows=[*FIRST, [8]]), 1)
