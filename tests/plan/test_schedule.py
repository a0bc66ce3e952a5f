"""Schedules against brute force, and for what they promise to ranks that follow them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.work import work_of
from tilth.core.errors import PlanError
from tilth.plan.offload import HostRates, OffloadLimits
from tilth.plan.schedule import loads, schedule

CAPACITY = 16


def seconds(lengths):
    """Linear work and attention."""
    n = np.asarray(lengths, np.float64)
    return n + n**2 / 16


def limits_of(host=np.inf):
    return OffloadLimits(8, 1.0, seconds, HostRates(0.5, host, 1.0))


@st.composite
def batches(draw, most=24):
    """Lengths, ranks, and the keywords of a schedule."""
    ranks = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, CAPACITY * ranks), max_size=most))
    chosen = {
        "balance": draw(st.sampled_from(["tokens", "cost", "none"])),
        "tolerance": draw(st.sampled_from([0.0, 0.02, 0.3])),
        "stages": draw(st.sampled_from([1, 1, 2, 4])),
        "offload": draw(st.sampled_from([None, limits_of(), limits_of(host=12.0)])),
    }
    return lengths, ranks, chosen


def units(rounds):
    return [unit for one in rounds for unit in one]


@settings(max_examples=60)
@given(batches())
def test_each_row_once_within_capacity_and_one_unit_a_round(batch):
    lengths, ranks, chosen = batch
    rounds = schedule(lengths, CAPACITY, ranks, seconds, **chosen)
    found = units(rounds)
    assert sorted(np.concatenate([[], *(u.rows for u in found)]).tolist()) == list(range(len(lengths)))
    for one in rounds:
        members = [rank for unit in one for rank in unit.ranks]
        assert one and len(set(members)) == len(members) and set(members) <= set(range(ranks))
    weight = seconds if chosen["balance"] != "tokens" else np.float64
    for unit in found:
        assert unit.rows.dtype == np.int64 and (np.diff(unit.rows) > 0).all() and list(unit.ranks) == sorted(unit.ranks)
        tokens, d = sum(lengths[r] for r in unit.rows), len(unit.ranks)
        assert unit.cost * d == pytest.approx(sum(float(weight(lengths[r])) for r in unit.rows))
        assert 0 <= unit.offload <= 1 and (unit.offload == 0 or len(unit.rows) == 1)
        assert tokens / d * (2 + 6 * (1 - unit.offload)) / 8 <= CAPACITY + 1e-6
        assert d == 1 or (len(unit.rows) == 1 and tokens > CAPACITY)  # rows that fit a rank send nothing


@given(batches(), st.randoms())
def test_the_order_of_the_rows_does_not_matter(batch, random):
    lengths, ranks, chosen = batch
    if chosen["balance"] == "none":
        return
    shuffled = random.sample(lengths, len(lengths))

    def named(values):
        rounds = schedule(values, CAPACITY, ranks, seconds, **chosen)
        return [sorted((u.ranks, sorted(values[r] for r in u.rows), u.cost, u.offload) for u in one) for one in rounds]

    assert [[x[:2] for x in one] for one in named(lengths)] == [[x[:2] for x in one] for one in named(shuffled)]


@settings(max_examples=60)
@given(batches())
def test_loads_differ_by_the_tolerance_and_the_largest_unit(batch):
    lengths, ranks, chosen = batch
    if chosen["balance"] == "none" or chosen["stages"] > 1:
        return
    rounds = schedule(lengths, CAPACITY, ranks, seconds, **chosen)
    done, found = loads(rounds, ranks), units(rounds)
    total = sum(u.cost * len(u.ranks) for u in found)
    largest = max((u.cost for u in found), default=0.0)
    assert done.max() - done.min() <= chosen["tolerance"] * total / ranks + largest + 1e-6


@given(batches())
def test_rings_do_not_deadlock(batch):
    """Each rank follows its own units; a unit runs when all its members have come to it."""
    lengths, ranks, chosen = batch
    rounds = schedule(lengths, CAPACITY, ranks, seconds, **chosen)
    queue = [[id(u) for u in units(rounds) if rank in u.ranks] for rank in range(ranks)]
    left = units(rounds)
    while left:
        ready = [u for u in left if all(queue[rank][0] == id(u) for rank in u.ranks)]
        assert ready
        for unit in ready:
            for rank in unit.ranks:
                queue[rank].pop(0)
        left = [u for u in left if not any(u is r for r in ready)]


def one_f_one_b(number, stage, stages):
    """Passes of one stage, ("F" or "B", micro-batch), in the order of 1F1B."""
    first = min(stages - 1 - stage, number)
    order = [("F", i) for i in range(first)]
    for i in range(number - first):
        order += [("F", first + i), ("B", i)]
    return order + [("B", i) for i in range(number - first, number)]


@settings(max_examples=40)
@given(batches(most=16), st.sampled_from([2, 3, 4]))
def test_rings_between_pipelines_do_not_deadlock(batch, stages):
    """Stages of one number are a ring, and blanks stand for rounds that a pipeline leaves out before its last gang."""
    lengths, ranks, chosen = batch
    rounds = schedule(lengths, CAPACITY, ranks, seconds, **{**chosen, "stages": stages})
    lists = []
    for rank in range(ranks):
        own = [next((u for u in one if rank in u.ranks), None) for one in rounds]
        last = max((at for at, u in enumerate(own) if u is not None and len(u.ranks) > 1), default=-1)
        lists.append([u for at, u in enumerate(own) if at <= last or u is not None])
    queue = {(r, s): one_f_one_b(len(lists[r]), s, stages) for r in range(ranks) for s in range(stages)}
    done = set()

    def waits(rank, stage, kind, index):
        if queue[rank, stage][:1] != [(kind, index)]:
            return True
        other = stage - 1 if kind == "F" else stage + 1
        return 0 <= other < stages and (rank, other, kind, index) not in done

    while any(queue.values()):
        before = len(done)
        for (rank, stage), todo in queue.items():
            if not todo:
                continue
            kind, index = todo[0]
            unit = lists[rank][index]
            members = (rank,) if unit is None else unit.ranks
            indices = [index if unit is None else next(i for i, u in enumerate(lists[m]) if u is unit) for m in members]
            if any(waits(m, stage, kind, i) for m, i in zip(members, indices)):
                continue
            for m, i in zip(members, indices):
                queue[m, stage].pop(0)
                done.add((m, stage, kind, i))
        assert len(done) > before


def least_makespan(lengths, ranks):
    """Bound of the best: each sequence on any ranks that hold it, as if no gang ever waited."""
    subsets = [c for d in range(1, ranks + 1) for c in itertools.combinations(range(ranks), d)]
    choices = [[c for c in subsets if len(c) * CAPACITY >= n and (len(c) == 1 or n > CAPACITY)] for n in lengths]
    best = math.inf
    for assignment in itertools.product(*choices):
        load = [0.0] * ranks
        for n, members in zip(lengths, assignment):
            for rank in members:
                load[rank] += float(seconds(n)) / len(members)
        best = min(best, max(load))
    return best


@settings(max_examples=40)
@given(st.integers(2, 3), st.data())
def test_near_the_best_makespan(ranks, data):
    lengths = data.draw(st.lists(st.integers(1, CAPACITY * ranks), min_size=1, max_size=5))
    found = loads(schedule(lengths, CAPACITY, ranks, seconds, balance="cost"), ranks).max()
    best = least_makespan(lengths, ranks)
    assert best - 1e-6 <= found <= 1.5 * best + 1e-6


def test_a_gang_of_a_small_batch_is_no_wider_than_pays():
    """17 tokens on 2 ranks beside 10 on the third: on 3 ranks they would leave the 10 for later."""
    gang, alone = sorted(units(schedule([10, 17], CAPACITY, 3, seconds, balance="cost")), key=lambda u: -len(u.ranks))
    assert len(gang.ranks) == 2 and len({*gang.ranks, *alone.ranks}) == 3


def tailed(count, ranks):
    """Heavy-tailed lengths in random order: most fit one rank, the longest takes all."""
    lengths = np.minimum(CAPACITY * ranks / np.arange(1, count + 1) ** 1.3 + 2, CAPACITY * ranks).astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


def test_a_heavy_tail_is_even_only_with_balance():
    ranks = 32
    lengths = tailed(40 * ranks, ranks)
    found = {how: loads(schedule(lengths, CAPACITY, ranks, seconds, balance=how), ranks) for how in ("cost", "none")}
    assert found["cost"].max() < 1.02 * seconds(lengths).sum() / ranks
    assert found["none"].max() > 1.1 * found["cost"].max()


def test_gangs_take_consecutive_ranks():
    lengths = [CAPACITY * 3] * 4 + [CAPACITY * 2] * 2 + [1] * 40
    gangs = [u.ranks for u in units(schedule(lengths, CAPACITY, 16, seconds, balance="cost")) if len(u.ranks) > 1]
    assert len(gangs) == 6 and all(r[-1] - r[0] == len(r) - 1 for r in gangs)


def test_a_gang_that_would_outlast_the_others_gets_more_ranks():
    """64 tokens fit 4 ranks, and the mean load is a fraction of what they would take there."""
    rounds = schedule([64] + [2] * 32, CAPACITY, 16, seconds, balance="cost")
    assert (
        len(units(rounds)[0].ranks) > 8
        and len(units(schedule([64], CAPACITY, 16, seconds, balance="none"))[0].ranks) == 4
    )


def test_pipelines_have_one_level_of_lengths_each_and_short_ones_go_where_there_are_more():
    lengths = [16] * 24 + [8] * 48 + [4] * 96 + [2] * 192
    rounds = schedule(lengths, CAPACITY, 8, seconds, balance="cost", stages=4)
    own = [[u for u in units(rounds) if rank in u.ranks] for rank in range(8)]
    spans = sorted((min(u.cost for u in us), max(u.cost for u in us)) for us in own)
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    time = [sum(u.cost for u in us) + 3 * max(u.cost for u in us) for us in own]
    assert max(time) < 1.2 * min(time)
    assert len(min(own, key=lambda us: us[0].cost)) > 1.2 * len(max(own, key=lambda us: us[0].cost))


def test_a_sequence_longer_than_all_ranks_is_refused():
    with raises(PlanError, "layout.hdp") as caught:
        schedule([3, 4 * CAPACITY + 1], CAPACITY, 4, seconds)
    assert str(4 * CAPACITY + 1) in str(caught.value)
    assert schedule([3, 4 * CAPACITY + 1], CAPACITY, 4, seconds, offload=limits_of())


@pytest.mark.parametrize("cost", [np.nan, np.inf, -1.0])
def test_a_cost_that_is_none_is_refused(cost):
    with raises(PlanError, "costs"):
        schedule([5, 3], 8, 2, lambda lengths: np.where(lengths == 3, cost, lengths), balance="cost")


def test_nothing():
    for balance in ("tokens", "cost", "none"):
        for stages in (1, 2):
            assert schedule([], CAPACITY, 4, seconds, balance=balance, stages=stages) == []


def test_work_of_a_schedule_grows_as_the_batch():
    few, many = (work_of(lambda: schedule(tailed(60 * r, r), CAPACITY, r, seconds, balance="cost")) for r in (8, 32))
    assert many < 8 * few


def test_gangs_are_not_widened_beyond_what_their_ring_takes():
    """Passing 64 tokens around takes 64, as long as 5 ranks compute; narrower plans are as fast and are kept."""
    rounds = schedule([64, 1, 1], CAPACITY, 16, seconds, balance="cost", ring=1.0)
    gang = next(u for u in units(rounds) if len(u.ranks) > 1)
    assert len(gang.ranks) == 5 and gang.cost == 64
