"""Supervised training with the same learner: the same rows, head, FSDP units and optimiser, another token loss.

It is for a warm start of small models, in the caller's own process (a group of one). Called by the command line
(`asyncrl sft`, and the toy model's first start).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.learner import dist, rows
from asyncrl.learner.export import export
from asyncrl.learner.rows import Row, Share
from asyncrl.learner.update import Trainer
from asyncrl.packing import plan
from asyncrl.trainers.aggregation import Totals, token_mean
from asyncrl.triton_kernels.rl_head import TokenLoss

Example = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and which of them are trained."""


def train_sft(
    config: Config,
    model_path: str | Path,
    out_path: str | Path,
    examples: Iterable[Example],
    steps: int,
    rows_per_step: int,
    lr: float,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> dict[str, float]:
    """Minimises the negative log-likelihood of the trained tokens and writes the model to `out_path`.

    Args:
        config: `learner` (token budget, device, AdamW, threads) and `model.dtype` are used.
        model_path: Hugging Face folder to start from.
        out_path: Hugging Face folder to write.
        examples: at least one; started again from its beginning when it ends, if it can be.
        steps: optimiser steps.
        rows_per_step: examples in a step.
        lr: peak learning rate; a twentieth of the steps warms up to it, a cosine leads to 0.
        on_step: called after each step with its number and loss (mean nats per trained token); returning True
            ends the training there.

    Returns:
        The last step's metrics.

    Raises:
        ValueError: there are no examples, or one is longer than the token budget.
        NotFinite: see `asyncrl.learner.update`.
    """
    learner = config.learner.model_copy(update={"lr": lr, "schedule": "cosine", "warmup_steps": steps // 20})
    train = config.train.model_copy(update={"steps": steps})
    sampling = config.sampling.model_copy(update={"temperature": 1.0})
    config = config.model_copy(update={"learner": learner, "train": train, "sampling": sampling})
    stream, metrics = _endless(examples), {"loss": float("nan")}
    with dist.alone(learner.device, learner.threads) as ranks:
        trainer = Trainer(config, model_path)
        trainer.self_test()
        for step in range(1, steps + 1):
            packed = pack(list(islice(stream, rows_per_step)), learner.token_budget, ranks.device)
            _, metrics = trainer.fit(packed, _negative_log_likelihood, step, batch_id=step)
            if on_step is not None and on_step(step, metrics["loss"]):
                break
        export(trainer, Path(model_path), Path(out_path))
    return metrics


def pack(examples: Sequence[Example], token_budget: int, device: torch.device) -> list[Row]:
    """Packed rows of examples, all trained tokens weighted equally."""
    (planned,) = plan([len(ids) for ids, _ in examples], 1, token_budget)
    ordered = [examples[index] for row in planned for index in row]
    ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in ordered])
    trained = np.concatenate([np.asarray(mask, dtype=bool) for _, mask in ordered])
    lengths = np.array([len(ids) for ids, _ in ordered], dtype=np.int64)
    trained[np.cumsum(lengths) - lengths] = False
    zeros = np.zeros(len(ids), dtype=np.float32)
    share = Share(
        ids=ids,
        behaviour=zeros,
        lag=zeros.astype(np.int64),
        trained=trained,
        lengths=lengths,
        prompt=np.zeros_like(lengths),
        episode=np.arange(len(ordered)),
        row_sizes=[len(row) for row in planned],
        sampled=int(trained.sum()),
    )
    totals = Totals(max(1.0, float(trained.sum())), float(len(ordered)))
    return rows.build(share, np.ones(len(ordered)), token_mean, totals, device)


def _negative_log_likelihood(row: Row) -> TokenLoss:
    return lambda logp, entropy, part: (-row.tokens.weight[part] * logp, {})


def _endless(examples: Iterable[Example]) -> Iterator[Example]:
    """The examples over and over.

    Raises:
        ValueError: there are none (left).
    """
    while True:
        found = False
        for example in examples:
            found = True
            yield example
        if not found:
            raise ValueError("supervised training ran out of examples; give a list, or an endless iterator")
