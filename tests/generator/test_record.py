"""The token record: append-only, spans add up, turns come back as sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Prefix, Span

PIECES = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=8)


@given(PIECES)
def test_a_record_rebuilt_from_its_spans_is_the_same_record(pieces: list[tuple[bool, int]]) -> None:
    record = TokenRecord()
    for version, (sampled, n) in enumerate(pieces):
        if sampled:
            record.sample(list(range(n)), [-0.5] * n, version)
        else:
            record.observe(list(range(n)))
    again = TokenRecord.from_prefix(
        Prefix(record.spans, len(record.spans)), record.ids.tobytes(), record.logprobs.tobytes()
    )
    assert (again.ids, again.logprobs, again.spans) == (record.ids, record.logprobs, record.spans)
    assert again.turns() == record.turns()
    assert sum(span.n for span in record.spans) == len(record.ids) == len(record.logprobs)


def test_a_turn_that_spans_two_versions_is_one_turn() -> None:
    record = TokenRecord()
    record.observe([1, 2])
    record.sample([3], [-1.0], 0)
    record.sample([4, 5], [-1.0, -2.0], 1)
    record.observe([6])
    record.sample([7], [-1.0], 1)
    assert record.turns() == [[3, 4, 5], [7]]
    assert record.ends_sampled
    record.sample([8], [-1.0], 2)
    assert record.turn == [7, 8]
    record.observe([1, 2, 6], fork=True)
    assert record.turn == record.turns()[-1] == [7, 8]
    assert (record.branch, record.branch_length) == ([1, 2, 6], 3)


def test_a_prefix_whose_arrays_do_not_fit_its_spans_is_refused() -> None:
    tokens = np.zeros(3, np.int32).tobytes()
    with pytest.raises(ValueError, match="3 tokens and 3 log-probs, but its spans add up to 4"):
        TokenRecord.from_prefix(Prefix([Span(4, -1, False)], 1), tokens, tokens)
