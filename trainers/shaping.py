"""Reward shaping: what is added to the environment's reward before the advantage is estimated.

Free of torch, one episode at a time. Called by the learner; the journal keeps the unshaped reward.
"""

from __future__ import annotations


def overlong_penalty(sampled: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, in [-1, 0]; 0 when `buffer` is 0.

        0                                      if sampled <= max_tokens - buffer
        (max_tokens - buffer - sampled)/buffer  up to max_tokens
        -1                                     beyond

    Yu et al. 2025 (arXiv:2503.14476), equation 13.
    """
    if buffer == 0:
        return 0.0
    return -min(max(sampled - (max_tokens - buffer), 0) / buffer, 1.0)
