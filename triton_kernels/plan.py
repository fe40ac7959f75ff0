"""How the RL head cuts its tokens: chunks that fit the workspace, and blocks that share one call of the loss.

Pure arithmetic on the host. Called by `asyncrl.triton_kernels.sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """Tokens whose loss is computed in one call."""

    tokens: slice
    chunks: list[slice]
    """Tokens whose logits exist at once, in order. More than one: their logits are computed twice, once for the
    loss and once for the gradients."""


def rows_that_fit(workspace_bytes: int, row_bytes: int, fixed_bytes: int) -> int:
    """Rows of a chunk; at least 1, and a multiple of 16 where that is possible."""
    rows = max(1, (workspace_bytes - fixed_bytes) // row_bytes)
    return rows // 16 * 16 or rows


def blocks(n: int, rows: int, sequences: Sequence[int] | None) -> list[Block]:
    """Cuts n tokens into blocks with chunks of at most `rows` tokens.

    Args:
        n: number of tokens.
        rows: most tokens of a chunk.
        sequences: lengths of the sequences that a block must hold whole; None: any cut will do.

    Raises:
        ValueError: the lengths do not add up to n.
    """
    if sequences is None:
        return [Block(chunk, [chunk]) for chunk in _even(0, n, rows)]
    if sum(sequences) != n or any(length < 0 for length in sequences):
        raise ValueError(f"sequences add up to {sum(sequences)} tokens, but there are {n}; give each one's length")
    found, start, stop = [], 0, 0
    for length in sequences:
        if stop + length - start > rows and stop > start:
            found.append(slice(start, stop))
            start = stop
        stop += length
    if stop > start:
        found.append(slice(start, stop))
    return [Block(tokens, _even(tokens.start, tokens.stop, rows)) for tokens in found]


def _even(start: int, stop: int, rows: int) -> list[slice]:
    """Chunks of nearly equal size, in sixteens: a last chunk of a few rows would waste a whole product."""
    if stop == start:
        return []
    size = -(-(stop - start) // -(-(stop - start) // rows))
    size = min(rows, -(-size // 16) * 16)
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]
