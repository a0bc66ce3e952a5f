"""Where the time went: parts sum to the whole, whatever overlaps; against a nanosecond-by-nanosecond reference."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.tree import s, tree, two_workers
from tests.errors import raises
from tests.examples import examples
from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, DATA, OTHER, PAUSE, PEERS, STAGES, account, covered
from tilth.core.errors import DataError

NS = 1e-9


def parts(found, rank):
    row = found.by_rank[found.ranks.index(rank)]
    return {name: round(float(t) / NS) for name, t in zip(found.names, row) if t}


def test_two_workers_in_closed_form():
    found = account(tree(*two_workers()))
    assert found.ranks == (0, 1) and found.steps.tolist() == [1, 2]
    assert found.seconds == pytest.approx([110 * NS, 70 * NS])
    # nobody is in a call in 0-5, 50-55, 94-114, 138-154, 178-180
    assert parts(found, 0) == {
        "generate": 19, "update": 15, "evaluate": 24, "save": 20, COMMUNICATION: 20, OTHER: 1,
        CONTROLLER: 48, PEERS: 33,
    }  # fmt: skip
    assert parts(found, 1) == {
        "generate": 41, "update": 27, "save": 24, COMMUNICATION: 10, PAUSE: 3, DATA: 2, OTHER: 1,
        CONTROLLER: 48, PEERS: 24,
    }  # fmt: skip
    assert found.busy == pytest.approx(np.array([79, 95]) * NS)
    assert found.whole == pytest.approx(180 * NS) and found.controller == pytest.approx((180 - 50 - 42 - 27 - 27) * NS)
    assert {role: (t / NS).round().tolist() for role, t in found.roles.items()} == {
        "rollout": [44, 42], "policy": [35, 53],
    }  # fmt: skip
    meetings = found.meetings
    assert (meetings.waiting / NS).round().tolist() == [10, 0] and (meetings.transfer / NS).round().tolist() == [10, 10]
    assert (meetings.blamed / NS).round().tolist() == [0, 10] and meetings.by_op == {"all_reduce": 15 * NS}


def test_phases_come_first_and_by_their_time():
    found = account(tree(*two_workers()))
    assert found.names[:4] == ("generate", "save", "update", "evaluate")
    assert next(iter(found.parts)) == "generate" and "data" in found.parts


def test_chosen_steps_alone():
    one, two = (account(tree(*two_workers()), range(k, k + 1)) for k in (1, 2))
    both = account(tree(*two_workers()))
    assert np.allclose(one.by_rank + two.by_rank, both.by_rank, atol=0)
    assert parts(one, 1) == {
        "generate": 41, "update": 27, COMMUNICATION: 10, PAUSE: 3, DATA: 2, OTHER: 1, CONTROLLER: 26,
    }  # fmt: skip
    assert np.allclose(np.concatenate([one.by_step, two.by_step]), both.by_step, atol=0)


def test_inline_what_no_span_names_is_the_process_s_own():
    found = account(tree(
        s("step", 0, 50, s("call", 1, 20, s("generate", 2, 18), seq=1), s("evaluate", 20, 30, s("call", 21, 29,
          s("generate", 22, 28), seq=2)), rank=0, step=1),
        s("save", 55, 60, rank=0),
        s("all_reduce", 3, 9, rank=0, step=1, thread="beside"),
        s("all_reduce", 45, 55, rank=0, step=1, thread="beside"),
    ))  # fmt: skip
    assert found.ranks == (0,) and parts(found, 0) == {"generate": 16, "evaluate": 10, "save": 5, OTHER: 29}
    assert found.controller == found.whole == pytest.approx(60 * NS)
    assert found.meetings.hidden == pytest.approx([11 * NS])  # 6, and 5 until the step ends


def test_a_receive_waits_for_its_send():
    found = account(tree(
        s("step", 0, 100, rank=2, step=1),
        s("call", 0, 90, s("send", 60, 70, detail="0>1", seq=0), rank=0, step=1, seq=1),
        s("call", 0, 90, s("receive", 10, 75, detail="0>1", seq=0), rank=1, step=1, seq=1),
    ))  # fmt: skip
    assert (found.meetings.waiting / NS).round().tolist() == [0, 50]
    assert (found.meetings.transfer / NS).round().tolist() == [10, 15]
    assert (found.meetings.blamed / NS).round().tolist() == [50, 0]
    assert parts(found, 0)[COMMUNICATION] == 10 and STAGES not in parts(found, 0)
    assert parts(found, 1)[STAGES] == 65 and COMMUNICATION not in parts(found, 1)
    assert (found.busy / NS).round().tolist() == [80, 25]


def test_a_meeting_whose_other_members_are_not_there_is_transfer():
    found = account(tree(
        s("step", 0, 100, rank=1, step=1),
        s("call", 0, 90, s("broadcast", 60, 70, detail="0,1", seq=3), rank=0, step=1, seq=1),
    ))  # fmt: skip
    assert found.meetings.waiting.tolist() == [0] and found.meetings.transfer == pytest.approx([10 * NS])


def test_two_of_three_members_say_nothing_of_who_came_last():
    """Rank 2's events are not there yet: it may have come after both."""
    found = account(tree(
        s("step", 0, 100, rank=3, step=1),
        s("call", 0, 90, s("all_reduce", 30, 70, detail="0,1,2", seq=0), rank=0, step=1, seq=1),
        s("call", 0, 90, s("all_reduce", 60, 70, detail="0,1,2", seq=0), rank=1, step=1, seq=1),
        s("call", 0, 90, rank=2, step=1, seq=1),
    ))  # fmt: skip
    assert found.meetings.waiting.tolist() == [0, 0, 0] == found.meetings.blamed.tolist()
    assert found.meetings.transfer == pytest.approx(np.array([40, 10, 0]) * NS)


