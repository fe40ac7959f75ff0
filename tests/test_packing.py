"""Packing plans: each property that the learner and the journal rely on, over random lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.packing import minibatch_of, plan, plan_parts

BUDGET = 64
lengths_strategy = st.lists(st.integers(1, BUDGET), max_size=80)


def tokens(lengths, rows):
    return sum(lengths[i] for row in rows for i in row)


@given(lengths_strategy, st.integers(1, 5))
def test_every_sequence_is_in_exactly_one_row(lengths, ranks):
    placed = [i for rows in plan(lengths, ranks, BUDGET) for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))


@given(lengths_strategy, st.integers(1, 5))
def test_no_row_exceeds_the_budget_and_ranks_have_equally_many_rows(lengths, ranks):
    planned = plan(lengths, ranks, BUDGET)
    assert len(planned) == ranks
    assert len({len(rows) for rows in planned}) == 1
    assert len(planned[0]) >= 1
    for rows in planned:
        assert all(sum(lengths[i] for i in row) <= BUDGET for row in rows)


@given(lengths_strategy, st.integers(1, 5))
def test_two_ranks_never_differ_by_more_than_one_sequence(lengths, ranks):
    totals = [tokens(lengths, rows) for rows in plan(lengths, ranks, BUDGET)]
    assert max(totals) - min(totals) <= max(lengths, default=0)


@given(lengths_strategy)
def test_first_fit_wastes_less_than_half_of_the_rows(lengths):
    (rows,) = plan(lengths, 1, BUDGET)
    assert len(rows) <= max(1, 2 * sum(lengths) / BUDGET + 1)


@given(lengths_strategy, st.integers(1, 5))
def test_rows_that_run_at_the_same_time_come_in_order_of_size(lengths, ranks):
    for rows in plan(lengths, ranks, BUDGET):
        sizes = [sum(lengths[i] for i in row) for row in rows]
        assert sizes == sorted(sizes, reverse=True)


def test_a_known_plan_stays_the_same_so_that_a_journal_replays():
    assert plan([5, 3, 3, 2, 2, 1], 2, 6) == [[[0, 5], [3]], [[1, 2], [4]]]


def test_a_batch_that_one_rank_has_no_share_of_gives_it_an_empty_row():
    assert plan([4], 2, 8) == [[[0]], [[]]]


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_that_fits_no_row_is_named(length):
    with pytest.raises(ValueError, match=f"sequence 1 has {length} tokens"):
        plan([3, length], 1, BUDGET)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3), st.data())
def test_minibatches_are_equal_pieces_of_every_ranks_rows_and_keep_groups_whole(groups, minibatches, ranks, data):
    lengths = data.draw(st.lists(st.integers(1, BUDGET), min_size=len(groups), max_size=len(groups)))
    parts = minibatch_of(groups, minibatches)
    chosen = [[i for i, part in enumerate(parts) if part == number] for number in range(minibatches)]
    planned = plan_parts(lengths, chosen, ranks, BUDGET)
    assert len({len(rows) for rows in planned}) == 1
    assert len(planned[0]) % minibatches == 0
    piece = len(planned[0]) // minibatches
    for number in range(minibatches):
        rows = [row for rank in planned for row in rank[number * piece : (number + 1) * piece]]
        assert sorted(i for row in rows for i in row) == chosen[number]
        assert all(sum(lengths[i] for i in row) <= BUDGET for row in rows)
    assert len({(group, part) for group, part in zip(groups, parts, strict=True)}) == len(set(groups))
    sizes = [len({groups[i] for i in part}) for part in chosen]
    assert max(sizes) - min(sizes) <= 1


@given(lengths_strategy, st.integers(1, 3))
def test_one_minibatch_is_the_plain_plan(lengths, ranks):
    assert plan_parts(lengths, [range(len(lengths))], ranks, BUDGET) == plan(lengths, ranks, BUDGET)
