"""Which checkpoints are kept: a pure function of their steps and rewards, without files. Called by `checkpoint`.

It may be applied again and again while checkpoints come one by one: a checkpoint that it once gives up would never
be kept later, whatever comes, so nothing is lost by deleting it at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import Checkpoint


def kept(rewards: Mapping[int, float | None], policy: Checkpoint) -> set[int]:
    """Steps of the checkpoints that stay: the newest, those at multiples, and the best.

    Args:
        rewards: for the step of each checkpoint that is there, the mean reward of the batches since the one
            before; None where it is not known, and such a one is never among the best.
        policy: `keep`, `keep_every` and `keep_best`. Of equal rewards the newer one is the better.
    """
    newest = sorted(rewards)[-policy.keep :]
    regular = [step for step in rewards if policy.keep_every and step % policy.keep_every == 0]
    scored = sorted((reward, step) for step, reward in rewards.items() if reward is not None)
    best = [step for _, step in scored[-policy.keep_best :]] if policy.keep_best else []
    return {*newest, *regular, *best}
