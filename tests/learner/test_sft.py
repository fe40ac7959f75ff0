"""Supervised training: it learns, trains only what it is told to, and leaves a folder that loads."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Learner
from asyncrl.learner.optim import learning_rate
from asyncrl.learner.sft import pack, train_sft


def successor_examples(n=64):
    """Counting sequences: after token t comes t + 1."""
    starts = np.random.default_rng(0).integers(0, 50, n)
    return [(list(range(s, s + 8)), [False] * 4 + [True] * 4) for s in starts]


def test_the_loss_falls_and_the_exported_model_has_learned(make_config, model_folder, tmp_path):
    losses = []
    config = make_config(learner={"token_budget": 256})
    last = train_sft(
        config, model_folder, tmp_path / "out", successor_examples(), 60, 16, 1e-2,
        lambda step, loss: losses.append((step, loss)),
    )  # fmt: skip
    assert [step for step, _ in losses] == list(range(1, 61))
    assert losses[0][1] > 3
    assert losses[-1][1] == last["loss"] < 0.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        predicted = model(torch.arange(20, 28)[None]).logits[0].argmax(-1)
    assert predicted[3:7].tolist() == [24, 25, 26, 27]
    assert not torch.distributed.is_initialized()


def test_only_the_tokens_of_the_mask_are_labels_and_never_the_first():
    rows = pack([([5, 6, 7], [True, False, True]), ([8, 9], [True, True])], 8, torch.device("cpu"))
    assert [row.labels.tolist() for row in rows] == [[7, 9]]
    assert rows[0].tokens.weight.tolist() == [0.5, 0.5]


def test_no_examples_is_an_error(make_config, model_folder, tmp_path):
    with pytest.raises(ValueError, match="ran out of examples"):
        train_sft(make_config(), model_folder, tmp_path / "out", [], 1, 4, 1e-3)


def test_the_schedules_warm_up_and_come_down():
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        settings = Learner(lr=1.0, warmup_steps=4, schedule=schedule)
        rates = [learning_rate(settings, step, 104) for step in (1, 2, 4, 5, 55, 104)]
        end = 1.0 if schedule == "constant" else 0.01 if schedule == "linear" else math.sin(math.pi / 200) ** 2
        assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, middle, end])
