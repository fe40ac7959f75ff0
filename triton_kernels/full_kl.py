"""The divergence of one LM head's distributions from another's, over the whole vocabulary, with its gradient.

    KL_t = sum_v p (log p - log q),   d z = p (log p - log q - KL_t)
    p = softmax(z) of the policy,     q = softmax(z) of the other

As in `rl_head`, one sweep over chunks of tokens leaves values and gradients behind: logits exist for one chunk at
a time, and are computed in float32. Only torch. Called by `asyncrl.learner.full_kl`, inside the FSDP root's
forward, where the head's weight is whole.

Shapes: N tokens, D hidden size (the other head may have another one), V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WORKSPACE_BYTES = 1 << 30
CPU_WORKSPACE_BYTES = 1 << 28
LIVE = 6
"""Matrices [C, V] in float32 that exist at once."""
LOWEST = -1e30
"""Stands for -inf in a bias that rules tokens out: 0 x -inf is not 0."""


class Head(NamedTuple):
    """An LM head: logits are cap(hidden weight' + bias), cap(x) = c tanh(x / c)."""

    weight: Tensor
    """[V, D] float32 or bfloat16."""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    """c; None: the logits are not capped."""


def full_kl(
    hidden: Tensor,
    head: Head,
    other_hidden: Tensor,
    other: Head,
    scale: Tensor,
    *,
    temperature: float = 1.0,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of KL(p || q) over N tokens, and each token's.

    Args:
        hidden: [N, D] states of the policy; it, the head's weight and its bias get gradients if they need them.
        head: of the policy, which p comes from.
        other_hidden: [N, D'] states of the other model; no gradient.
        other: its head, which q comes from; no gradient.
        scale: [N] float32, weight of each token in the sum; no gradient.
        temperature: of both softmaxes.
        workspace_bytes: of one chunk; at least one token is computed at a time. None: 1 GiB, or on a CPU 256 MiB.

    Returns:
        The sum [] with gradient, and KL [N] without; float32, nats. `backward` can be called once.

    Raises:
        ValueError: shapes do not fit together, or the temperature is not above 0.
        RuntimeError: at a second `backward`.
    """
    _check(hidden, head, other_hidden, other, scale, temperature)
    if workspace_bytes is None:
        workspace_bytes = CPU_WORKSPACE_BYTES if hidden.device.type == "cpu" else WORKSPACE_BYTES
    rows = max(1, workspace_bytes // (4 * LIVE * len(head.weight)))
    grad = torch.is_grad_enabled()
    loss, kl = _Node.apply(
        hidden, head.weight, head.bias, head.softcap, other_hidden, other, scale, temperature, rows, grad
    )
    return loss, kl


class _Node(torch.autograd.Function):
    """The sweep as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        other_hidden: Tensor,
        other: Head,
        scale: Tensor,
        temperature: float,
        rows: int,
        grad: bool,
    ) -> tuple[Tensor, Tensor]:
        found = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3] if grad else (False,) * 3)
        head, other = _wide(Head(weight, bias, softcap)), _wide(other)
        kl = scale.new_zeros(len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            log_p, slope = _log_probs(hidden[chunk], head, temperature)
            log_q, _ = _log_probs(other_hidden[chunk], other, temperature)
            p, ratio = log_p.exp(), log_p.sub_(log_q)
            kl[chunk] = (p * ratio).sum(-1)
            if found.wanted:
                d_logits = p.mul_(ratio.sub_(kl[chunk, None])).mul_(scale[chunk, None] / temperature)
                found.add(chunk, d_logits if slope is None else d_logits.mul_(slope), head)
        ctx.gradients = found.cast() if found.wanted else None
        ctx.mark_non_differentiable(kl)
        return (scale * kl).sum(), kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("full_kl's gradients were handed out already; call backward once per forward")
        found, ctx.gradients = ctx.gradients, None
        return *(None if d is None else d.mul_(upstream) for d in found), *[None] * 7


class _Gradients:
    """Gradients to the policy's inputs as they are summed up, in float32; None for those that are not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self._inputs, self._states = (hidden, weight, bias), hidden.detach()
        self._parts = [
            torch.zeros_like(x, dtype=torch.float32) if x is not None and need else None
            for x, need in zip(self._inputs, needed, strict=True)
        ]
        self.wanted = any(part is not None for part in self._parts)

    def add(self, chunk: slice, d_logits: Tensor, head: Head) -> None:
        """Adds what a chunk's logit gradients [C, V] lead to."""
        hidden, weight, bias = self._parts
        if hidden is not None:
            hidden[chunk] = _product(d_logits, head.weight)
        if weight is not None:
            weight += _product(d_logits.t(), self._states[chunk])
        if bias is not None:
            bias += d_logits.sum(0)

    def cast(self) -> list[Tensor | None]:
        """In the inputs' dtypes."""
        pairs = zip(self._parts, self._inputs, strict=True)
        return [None if part is None or x is None else part.to(x.dtype) for part, x in pairs]


def _wide(head: Head) -> Head:
    """The head without gradient; on a CPU, which has no product of narrow inputs into float32, in float32."""
    weight = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach().float().clamp(min=LOWEST)
    return Head(weight if weight.is_cuda else weight.float(), bias, head.softcap)


def _log_probs(hidden: Tensor, head: Head, temperature: float) -> tuple[Tensor, Tensor | None]:
    """[C, V] float32 log-probs, and the cap's derivative where there is one."""
    logits = _product(hidden.detach(), head.weight.t())
    if head.bias is not None:
        logits += head.bias
    slope = None
    if head.softcap is not None:
        capped = logits.div_(head.softcap).tanh_()
        slope = 1 - capped.square()
        logits = capped.mul_(head.softcap)
    return logits.div_(temperature).log_softmax(-1), slope


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with a float32 result; on a GPU, in the precision of b."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _check(
    hidden: Tensor, head: Head, other_hidden: Tensor, other: Head, scale: Tensor, temperature: float
) -> None:
    (n, size), (vocabulary, _) = hidden.shape, head.weight.shape
    expected = (
        ("weight", head.weight, (vocabulary, size)),
        ("other_hidden", other_hidden, (n, other.weight.shape[1])),
        ("the other weight", other.weight, (vocabulary, other.weight.shape[1])),
        ("scale", scale, (n,)),
    )
    wrong = [f"{name} is {list(x.shape)}, not {list(shape)}" for name, x, shape in expected if x.shape != shape]
    if wrong:
        raise ValueError(
            f"with hidden {list(hidden.shape)} and a vocabulary of {vocabulary}: {'; '.join(wrong)}. A divergence "
            "over the vocabulary needs two models with the same one"
        )
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be above 0")
