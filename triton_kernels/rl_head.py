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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asyncrl.triton_kernels.backend import Backend
from asyncrl.triton_kernels.sweep import Gradients, Options, Shard, Sweep

WORKSPACE_BYTES = 1 << 30
CPU_WORKSPACE_BYTES = 1 << 28
"""On a CPU more rows gain nothing, and fresh pages cost time."""

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
    ignore_index: int | None = None,
    sequences: Sequence[int] | None = None,
    squares: bool = False,
    workspace_bytes: int | None = None,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> HeadOutput:
    """Loss of N tokens and, if gradients are on, those to `hidden`, `weight` and `bias` that are needed.

    One sweep; the same inputs give the same bits. Beyond inputs, outputs and gradients it holds `workspace_bytes`.
    The weight's gradient is summed in float32; at the end, when the workspace is given up, it is cast to the
    weight's dtype. A CPU, and inputs of two dtypes, cost a float32 copy of a bfloat16 weight.

    Args:
        hidden: [N, D] float32 or bfloat16, the states that predict the labels.
        weight: [V, D] float32 or bfloat16, the LM head; a tied embedding is one too.
        labels: [N] int64, below V. Outside a CPU that is not checked: such a label has log-prob -inf.
        token_loss: the algorithm's loss, called once per block of tokens. Only the log-probs and entropies that it
            is given lead to gradients.
        temperature: of the softmax, one for all or [N]; no gradient.
        bias: [V], of the LM head; -inf rules a label out.
        softcap: c of logits that are capped to c tanh(logits / c) before the temperature (Gemma 2,
            arXiv:2408.00118, section 2).
        ignore_index: label of tokens that have no loss and no gradient. Their products are computed all the same:
            a caller with many of them selects first. A loss of whole sequences sees zeros for them, and has to
            leave them out of its sums.
        sequences: lengths of the N tokens' sequences, for a loss that needs each of them whole.
        squares: whether the sum of squared probabilities is wanted.
        workspace_bytes: of the logits of one chunk; at least one row is computed at a time. None: 1 GiB, or on a
            CPU 256 MiB.
        shard: the vocabulary is divided over ranks, which have the same tokens. One collective per chunk, one
            before and one after the sweep; d hidden is whole on every rank.
        backend: of the row steps.

    Returns:
        The outputs; calling `backward` on `loss`, once, gives the gradients in the inputs' dtypes.

    Raises:
        ValueError: shapes, dtypes, labels, lengths or settings do not fit together, or a loss or metric is not one
            number per token.
        RuntimeError: at a second `backward`.
    """
    _check(hidden, weight, labels, bias, temperature, softcap, ignore_index, shard)
    workspace = _workspace(workspace_bytes, hidden.device)
    options = Options(temperature, softcap, ignore_index, squares, workspace, shard, backend)
    kept: dict[str, Any] = {}
    grad = torch.is_grad_enabled()
    with _no_autocast(hidden.device):
        loss = _Node.apply(hidden, weight, bias, labels, token_loss, sequences, options, grad, kept)
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
    ignore_index: int | None = None,
    workspace_bytes: int | None = None,
    shard: Shard | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies, [N] each, float32, without a loss or gradients: one product.

    Arguments and errors as in `rl_head`.
    """
    _check(hidden, weight, labels, bias, temperature, softcap, ignore_index, shard)
    workspace = _workspace(workspace_bytes, hidden.device)
    options = Options(temperature, softcap, ignore_index, False, workspace, shard, backend)
    with _no_autocast(hidden.device):
        sweep = Sweep(hidden, weight, bias, labels, options)
        for block in sweep.plan(None):
            for chunk in block.chunks:
                sweep.score(chunk)
    return sweep.logp, sweep.entropy


def _workspace(workspace_bytes: int | None, device: torch.device) -> int:
    if workspace_bytes is not None:
        return workspace_bytes
    return CPU_WORKSPACE_BYTES if device.type == "cpu" else WORKSPACE_BYTES


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The products choose their own precision."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


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
        grad: bool,
        kept: dict[str, Any],
    ) -> Tensor:
        sweep = Sweep(hidden, weight, bias, labels, options)
        wanted = ctx.needs_input_grad[:3]  # Whatever the grad mode is, which `grad` says.
        gradients = sweep.gradients(*wanted) if grad and any(wanted) else None
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
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found: Gradients | None = ctx.gradients
        if found is None:
            raise RuntimeError("the RL head's gradients were handed out already; call backward once per forward")
        ctx.gradients = None
        each = (found.hidden, found.weight, found.bias)
        return *(None if d is None else d.mul_(upstream) for d in each), *[None] * 6


def _call(
    token_loss: TokenLoss, sweep: Sweep, tokens: slice, metrics: dict[str, list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the caller's loss on one block: its sum, and its gradients to log-prob and entropy."""
    keep = None if sweep.keep is None else sweep.keep[tokens]
    with torch.enable_grad():
        logp, entropy = (x[tokens].detach().requires_grad_() for x in (sweep.logp, sweep.entropy))
        each, extra = token_loss(logp, entropy, tokens)
        for name, values in {"loss": each, **extra}.items():
            if values.shape != logp.shape:
                raise ValueError(
                    f"token_loss gave a {name} of shape {list(values.shape)} for {len(logp)} tokens; it must give "
                    "one number per token, already divided by what a mean would divide by"
                )
        loss = (each if keep is None else torch.where(keep, each, 0.0)).sum()
        g, h = (
            torch.autograd.grad(loss, [logp, entropy], allow_unused=True) if loss.requires_grad else (None, None)
        )
    for name, values in extra.items():
        metrics.setdefault(name, []).append(values.detach())
    if keep is not None:  # The loss of an ignored token may be inf, and 0 x inf is not 0.
        g, h = (None if d is None else torch.where(keep, d, 0.0) for d in (g, h))
    # The gradient of a sum is one number with a stride of 0; kernels read vectors.
    g = torch.zeros_like(logp) if g is None else g.contiguous()
    return loss.detach(), g, None if h is None else h.contiguous()


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    shard: Shard | None,
) -> None:
    if weight.dim() != 2 or labels.dim() != 1:
        raise ValueError(
            f"weight is {list(weight.shape)} and labels are {list(labels.shape)}; give [vocabulary, hidden size] "
            "and [tokens]"
        )
    n, (vocabulary, size) = len(labels), weight.shape
    expected = (("hidden", hidden, [n, size]), ("bias", bias, [vocabulary]), ("temperature", temperature, [n]))
    wrong = [
        f"{name} is {list(tensor.shape)}, not {shape}"
        for name, tensor, shape in expected
        if isinstance(tensor, Tensor) and list(tensor.shape) != shape
    ]
    if wrong:
        raise ValueError(f"with weight {list(weight.shape)} and {n} labels: {'; '.join(wrong)}")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name} is {tensor.dtype}; allowed: float32 and bfloat16. float16 gradients of a batch's mean "
                "underflow, and float64 would be computed in float32"
            )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap = {softcap}: must be above 0, or None for logits that are not capped")
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be above 0; a greedy policy has no gradient")
    if n and shard is None and labels.device.type == "cpu":
        _check_labels(labels, vocabulary, ignore_index)


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int | None) -> None:
    outside = (labels < 0) | (labels >= vocabulary)
    if ignore_index is not None:
        outside &= labels != ignore_index
    if bool(outside.any()):
        raise ValueError(
            f"label {int(labels[outside][0])} is not in the vocabulary of {vocabulary}; leave tokens without a "
            "label out, or name their label in `ignore_index`"
        )
