"""Members of communications, against a reader who sorts them into heaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.analysis.matching import ranks_of, together

OPS, DETAILS = ("all_reduce", "send", "receive", "broadcast"), ("0,1", "0>1", "2", "0,1,2", "policy.update", "")
SIZES = (2, 2, 1, 3, 0, 0)


@pytest.mark.parametrize(("detail", "ranks"), list(zip(DETAILS, SIZES)))
def test_ranks_that_a_detail_names(detail, ranks):
    assert ranks_of(detail) == ranks


rows = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(-1, 2), st.integers(0, 2))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(rows, max_size=25))
def test_as_by_heaps(drawn):
    op, detail, seq, rank = np.array(drawn, np.int64).reshape(-1, 4).T
    number, ranks = together(op.astype(np.int32), OPS, detail.astype(np.int32), DETAILS, seq, rank)
    heaps = {}
    for i, (o, d, q, r) in enumerate(drawn):
        heaps.setdefault(("pair" if OPS[o] in ("send", "receive") else o, d, q), []).append((i, r))
    names = set()
    for (_, d, q), members in heaps.items():
        mine = [i for i, _ in members]
        whole = q >= 0 and SIZES[d] and len(members) == SIZES[d] == len({r for _, r in members})
        assert ranks[mine].tolist() == [SIZES[d] if whole else 0] * len(mine)
        assert len(set(number[mine].tolist())) == 1 and (number[mine[0]] >= 0) == bool(whole)
        if whole:
            assert number[mine[0]] not in names
            names.add(int(number[mine[0]]))


def test_one_rank_twice_is_not_two_ranks():
    number, _ = together(
        *(np.zeros(2, np.int32), OPS, np.zeros(2, np.int32), DETAILS), np.zeros(2, int), np.ones(2, int)
    )
    assert number.tolist() == [-1, -1]
