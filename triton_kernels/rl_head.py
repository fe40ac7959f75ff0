"""The RL head: hidden states and the LM head go in; log-probs, entropies, loss and both gradients come out.

The loss of a token depends only on its own log-prob, its entropy and data that is known before. So one sweep
over chunks of tokens is enough, with three matrix products per chunk where recomputation needs four:

    logits (float32) -> row statistics -> the caller's loss on vectors of the chunk, under autograd
                     -> d logits, in place -> d hidden, d weight (accumulated in float32)

Logits exist for one chunk at a time, `[tokens, vocabulary]` never. Backward only scales the gradients that the
sweep left behind. It is plain torch, for CPU and CUDA: the reference for a kernel of its row steps.

Called by `asyncrl.learner.model` inside the FSDP root's forward, where the head's weight is whole.

Shapes: N tokens, C tokens of a chunk, D hidden size, V vocabulary.

    q = softmax(z / T),   E = -q log q,   H = sum_v E
    d z = (1/T) [ g (1_label - q) + h (E - q H) ],   g = dL/d logp,   h = dL/dH
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""`(logp [C], entropy [C], which tokens) -> (loss [C], metrics [C] by name)`. The first two carry gradient;
the loss of a token may depend on its own entries only. Metrics are detached."""


class HeadOutput(NamedTuple):
    """What the sweep leaves. `loss` carries gradient to hidden states and weight; the rest carries none."""

    loss: Tensor
    """[] sum of the token losses, float32."""
    logp: Tensor
    """[N] log-probs of the labels, float32."""
    entropy: Tensor
    """[N] entropies in nats, float32."""
    metrics: dict[str, Tensor]
    """[N] each, as the token loss returned them; empty if there are no tokens."""


def rl_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int = 2048,
) -> HeadOutput:
    """Loss of N tokens and, if gradients are on, the gradients to `hidden` and `weight`, in one sweep.

    Args:
        hidden: [N, D], the states that predict the labels.
        weight: [V, D], the LM head.
        labels: [N] int64.
        token_loss: the algorithm's loss, called once per chunk.
        temperature: of the softmax, one for all or [N].
        chunk: tokens whose logits exist at once.

    Returns:
        The outputs; calling `backward` on `loss` gives the gradients, in the inputs' dtypes.
    """
    kept: dict[str, Any] = {}
    loss = _Sweep.apply(hidden, weight, labels, token_loss, temperature, chunk, kept)
    return HeadOutput(loss, kept["logp"], kept["entropy"], kept["metrics"])


@torch.no_grad()
def logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies, [N] each, float32, without a loss or gradients."""
    logp = hidden.new_empty(len(labels), dtype=torch.float32)
    entropy = torch.empty_like(logp)
    head = _wide(weight)
    for part in _chunks(len(labels), chunk):
        log_q = _logits(hidden[part], head, _of(temperature, part)).log_softmax(-1)
        logp[part] = log_q.gather(1, labels[part, None])[:, 0]
        entropy[part] = _entropy_terms(log_q.exp(), log_q).sum(-1)
    return logp, entropy


class _Sweep(torch.autograd.Function):
    """The sweep as one autograd node; `kept` carries the outputs that have no gradient out of it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_loss: TokenLoss,
        temperature: float | Tensor,
        chunk: int,
        kept: dict[str, Any],
    ) -> Tensor:
        n = len(labels)
        backward = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        head = _wide(weight)
        d_hidden = torch.zeros_like(hidden) if backward else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if backward else None
        logp, entropy = hidden.new_empty(n, dtype=torch.float32), hidden.new_empty(n, dtype=torch.float32)
        loss = hidden.new_zeros((), dtype=torch.float32)
        metrics: dict[str, list[Tensor]] = {}
        for part in _chunks(n, chunk):
            scale = _of(temperature, part)
            log_q = _logits(hidden[part], head, scale).log_softmax(-1)
            q = log_q.exp()
            terms = _entropy_terms(q, log_q)
            logp[part] = log_q.gather(1, labels[part, None])[:, 0]
            entropy[part] = terms.sum(-1)
            chunk_loss, g, h = _call(token_loss, logp[part], entropy[part], part, metrics)
            loss += chunk_loss
            if d_hidden is None or d_weight is None:
                continue
            d_logits = _d_logits(q, terms, labels[part], entropy[part], g, h).div_(scale)
            d_hidden[part], d_chunk = _products(d_logits, hidden[part], head)
            d_weight += d_chunk
        kept.update(logp=logp, entropy=entropy, metrics={k: torch.cat(v) for k, v in metrics.items()})
        if d_hidden is not None and d_weight is not None:
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * upstream, d_weight * upstream, None, None, None, None, None


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]


def _of(temperature: float | Tensor, part: slice) -> float | Tensor:
    """The temperature of a chunk, in a shape that divides its logits."""
    return temperature[part, None].float() if isinstance(temperature, Tensor) else temperature


def _wide(weight: Tensor) -> Tensor:
    """The weight as the products take it. CPU products have no float32 output for bfloat16 inputs."""
    return weight.float() if weight.device.type == "cpu" else weight


def _logits(hidden: Tensor, head: Tensor, scale: float | Tensor) -> Tensor:
    """[C, V] float32 logits over the temperature: rounding them to bfloat16 moves log-probs by up to 0.06."""
    if hidden.dtype == torch.float32 or head.dtype == torch.float32:
        return (hidden.float() @ head.t().float()).div_(scale)
    return torch.mm(hidden, head.t(), out_dtype=torch.float32).div_(scale)


def _entropy_terms(q: Tensor, log_q: Tensor) -> Tensor:
    """-q log q, 0 where q underflowed (log q may be -inf there)."""
    return torch.where(q > 0, -q * log_q, 0.0)


def _call(
    token_loss: TokenLoss, logp: Tensor, entropy: Tensor, part: slice, metrics: dict[str, list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the caller's loss on one chunk: its sum, and its gradients to log-prob and entropy."""
    with torch.enable_grad():
        logp, entropy = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss, extra = token_loss(logp, entropy, part)
        g, h = (
            torch.autograd.grad(loss.sum(), [logp, entropy], allow_unused=True)
            if loss.requires_grad
            else (None, None)
        )
    for name, values in extra.items():
        metrics.setdefault(name, []).append(values.detach())
    return loss.detach().sum(), torch.zeros_like(logp) if g is None else g, h


def _d_logits(q: Tensor, terms: Tensor, labels: Tensor, entropy: Tensor, g: Tensor, h: Tensor | None) -> Tensor:
    """d loss / d (logits / temperature), written over `q`."""
    if h is None:
        q.mul_(-g[:, None])
    else:
        q.mul_(-(g + h * entropy)[:, None]).add_(terms.mul_(h[:, None]))
    return q.scatter_add_(1, labels[:, None], g[:, None])


def _products(d_logits: Tensor, hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """d hidden in the head's dtype and d weight in float32, of one chunk."""
    if head.dtype == torch.float32:
        return d_logits @ head, d_logits.t() @ hidden.float()
    narrow = d_logits.to(head.dtype)
    return narrow @ head, torch.mm(narrow.t(), hidden, out_dtype=torch.float32)
