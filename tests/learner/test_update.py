"""The optimiser step: equal on one and two ranks, blind to packing, and never applied when not finite."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learner.errors import NotFinite
from asyncrl.learner.rows import build, lag_limit, read
from asyncrl.learner.update import Trainer
from asyncrl.packing import plan


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def assert_same_weights(first, second, tolerance):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=tolerance, rtol=tolerance, msg=name)


def test_two_ranks_have_the_losses_and_weights_of_one(
    run_ranks, alone, model_folder, untied_folder, make_config, batches, tmp_path
):
    variants = [
        (make_config(algo={"name": "dapo"}, learner={"lr": 1e-3}), model_folder),
        (
            make_config(
                algo={"name": "grpo", "proximal": "behaviour", "entropy_bonus": 0.01}, learner={"lr": 1e-3}
            ),
            untied_folder,
        ),
    ]
    jobs = [
        {"config": config.model_dump(), "model": str(folder), "steps": 4, "folder": str(tmp_path / "unused")}
        for config, folder in variants
    ]
    for (config, folder), (two, weights) in zip(variants, run_ranks(2, jobs), strict=True):
        trainer = Trainer(config, folder)
        one = [trainer.train(*batches.share(step), step) for step in (1, 2, 3, 4)]
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
        assert_same_weights(whole(trainer), weights, 1e-5)
        assert one[0]["loss"] != one[3]["loss"]


def test_a_step_does_not_depend_on_how_the_batch_is_packed(alone, model_folder, make_config, batches):
    results = []
    for rows in (None, [[i] for i in range(14)], [[13, 2, 7], [0, 1], [], [3, 4, 5, 6], [8, 9, 10, 11, 12]]):
        trainer = Trainer(make_config(learner={"head_workspace_mb": 4 if rows else None}), model_folder)
        metrics = trainer.train(*batches.share(1, rows=rows), 1)
        results.append((metrics, whole(trainer)))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        assert_same_weights(weights, results[0][1], 1e-4)


def test_a_sequence_loss_does_not_depend_on_packing_or_on_the_workspace(
    run_ranks, alone, model_folder, make_config, batches, tmp_path
):
    """In the smaller workspace no sequence fits, so every one is swept twice."""
    algo = {"name": "gspo", "loss_args": {"clip_low": 0.5, "clip_high": 0.5}}
    results = []
    for rows, workspace in ((None, None), ([[13, 2, 7], [0, 1], [3, 4, 5, 6], [8, 9, 10, 11, 12]], 4)):
        trainer = Trainer(make_config(algo=algo, learner={"head_workspace_mb": workspace}), model_folder)
        assert trainer.algorithm.sequence_level
        results.append((trainer.train(*batches.share(1, rows=rows), 1), whole(trainer)))
    config = make_config(algo=algo, learner={"head_workspace_mb": 4})
    job = {
        "config": config.model_dump(),
        "model": str(model_folder),
        "steps": 1,
        "folder": str(tmp_path / "unused"),
    }
    ((two, weights),) = run_ranks(2, [job])
    results.append((two[0], weights))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        assert_same_weights(weights, results[0][1], 1e-4)
    assert 0 < results[0][0]["clipped"] < 1


def test_the_same_batch_and_state_give_the_same_bits(alone, model_folder, make_config, batches):
    runs = []
    for _ in range(2):
        trainer = Trainer(make_config(), model_folder)
        metrics = [trainer.train(*batches.share(step), step) for step in (1, 2)]
        runs.append((metrics, whole(trainer)))
    assert json.dumps(runs[0][0]) == json.dumps(runs[1][0])
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def slow_loss(folder, batch, tokens, logprobs, step, limit):
    """DAPO's loss with weights for the distance to the behaviour policy, by the stock model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    order = [i for row in batch.rows for i in row]
    terms, count, start = [], 0, 0
    for index, spans in zip(order, batch.spans, strict=True):
        episode = batch.episodes[index]
        ids = torch.from_numpy(tokens[start : start + episode.length].astype(np.int64))
        mu = torch.from_numpy(logprobs[start : start + episode.length]).double()
        start += episode.length
        if episode.reward is None:
            continue
        peers = [e.reward for e in batch.episodes if e.group_id == episode.group_id and e.reward is not None]
        advantage = (episode.reward - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-6) if len(peers) > 1 else 0.0
        logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        position = 0
        for span in spans:
            for t in range(position, position + span.n):
                if span.sampled and t > 0 and step - 1 - span.version <= limit:
                    current = logp[t - 1, ids[t]]
                    weight = min(math.exp(current.item() - mu[t].item()), 2.0)
                    terms.append(-weight * advantage * (current - current.item()).exp())
                    count += 1
            position += span.n
    loss = sum(terms) / count
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    return loss.item(), norm, count


