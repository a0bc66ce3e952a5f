"""Which sample of which source stands at a position: weights, schedules, ends; a pure function of seed and position."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.config.schema import MixtureSource
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.data.mixture import Mixture, MixtureRow
from tilth.data.order import Order

ORDER = stream(5, "examples")


def part(name, weight=1.0, **more):
    return MixtureSource(name=name, weight=weight, **more)


def mixture(*parts, sizes=(7, 11, 3), each=4, lengths=None):
    ends = np.cumsum(sizes[: len(parts)])
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    return Mixture(parts, rows, each, lengths=lengths)


def reference(parts, sizes, each, count, lengths=None):
    """The source of each sample and its place there, one at a time, in whole numbers; fewer if the mixture ends."""
    low, high = stream(ORDER.seed, ORDER.id, "mixture").bits(0, 2).tolist()
    counts, tokens, found = [0] * len(parts), 0, []
    starts = np.cumsum([0, *sizes])
    for position in range(count):
        weights = []
        for own, taken, size in zip(parts, counts, sizes):
            now = tokens if own.schedule_by == "tokens" else position // each
            factor = ([1.0] + [own.schedule[p] for p in sorted(own.schedule, key=int) if int(p) <= now])[-1]
            weights.append(0.0 if own.at_end == "leave" and taken >= size else own.weight * factor)
        if not sum(weights):
            return found, "data.mixture.weight"
        share = ((high << 32 | low) + position * 0x9E3779B97F4A7C15) % 2**64 / 2**64
        edge, number = 0.0, 0
        for number, weight in enumerate(weights):
            edge += weight
            if share < edge / sum(weights):
                break
        if parts[number].at_end == "stop" and counts[number] >= sizes[number]:
            return found, f"data.mixture.{parts[number].name}.at_end"
        epoch, place = divmod(counts[number], sizes[number])
        own = ORDER if len(parts) == 1 else stream(ORDER.seed, ORDER.id, "source", parts[number].name)
        row = starts[number] + Order(np.arange(sizes[number])).take(own, epoch * sizes[number] + place, 1)[0]
        counts[number] += 1
        tokens += 0 if lengths is None else int(lengths[row])
        found.append(int(row))
    return found, ""


CASES = [
    (part("a"), part("b", 2.0), part("c", 0.25)),
    (part("a", schedule={"0": 1.0, "5": 0.0}), part("b", schedule={"0": 0.5, "3": 2.0, "9": 0.1})),
    (part("a", at_end="leave"), part("b", 3.0), part("c", at_end="leave", schedule={"0": 0.0, "4": 1.0})),
    (part("a", schedule={"0": 1.0, "40": 0.2}, schedule_by="tokens"), part("b", schedule={"0": 1.0, "6": 4.0})),
]


@pytest.mark.parametrize("parts", CASES, ids=["weights", "steps", "leave", "tokens"])
def test_each_sample_is_that_of_a_count_one_by_one(parts):
    lengths = np.arange(21) % 5 + 1 if parts[0].schedule_by == "tokens" else None
    made = mixture(*parts, lengths=lengths)
    expected, _ = reference(parts, (7, 11, 3)[: len(parts)], 4, 70, lengths)
    assert made.take(ORDER, 0, 70).tolist() == expected


FACTORS = st.sampled_from([0.0, 0.1, 1.0, 2.5])
SCHEDULES = st.dictionaries(st.integers(1, 40), FACTORS, max_size=3)


@st.composite
def parts_of_any_kind(draw, name):
    points = draw(SCHEDULES)
    schedule = {"0": draw(FACTORS)} | {str(at): factor for at, factor in points.items()} if points else {}
    by, at_end = draw(st.sampled_from(["steps", "tokens"])), draw(st.sampled_from(["repeat", "leave", "stop"]))
    return part(name, draw(FACTORS), schedule=schedule, schedule_by=by, at_end=at_end)


@settings(max_examples=examples(200), deadline=None)
@given(
    parts=st.integers(1, 4).flatmap(lambda n: st.tuples(*(parts_of_any_kind(name) for name in "abcd"[:n]))),
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    each=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 90), max_size=3),
    block=st.sampled_from([1, 7, 64]),
)
def test_any_mixture_is_that_of_a_count_one_by_one_wherever_a_resume_begins(parts, sizes, each, cuts, block):
    """Also where it ends, and by which source."""
    sizes = sizes[: len(parts)]
    lengths = np.arange(sum(sizes)) * 7 % 5 + 1
    expected, key = reference(parts, sizes, each, 90, lengths)
    borders = sorted(min(cut, len(expected)) for cut in (0, *cuts, 90))
    with patch("tilth.data.mixture._BLOCK", block):
        for start, stop in pairwise(borders):  # a new one knows the position alone
            made = mixture(*parts, sizes=sizes, each=each, lengths=lengths)
            assert made.take(ORDER, start, stop - start).tolist() == expected[start:stop]
        made.check(ORDER, len(expected))
        for end in (made.check, lambda order, count: made.take(order, count - 1, 1)) if key else ():
            with raises(DataError, key):
                end(ORDER, len(expected) + 1)


@settings(max_examples=examples(12), deadline=None)
@given(cuts=st.lists(st.integers(0, 190), min_size=1, max_size=3), case=st.sampled_from(CASES))
def test_a_draw_needs_its_position_and_nothing_else(cuts, case):
    lengths = np.arange(21) % 5 + 1
    with patch("tilth.data.mixture._BLOCK", 16):
        whole = mixture(*case, lengths=lengths).take(ORDER, 0, 200)
        made, borders = mixture(*case, lengths=lengths), sorted([0, *cuts, 200])
        drawn = [made.take(ORDER, a, b - a) for a, b in pairwise(borders)]
        assert np.concatenate(drawn).tolist() == whole.tolist()
        assert mixture(*case, lengths=lengths).take(ORDER, cuts[0], 5).tolist() == whole[cuts[0] : cuts[0] + 5].tolist()


def test_a_source_leaves_at_one_place_wherever_draws_begin():
    parts = (part("a", 0.2, at_end="leave"), part("b", 0.4), part("c", 0.4))
    for seed in range(12):
        order = stream(seed, "examples")
        whole = mixture(*parts, sizes=(7, 33, 50)).take(order, 0, 80).tolist()
        for each in (3, 4):
            made = mixture(*parts, sizes=(7, 33, 50))
            drawn = [made.take(order, at, min(each, 80 - at)) for at in range(0, 80, each)]
            assert np.concatenate(drawn).tolist() == whole


def test_shares_are_those_of_the_weights_in_every_stretch():
    made = mixture(part("a", 5.0), part("b", 3.0), part("c", 2.0), sizes=(500, 500, 500))
    for start in (0, 17, 1_000):
        counts = made.counts(made.take(ORDER, start, 1000))
        assert all(abs(counts[name] - share) <= 6 for name, share in (("a", 500), ("b", 300), ("c", 200)))


def test_each_sample_of_a_source_comes_once_in_its_epoch():
    made = mixture(part("a"), part("b", 2.0))
    drawn = made.take(ORDER, 0, 600)
    mine = drawn[drawn < 7]
    assert len(mine) > 150
    for epoch in range(len(mine) // 7):
        assert sorted(mine[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_one_epoch_of_all_is_each_sample_once():
    parts = [part(name, weight, at_end="leave") for name, weight in (("a", 1.0), ("b", 5.0), ("c", 0.1))]
    made = mixture(*parts)
    assert sorted(made.take(ORDER, 0, 21).tolist()) == list(range(21))
    with raises(DataError, "data.mixture.weight"):
        made.take(ORDER, 0, 22)
    assert made.ends(ORDER, 0, 21)[0] == "source a has given all of its 7 samples, and leaves the mixture"


def test_one_source_is_drawn_as_without_a_mixture():
    rows = np.array([2, 3, 5, 8])
    made = Mixture([part("a")], [rows], 4)
    assert made.take(ORDER, 3, 30).tolist() == Order(rows).take(ORDER, 3, 30).tolist() and len(made) == 4


def test_seeds_and_streams_differ():
    drawn = [
        mixture(part("a"), part("b")).take(one, 0, 60).tolist() for one in (ORDER, stream(5, "prompts"), stream(6, "x"))
    ]
    assert len(set(map(tuple, drawn))) == 3


def test_the_order_of_sources_does_not_change_what_each_gives():
    """A source's own order comes from its name: a further source leaves it as it is."""
    alone = mixture(part("a"), part("b", 0.0)).take(ORDER, 0, 7)
    more = mixture(part("a"), part("b", 2.0)).take(ORDER, 0, 40)
    assert more[more < 7][:7].tolist() == alone.tolist()


