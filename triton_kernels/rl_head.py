"""The RL head: hidden states and the LM head go in; log-probs, entropies, loss and both gradients come out.

The loss of a token depends only on its own log-prob, its entropy and data that is known before. So one sweep over
chunks of tokens is enough, with three matrix products per chunk where recomputation needs four:

    logits (float32) -> statistics of each row -> the caller's loss on vectors of the chunk, under autograd
                     -> d logits, in place -> d hidden, d weight (accumulated in float32)

Logits exist for one chunk at a time, `[tokens, vocabulary]` never. A loss that looks at whole sequences gets
whole sequences; those that do not fit a chunk are swept twice, with four products. Backward only scales the
gradients that the sweep left behind. The steps themselves are in `sweep`.

Called by `asyncrl.learner`, inside the FSDP root's forward, where the head's weight is whole.

Shapes: N tokens, D hidden size, V vocabulary (with `shard`: this rank's part of it).

    z = cap(hidden weight' + bias) / T,   q = softmax(z),   H = -sum_v q log q,   cap(x) = c tanh(x / c)
    d z = g (1_label - q) - h q (log q + H),   g = dL/d logp,   h = dL/dH
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.triton_kernels.backend import Backend
from asyncrl.triton_kernels.sweep import Gradients, Options, Shard, Sweep

WORKSPACE_BYTES = 1 << 30

TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""`(logp [C], entropy [C], which tokens) -> (loss [C], metrics [C] by name)`. The first two carry gradient.
The loss of a token may depend on its own entries only, or, where `sequences` is given, on those of its sequence.
Metrics are detached."""


class HeadOutput(NamedTuple):
    """What the sweep leaves. `loss` carries gradient to hidden states, weight and bias; the rest carries none."""

    loss: Tensor
    """[] sum of the token losses, float32."""
    logp: Tensor
    """[N] log-probs of the labels, float32; 0 for ignored tokens."""
    entropy: Tensor
    """[N] entropies in nats, float32; 0 for ignored tokens."""
    metrics: dict[str, Tensor]
    """[N] each, as the token loss returned them; empty if there are no tokens."""
    squares: Tensor | None
    """[N] sum of the squared probabilities, float32, if it was asked for."""


def rl_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    token_loss: TokenLoss,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore: int | None = None,
    sequences: Sequence[int] | None = None,
    squares: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> HeadOutput:
    """Loss of N tokens and, if gradients are on, the gradients to `hidden`, `weight` and `bias`, in one sweep.

    The same inputs give the same bits. Beyond inputs and outputs it holds `workspace_bytes`, the gradients (that
    of the weight in float32 until the end), and on a CPU a float32 copy of a narrower weight.

    Args:
        hidden: [N, D], the states that predict the labels.
        weight: [V, D], the LM head; a tied embedding is one too.
        labels: [N] int64.
        token_loss: the algorithm's loss, called once per block of tokens.
        temperature: of the softmax, one for all or [N].
        bias: [V], of the LM head.
        softcap: c of logits that are capped to c tanh(logits / c) before the temperature (Gemma 2,
            arXiv:2408.00118, section 2).
        ignore: label of tokens that are left out: no loss, no gradient. Their products are computed all the same;
            a caller with many of them selects first.
        sequences: lengths of the N tokens' sequences, for a loss that needs each of them whole.
        squares: whether the sum of squared probabilities is wanted.
        workspace_bytes: of the logits of one chunk; at least one row is computed at a time.
        shard: the vocabulary is divided over ranks: one collective per chunk, one before and one after the sweep.
        backend: of the row steps.

    Returns:
        The outputs; calling `backward` on `loss`, once, gives the gradients in the inputs' dtypes.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(hidden, weight, labels, bias, temperature)
    options = Options(temperature, softcap, ignore, squares, workspace_bytes, shard, backend)
    kept: dict[str, Any] = {}
    loss = _Node.apply(hidden, weight, bias, labels, token_loss, sequences, options, kept)
    return HeadOutput(loss, kept["logp"], kept["entropy"], kept["metrics"], kept["squares"])


@torch.no_grad()
def logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies, [N] each, float32, without a loss or gradients: one product.

    Arguments and errors as in `rl_head`.
    """
    _check(hidden, weight, labels, bias, temperature)
    options = Options(temperature, softcap, ignore, False, workspace_bytes, shard, backend)
    sweep = Sweep(hidden, weight, bias, labels, options)
    for block in sweep.plan(None):
        for chunk in block.chunks:
            sweep.score(chunk)
    return sweep.logp, sweep.entropy


class _Node(torch.autograd.Function):
    """The sweep as one autograd node; `kept` carries the outputs that have no gradient out of it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_loss: TokenLoss,
        sequences: Sequence[int] | None,
        options: Options,
        kept: dict[str, Any],
    ) -> Tensor:
        sweep = Sweep(hidden, weight, bias, labels, options)
        gradients = Gradients(hidden, weight, bias) if any(ctx.needs_input_grad[:3]) else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        metrics: dict[str, list[Tensor]] = {}
        for block in sweep.plan(sequences):
            for chunk in block.chunks:
                sweep.score(chunk)
            block_loss, g, h = _call(token_loss, sweep, block.tokens, metrics)
            loss += block_loss
            if gradients is not None:
                sweep.differentiate(block, g, h, gradients)
        joined = {name: torch.cat(parts) for name, parts in metrics.items()}
        kept.update(logp=sweep.logp, entropy=sweep.entropy, metrics=joined, squares=sweep.squares)
        ctx.gradients = None if gradients is None else sweep.finish(gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the RL head's gradients were handed out already; call backward once per forward")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if d is None else d.mul_(upstream) for d in gradients), *[None] * 5


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float | Tensor
) -> None:
    n, (vocabulary, size) = len(labels), weight.shape
    wrong = [
        f"{name} is {list(tensor.shape)}, not {shape}"
        for name, tensor, shape in (
            ("hidden", hidden, [n, size]),
            ("bias", bias, [vocabulary]),
            ("temperature", temperature, [n]),
        )
        if isinstance(tensor, Tensor) and list(tensor.shape) != shape
    ]
    if wrong:
        raise ValueError(f"with weight {list(weight.shape)} and {n} labels: {'; '.join(wrong)}")


def _call(
    token_loss: TokenLoss, sweep: Sweep, tokens: slice, metrics: dict[str, list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the caller's loss on one block: its sum, and its gradients to log-prob and entropy."""
    keep = None if sweep.keep is None else sweep.keep[tokens]
    with torch.enable_grad():
        logp, entropy = (x[tokens].detach().requires_grad_() for x in (sweep.logp, sweep.entropy))
        loss, extra = token_loss(logp, entropy, tokens)
        loss = (loss if keep is None else torch.where(keep, loss, 0.0)).sum()
        g, h = (
            torch.autograd.grad(loss, [logp, entropy], allow_unused=True) if loss.requires_grad else (None, None)
        )
    for name, values in extra.items():
        metrics.setdefault(name, []).append(values.detach())
    if keep is not None:  # The loss of an ignored token may be inf, and 0 x inf is not 0.
        g, h = (None if d is None else torch.where(keep, d, 0.0) for d in (g, h))
    return loss.detach(), torch.zeros_like(logp) if g is None else g, h
