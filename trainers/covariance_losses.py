"""Losses that treat tokens of high covariance differently, because these are what makes the entropy fall.

    cov_t = (A_t - mean A) (log pi_t - mean log pi),   means over all tokens of the batch

Cui et al. 2025 (arXiv:2505.22617), section 4.2. A loss sees one chunk of tokens, the covariance the whole batch,
so each loss here has a marker in `MARKERS`: it is called once, before the update, with all N tokens of all ranks,
and returns [N], 1 for the tokens that it chose; the loss reads that as `tokens.mark`. Markers are pure functions
of the batch: the same on every rank, and whatever the order of the sequences.

Called by `asyncrl.trainers.algorithm`; the losses' signature is that of `asyncrl.trainers.losses`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.trainers.losses import clipped_surrogate, proximal, ratio_of, unclipped
from asyncrl.trainers.tokens import Tokens
from asyncrl.triton_kernels.segments import segment_ids


def clip_cov(
    logp: Tensor,
    tokens: Tokens,
    *,
    share: float,
    cov_low: float,
    cov_high: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """max(-rA, -clip(r, 1 - clip_low, 1 + clip_high) A); the marked tokens have no gradient.

    Marked is a random fraction `share` of the batch's tokens, at least one, out of those that the clip does not
    cut and whose covariance is between `cov_low` and `cov_high`. Cui et al. 2025 (arXiv:2505.22617), section 4.2.
    """
    marked = _marked(tokens)
    loss, clipped = clipped_surrogate(ratio_of(logp, proximal(tokens)), tokens.advantage, clip_low, clip_high)
    return torch.where(marked, loss.detach(), loss), clipped | marked


def kl_cov(logp: Tensor, tokens: Tokens, *, share: float, coef: float) -> tuple[Tensor, Tensor]:
    """-rA, and for the marked tokens + coef |log pi - log mu|.

    Marked is the fraction `share` of the batch's tokens, at least one, of largest covariance. mu is the policy
    that sampled the token, as in the paper, and not the proximal policy: against the current one
    (`proximal = "current"`) the penalty would have no gradient. Cui et al. 2025 (arXiv:2505.22617), section 4.2.
    """
    penalty = coef * (logp - tokens.behaviour).abs()
    loss = -ratio_of(logp, proximal(tokens)) * tokens.advantage
    return loss + torch.where(_marked(tokens), penalty, 0.0), unclipped(logp)


def clip_cov_mark(
    logp: Tensor,
    tokens: Tokens,
    *,
    share: float,
    cov_low: float,
    cov_high: float,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """[N]: 1 for the tokens whose gradient `clip_cov` drops, else 0."""
    cov = covariance(logp, tokens.advantage)
    _, clipped = clipped_surrogate(ratio_of(logp, proximal(tokens)), tokens.advantage, clip_low, clip_high)
    eligible = (cov > cov_low) & (cov < cov_high) & ~clipped
    order = lots(tokens).argsort(stable=True)
    return _mark(logp, order[eligible[order]], share)


def kl_cov_mark(logp: Tensor, tokens: Tokens, *, share: float) -> Tensor:
    """[N]: 1 for the tokens that `kl_cov` penalises, else 0. Equal covariances are told apart by lot."""
    order = lots(tokens).argsort(stable=True)
    largest = covariance(logp, tokens.advantage)[order].argsort(descending=True, stable=True)
    return _mark(logp, order[largest], share)


MARKERS: dict[str, Callable[..., Tensor]] = {"clip_cov": clip_cov_mark, "kl_cov": kl_cov_mark}
"""The marker of each loss that has one: `(logp [N], tokens, *, parameters) -> [N]`."""


def covariance(logp: Tensor, advantage: Tensor) -> Tensor:
    """[N] float64: each token's term of the covariance between advantage and log-prob."""
    first, second = advantage.double(), logp.double()
    return (first - first.mean()) * (second - second.mean())


def lots(tokens: Tokens) -> Tensor:
    """[N] int64: a pseudo-random number for each token, by which the batch's tokens can be drawn in random order.

    A hash of all behaviour log-probs of its sequence and of its place there. These are stored facts: they depend
    on neither the order of the sequences nor the last bits of a forward pass, and every batch draws anew. Only
    equal sequences draw equal lots, and between their tokens the choice makes no difference.
    """
    edges = tokens.edges()
    owner = segment_ids(edges, len(tokens.behaviour))
    place = torch.arange(len(owner), device=owner.device) - edges[owner]
    bits = tokens.behaviour.float().view(torch.int32).long()
    fingerprint = edges.new_zeros(len(edges) - 1).index_add(0, owner, _mixed((bits << 32) + place))
    return _mixed(fingerprint[owner] + place)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int64 that scatters neighbours: the last step of SplitMix64 (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * (factor - (1 << 64))
    return x ^ (x >> 31)


def _mark(logp: Tensor, order: Tensor, share: float) -> Tensor:
    """[N]: 1 for the first of `order`, as many as the share says, but at least one: small batches too."""
    count = max(1, int(share * len(logp))) if share else 0
    return torch.zeros_like(logp).index_fill(0, order[:count], 1.0)


def _marked(tokens: Tokens) -> Tensor:
    """[n] bool."""
    assert tokens.mark is not None, "the learner calls Algorithm.mark before the update"
    return tokens.mark > 0
