"""Reward shaping: what becomes of the environment's rewards before advantages are estimated.

The journal keeps the unshaped reward, and group filters see it. Shapings apply in the order in which the setting
names them; each takes `Outcomes` and returns them changed. Named rewards (`Outcomes.rewards`) are not shaped. A
greedy episode, which is a baseline, is shaped like the others where the shaping is about the reward (`normalise`,
`clip`) or the truncation; it is in no row, so its length is unknown, and shapings by length leave it alone.
Names, parameters and defaults are in `asyncrl.trainers.parts`. Called through
`asyncrl.trainers.algorithm.Algorithm.shape`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.trainers.outcomes import Outcomes, moments


def overlong(outcomes: Outcomes, *, overlong_buffer: int, overlong_coef: float) -> Outcomes:
    """DAPO's soft overlong punishment: R + overlong_coef p, by the number of sampled tokens n.

        p = 0                                  if n <= max_tokens - buffer
        p = (max_tokens - buffer - n) / buffer up to max_tokens
        p = -1                                 beyond

    Nothing if `max_tokens` is 0. It is the limit of one turn, n is the episode's in all. Yu et al. 2025
    (arXiv:2503.14476), equation 13.
    """
    if not outcomes.max_tokens:
        return outcomes
    free = outcomes.max_tokens - overlong_buffer
    excess = ((outcomes.lengths.double() - free) / overlong_buffer).clamp(0, 1)
    return replace(outcomes, reward=outcomes.reward - overlong_coef * excess * outcomes.valid)


def drop_truncated(outcomes: Outcomes) -> Outcomes:
    """Truncated episodes are not valid, so neither trained nor in a baseline; nor are greedy ones a baseline.

    DAPO's overlong filtering: a correct solution that was cut off is not a wrong one. Yu et al. 2025
    (arXiv:2503.14476), section 3.4.
    """
    if outcomes.truncated is None:
        return outcomes
    greedy = None if outcomes.greedy is None else outcomes.greedy & ~outcomes.truncated
    return replace(outcomes, valid=outcomes.valid & ~outcomes.truncated, greedy=greedy)


def length(outcomes: Outcomes, *, length_coef: float) -> Outcomes:
    """Kimi k1.5's length reward: R + length_coef L, with the group's shortest and longest valid episode.

        l = 0.5 - (n - shortest) / (longest - shortest);  L = l if correct, else min(0, l);  0 if all are as long

    Correct means R > 0: the group's mean would call some wrong where all are right. So name it before shapings
    that move the zero. Kimi Team 2025 (arXiv:2501.12599), section 2.3.3.
    """
    sampled = outcomes.lengths.double()
    shortest, longest = outcomes.group_min(sampled), outcomes.group_max(sampled)
    share = 0.5 - (sampled - shortest) / (longest - shortest).clamp(min=1)
    share = torch.where(outcomes.reward > 0, share, share.clamp(max=0))
    applies = outcomes.valid & (longest > shortest)
    return replace(outcomes, reward=outcomes.reward + length_coef * torch.where(applies, share, 0.0))


def normalise(outcomes: Outcomes) -> Outcomes:
    """(R - mean) / std over the valid episodes of the batch, std with n - 1; equal rewards are only centred.

    The rewards of greedy episodes go through the same map, of which they are no part.
    """
    mean, std = moments(outcomes.reward, outcomes.valid)
    scaled = (outcomes.reward - mean) / std
    return replace(outcomes, reward=torch.where(_rewarded(outcomes), scaled, outcomes.reward))


def clip(outcomes: Outcomes, *, reward_low: float, reward_high: float) -> Outcomes:
    """R kept in [reward_low, reward_high], also of greedy episodes."""
    bounded = outcomes.reward.clamp(reward_low, reward_high)
    return replace(outcomes, reward=torch.where(_rewarded(outcomes), bounded, outcomes.reward))


def _rewarded(outcomes: Outcomes) -> Tensor:
    """[E] bool: the episode is valid, or a greedy one that is a baseline."""
    return outcomes.valid if outcomes.greedy is None else outcomes.valid | outcomes.greedy
