"""Pictures of a trace: every path lies where its spans are, parts sum to the whole, pages stay small."""

import itertools
import re
import xml.dom.minidom

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.tree import s, tree, two_workers
from tests.examples import examples
from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, OTHER, PAUSE, PEERS, account
from tilth.ui.charts import HEIGHT, WIDTH, nice
from tilth.ui.timeline import (
    BARS,
    BLANK,
    COLUMNS,
    FIXED,
    LANES,
    MEETING,
    ROWS,
    chosen,
    divided,
    health,
    hues,
    lanes,
    runs,
    stack,
    timeline,
    typical,
)


def parsed(html):
    return xml.dom.minidom.parseString(f"<div>{html}</div>")


def shares(lane, names):
    """What part of a lane each name has; what is blank left out."""
    return {n: float((lane.codes == i).mean()) for i, n in enumerate(names) if (lane.codes == i).any()}


def test_lanes_are_the_spans_of_the_step():
    made, names, seconds = lanes(tree(*two_workers()), 1, (0, 1))
    assert [lane.name for lane in made] == ["controller", "rank 0", "rank 1"] and seconds == pytest.approx(110e-9)
    one = {"generate": 41, "update": 27, COMMUNICATION: 10, PAUSE: 3, "data": 2, OTHER: 1}
    zero = {"generate": 19, "update": 15, COMMUNICATION: 10, MEETING: 10, OTHER: 1}
    for lane, expected in zip(made[1:], (zero, one)):
        assert shares(lane, names) == pytest.approx({n: t / 110 for n, t in expected.items()}, abs=2 / COLUMNS)
    awaits = 50 + 42
    assert shares(made[0], names) == pytest.approx({OTHER: (100 - awaits) / 110}, abs=3 / COLUMNS)
    first = runs(made[1].codes)[0]
    assert names[first[0]] == "generate" and abs(first[1] - 5 / 110 * COLUMNS) <= 1


def test_what_follows_a_step_is_in_its_lane():
    made, names, seconds = lanes(tree(*two_workers()), 2, (0, 1))
    assert seconds == pytest.approx(70e-9)
    expected = {"evaluate": 24 / 70, "save": 20 / 70}
    assert shares(made[1], names) == pytest.approx(expected, abs=2 / COLUMNS)


def test_a_span_over_two_lanes_and_one_too_short_to_see():
    events = tree(
        s("step", 0, 10**6, rank=1, step=1), s("step", 10**6, 2 * 10**6, rank=1, step=2),
        s("call", 500_000, 1_500_000, s("gc", 600_000, 600_050), rank=0, step=1, seq=0),
    )  # fmt: skip
    for step, first, count in ((1, 500, 500), (2, 0, 500)):
        made, names, _ = lanes(events, step, (0,))
        assert runs(made[1].codes) == [(names.index(OTHER), first, count)]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(BLANK, 3), min_size=1, max_size=40))
def test_stretches_make_the_lane_again(codes):
    again = np.full(len(codes), BLANK)
    found = runs(np.array(codes))
    for code, first, count in found:
        assert code != BLANK and count > 0 and (again[first : first + count] == BLANK).all()
        again[first : first + count] = code
    assert again.tolist() == codes
    assert all(a[0] != b[0] or a[1] + a[2] < b[1] for a, b in itertools.pairwise(found))


def test_the_figure_s_paths_are_the_lanes():
    events = tree(*two_workers())
    page = parsed(timeline(events, 1, "A <typical> step"))
    made, names, _ = lanes(events, 1, (0, 1))
    drawn = page.getElementsByTagName("svg")
    assert "communication is pale until the last member is there" in page.toxml()
    assert len(drawn) == 3 and "A <typical> step" in page.getElementsByTagName("strong")[0].firstChild.data
    for svg, lane in zip(drawn, made):
        found = np.full(COLUMNS, BLANK)
        for path in svg.getElementsByTagName("path"):
            name = path.firstChild.firstChild.data.split(": ")[1]
            assert path.getAttribute("class") == f"band {hues(names)[name]}"
            for a, b in re.findall(r"M(\d+) 0h(\d+)v26h-\d+z", path.getAttribute("d")):
                assert (found[int(a) : int(a) + int(b)] == BLANK).all()
                found[int(a) : int(a) + int(b)] = names.index(name)
        assert found.tolist() == lane.codes.tolist()


def many(ranks, steps=1):
    """Runs of any size: every rank generates, rank r a little longer than r - 1."""
    for k in range(steps):
        yield s("step", 1000 * k, 1000 * k + 900, rank=ranks, step=k)
        for r in range(ranks):
            yield s("call", 1000 * k, 1000 * k + 100 + r, s("generate", 1000 * k, 1000 * k + 100 + r), rank=r, step=k)


def test_many_ranks_are_cut_and_it_is_said():
    text = timeline(tree(*many(40)), 0, "step")
    assert text.count("<svg") == LANES + 1 and f"{LANES} of 40 ranks" in text
    text = timeline(tree(*many(40)), 0, "step", (3, 39, 17))
    assert re.findall(r"<span>(rank \d+)", text) == ["rank 3", "rank 17", "rank 39"] and "3 of 40 ranks" in text


