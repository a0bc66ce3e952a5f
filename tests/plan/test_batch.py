"""Plans of batches: their promises, and the micro-batches that the tokens themselves would give."""

import pickle
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.batch import Jagged
from tilth.core.errors import PlanError
from tilth.plan.batch import (
    COPIES,
    WORTH,
    MicroBatchLimits,
    RankLoad,
    RowTable,
    check_plan,
    plan_batch,
    plan_rows,
)
from tilth.plan.offload import HostRates, OffloadLimits
from tilth.plan.packing import divide, micro_batches

HOST = OffloadLimits(6, 1.0, np.zeros_like, HostRates(1.0, 1e9, 1.0))
PROMPTS = [[1], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8], [9] * 12]
SAMPLES = st.lists(
    st.tuples(st.sampled_from(PROMPTS), st.integers(0, 9), st.integers(0, 3)), max_size=24
)  # prompt, tokens of the completion, group
LIMITS = st.builds(MicroBatchLimits, st.integers(1, 60), st.booleans(), st.booleans(), st.booleans())


def batch(samples):
    rows = [np.array(p + list(range(n)), np.int64) for p, n, _ in samples]
    mask = [np.array([0] * len(p) + [1] * n, np.uint8) for p, n, _ in samples]
    groups = np.array([g for *_, g in samples], np.int64)
    return Jagged.of(rows), np.concatenate([np.zeros(0, np.uint8), *mask]), groups


def table_of(samples, opens=None):
    tokens, mask, _ = batch(samples)
    return RowTable.of(tokens, mask, opens)