# ---- ends ----


def test_a_source_that_stops_the_run_names_itself():
    made = mixture(part("a", at_end="stop"), part("b"))
    with raises(DataError, "data.mixture.a.at_end"):
        made.take(ORDER, 0, 40)
    with raises(DataError, "data.mixture.a.at_end"):
        made.check(ORDER, 40)
    made.check(ORDER, 10)
    assert len(made.take(ORDER, 0, 12)) == 12


def test_a_schedule_that_ends_before_the_run():
    made = mixture(part("a", schedule={"0": 1.0, "3": 0.0}), part("b", schedule={"0": 1.0, "3": 0.0}))
    made.check(ORDER, 12)
    with raises(DataError, "data.mixture.weight"):
        made.check(ORDER, 13)


def test_a_source_without_a_sample():
    with raises(DataError, "data.mixture.b.empty"):
        mixture(part("a"), part("b"), sizes=(4, 0))


# ---- figures ----


def test_counts_and_table():
    made = mixture(part("a", 3.0), part("b"), part("c", 0.0, schedule={"0": 1.0}), lengths=np.arange(21))
    assert made.counts(np.array([0, 6, 7, 17, 20])) == {"a": 2, "b": 2, "c": 1}
    assert made.table() == [
        MixtureRow("a", 7, 21, 0.75), MixtureRow("b", 11, sum(range(7, 18)), 0.25), MixtureRow("c", 3, 57, 0.0)
    ]  # fmt: skip
    assert mixture(part("a"), part("b")).table()[0].tokens is None


def test_the_end_of_an_epoch_is_told_once():
    made = mixture(part("a"), part("b"))
    lines = [line for start in range(0, 60, 4) for line in made.ends(ORDER, start, 4)]
    assert lines.count("source a has given all of its 7 samples, and begins again") == 30 // 7
