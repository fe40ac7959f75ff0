"""Which rank packs which sequence into which row: a pure function of the sequences' lengths.

A row is one `[1, tokens]` forward pass of the learner. The hub plans a batch when it seals it (the plan is
part of the journal, so a replay packs the same rows); the learner's supervised trainer plans with the same
function. No torch, no I/O, no randomness: the same lengths always give the same plan.

It is not an optimum: longest-processing-time across ranks (Graham 1969, at most 4/3 of the optimum) and
first-fit-decreasing within a rank (at most 11/9 of the optimum) are within a few per cent on real lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan(lengths: Sequence[int], ranks: int, token_budget: int) -> list[list[list[int]]]:
    """Plans the packed rows of a batch.

    Args:
        lengths: tokens of each sequence, at least 1.
        ranks: learner ranks.
        token_budget: most tokens of a row.

    Returns:
        `[rank][row][index into lengths]`. Every index occurs once; no row exceeds the budget; every rank has
        the same number of rows (at least 1), because FSDP's collectives run in step, so a row may be empty.
        Ranks hold about equally many tokens, and rows come largest first, so that rows which run at the same
        time match.

    Raises:
        ValueError: a length is below 1 or above the budget, or `ranks` is below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: a plan needs at least one learner rank")
    for index, length in enumerate(lengths):
        if not 1 <= length <= token_budget:
            raise ValueError(
                f"sequence {index} has {length} tokens; a packed row holds 1 to {token_budget} "
                "(learner.token_budget): raise it above the longest sequence"
            )
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows_of = [_first_fit(share, lengths, token_budget) for share in _balance(longest_first, lengths, ranks)]
    n_rows = max(1, *(len(rows) for rows in rows_of))
    return [rows + [[] for _ in range(n_rows - len(rows))] for rows in rows_of]


def plan_parts(
    lengths: Sequence[int], parts: Sequence[Sequence[int]], ranks: int, token_budget: int
) -> list[list[list[int]]]:
    """Plans minibatches: the rows of `parts[0]`, then those of `parts[1]`, and so on.

    Each part has the same number of rows on every rank, so that the learner finds the minibatches again by
    cutting a rank's rows into `len(parts)` equal pieces; parts with fewer rows are filled up with empty ones.

    Args:
        lengths: tokens of each sequence, at least 1.
        parts: indices into `lengths`.
        ranks: learner ranks.
        token_budget: most tokens of a row.

    Returns:
        As `plan`; indices that are in no part are in no row.

    Raises:
        ValueError: as `plan`.
    """
    planned = [plan([lengths[index] for index in part], ranks, token_budget) for part in parts]
    n_rows = max(len(rows) for rows_of in planned for rows in rows_of)
    merged: list[list[list[int]]] = [[] for _ in range(ranks)]
    for part, rows_of in zip(parts, planned, strict=True):
        for rank, rows in enumerate(rows_of):
            merged[rank] += [[part[index] for index in row] for row in rows]
            merged[rank] += [[] for _ in range(n_rows - len(rows))]
    return merged


def minibatch_of(groups: Sequence[int], minibatches: int) -> list[int]:
    """The minibatch of each episode, given its group: equally many groups each, in the order of their first
    episodes.

    Both who plans the rows and who trains on them ask this, so that nothing else has to be agreed on.
    """
    ordinal = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    return [ordinal[group] * minibatches // len(ordinal) for group in groups]


def _balance(longest_first: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Gives each sequence, longest first, to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for index in longest_first:
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(index)
        heapq.heappush(heap, (tokens + lengths[index], rank))
    return shares


def _first_fit(share: list[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Puts each sequence, longest first, into the first row with room; rows come back largest first."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in share:
        row = next((row for row, room in enumerate(free) if lengths[index] <= room), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(token_budget)
        rows[row].append(index)
        free[row] -= lengths[index]
    order = sorted(range(len(rows)), key=lambda row: (free[row], row))
    return [sorted(rows[row]) for row in order]
