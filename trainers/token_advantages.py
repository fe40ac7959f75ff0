"""Advantage estimators that give every token a number, and the targets of the critic that two of them need.

Every learner rank holds all outcomes and token columns of a batch, so an estimator communicates nothing. The
tokens are those that the policy sampled: an environment's answers are left out, so that every recursion steps from
one sampled token to the next. Tokens of an episode that is not valid count in no mean and have advantage 0. Names,
parameters and defaults are in `asyncrl.trainers.parts`. Called through `asyncrl.trainers.algorithm.Algorithm`,
after shaping and rejection.

A truncated episode ends like any other: its value after the last token is 0. The environment has rewarded what
there is, and nothing comes after it; a bootstrap would reward a policy for not finishing.

All take `Outcomes` and return [N] float64. In the formulas r is a token's reward: the episode's at its last token,
minus the KL penalty of each token if there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.trainers.advantages import rloo
from asyncrl.trainers.outcomes import Outcomes, moments, whitened
from asyncrl.triton_kernels import scan

# ---- without a critic ------------------------------------------------------------------------------


def reinforce_pp(outcomes: Outcomes, *, gamma: float) -> Tensor:
    """A_t = whiten(sum over k >= 0 of gamma^k r_(t+k)), over all valid tokens of the batch; std with n - 1.

    Hu et al. 2025 (arXiv:2501.03262), section 3.

    Args:
        outcomes: see the module.
        gamma: discount for each token.
    """
    returns = scan.discounted_returns(outcomes.token_rewards(), outcomes.edges(), gamma)
    return _of_valid(outcomes, returns, whiten=True)


def otb(outcomes: Outcomes) -> Tensor:
    """A_t = G_t - B_t,  B_t = sum(G_t W_t) / sum(W_t) over the group's episodes that have a token t.

    G_t = sum of r from t on, W_t = sum over j <= t of (1 - 2 pi_j + sum over the vocabulary of pi^2): the squared
    norm of the logits' gradient up to t. Positions count sampled tokens only. Li et al. 2026 (arXiv:2602.07078),
    the logit-gradient proxy.

    Past the end of the second-longest episode only the longest has tokens, and there the last baseline of two goes
    on. The formula's own value is G_t, which would train nothing; the reference implementation takes 0, which
    gives the tail of the longest episode its raw reward: long episodes would be pushed by the sign of the reward
    instead of by how they compare, and a constant added to all rewards would matter.
    """
    edges, lengths = outcomes.edges(), outcomes.lengths
    returns = scan.discounted_returns(outcomes.token_rewards(), edges, 1.0)
    weight = _energy(outcomes)
    second = outcomes.group_sum(torch.where(outcomes.rank(lengths.double()) == 1, lengths.double(), 0.0)).long()
    position = torch.arange(outcomes.total) - outcomes.spread(edges[:-1])
    width = int(lengths.max()) if len(lengths) else 0
    slot = outcomes.spread(outcomes.group) * width + position
    valid = outcomes.spread(outcomes.valid)

    def sums(values: Tensor) -> Tensor:
        """Over the group's tokens at each position: [G * width]."""
        return values.new_zeros(outcomes.groups * width).index_add(0, slot, torch.where(valid, values, 0.0))

    last = slot - position + torch.minimum(position, outcomes.spread(second - 1).clamp(min=0))
    baseline = sums(returns * weight)[last] / sums(weight)[last]
    return torch.where(outcomes.spread(outcomes.valid & (second > 0)), returns - baseline, 0.0)


def prime(outcomes: Outcomes, *, process_coef: float, outcome_coef: float) -> Tensor:
    """A_t = process_coef sum over s >= t of (p_s - mean of the others' p)  +  outcome_coef RLOO of the reward.

    p is the implicit process reward, beta (log pi_phi - log ref), which the column `process` holds; in the mean of
    the others, p is an episode's average over its tokens. Cui et al. 2025 (arXiv:2502.01456), equation 5, with
    gamma = 1. The KL penalty is taken from the reward of the whole episode.

    Args:
        outcomes: with the column `process`.
        process_coef: of the process rewards.
        outcome_coef: of the outcome.
    """
    process = outcomes.columns["process"]
    mean = outcomes.token_sum(process) / outcomes.lengths.clamp(min=1)
    others = (outcomes.group_sum(mean) - mean) / (outcomes.group_size() - 1).clamp(min=1)
    returns = scan.discounted_returns(process - outcomes.spread(others), outcomes.edges(), 1.0)
    outcome = outcomes.spread(rloo(outcomes.after_penalty()))
    advantage = process_coef * returns + outcome_coef * outcome
    return torch.where(outcomes.spread(outcomes.compared()), advantage, 0.0)


