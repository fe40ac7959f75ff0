"""Problems for the RL head's tests: inputs, the field's losses, and float64 autograd through all logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from asyncrl.triton_kernels.rl_head import HeadOutput, TokenLoss, rl_head


@dataclass(frozen=True)
class Problem:
    """One head and its tokens."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    advantage: Tensor
    behaviour: Tensor
    reference: Tensor
    scale: Tensor
    lengths: tuple[int, ...]
    temperature: float | Tensor = 1.0
    bias: Tensor | None = None
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


@dataclass(frozen=True)
class Result:
    """What a loss gives, and its gradients."""

    loss: Tensor
    magnitude: Tensor
    """Sum of the tokens' absolute losses: what cancels in `loss` costs no more accuracy than this."""
    logp: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    d_bias: Tensor | None
    squares: Tensor | None
    output: HeadOutput | None = None


def problem(n: int = 37, d: int = 24, v: int = 257, seed: int = 0, spread: float = 1.0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g) * spread
    weight = torch.randn(v, d, generator=g) / d**0.5 * 2.5
    labels = torch.randint(0, v, (n,), generator=g)
    logp = (hidden @ weight.t()).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    drift, other = torch.randn(2, n, generator=g) * 0.3
    lengths = (n - n // 2 - n // 4, n // 4, n // 2)
    return Problem(
        hidden, weight, labels, torch.randn(n, generator=g), logp + drift, logp + other,
        torch.rand(n, generator=g) / n, lengths,
    )  # fmt: skip


def losses(p: Problem) -> dict[str, TokenLoss]:
    """The field's losses, written from their papers, with a weight for every token."""

    def of(part: slice, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return p.advantage[part].to(like), p.behaviour[part].to(like), p.scale[part].to(like)

    def ppo_clip(logp, entropy, part):
        a, old, w = of(part, logp)
        ratio = (logp - old).exp()
        return -w * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), {"ratio": ratio.detach()}

    def dapo(logp, entropy, part):
        a, old, w = of(part, logp)
        ratio = (logp - old).exp()
        loss = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.28) * a)
        return w * torch.where(a < 0, torch.minimum(loss, -3 * a), loss), {}

    def cispo(logp, entropy, part):
        a, old, w = of(part, logp)
        return -w * (logp.detach() - old).exp().clamp(max=1.2) * a * logp, {}

    def reinforce(logp, entropy, part):
        a, _, w = of(part, logp)
        return -w * (a * logp + 0.1 * entropy), {}

    def k3(logp, entropy, part):
        a, old, w = of(part, logp)
        gap = p.reference[part].to(logp) - logp
        return w * (-(logp - old).exp() * a + 0.5 * (gap.exp() - 1 - gap)), {}

    def gspo(logp, entropy, part):
        a, old, w = of(part, logp)
        ends = list(accumulate(p.lengths))
        whole = [
            slice(end - length - part.start, end - part.start)
            for end, length in zip(ends, p.lengths, strict=True)
            if part.start <= end - length and end <= part.stop
        ]
        ratio = torch.cat([(logp - old)[own].mean().exp().expand(own.stop - own.start) for own in whole])
        return -w * torch.minimum(ratio * a, ratio.clamp(0.95, 1.05) * a), {}

    def entropy_only(logp, entropy, part):
        return -p.scale[part].to(logp) * entropy, {}

    found = (ppo_clip, dapo, cispo, reinforce, k3, gspo, entropy_only)
    return {loss.__name__: loss for loss in found}


def reference(p: Problem, token_loss: TokenLoss) -> Result:
    """The same loss in float64, by plain autograd through the whole logits."""
    hidden, weight = p.hidden.double().requires_grad_(), p.weight.double().requires_grad_()
    bias = None if p.bias is None else p.bias.double().requires_grad_()
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    if p.softcap is not None:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    scale = p.temperature[:, None].double() if isinstance(p.temperature, Tensor) else p.temperature
    log_q = (logits / scale).log_softmax(-1)
    q = log_q.exp()
    logp = log_q.gather(1, p.labels[:, None])[:, 0]
    entropy = -torch.where(q > 0, q * log_q, 0.0).sum(-1)
    tokens = token_loss(logp, entropy, slice(0, len(logp)))[0]
    tokens.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Result(
        tokens.detach().sum(), tokens.detach().abs().sum(), logp.detach(), entropy.detach(),
        hidden.grad, weight.grad, None if bias is None else bias.grad, q.square().sum(-1).detach(),
    )  # fmt: skip


def run(p: Problem, token_loss: TokenLoss, rows: int | None = None, **arguments) -> Result:
    """The head on the problem, `rows` tokens at a time."""
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    bias = None if p.bias is None else p.bias.clone().requires_grad_()
    if rows is not None:
        arguments["workspace_bytes"] = rows_workspace(p, rows, arguments.get("backend", "torch"))
    magnitude = torch.zeros(())

    def recorded(logp: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = token_loss(logp, entropy, part)
        magnitude.add_(loss.detach().abs().sum())
        return loss, metrics

    out = rl_head(
        hidden, weight, p.labels, token_loss=recorded, temperature=p.temperature, bias=bias, softcap=p.softcap,
        **arguments,
    )  # fmt: skip
    out.loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Result(
        out.loss.detach(), magnitude, out.logp, out.entropy, hidden.grad, weight.grad,
        None if bias is None else bias.grad, out.squares, out,
    )  # fmt: skip


def rows_workspace(p: Problem, rows: int, backend: str) -> int:
    """The workspace in which `rows` rows fit, and no more."""
    from asyncrl.triton_kernels import rows_torch, rows_triton

    implementation = rows_triton if backend == "triton" else rows_torch
    vocabulary = len(p.weight)
    return implementation.fixed_bytes(vocabulary, p.weight.device) + rows * (
        implementation.row_bytes(vocabulary, False) + 8 * p.weight.shape[1]
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry that is expected."""
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_equal(actual: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert (actual.loss.double() - expected.loss.double()).abs() < tolerance * expected.magnitude
    for name in ("logp", "entropy", "d_hidden", "d_weight", "d_bias"):
        a, b = getattr(actual, name), getattr(expected, name)
        if b is not None:
            found = distance(a, b)
            assert found < tolerance, f"{name}: {found}"


def _shard_variants() -> dict[str, tuple[Problem, dict[str, Any]]]:
    """Heads whose vocabulary is divided, and the settings of each."""
    p = problem(v=257)
    everything = replace(p, bias=torch.linspace(-2, 2, 257), softcap=5.0, temperature=torch.linspace(0.5, 2, 37))
    ignored = replace(everything, labels=torch.where(torch.arange(37) % 5 == 0, -100, p.labels))
    return {
        "plain": (replace(p, temperature=0.7), {}),
        "everything": (ignored, {"ignore_index": -100, "backend": "triton"}),
        "whole sequences": (everything, {"sequences": p.lengths}),
    }


SHARD_VARIANTS = _shard_variants()
