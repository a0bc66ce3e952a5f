"""Curves: ranges, ticks, thinning, and the numbers that go along for the pointer."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.ui.charts import FORMS, HEIGHT, POINTS, WIDTH, Frame, charts, decades, draw, nice, smooth, thin

finite = st.floats(-1e9, 1e9)


def records(n=10, phase="grpo", **metrics):
    return [{"step": i + 1, "phase": phase} | {k: f(i) for k, f in metrics.items()} for i in range(n)]


def drawn(rows, title):
    for chart, curves in charts(rows):
        if chart.title == title:
            return draw(chart, curves, (rows[0]["step"], rows[-1]["step"]))
    raise AssertionError(f"no chart {title}: {[c.title for c, _ in charts(rows)]}")


@given(finite, finite)
def test_ticks_cover_the_range_in_few_round_steps(a, b):
    low, high = min(a, b), max(a, b)
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-3):
        return
    ticks = nice(low, high)
    steps = [y - x for x, y in itertools.pairwise(ticks)]
    slack = 1e-6 * (high - low)
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack and 2 <= len(ticks) <= 8
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert any(mantissa == pytest.approx(m, rel=1e-3) for m in (1, 2, 2.5, 5, 10))


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-8])
def test_a_flat_curve_has_a_range(value):
    ticks = nice(value, value)
    assert ticks[0] < value < ticks[-1]


@given(st.floats(1e-12, 1e3), st.floats(1e-12, 1e3))
def test_decades(a, b):
    low, high = min(a, b), max(a, b)
    ticks = decades(low, high)
    assert ticks[0] <= low * 1.001 and ticks[-1] >= high * 0.999 and 2 <= len(ticks) <= 6


@given(st.lists(finite, min_size=1, max_size=2000), st.integers(2, 50))
def test_thinning_keeps_ends_order_and_the_band(values, limit):
    points = list(enumerate(values))
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 1) or len(points) <= limit
    assert kept[-1] == points[-1] and kept[0][0] <= points[-1][0] / max(limit - 1, 1) + 1
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert min(values) - 1e-3 <= min(y for _, y in kept) and max(y for _, y in kept) <= max(values) + 1e-3


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_an_axis_of_shares_never_leaves_0_to_1(values):
    rows = records(len(values), **{"groups/flat": lambda i: values[i], "accuracy/heldout": lambda i: values[i]})
    for title in ("Flat groups", "Held-out accuracy"):
        _, data = drawn(rows, title)
        low, high = data["y"]
        assert low == 0 and max(values) <= high <= 1 + 1e-9 and high > 0


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_amounts_are_never_below_0(value):
    _, data = drawn(records(3, **{"length/mean": lambda i: value}), "Completion length")
    assert data["y"][0] == 0 < data["y"][1] and data["y"][1] >= value


def test_answers_are_told_by_their_accuracy_or_by_their_reward():
    both = records(3, **{"accuracy/heldout": lambda i: 0.5, "reward/heldout": lambda i: 0.5})
    assert [c.title for c, _ in charts(both)] == ["Held-out accuracy"]
    mixed = [*both, {"step": 4, "phase": "grpo", "reward/heldout": 0.25}]
    ((chart, (line,)),) = charts(mixed)
    assert chart.title == "Held-out reward" and chart.form == "number" and len(line.points) == 4


def test_each_part_of_the_reward_is_a_line():
    rows = records(3, **{f"reward/heldout/part/{n}": (lambda i, k=k: k * i) for k, n in enumerate("abc", -1)})
    ((chart, lines),) = charts(rows)
    assert chart.form == "number" and [c.line.label for c in lines] == ["a", "b", "c"]
    assert len({c.line.colour for c in lines}) == 3


def test_three_phases_are_told_apart():
    rows = records(9, **{"accuracy/heldout": lambda i: 0.5})
    figure, _ = draw(*charts(rows)[0], (1, 9), [("warm-up", 1, 3), ("critic", 3, 5), ("PPO", 5, 9)])
    assert figure.count('class="shade"') == 2
    assert re.search(r'd="M250.0 0V400" class="border"', figure)
    assert re.findall(r"left:(.*?)%;max-width:(.*?)%", figure) == [
        ("0.00", "25.00"),
        ("25.00", "25.00"),
        ("50.00", "50.00"),
    ]


def test_short_curves_are_left_alone():
    points = [(1.0, 2.0), (2.0, 7.0)]
    assert thin(points) == points and smooth(points) == points


def test_smoothing_is_a_centred_mean():
    points = [(float(i), float(i % 2)) for i in range(200)]
    assert smooth(points)[100][1] == pytest.approx(sum(i % 2 for i in range(95, 106)) / 11)
    line = [(float(i), 3.0 * i) for i in range(200)]
    assert smooth(line)[50] == line[50]


def test_a_value_lands_where_it_belongs():
    figure, data = drawn(records(3, **{"reward/mean": lambda i: [0.0, 1.0, 0.5][i]}), "Reward")
    path = re.search(r'class="line sky"', figure) and re.search(r'd="(M[^"]*)" class="line sky"', figure)[1]
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path) if p]
    assert points == [(0.0, HEIGHT), (WIDTH / 2, 0.0), (WIDTH, HEIGHT / 2)]
    assert data["lines"][0] == {"x": [1, 2, 3], "y": [0.0, 1.0, 0.5], "last": 0.5, "c": "sky"}


def test_logarithmic_heights():
    f = Frame((0, 1), (1e-8, 1e-4), log=True)
    assert [f.down(v) for v in (1e-4, 1e-6, 1e-8, 1e-20, 1.0)] == pytest.approx([0, 0.5, 1, 1, 0])


def test_the_loss_of_each_phase_stands_alone():
    rows = records(5, "warmup", loss=lambda i: 3.0 - i)
    rows += [r | {"step": r["step"] + 5} for r in records(5, "grpo", loss=lambda i: 0.001 * i)]
    titles = [c.title for c, _ in charts(rows)]
    assert titles == ["Loss, warm-up", "Loss, GRPO"]
    _, data = drawn(rows, "Loss, GRPO")
    assert data["x"] == (6.0, 10.0) and data["y"][1] < 0.01


def test_what_is_not_there_or_dull_makes_no_chart():
    assert charts([]) == []
    assert (
        charts(
            records(4, **{"reward/missing": lambda i: 0.0, "clip_low": lambda i: 0.0, "mismatch/max": lambda i: 0.0})
        )
        == []
    )
    assert charts(records(4, loss=lambda i: None)) == []
    assert charts(records(4, loss=lambda i: math.nan)) == []


def test_one_single_step():
    figure, data = drawn(records(1, **{"accuracy/heldout": lambda i: 0.5}), "Held-out accuracy")
    assert "dots" in figure and data["x"] == (1, 1)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=50))
def test_any_numbers_can_be_drawn(values):
    rows = records(len(values), grad_norm=lambda i: values[i], **{"mismatch/max": lambda i: abs(values[i])})
    for chart, curves in charts(rows):
        figure, _ = draw(chart, curves, (1, len(values)))
        assert "nan" not in figure and "inf" not in figure


def test_long_curves_stay_small():
    figure, data = drawn(records(20_000, entropy=lambda i: math.sin(i / 999)), "Entropy")
    assert len(data["lines"][0]["x"]) <= POINTS and len(figure) < 20_000


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [("share", 0.9412, "94.1 %"), ("number", 2.8e-6, "2.8e-6"), ("number", 1e-4, "1e-4"), ("number", 0.25, "0.25"),
     ("count", 15234, "15.2k"), ("count", 2.5e6, "2.5M"), ("number", 0, "0"), ("size", 8e8, "800 MB"),
     ("number", -0.02, "-0.02")],
)  # fmt: skip
def test_forms(form, value, text):
    assert FORMS[form](value) == text


@pytest.mark.parametrize(
    "values", [(5e-324, 5e-324), (0.0, 5e-324), (0.0, 0.0), (3.0, 3.0), (-1e300, 1e300), (1e-295, 2e-295)]
)
def test_round_numbers_cover_any_range(values):
    low, high = values
    found = nice(low, high)
    assert len(found) > 1 and found[0] <= low and found[-1] >= high and found == sorted(found)


def test_samples_that_are_behind_have_charts_of_how_far_and_who_waits():
    names = ("staleness/mean", "staleness/max", "staleness/tokens/0", "staleness/tokens/1", "length/mean")
    names += (
        "mixture/books",
        "mixture/web",
        "fully_async/trainer/idle_ratio",
        "fully_async/rollouter/idle_ratio",
        "length/dropped",
    )
    found = {
        c.title: [line.line.metric for line in lines] for c, lines in charts(records(3, **{n: float for n in names}))
    }
    assert found["Staleness"] == ["staleness/mean", "staleness/max"]
    assert found["Tokens by versions behind"] == ["staleness/tokens/0", "staleness/tokens/1"]
    assert found["Samples by source"] == ["mixture/books", "mixture/web"]
    assert len(found["Waiting"]) == 2 and found["Completion length"] == ["length/mean", "length/dropped"]