# ---- with a critic ---------------------------------------------------------------------------------


def gae(outcomes: Outcomes, *, gamma: float, lam: float, whiten: bool) -> Tensor:
    """A_t = sum over k >= 0 of (gamma lam)^k (r_(t+k) + gamma V_(t+k+1) - V_(t+k)).

    Schulman et al. 2015 (arXiv:1506.02438), equation 16.

    Args:
        outcomes: with the column `value`.
        gamma: discount for each token.
        lam: 0: least variance; 1: the return minus V.
        whiten: to mean 0 and std 1 (n - 1) over all valid tokens of the batch.
    """
    return _of_valid(outcomes, _gae(outcomes, gamma, lam)[0], whiten)


def gae_targets(outcomes: Outcomes, *, gamma: float, lam: float) -> Tensor:
    """What the critic of `gae` is fitted to: its advantages, not whitened, plus V. V itself where not valid."""
    return _targets(outcomes, _gae(outcomes, gamma, lam)[1])


def vtrace(outcomes: Outcomes, *, gamma: float, lam: float, rho_max: float, c_max: float, scale: bool) -> Tensor:
    """A_t = rho_t (r_t + gamma vs_(t+1) - V_t), with V-trace's targets vs and rho_t = min(rho_max, pi / mu).

    The importance weight is in the advantage. Espeholt et al. 2018 (arXiv:1802.01561), section 4.2; the targets
    are those of `asyncrl.triton_kernels.scan.vtrace`.

    Args:
        outcomes: with the columns `value`, `logp` and `behaviour`.
        gamma: discount for each token.
        lam: as in TD(lambda).
        rho_max: cap of the weight.
        c_max: cap of the weights by which corrections reach back.
        scale: to std 1 (n - 1) over all valid tokens of the batch. Nothing is subtracted: the weight is in the
            advantage, and a token that the policy would hardly sample any more (rho near 0) must keep one near 0.
    """
    advantage = _vtrace(outcomes, gamma, lam, rho_max, c_max)[1]
    std = moments(advantage, outcomes.spread(outcomes.valid))[1] if scale else 1.0
    return _of_valid(outcomes, advantage / std, whiten=False)


def vtrace_targets(outcomes: Outcomes, *, gamma: float, lam: float, rho_max: float, c_max: float) -> Tensor:
    """What the critic of `vtrace` is fitted to: vs. V itself where not valid."""
    return _targets(outcomes, _vtrace(outcomes, gamma, lam, rho_max, c_max)[0])


TARGETS: dict[str, Callable[..., Tensor]] = {"gae": gae_targets, "vtrace": vtrace_targets}
"""[N] targets of the critic, by the name of the estimator; parameters as there, without `whiten` and `scale`."""


def _gae(outcomes: Outcomes, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    return scan.gae(outcomes.token_rewards(), outcomes.columns["value"], outcomes.edges(), gamma, lam)


def _vtrace(outcomes: Outcomes, gamma: float, lam: float, rho_max: float, c_max: float) -> tuple[Tensor, Tensor]:
    log_ratio = outcomes.columns["logp"] - outcomes.columns["behaviour"]
    rewards, values = outcomes.token_rewards(), outcomes.columns["value"]
    return scan.vtrace(rewards, values, log_ratio, outcomes.edges(), gamma, rho_max, c_max, lam)


def _of_valid(outcomes: Outcomes, values: Tensor, whiten: bool) -> Tensor:
    """[N] values of the valid episodes' tokens, 0 elsewhere."""
    valid = outcomes.spread(outcomes.valid)
    return whitened(values, valid) if whiten else torch.where(valid, values, 0.0)


def _targets(outcomes: Outcomes, targets: Tensor) -> Tensor:
    """[N] targets; where nothing is known of the return, the critic's own value, which pulls it nowhere."""
    return torch.where(outcomes.spread(outcomes.valid), targets, outcomes.columns["value"])


def _energy(outcomes: Outcomes) -> Tensor:
    """[N] W_t of `otb`: a sum forwards over each episode's tokens.

    The floor makes the baseline of positions where all were certain (W = 0) the plain mean.
    """
    step = 1 - 2 * outcomes.columns["logp"].exp() + outcomes.columns["squares"]
    edges = outcomes.edges()
    mirrored = edges[-1] - edges.flip(0)
    return scan.reverse_scan(torch.ones_like(step), step.clamp(min=0).flip(0), mirrored).flip(0) + 1e-12
