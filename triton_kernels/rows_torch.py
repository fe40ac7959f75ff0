"""The row steps of the RL head in plain torch: for CPUs, for machines without Triton, and as the reference.

Two passes over the logits of a chunk, which stand in one float32 buffer: `statistics` reads them, `gradients`
overwrites them. Both go through the buffer a few rows at a time, so that the temporaries stay in the cache and the
workspace does not grow. Same contract as `rows_triton`; called by `asyncrl.triton_kernels.sweep`.

Per row, with z = cap(logits) / T over this rank's part of the vocabulary:

    m = max z,   s = sum e^(z-m),   u = sum (z-m) e^(z-m),   z_label (-inf if it is not here),   sum e^(2(z-m))
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCRATCH_BYTES = 2 << 20
"""Size of a temporary on a CPU: small enough for the caches, large enough for the time of a call not to count."""
GPU_SCRATCH_BYTES = 64 << 20
RULED_OUT = -1e20
"""A label whose logit is below this is one that the bias rules out: its log-prob is -inf."""


def row_bytes(vocabulary: int, narrow: bool) -> int:
    """Workspace of one row: float32 logits, and their gradient where products take a narrower type."""
    return vocabulary * (6 if narrow else 4)


def fixed_bytes(vocabulary: int, device: torch.device) -> int:
    """Workspace that does not depend on the chunk: two temporaries."""
    return 2 * max(_scratch_bytes(device), 4 * vocabulary)


def buffer(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """[rows, V] float32 for the logits of a chunk."""
    return torch.empty(rows, vocabulary, dtype=torch.float32, device=device)


def statistics(
    logits: Tensor, labels: Tensor, inverse: Tensor, softcap: float | None, first: int, squares: bool
) -> Tensor:
    """[n, 5] float32: m, s, u, z_label, sum of squares (0 if not asked for).

    Args:
        logits: [n, V] float32, finite; not changed.
        labels: [n] int64, ids in the whole vocabulary.
        inverse: [n] float32, 1 / T.
        softcap: c of c tanh(logits / c), or None.
        first: id of the first column.
        squares: whether the sum of squares is wanted.
    """
    out = logits.new_zeros(len(logits), 5)
    spare = [torch.empty_like(logits[: _step(logits)]) for _ in range(2)]
    for rows in _slices(logits):
        z, e = (buffer[: rows.stop - rows.start] for buffer in spare)
        scale = inverse[rows, None]
        _scaled(logits[rows], scale, softcap, z)
        largest = z.amax(-1, keepdim=True)
        z.sub_(largest)
        out[rows, 3] = _label_logit(z, labels[rows] - first, largest)
        torch.exp(z, out=e)
        out[rows, 0] = largest[:, 0]
        out[rows, 1] = e.sum(-1)
        out[rows, 2] = z.mul_(e).sum(-1)
        if squares:
            out[rows, 4] = e.square_().sum(-1)
    return out


def gradients(
    logits: Tensor,
    labels: Tensor,
    inverse: Tensor,
    norm: Tensor,
    entropy: Tensor,
    g: Tensor,
    h: Tensor | None,
    softcap: float | None,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """[n, V] d loss / d logits in `dtype`, written over the logits where the type allows it.

    Args:
        logits: [n, V] float32, finite; destroyed.
        labels: [n] int64, ids in the whole vocabulary.
        inverse: [n] float32, 1 / T.
        norm: [n] float32, log of the sum of e^z over the whole vocabulary.
        entropy: [n] float32.
        g: [n] float32, d loss / d log-prob.
        h: [n] float32, d loss / d entropy; None: the loss does not depend on it.
        softcap: c of c tanh(logits / c), or None.
        first: id of the first column.
        dtype: of the result.
    """
    spare = [torch.empty_like(logits[: _step(logits)]) for _ in range(2)]
    for rows in _slices(logits):
        z = logits[rows]
        e, slope = (buffer[: rows.stop - rows.start] for buffer in spare)
        scale = inverse[rows, None]
        if softcap is not None:
            torch.div(z, softcap, out=slope).tanh_().square_().neg_().add_(1)
        _scaled(z, scale, softcap, z)
        z.sub_(norm[rows, None])
        if h is None:
            z.exp_().mul_(-g[rows, None] * scale)
        else:
            torch.exp(z, out=e)
            z.mul_(h[rows, None]).add_((g + h * entropy)[rows, None])
            z.mul_(e.mul_(-scale))
        _add_at_label(z, labels[rows] - first, g[rows] * inverse[rows])
        if softcap is not None:
            z.mul_(slope)
    return logits.to(dtype)


def _scratch_bytes(device: torch.device) -> int:
    return SCRATCH_BYTES if device.type == "cpu" else GPU_SCRATCH_BYTES


def _step(logits: Tensor) -> int:
    return max(1, min(len(logits), _scratch_bytes(logits.device) // (4 * logits.shape[1])))


def _slices(logits: Tensor) -> Iterator[slice]:
    step = _step(logits)
    return (slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step))


def _scaled(logits: Tensor, scale: Tensor, softcap: float | None, out: Tensor) -> None:
    """out = cap(logits) / T; `out` may be the logits themselves."""
    if softcap is None:
        torch.mul(logits, scale, out=out)
    else:
        torch.div(logits, softcap, out=out).tanh_().mul_(softcap * scale)


def _owned(local: Tensor, width: int) -> Tensor:
    return (local >= 0) & (local < width)


def _label_logit(z: Tensor, local: Tensor, largest: Tensor) -> Tensor:
    own = _owned(local, z.shape[1])
    at = z.gather(1, torch.where(own, local, 0)[:, None]) + largest
    return torch.where(own & (at[:, 0] > RULED_OUT), at[:, 0], -torch.inf)


def _add_at_label(z: Tensor, local: Tensor, value: Tensor) -> None:
    """Adds one value per row at its label, if this part of the vocabulary holds it."""
    own = _owned(local, z.shape[1])
    at = torch.where(own, local, 0)[:, None]
    z.scatter_(1, at, z.gather(1, at) + torch.where(own, value, 0.0)[:, None])
