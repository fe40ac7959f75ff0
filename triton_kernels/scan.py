"""Recursions that run backwards over the tokens of packed sequences, all from one reverse scan.

    x_t = a_t x_(t+1) + b_t   within each segment,   x past a segment's end = 0

Discounted returns, generalised advantage estimates, lambda returns and V-trace are this recursion with different
a and b. None of them carries gradient: they are targets and baselines. They do not skip tokens: leave out those
that take no part in the recursion, such as an environment's answers. For algorithms with a value function.

Shapes: N tokens, S segments. `cu_seqlens` [S + 1] int64 as in `segments`; segments may be empty. All vectors are
float32, or all float64 with the torch path, and on one device. A NaN stays within its segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.triton_kernels.backend import Backend
from asyncrl.triton_kernels.segments import check, segment_ids, use_triton_for


@torch.no_grad()
def reverse_scan(a: Tensor, b: Tensor, cu_seqlens: Tensor, *, backend: Backend = "auto") -> Tensor:
    """[N]: x_t = a_t x_(t+1) + b_t within each segment, where x past the end is 0. No gradient.

    Args:
        a: [N] factors.
        b: [N] terms.
        cu_seqlens: [S + 1] int64.
        backend: see `backend.use_triton`.

    Raises:
        ValueError: shapes, types or edges do not fit together.
    """
    _check(cu_seqlens, a=a, b=b)
    if use_triton_for(b, backend):
        from asyncrl.triton_kernels import scan_triton

        return scan_triton.reverse_scan(a, b, cu_seqlens)
    return _doubling(a, b, _tokens_after(cu_seqlens, len(b)))


@torch.no_grad()
def discounted_returns(rewards: Tensor, cu_seqlens: Tensor, gamma: float, *, backend: Backend = "auto") -> Tensor:
    """[N]: sum over k >= 0 of gamma^k r_(t+k), to the end of the segment."""
    return reverse_scan(torch.full_like(rewards, gamma), rewards, cu_seqlens, backend=backend)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns that a value function is fitted to, [N] each.

    A_t = sum over k of (gamma lam)^k delta_(t+k),  delta_t = r_t + gamma V_(t+1) - V_t;  returns A_t + V_t.
    Schulman et al. 2015 (arXiv:1506.02438), equation 16.

    Args:
        rewards: [N].
        values: [N], V of the state before each token.
        cu_seqlens: [S + 1] int64.
        gamma: discount.
        lam: 0 gives delta_t (least variance), 1 the discounted return minus V_t (least bias).
        bootstrap: [S], V after the last token of each segment; None: 0, the episode ended there.
        backend: see `backend.use_triton`.

    Raises:
        ValueError: shapes, types or edges do not fit together.
    """
    _check(cu_seqlens, rewards=rewards, values=values)
    delta = rewards + gamma * _following(values, bootstrap, cu_seqlens) - values
    advantages = reverse_scan(torch.full_like(delta, gamma * lam), delta, cu_seqlens, backend=backend)
    return advantages, advantages + values


def td_lambda(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """[N] lambda returns: G_t = r_t + gamma ((1 - lam) V_(t+1) + lam G_(t+1)), with the bootstrap after the end.

    Sutton and Barto 2018, section 12.1. They are the returns of `gae`; arguments and errors as there.
    """
    return gae(rewards, values, cu_seqlens, gamma, lam, bootstrap, backend=backend)[1]


@torch.no_grad()
def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    rho_max: float = 1.0,
    c_max: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """V-trace targets vs and policy-gradient advantages rho_t (r_t + gamma vs_(t+1) - V_t), [N] each.

    vs_t = V_t + rho_t (r_t + gamma V_(t+1) - V_t) + gamma c_t (vs_(t+1) - V_(t+1)),
    rho_t = min(rho_max, pi / mu),  c_t = lam min(c_max, pi / mu).
    Espeholt et al. 2018 (arXiv:1802.01561), section 4.1 and remarks 1 and 2.

    Args:
        rewards: [N].
        values: [N], V of the state before each token.
        log_ratio: [N], log pi - log mu of the sampled tokens: the learner's policy over the behaviour policy.
        cu_seqlens: [S + 1] int64.
        gamma: discount.
        rho_max: decides which policy the targets are the value of; infinity: the learner's.
        c_max: how far corrections reach back; it changes the speed, not the fixed point.
        lam: as in TD(lambda).
        bootstrap: [S], V after the last token of each segment; None: 0, the episode ended there.
        backend: see `backend.use_triton`.

    Raises:
        ValueError: shapes, types or edges do not fit together.
    """
    _check(cu_seqlens, rewards=rewards, values=values, log_ratio=log_ratio)
    ratio = log_ratio.exp()
    rho, c = ratio.clamp(max=rho_max), lam * ratio.clamp(max=c_max)
    delta = rho * (rewards + gamma * _following(values, bootstrap, cu_seqlens) - values)
    targets = values + reverse_scan(gamma * c, delta, cu_seqlens, backend=backend)
    advantages = rho * (rewards + gamma * _following(targets, bootstrap, cu_seqlens) - values)
    return targets, advantages


def _check(cu_seqlens: Tensor, **vectors: Tensor) -> None:
    """All vectors are packed alike: one shape, one type, one device."""
    (name, first), *others = vectors.items()
    check(first, cu_seqlens)
    for other, vector in others:
        if (vector.shape, vector.dtype, vector.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"{name} is {first.dtype} {list(first.shape)} on {first.device}, {other} is {vector.dtype} "
                f"{list(vector.shape)} on {vector.device}; both must be packed alike"
            )


def _tokens_after(cu_seqlens: Tensor, n: int) -> Tensor:
    """[n] int64: how many tokens of its segment follow each token."""
    return cu_seqlens[1:][segment_ids(cu_seqlens, n)] - 1 - torch.arange(n, device=cu_seqlens.device)


def _following(values: Tensor, bootstrap: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[N]: the value after each token: the next token's, or its segment's bootstrap."""
    n, segments = len(values), len(cu_seqlens) - 1
    if bootstrap is None:
        bootstrap = values.new_zeros(segments)
    if bootstrap.shape != (segments,):
        raise ValueError(
            f"bootstrap has shape {list(bootstrap.shape)}; give one value for each of {segments} segments"
        )
    end = bootstrap.to(values.dtype)[segment_ids(cu_seqlens, n)]
    return torch.where(_tokens_after(cu_seqlens, n) == 0, end, values.roll(-1))


def _doubling(a: Tensor, b: Tensor, after: Tensor) -> Tensor:
    """The scan in log2(longest segment) steps: after the step of distance d, x holds 2 d terms of each sum.

    `a` becomes the product of 2 d factors. It gets shorter with every step: the tokens at the end that it loses
    have no token at the next distance.
    """
    x, distance = b.clone(), 1
    longest = int(after.max()) if len(b) else 0
    while distance <= longest:
        reaches = after[:-distance] >= distance
        x[:-distance] += torch.where(reaches, a[: len(x) - distance] * x[distance:], 0.0)
        a = a[:-distance] * a[distance:]
        distance *= 2
    return x
