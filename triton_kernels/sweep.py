"""The steps of the RL head's sweep: logits of a chunk, their statistics, and the products of their gradients.

`Sweep` holds the inputs and what is filled token by token; it knows no loss and no autograd. The order of the
steps, and where a loss comes in, is in `asyncrl.triton_kernels.rl_head`, which calls this. The row steps are
`rows_triton` on GPUs and `rows_torch` elsewhere; the products are torch's.

Shapes: N tokens, C of a chunk, D hidden size, V vocabulary (with a shard: this rank's part of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.triton_kernels import rows_torch
from asyncrl.triton_kernels.backend import Backend, use_triton
from asyncrl.triton_kernels.plan import Block, blocks, rows_that_fit

LOWEST = -1e30
"""Stands for -inf in a bias that rules labels out: 0 x -inf is not 0."""
SUMMANDS = 4096
"""Terms of one running sum over the vocabulary, in float32 products."""


class Shard(NamedTuple):
    """A vocabulary divided over the ranks of a group: each has all tokens and some rows of the weight."""

    group: dist.ProcessGroup
    first: int
    """Id of this rank's first label."""


@dataclass(frozen=True)
class Options:
    """What carries no gradient; see `rl_head`."""

    temperature: float | Tensor
    softcap: float | None
    ignore_index: int | None
    squares: bool
    workspace_bytes: int
    shard: Shard | None
    backend: Backend


@dataclass(frozen=True)
class Gradients:
    """Gradients as they are summed up; None for inputs that need none. What is summed is float32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Sweep:
    """One head and its tokens."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: Options
    ) -> None:
        self._hidden, self._weight = hidden.detach(), weight.detach()
        self._bias = None if bias is None else bias.detach().float().clamp(min=LOWEST)
        self._options, self._first = options, options.shard.first if options.shard else 0
        n = len(labels)
        self.keep = None if options.ignore_index is None else labels != options.ignore_index
        """[N] bool: tokens that are not ignored; None: all."""
        self._labels = labels.contiguous() if self.keep is None else torch.where(self.keep, labels, 0)
        self._inverse = _inverse(options.temperature, n, hidden.device)
        self._rows = _row_steps(hidden.device, options.backend)
        # A CPU has no product with narrow inputs and float32 output.
        self._narrow = hidden.dtype == weight.dtype != torch.float32 and hidden.device.type != "cpu"
        self._head = self._weight if self._narrow else self._weight.float()
        self._logits = hidden.new_empty(0, 0, dtype=torch.float32)
        self.logp, self.entropy, self._norm = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
        self.squares = hidden.new_zeros(n, dtype=torch.float32) if options.squares else None

    def plan(self, sequences: Sequence[int] | None) -> list[Block]:
        """Cuts the tokens, and allocates the logits of the largest chunk.

        Raises:
            ValueError: the sequences do not cover the tokens.
        """
        vocabulary, size = self._weight.shape
        row = self._rows.row_bytes(vocabulary, self._narrow) + 8 * size
        fixed = self._rows.fixed_bytes(vocabulary, self._hidden.device)
        rows = rows_that_fit(self._options.workspace_bytes, row, fixed)
        if self._options.shard is not None:
            rows = _least(rows, self._options.shard.group, self._hidden.device)
        found = blocks(len(self._labels), rows, sequences)
        largest = max((c.stop - c.start for block in found for c in block.chunks), default=0)
        self._logits = self._rows.buffer(largest, vocabulary, self._hidden.device)
        return found

    def score(self, chunk: slice) -> None:
        """Fills log-probs and entropies of a chunk, and leaves its logits in the buffer."""
        statistics = self._rows.statistics(
            self._compute_logits(chunk), self._labels[chunk], self._inverse[chunk], self._options.softcap,
            self._first, self._options.squares,
        )  # fmt: skip
        if self._options.shard is not None:
            statistics = _joined(statistics, self._options.shard.group)
        top, s, u, label, squares = statistics.unbind(1)
        log_s = s.log()
        self._norm[chunk] = top + log_s
        self._fill(self.logp, chunk, label - top - log_s)
        self._fill(self.entropy, chunk, log_s - u / s)
        if self.squares is not None:
            self._fill(self.squares, chunk, squares / s.square())

    def gradients(self, hidden: bool, weight: bool, bias: bool) -> Gradients:
        """Where the gradients that are needed are summed up."""
        narrow = self._options.shard is None  # The parts of several ranks are summed in float32.
        return Gradients(
            torch.empty_like(self._hidden, dtype=None if narrow else torch.float32) if hidden else None,
            torch.zeros_like(self._weight, dtype=torch.float32) if weight else None,
            torch.zeros_like(self._bias) if bias and self._bias is not None else None,
        )

    def differentiate(self, block: Block, g: Tensor, h: Tensor | None, into: Gradients) -> None:
        """Adds the gradients of a block, whose last chunk was scored last and is in the buffer.

        Args:
            block: of n tokens.
            g: [n] d loss / d log-prob.
            h: [n] d loss / d entropy, or None for 0.
            into: where they are added.
        """
        dtype = self._weight.dtype if self._narrow else torch.float32
        for chunk in reversed(block.chunks):
            part = slice(chunk.start - block.tokens.start, chunk.stop - block.tokens.start)
            scored = chunk is block.chunks[-1]
            logits = self._logits[: chunk.stop - chunk.start] if scored else self._compute_logits(chunk)
            d_logits = self._rows.gradients(
                logits, self._labels[chunk], self._inverse[chunk], self._norm[chunk], self.entropy[chunk],
                g[part], None if h is None else h[part], self._options.softcap, self._first, dtype,
            )  # fmt: skip
            self._add_products(d_logits, chunk, into)

    def finish(self, found: Gradients) -> Gradients:
        """The gradients in the inputs' dtypes; the logits are given up before the weight's is cast."""
        self._logits = self._logits.new_empty(0, 0)
        if self._options.shard is not None and found.hidden is not None:
            dist.all_reduce(found.hidden, group=self._options.shard.group)
        hidden = None if found.hidden is None else found.hidden.to(self._hidden.dtype)
        weight = None if found.weight is None else found.weight.to(self._weight.dtype)
        return Gradients(hidden, weight, found.bias)

    def _fill(self, column: Tensor, chunk: slice, values: Tensor) -> None:
        column[chunk] = values if self.keep is None else torch.where(self.keep[chunk], values, 0.0)

    def _compute_logits(self, chunk: slice) -> Tensor:
        """[C, V] float32 into the buffer: rounding logits to bfloat16 moves log-probs by up to 0.06."""
        logits, hidden = self._logits[: chunk.stop - chunk.start], self._hidden[chunk]
        if self._narrow:
            torch.mm(hidden, self._head.t(), out_dtype=torch.float32, out=logits)
        else:
            torch.mm(hidden.float(), self._head.t(), out=logits)
        return logits if self._bias is None else logits.add_(self._bias)

    def _add_products(self, d_logits: Tensor, chunk: slice, into: Gradients) -> None:
        hidden = self._hidden[chunk]
        if into.hidden is not None:
            # A product that rounds its partial sums to bfloat16 would lose digits over so many labels.
            into.hidden[chunk] = (
                torch.mm(d_logits, self._head, out_dtype=torch.float32)
                if self._narrow
                else _long_product(d_logits, self._head)
            )
        if into.weight is not None and self._narrow:
            torch.addmm(into.weight, d_logits.t(), hidden, out_dtype=torch.float32, out=into.weight)
        elif into.weight is not None:
            into.weight.addmm_(d_logits.t(), hidden.float())
        if into.bias is not None:
            into.bias.add_(d_logits.sum(0, dtype=torch.float32))