def from_tokens(tokens, mask, most, *, share, several=False):
    """The micro-batches that a rank finds by comparing the prompts of its rows: [(groups, shared)]."""
    prompts = [int(np.argmax(m)) if m.any() else len(m) for m in np.split(mask, tokens.offsets[1:-1])]
    groups, newest = [], {}
    for row, prompt in enumerate(prompts[: len(tokens.lengths)] if share else []):
        length, key = int(tokens.lengths[row]), tokens.row(row)[:prompt].tobytes()
        group, size = newest.get(key, (-1, most))
        if prompt == length or size + length - prompt > most:
            groups.append([])
            group, size = len(groups) - 1, prompt
        groups[group].append(row)
        newest[key] = group, size + length - prompt
    trees = [g for g in groups if len(g) > 1]
    computed = [int(tokens.lengths[g].sum()) - (len(g) - 1) * prompts[g[0]] for g in trees]
    if sum(computed) > WORTH * sum(int(tokens.lengths[g].sum()) for g in trees):
        trees, computed = [], []
    sizes = [max(size, int(tokens.lengths[g].sum()) // COPIES) for g, size in zip(trees, computed)]
    alone = [row for row in range(len(tokens.lengths)) if not any(row in g for g in trees)]
    found = [([trees[u] for u in units], True) for units in micro_batches(sizes, most)]
    found += [([[alone[i] for i in rows]], False) for rows in micro_batches(tokens.lengths[alone], most)]
    if several and len(found) == 1 and len(tokens.lengths) > 1 and most > 1:
        return from_tokens(tokens, mask, min(most, len(mask)) // 2, share=share, several=True)
    return found


def plain(micros):
    return [([g.tolist() for g in micro.groups], micro.shared) for micro in micros]


@given(SAMPLES, LIMITS, st.integers(1, 4), st.booleans())
def test_ranks_get_the_micro_batches_that_their_tokens_would_give(samples, limits, ranks, dropout):
    tokens, mask, groups = batch(samples)
    plan = plan_batch(table_of(samples), groups, ranks, limits, dropout=dropout)
    wanted = divide(tokens.lengths, groups, ranks)
    for rows, theirs, found in zip(plan.rows, wanted, plan.ranks, strict=True):
        assert rows.tolist() == theirs.tolist()
        own = tokens.take(rows), Jagged(mask, tokens.offsets).take(rows).values
        assert plain(found.score) == from_tokens(*own, limits.tokens, share=limits.share)
        drops = dropout and limits.dropout
        share = limits.share and not drops
        assert plain(found.learn) == from_tokens(*own, limits.tokens, share=share, several=limits.several)


@given(SAMPLES, LIMITS, st.integers(1, 4))
def test_each_row_once_within_the_caps_and_the_same_again(samples, limits, ranks):
    _, _, groups = batch(samples)
    table = table_of(samples)
    plan = plan_batch(table, groups, ranks, limits)
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(len(samples)))
    for rows, rank in zip(plan.rows, plan.ranks):
        for micros in rank:
            assert sorted(row for m in micros for row in m.rows.tolist()) == list(range(len(rows)))
            check_plan(micros, table.take(rows))
            for micro in micros:
                assert micro.cost <= limits.tokens or len(micro.rows) == 1
                prompts = [{tuple(samples[rows[i]][0]) for i in group} for group in micro.groups]
                assert not micro.shared or all(len(each) == 1 for each in prompts)
    again = pickle.loads(pickle.dumps(plan_batch(table, groups, ranks, limits)))
    for one, other in zip(plan.ranks, again.ranks, strict=True):
        assert [plain(micros) for micros in one] == [plain(micros) for micros in other]


def test_a_shared_prompt_costs_once():
    table = table_of([(PROMPTS[3], 2, 0)] * 4)
    (micro,) = plan_rows(table, MicroBatchLimits(100, share=True)).learn
    assert micro.shared and micro.cost == 12 + 4 * 2
    (micro,) = plan_rows(table, MicroBatchLimits(100, share=True), costs=lambda n: n.astype(float) ** 2).learn
    assert micro.cost == 4 * 14**2 - 3 * 12**2


def test_a_plan_is_small():
    """16 groups of 8 samples: some 20 bytes a row."""
    rng = np.random.default_rng(0)
    table = RowTable(rng.integers(150, 400, 128), np.full(128, 100), np.repeat(np.arange(16), 8))
    for limits in (MicroBatchLimits(4096), MicroBatchLimits(4096, share=True)):
        plan = plan_batch(table, np.repeat(np.arange(16), 8), 4, limits)
        assert max(len(pickle.dumps(rank)) for rank in plan.ranks) < 32 * 60


def test_a_row_of_several_conversations_shares_nothing():
    samples = [(PROMPTS[3], 2, 0)] * 4
    tokens, _, _ = batch(samples)
    opens = np.zeros(len(tokens.values), np.uint8)
    opens[tokens.offsets[2] + 13] = 1
    table = table_of(samples, opens)
    assert table.prefixes.tolist() == [12, 12, 0, 12]
    assert not any(micro.shared for micro in plan_rows(table, MicroBatchLimits(100, share=True)).learn)


def test_equal_prompts_alone_have_one_digest():
    rng, seen = np.random.default_rng(0), defaultdict(set)
    samples = [(rng.integers(0, 3, rng.integers(1, 6)).tolist(), 2, 0) for _ in range(500)]
    for (prompt, *_), digest in zip(samples, table_of(samples).digests.tolist()):
        seen[digest].add(tuple(prompt))
    assert all(len(prompts) == 1 for prompts in seen.values())
    assert len(seen) == len({tuple(prompt) for prompt, *_ in samples})


CHANGES = [("lengths", 1, "plan.1"), ("prefixes", -1, "plan.0"), ("digests", 1, "plan.0")]


@pytest.mark.parametrize("column, by, key", CHANGES)
def test_a_plan_of_other_rows_is_refused(column, by, key):
    table = table_of([(PROMPTS[3], 2, 0), (PROMPTS[3], 3, 0), (PROMPTS[0], 9, 1)])
    plan = plan_rows(table, MicroBatchLimits(100, share=True)).learn
    assert plain(plan) == [([[0, 1]], True), ([[2]], False)]
    check_plan(plan, table)
    row = 2 if column == "lengths" else 1
    other = getattr(table, column).copy()
    other[row] += by
    with raises(PlanError, key):
        check_plan(plan, table._replace(**{column: other}))


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 2, 2], [0, 1, 1]])
def test_a_plan_with_a_row_twice_or_never_is_refused(rows):
    table = table_of([(PROMPTS[0], 9, 1)] * 3)
    (micro,) = plan_rows(table, MicroBatchLimits(100)).learn
    with raises(PlanError, "plan.rows"):
        check_plan([micro._replace(groups=(np.array(rows),))], table)