def test_who_waits_waits_no_longer_than_its_communication():
    """Rank 1's clock is off, or what rank 0 sent was buffered: its span is over before the other has begun."""
    found = account(tree(
        s("step", 0, 100, rank=2, step=1),
        s("call", 0, 90, s("send", 10, 12, detail="0>1", seq=0), s("gc", 20, 80), rank=0, step=1, seq=1),
        s("call", 0, 90, s("receive", 60, 75, s("gc", 62, 65), detail="0>1", seq=0), rank=1, step=1, seq=1),
    ))  # fmt: skip
    assert (found.meetings.waiting / NS).round().tolist() == [2, 0]
    assert (found.meetings.transfer / NS).round().tolist() == [0, 12]
    assert (found.meetings.waiting + found.meetings.transfer)[0] == pytest.approx(parts(found, 0)[COMMUNICATION] * NS)


def many(tokens, slow=(1, 1, 1, 1)):
    """A step in which each rank has passes of so many tokens (in the mean); one costs 50 ns, and 2 ns a token."""
    rng, calls = np.random.default_rng(0), []
    for rank, (mean, times) in enumerate(zip(tokens, slow)):
        amounts = np.append(rng.integers(mean // 2, 2 * mean, 20), [10, 2000])  # all ranks have short and long ones
        at = np.append(0, np.cumsum((50 + 2 * amounts) * times))
        inside = [s("forward", int(a), int(b), tokens=int(n)) for a, b, n in zip(at, at[1:], amounts)]
        calls.append(s("call", 0, int(at[-1]), *inside, rank=rank, step=1, seq=1))
    return tree(s("step", 0, 200_000, rank=len(tokens), step=1), *calls)


def test_pace_is_for_the_cost_of_the_work_not_its_tokens():
    """Rank 0 has short passes, which take more a token, and rank 3 long ones: none of them is slow."""
    assert account(many((20, 200, 200, 900))).pace == pytest.approx([1] * 4, abs=1e-6)
    assert account(many((20, 200, 200, 900), slow=(1, 1, 2, 1))).pace == pytest.approx([1, 1, 2, 1], abs=1e-2)


def test_work_that_no_other_rank_shares_is_of_no_pace():
    own = s("call", 150_000, 190_000, s("sample", 150_000, 190_000), rank=1, step=1, seq=2)
    found = account(tree(
        s("step", 0, 200_000, rank=3, step=1),
        *[s("call", 0, 20, s("forward", 0, 20, tokens=7), rank=r, step=1, seq=1) for r in (0, 2)],
        own,
    ))  # fmt: skip
    assert found.pace[[0, 2]].tolist() == [1, 1] and np.isnan(found.pace[1])


def test_a_rank_ten_percent_slow_is_found_among_many():
    """As by MegaScale's heat map: 64 ranks, noise of 5 % a span. The slow one has less to do, so it is not the last."""
    rng, roots = np.random.default_rng(0), []
    for k in range(4):
        roots.append(s("step", 10**9 * k, 10**9 * k + 9 * 10**8, rank=64, step=k))
        for r in range(64):
            tokens = rng.integers(100, 160, 6 if r == 41 else 8)
            took = tokens * rng.normal(1, 0.05, len(tokens)) * (1.1e5 if r == 41 else 1e5)
            at = 10**9 * k + np.append(0, np.cumsum(took)).astype(int)
            inside = [s("forward", a, b, tokens=int(n)) for a, b, n in zip(at, at[1:], tokens)]
            roots.append(s("call", at[0], at[-1], *inside, rank=r, step=k, seq=k))
    found = account(tree(*roots))
    assert found.pace.argmax() == 41 and found.pace[41] == pytest.approx(1.1, abs=0.03)
    assert np.sort(found.pace)[-2] < 1.05 and found.busy.argmin() == 41


def test_pace_of_one_rank_is_not_known():
    found = account(tree(s("step", 0, 9, s("call", 0, 8, s("forward", 0, 5, tokens=3), seq=0), rank=0, step=1)))
    assert np.isnan(found.pace).all()


def test_no_steps():
    with raises(DataError, "steps.ended"):
        account(tree(s("call", 0, 5, rank=0, seq=1)))
    with raises(DataError, "steps"):
        account(tree(*two_workers()), range(5, 9))


# ---- against a reference ----

INNER = ("generate", "update", "forward", "all_reduce", "gc", "load", "sample", "save.begin", "mine")
KINDS = {"all_reduce": COMMUNICATION, "gc": PAUSE}
PHASED = ("generate", "update")


@st.composite
def spans(draw, low, high, depth):
    """Disjoint spans within [low, high], each with such spans inside."""
    cuts = sorted(draw(st.sets(st.integers(low, high), min_size=0, max_size=6)))
    found = []
    for a, b in zip(cuts[::2], cuts[1::2]):
        inside = draw(spans(a, b, depth - 1)) if depth else []
        found.append(s(draw(st.sampled_from(INNER)), a, b, *inside))
    return found


@st.composite
def runs(draw):
    """A controller with steps, and calls of up to three workers, some of them made inside of an evaluation."""
    bounds = sorted(draw(st.sets(st.integers(0, 120), min_size=2, max_size=4)))
    steps = [s("step", a, b, rank=3, step=i) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    numbers, calls, asked = iter(range(100)), [], []
    for rank in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(bounds[0], bounds[-1]), min_size=2, max_size=6)))
        for a, b in zip(cuts[::2], cuts[1::2]):
            number = next(numbers)
            calls.append(s("call", a, b, *draw(spans(a, b, 2)), rank=rank, seq=number))
            if draw(st.booleans()):
                asked.append(s("submit", bounds[0], bounds[0], rank=3, seq=number))
    evaluate = s("evaluate", bounds[0], bounds[0], *asked, rank=3)
    return [*steps, evaluate, *calls], bounds, calls, {a["seq"] for a in asked}


