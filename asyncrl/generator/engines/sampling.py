"""Sampling one token for each row, with randomness that is a function of seed and position.

There is no generator state: the uniform number that picks a token is a hash of the request's seed and of the
token's index in the whole sequence (counter-based random numbers, Salmon et al., SC 2011; the mixing function
is splitmix64's, Steele et al., OOPSLA 2014). So a request gives the same tokens whatever else is in the batch,
and one that is continued elsewhere from a prefix makes the very draws that it would have made. Called by
`TransformersEngine`; pure functions of tensors, without host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
COLDEST = 1e-5
"""Temperatures below this are taken as this one, where the distribution is the arg max: 0 is greedy."""


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return ((x + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap; right shifts are made logical by a mask."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def seed_key(seed: int) -> int:
    """An int64 for a seed (taken modulo 2**64), mixed so that near seeds give unrelated streams."""
    return int(_mix(torch.tensor(_signed(seed * _GAMMA + 1))).item())


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [rows], from `seed_key`s and positions, both int64 [rows]."""
    bits = _mix(keys + positions * _signed(_GAMMA))
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample(logits: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the cumulative distribution.

    Args:
        logits: [rows, vocab], float32.
        temperatures: [rows], float32.
        keys: [rows], int64, from `seed_key`.
        positions: [rows], int64, index in its sequence of the token that is drawn.

    Returns:
        Tokens, int64 [rows], and their log-probs after the temperature, float32 [rows].
    """
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    # In float64 the target is always below the last sum, so a token of probability 0 is never picked.
    sums = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = uniform(keys, positions) * sums[:, -1]
    tokens = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=logits.shape[1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