def test_typical_and_longest():
    took = [10, 30, 20, 90, 21]
    starts = np.cumsum([0, *took])
    found = account(tree(*[s("step", a, a + d, rank=0, step=7 + i) for i, (a, d) in enumerate(zip(starts, took))]))
    assert typical(found) == (11, 10)
    assert typical(found, np.array([True, True, False, False, False])) == (7, 8)
    assert typical(found, np.zeros(5, bool)) == (11, 10)


def test_the_stack_sums_to_the_steps():
    found = account(tree(*two_workers()))
    page = parsed(stack(found))
    paths = [p for p in page.getElementsByTagName("path") if "band" in p.getAttribute("class")]
    top = nice(0.0, float(found.seconds.max()), 3)[-1]
    corners = {}
    for path in paths:
        low, high = outline(path.getAttribute("d"))
        corners[path.firstChild.firstChild.data] = (low, high)
        assert (low <= high).all()
    heights = {name: (high - low) / HEIGHT * top for name, (low, high) in corners.items()}
    assert set(heights) == set(found.parts)
    for name, expected in zip(found.names, found.by_step.T):
        if name in heights:
            assert heights[name] == pytest.approx(expected, abs=2e-9)
    assert sum(heights.values()) == pytest.approx(found.seconds, abs=2e-9)


def outline(d):
    """Heights of the lower and of the upper edge of a stair, from the ground, column by column."""
    moves = re.findall(r"([MHV])([\d.e+-]+)(?: ([\d.e+-]+))?", d)
    y, levels = float(moves[0][2]), []
    for kind, a, _ in moves[1:]:
        if kind == "V":
            y = float(a)
        elif float(a) != (levels[-1][0] if levels else 0.0):
            levels.append((float(a), y))
    half = len(levels) // 2
    upper, lower = [y for _, y in levels[:half]], [y for _, y in levels[half:]][::-1]
    return HEIGHT - np.array(lower), HEIGHT - np.array(upper)


def test_many_steps_stay_small():
    text = stack(account(tree(*many(1, steps=1000))))
    assert len(text) < 20_000 and f"{WIDTH:g}" in text
    edges = {m for m in re.findall(r"H([\d.]+)", parsed(text).getElementsByTagName("path")[0].getAttribute("d"))}
    assert len(edges) == BARS + 1


def test_colours_are_the_same_everywhere_and_each_phase_has_its_own():
    found = account(tree(*two_workers()))
    colours = hues(found.names)
    phases = [n for n in found.names if n not in FIXED and n not in (OTHER, "data")]
    assert len({colours[n] for n in phases}) == len(phases) == 4
    assert colours[COMMUNICATION] == "ink" and colours[PEERS] != colours[CONTROLLER]
    page = parsed(divided(found))
    shown = {i.getAttribute("title"): i.getAttribute("class") for i in page.getElementsByTagName("i")}
    assert {n: c for n, c in shown.items() if n} == {n: colours[n] for n in found.parts}
    flex = [float(i.getAttribute("style")[5:]) for i in page.getElementsByTagName("i") if i.getAttribute("title")]
    assert sum(flex) == pytest.approx(1, abs=1e-4)


def cells(html):
    """Text of each row of a table."""
    rows = parsed(html).getElementsByTagName("tr")
    text = lambda node: node.data if node.nodeType == 3 else "".join(map(text, node.childNodes))  # noqa: E731
    return [[text(c) for c in row.childNodes] for row in rows]


def test_health_has_a_row_a_rank():
    found = account(tree(*two_workers()))
    head, zero, one = cells(health(found))
    assert head == ["rank", "parts", "busy", "communication", "gc", "pipeline", "waits", "waited for", "pace"]
    assert zero == ["0", "", "44 %", "11 %", "–", "–", "45 %", "–", f"{found.pace[0]:.2f}"]
    assert one == ["1", "", "53 %", "5.6 %", "1.7 %", "–", "40 %", "5.6 %", f"{found.pace[1]:.2f}"]


def test_a_slow_rank_is_marked():
    roots = [s("step", 0, 100, rank=4, step=0)]
    for r in range(4):
        took = 40 if r == 2 else 20
        roots.append(s("call", 0, 90, s("forward", 0, took, tokens=10), rank=r, step=0, seq=0))
    text = health(account(tree(*roots)))
    assert [row[-1] for row in cells(text)[1:]] == ["1.00", "1.00", "2.00", "1.00"]
    assert text.count('class="clay">2.00') == 1


def test_of_many_ranks_the_strange_ones_are_shown():
    roots = [s("step", 0, 1000, rank=60, step=0)]
    roots += [s("call", 0, 700 if r in (7, 31) else 300, rank=r, step=0, seq=r) for r in range(60)]
    found = account(tree(*roots))
    shown = chosen(found)
    assert {7, 31} <= set(shown) and len(shown) == ROWS and shown == sorted(shown)
    assert "36 ranks that differ less" in health(found)
    assert chosen(found, 2) == [7, 31]