@given(SAMPLES, LIMITS, st.integers(1, 4), st.booleans())
def test_loads_are_the_tokens_and_squares_that_are_computed(samples, limits, ranks, dropout):
    table, groups = table_of(samples), batch(samples)[2]
    plan = plan_batch(table, groups, ranks, limits, dropout=dropout)
    for rows, part in zip(plan.rows, plan.ranks):
        own = table.take(rows)
        found = RankLoad.of(part.learn, own)
        for i, micro in enumerate(part.learn):
            sizes = [(int(own.lengths[r]), 0) for g in micro.groups for r in g[:1]]
            sizes += [(int(own.lengths[r]), int(own.prefixes[r]) * micro.shared) for g in micro.groups for r in g[1:]]
            assert found.tokens[i] == sum(n - p for n, p in sizes) == micro.cost == found.cost[i]
            assert found.squares[i] == sum(n**2 - p**2 for n, p in sizes)


def test_a_blank_is_no_load():
    table = RowTable(np.array([7, 5]), *np.zeros((2, 2), np.int64))
    (micro,) = plan_rows(table, MicroBatchLimits(100)).learn
    blank = micro._replace(groups=(np.zeros(0, np.int64),), cost=0.0)
    found = RankLoad.of((blank, micro, blank), table)
    assert (found.tokens.tolist(), found.squares.tolist()) == ([0, 12, 0], [0, 74, 0])
    assert [len(column) for column in RankLoad.of((), table)] == [0, 0, 0]


def by_squares(lengths):
    return lengths.astype(np.float64) ** 2


@given(SAMPLES, LIMITS, st.integers(1, 4), st.sampled_from(["tokens", "cost", "none"]))
def test_a_balance_moves_rows_and_never_changes_which_there_are(samples, limits, ranks, by):
    table = table_of(samples)
    plan = plan_batch(table, batch(samples)[2], ranks, limits, costs=by_squares, balance=by)
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(len(samples)))
    for rows, part in zip(plan.rows, plan.ranks):
        for micros in part:
            check_plan(micros, table.take(rows))
        if by == "cost":
            assert [m.cost for m in part.learn] == sorted((m.cost for m in part.learn), reverse=True)
    if by == "none":
        assert [rows.tolist() for rows in plan.rows] == [
            r.tolist() for r in np.array_split(np.arange(len(samples)), ranks)
        ]


def test_costs_balance_what_tokens_do_not():
    """One long sequence costs as much as many short ones of more tokens."""
    table = RowTable(np.array([100] + [10] * 30), np.zeros(31, np.int64), np.zeros(31, np.int64))
    loads = {}
    for by, costs in (("tokens", {}), ("cost", {"costs": by_squares}), ("none", {})):
        plan = plan_batch(table, None, 2, MicroBatchLimits(1000), balance=by, **costs)
        loads[by] = [float(by_squares(table.lengths[rows]).sum()) for rows in plan.rows]
    assert max(loads["cost"]) == 10_000 < min(max(loads["tokens"]), max(loads["none"]))
    assert [len(rows) for rows in plan.rows] == [16, 15]


def test_groups_stay_whole_by_cost_where_that_is_as_good():
    groups = np.repeat(np.arange(8), 4)
    table = RowTable(np.random.default_rng(0).integers(50, 70, 32), *np.zeros((2, 32), np.int64))
    plan = plan_batch(table, groups, 2, MicroBatchLimits(1000), costs=by_squares, balance="cost")
    assert not set(groups[plan.rows[0]]) & set(groups[plan.rows[1]])


def test_each_micro_batch_has_the_share_that_moves_to_the_host():
    table = RowTable(*(np.array(column, np.int64) for column in ([10, 30, 20, 10, 120], [1] * 5, [0] * 5)))
    plan = plan_rows(table, MicroBatchLimits(40, offload=0.25))
    assert {micro.offload for micro in plan.learn} == {0.25} and plan.learn is plan.score
    plan = plan_rows(table, MicroBatchLimits(40, offload=HOST))
    shares = {int(table.lengths[micro.rows].sum()): micro.offload for micro in plan.learn}
    assert shares.pop(120) == pytest.approx(6 * (120 - 40) / (4 * 120)) and set(shares.values()) == {0.0}
    assert pickle.loads(pickle.dumps(plan)).learn[0].offload == plan.learn[0].offload
    assert {micro.offload for micro in plan_rows(table, MicroBatchLimits(40)).learn} == {0.0}