@pytest.mark.parametrize("limit", [0, 1, 64])
def test_loss_and_gradient_norm_equal_a_slow_reference(alone, model_folder, make_config, batches, limit):
    staleness = {"over_age": "mask", "max_lag": limit}
    trainer = Trainer(make_config(staleness=staleness, algo={"proximal": "current"}), model_folder)
    share = batches.share(4)
    metrics = trainer.train(*share, 4)
    loss, norm, count = slow_loss(model_folder, *share, 4, limit)
    assert metrics["tokens_trained"] == count
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["stale_share"] == pytest.approx(1 - count / metrics["tokens_sampled"])
    lags = {int(name.split("/")[1]): n for name, n in metrics.items() if name.startswith("lag_hist/")}
    assert sum(lags.values()) == count
    assert max(lags) <= limit
    assert metrics["lag_mean"] == pytest.approx(sum(lag * n for lag, n in lags.items()) / count)


def test_the_ratio_metrics_are_those_of_the_log_probs(alone, model_folder, make_config, batches):
    config = make_config(algo={"proximal": "current"})
    batch, tokens, logprobs = batches.share(2)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    share = read(batch, tokens, logprobs, 2, lag_limit(config))
    logs, start = [], 0
    for length in share.lengths:
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        with torch.no_grad():
            logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        logs += [logp[t - 1, ids[t]] - logprobs[start + t] for t in range(length) if share.trained[start + t]]
        start += length
    ratio = torch.stack(logs).double().exp().numpy()
    metrics = Trainer(config, model_folder).train(batch, tokens, logprobs, 2)
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "kl": (ratio - 1 - np.log(ratio)).mean(),
        "weight_mean": np.minimum(ratio, 2).mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_tokens_over_age_have_no_gradient(alone, model_folder, make_config, batches):
    trainer = Trainer(make_config(staleness={"over_age": "mask", "max_lag": 2}), model_folder)
    before = whole(trainer)
    metrics = trainer.train(*batches.share(9, version=0), 9)
    assert (metrics["tokens_trained"], metrics["stale_share"], metrics["grad_norm"]) == (0, 1, 0)
    assert all(torch.equal(before[name], after) for name, after in whole(trainer).items())


def test_which_tokens_are_trained(make_config, batches):
    batch, tokens, logprobs = batches.share(3)
    share = read(batch, tokens, logprobs, 3, None)
    rows = build(share, share.trained, np.ones(len(share.lengths)), {}, torch.device("cpu"))
    position = 0
    for index, spans in zip(share.episode, batch.spans, strict=True):
        for span in spans:
            part = share.trained[position : position + span.n]
            assert part.all() == (span.sampled and batch.episodes[index].reward is not None)
            assert part.any() == part.all()
            position += span.n
    for row in rows:
        assert torch.equal(row.ids[row.states + 1], row.labels)
        assert (row.positions[row.states + 1] == row.positions[row.states] + 1).all()
    assert sum(len(row.labels) for row in rows) == share.trained.sum()


def test_the_lag_limit_follows_the_policy_for_over_age_tokens(make_config):
    limits = {
        p: lag_limit(make_config(staleness={"over_age": p, "max_lag": 3})) for p in ("mask", "train", "wait")
    }
    assert limits == {"mask": 3, "train": 64, "wait": None}


def test_a_share_that_does_not_fit_is_refused(batches):
    batch, tokens, logprobs = batches.share(1)
    with pytest.raises(ValueError, match="do not fit"):
        read(batch, tokens[:-1], logprobs, 1, None)


def test_a_log_prob_that_is_not_finite_leaves_the_weights_untouched(alone, model_folder, make_config, batches):
    trainer = Trainer(make_config(), model_folder)
    trainer.train(*batches.share(1), 1)
    before = whole(trainer)
    state = {name: value.clone() for name, value in trainer.optimizer.state().items()}
    batch, tokens, logprobs = batches.share(2)
    with pytest.raises(NotFinite, match="step 2: the policy's loss is not finite on batch 2") as caught:
        trainer.train(batch, tokens, np.full_like(logprobs, np.nan), 2)
    assert (caught.value.step, caught.value.batch_id, trainer.step) == (2, 2, 1)
    assert all(torch.equal(before[name], after) for name, after in whole(trainer).items())
    for name, value in trainer.optimizer.state().items():
        assert torch.equal(local(state[name]), local(value))
    trainer.train(*batches.share(3), 3)


def test_not_finite_on_one_rank_stops_the_step_on_all(
    run_ranks, alone, model_folder, make_config, batches, tmp_path
):
    config = make_config()
    job = {"config": config.model_dump(), "model": str(model_folder), "steps": 2, "folder": str(tmp_path)}
    [(metrics, weights)] = run_ranks(2, [job | {"poison": 2}])
    assert metrics[1] == {"not_finite": 2}
    trainer = Trainer(config, model_folder)
    trainer.train(*batches.share(1), 1)
    assert_same_weights(weights, whole(trainer), 1e-5)


def test_more_ranks_than_work_leaves_empty_rows_that_do_no_harm(alone, model_folder, make_config, batches):
    (rows,) = plan([e.length for e in batches.share(1)[0].episodes], 1, 64)
    plain, padded = (Trainer(make_config(), model_folder) for _ in range(2))
    a = plain.train(*batches.share(1, rows=rows), 1)
    b = padded.train(*batches.share(1, rows=[*rows, []]), 1)
    assert a == pytest.approx(b, rel=1e-6)
    assert_same_weights(whole(plain), whole(padded), 1e-6)