def _row_steps(device: torch.device, backend: Backend) -> ModuleType:
    if not use_triton(device, backend):
        return rows_torch
    from asyncrl.triton_kernels import rows_triton

    return rows_triton


def _inverse(temperature: float | Tensor, n: int, device: torch.device) -> Tensor:
    """[n] float32, 1 / T."""
    if isinstance(temperature, Tensor):
        return temperature.detach().to(device, torch.float32).reciprocal()
    return torch.full((n,), 1 / temperature, dtype=torch.float32, device=device)


def _long_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whose inner dimension is the vocabulary.

    One running sum over 150,000 terms costs up to two digits, as the plain product of a few rows shows.
    """
    total = a.new_zeros(a.shape[0], b.shape[1])
    for columns, rows in zip(a.split(SUMMANDS, 1), b.split(SUMMANDS), strict=True):
        total += columns @ rows
    return total


def _least(rows: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The smallest number of any rank: all of them must cut the tokens alike."""
    least = torch.tensor(rows, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)


def _joined(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Statistics of the whole rows from those of every rank's part, joined in rank order: one collective."""
    parts = statistics.new_empty(group.size() * len(statistics), statistics.shape[1])
    dist.all_gather_into_tensor(parts, statistics, group=group)
    top, s, u, label, squares = parts.view(group.size(), *statistics.shape).unbind(2)
    largest = top.amax(0)
    gap = top - largest
    w = gap.exp()
    s, u, squares = (column.sum(0) for column in (w * s, w * (u + gap * s), w.square() * squares))
    return torch.stack([largest, s, u, label.amax(0), squares], 1)
