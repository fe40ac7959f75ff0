"""Start-up check: packed rows must give the log-probs that separate sequences give.

Several mistakes corrupt packed attention without an error (a cache, a mask of ones, a model that ignores the
segments), and a model may scale its logits, which the RL head does not. So the whole path of a training
row is compared with the stock forward of transformers, one sequence at a time, before anything is trained.
Called once per start by `asyncrl.learner.update.Trainer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Dtype
from asyncrl.learner import attention
from asyncrl.learner.model import Policy, head, units
from asyncrl.triton_kernels.rl_head import logprob_and_entropy

LENGTHS = (5, 17, 1, 24, 9)
TOLERANCE: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest mean difference of log-probs, relative to their spread. A wrong mask gives about 1."""


class PackingMismatch(RuntimeError):
    """Packed and separate sequences have different log-probs: training would be silently wrong."""


@torch.no_grad()
def self_test(policy: Policy, dtype: Dtype, device: torch.device) -> float:
    """Compares packed with separate log-probs and returns the relative difference. Collective.

    Raises:
        PackingMismatch: the difference is above the tolerance of the compute dtype.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.hf.config.get_text_config().vocab_size
    ids = [torch.randint(vocabulary, (n,), generator=generator).to(device) for n in LENGTHS]
    packed = policy(_packed, ids)
    policy.hf.set_attn_implementation("sdpa")
    separate = torch.cat([policy(_separate, sequence) for sequence in ids])
    policy.hf.set_attn_implementation(attention.NAME)
    units(policy)[0].reshard()
    spread = separate.std().clamp(min=1e-3)
    error = float((packed - separate).abs().mean() / spread)
    if not error <= TOLERANCE[dtype]:
        raise PackingMismatch(
            f"packed and separate sequences differ by {error:.2g} of their log-probs' spread in {dtype} "
            f"(allowed: {TOLERANCE[dtype]:.0e}); {type(policy.hf).__name__} cannot be trained with packed rows. "
            "A model that scales its logits, or whose attention does not take `segments`, shows this."
        )
    return error


def _packed(hf: Any, ids: list[Tensor]) -> Tensor:
    """Log-probs of all tokens but each sequence's first, from one packed row."""
    lengths = [len(sequence) for sequence in ids]
    row = attention.segments(lengths).to(ids[0].device)
    positions = torch.cat([torch.arange(n, device=ids[0].device) for n in lengths])
    joined = torch.cat(ids)
    hidden = hf.model(
        input_ids=joined[None], position_ids=positions[None], use_cache=False, segments=row
    ).last_hidden_state[0]
    labels = torch.nonzero(positions)[:, 0]
    return logprob_and_entropy(hidden[labels - 1], labels=joined[labels], **head(hf))[0]


def _separate(hf: Any, ids: Tensor) -> Tensor:
    """The same of one sequence, by the stock forward."""
    logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
