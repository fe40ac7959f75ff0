"""What tests do with the models beside the policy, in their own process and in the ranks of `rank_worker`.

Every job is a function (fixtures, ranks, job) -> (metrics by step, whole tensors by name), like `rank_worker.run`.
"""

from functools import partial

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asyncrl.config import Config
from asyncrl.learner import model
from asyncrl.learner.critic import Critic
from asyncrl.learner.digest import digest as fingerprint
from asyncrl.learner.dist import sum_over_ranks
from asyncrl.learner.full_kl import FullKl
from asyncrl.learner.process_reward import ProcessReward
from asyncrl.learner.reference import Reference
from asyncrl.learner.rows import build, read
from asyncrl.learner.trained import Trained
from asyncrl.learner.update import Trainer


def rows_of(share, device="cpu"):
    """Packed rows of all candidates of `Batches.share`, and the outcome of each row's sequences."""
    batch, tokens, logprobs = share
    found = read(batch, tokens, logprobs, batch.step, None)
    rewards = [np.nan if batch.episodes[i].reward is None else batch.episodes[i].reward for i in found.episode]
    rewards = torch.tensor(rewards)
    outcomes = torch.where(rewards.isnan(), rewards, (rewards > 0.5).float())
    rows = build(found, found.candidate, np.ones(len(found.lengths)), {}, torch.device(device))
    return rows, list(outcomes.split(found.row_sizes))


def separable(share):
    """The same batch, in which an episode's outcome shows in every token: good ones are below 30."""
    batch, tokens, logprobs = share
    order = [i for row in batch.rows for i in row]
    good = np.repeat(
        [(batch.episodes[i].reward or 0) > 0.5 for i in order], [batch.episodes[i].length for i in order]
    )
    return batch, (tokens % 30 + np.where(good, 0, 30)).astype(np.int32), logprobs


def fits_of(critic, rows):
    """What a critic is fitted to in tests: old values beside its own, targets from positions and labels."""
    total = float(sum_over_ranks(torch.tensor(float(sum(len(row.labels) for row in rows)))))
    fits = []
    for row in rows:
        target = torch.sin(row.labels * 0.7) + 0.1 * row.positions[row.states]
        old = critic.values(row) + 0.4 * torch.cos(row.labels.float())
        fits.append((old, target, torch.full_like(target, 1 / total)))
    return fits


def whole(tensors, prefix=""):
    """Sharded tensors whose names begin with the prefix, whole. Collective."""
    found = {name.removeprefix(prefix): t.detach() for name, t in tensors.items() if name.startswith(prefix)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def wake(tensors):
    """Gives a value head, which is 0 at first, weights that every rank agrees on."""
    head = tensors["model.value.weight"]
    weight = torch.sin(torch.arange(head.shape[1])).view(1, -1)
    local = head.to_local()
    local.detach().copy_(weight[: len(local)])


def critic(fixtures, ranks, job):
    found = Critic(Config.model_validate(job["config"]), job["model"], ranks)
    wake(found.state())
    metrics = []
    for step in range(1, job["steps"] + 1):
        rows, _ = rows_of(fixtures.Batches().share(step, ranks.world_size, ranks.rank, rows=job.get("rows")))
        metrics.append(found.fit(rows, fits_of(found, rows), step, step))
    return metrics, whole(found.state())


def process(fixtures, ranks, job):
    found = ProcessReward(Config.model_validate(job["config"]), job["model"], ranks)
    metrics = []
    for step in range(1, job["steps"] + 1):
        share = fixtures.Batches().share(step, ranks.world_size, ranks.rank, rows=job.get("rows"))
        rows, outcomes = rows_of(separable(share))
        metrics.append(found.update(rows, outcomes, step, step))
        rewards = torch.stack([found.rewards(row).double().square().sum() for row in rows]).sum()
        metrics[-1]["squared_rewards"] = float(sum_over_ranks(rewards))
    return metrics, whole(found.state())


def reference(fixtures, ranks, job):
    """Log-probs of a batch under a reference, before and after it becomes a copy of a policy that moved."""
    policy = moved(job["model"], ranks)
    found = Reference(job["model"], "float32", ranks)
    rows, _ = rows_of(fixtures.Batches().share(1, ranks.world_size, ranks.rank, rows=job.get("rows")))
    temperature = job["config"]["sampling"]["temperature"]

    def total(logp):
        return float(sum_over_ranks(torch.stack([logp(row).double().square().sum() for row in rows]).sum()))

    def of_policy(row):
        return model.logp_of(policy, row, temperature, None).logp

    sums = {"before": total(lambda row: found.logp(row, temperature)), "policy": total(of_policy)}
    found.copy_from(policy)
    sums["after"] = total(lambda row: found.logp(row, temperature))
    return [sums], whole(found.state())


def digest(fixtures, ranks, job):
    """The digest of a learner that has not trained yet: training sums in another order on more ranks."""
    trainer = Trainer(Config.model_validate(job["config"]), job["model"])
    return [{"digest": fingerprint(trainer.state())}], {}


def full_kl(fixtures, ranks, job):
    """One step of a policy that has moved, towards its reference."""
    policy = moved(job["model"], ranks)
    trained = Trained(Config.model_validate(job["config"]), policy, 1e-3, "the policy")
    reference = Reference(job["model"], "float32", ranks)
    rows, _ = rows_of(fixtures.Batches().share(1, ranks.world_size, ranks.rank, rows=job.get("rows")))
    terms = [FullKl(policy, reference, row, torch.cos(row.labels.float()) + 1.5, 0.7, 4096) for row in rows]

    def loss_of(row, term):
        return policy(model.head_loss, row, zero_loss, 0.7, None, False, term).loss

    fitted = trained.fit([partial(loss_of, *pair) for pair in zip(rows, terms, strict=True)], 1, 1)
    kl = sum_over_ranks(torch.stack([term.kl.double().sum() for term in terms]).sum())
    return [{"loss": fitted.loss, "norm": fitted.grad_norm, "kl": float(kl)}], whole(trained.state())


def moved(path, ranks):
    """A policy that is not its reference."""
    policy = model.load(path, "float32", ranks)
    with torch.no_grad():
        for shard in policy.parameters():
            shard.mul_(1.1)
    return policy


def zero_loss(logp, entropy, part):
    return torch.zeros_like(logp), {}


def slow_states(hf, row):
    """[n, D] states of a row's labels by the stock forward, one sequence at a time; [n] sequence of each label."""
    lengths = row.segments.bounds.diff().tolist()
    assert sum(lengths) == len(row.ids), "give rows without a shared prompt"
    hidden = [
        hf.model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in row.ids.split(lengths)
    ]
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.cat(hidden)[row.states], owner[row.states]


def unshared(share):
    """The same batch whose prompts count as sampled, so that no token is stored once for two sequences."""
    batch, tokens, logprobs = share
    spans = [[msgspec.structs.replace(run[0], sampled=True, version=0), *run[1:]] for run in batch.spans]
    return msgspec.structs.replace(batch, spans=spans), tokens, logprobs