def paint(line, low, node, outer, evaluated):
    """Each nanosecond belongs to the innermost span there, as if a reader went along with a ruler."""
    phase = outer or (node["op"] if node["op"] in PHASED else None)
    name = "evaluate" if evaluated else phase
    said = KINDS.get(node["op"]) or name or (DATA if node["op"] == "load" else OTHER)
    for t in range(node["start"], node["start"] + node["duration"]):
        line[t - low] = said
    for child in node["inside"]:
        paint(line, low, child, phase, evaluated)


@settings(max_examples=examples(80), deadline=None)
@given(runs())
def test_as_if_painted(made):
    roots, bounds, calls, asked = made
    found = account(tree(*roots))
    low, high = bounds[0], bounds[-1]
    lines = {rank: [None] * (high - low) for rank in found.ranks}
    for call in calls:
        paint(lines[call["rank"]], low, call, None, call["seq"] in asked)
    free = [all(line[t] is None for line in lines.values()) for t in range(high - low)]
    for rank, line in lines.items():
        line = [p or (CONTROLLER if free[t] else PEERS) for t, p in enumerate(line)]
        expected = {name: line.count(name) for name in set(line)}
        assert parts(found, rank) == expected
    assert np.allclose(found.by_rank.sum(1), found.whole, atol=0)
    assert (found.by_step.sum(1) > found.seconds * (1 - 1e-9)).all()  # more where a call goes on into the next step


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12), st.lists(st.integers(-5, 90)))
def test_covered_counts_every_moment_once(intervals, at):
    intervals = sorted((a, a + d) for a, d in intervals)
    start, end = (np.array([i[k] for i in intervals], np.int64) for k in (0, 1))
    expected = [sum(any(a <= t < b for a, b in intervals) for t in range(-10, until)) for until in at]
    assert covered(start, end, np.array(at, np.int64)).tolist() == expected
