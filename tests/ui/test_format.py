"""Numbers in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.ui import format


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, ""),
        (
            {"step": 1200, "metric": "accuracy/heldout", "value": 0.5},
            "best at step 1,200: held-out accuracy 50.0 %",
        ),
        ({"step": 3, "metric": "accuracy/heldout", "value": 0.0}, "best at step 3: held-out accuracy 0.0 %"),
        ({"step": 3, "metric": "reward/heldout", "value": 0.5}, "best at step 3: held-out mean reward 0.5"),
        (
            {"step": 3, "metric": "accuracy/pairs", "value": 0.5},
            "best at step 3: 50.0 % of the held-out pairs in their order",
        ),
        ({"step": 3, "metric": "loss/heldout", "value": 2.5}, "best at step 3: held-out loss 2.5000 nats per token"),
    ],
)
def test_best(found, text):
    assert format.best(found) == text


@pytest.mark.parametrize("phase", ["warmup", "sft", "pretrain", "values", "grpo", "ppo"])
def test_each_phase_has_a_name_for_people(phase):
    assert format.phase_name(phase) != phase


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05"), (90000, "25:00:00")],
)
def test_duration(seconds, text):
    assert format.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.5, "0.5"),
        (1234567, "1,234,567"),
        (1.2e-6, "1.2e-06"),
        (-0.25, "-0.25"),
        (999.4, "999"),
    ],
)
def test_number(value, text):
    assert format.number(value) == text


def test_share_and_size():
    assert (format.share(0.9412), format.share(None)) == ("94.1 %", "–")
    assert [format.size(n) for n in (None, 12, 1500, 2.5e6, 1.38e9)] == ["–", "12 bytes", "1.5 kB", "2.5 MB", "1.38 GB"]


@pytest.mark.parametrize(
    ("reward", "kind"), [(1.0, "right"), (0.0, "wrong"), (-1, "wrong"), (0.3, "partly"), (None, "missing")]
)
def test_verdict(reward, kind):
    assert format.verdict({"reward": reward}) == kind


@given(st.floats(-1e12, 1e12))
def test_numbers_are_short(value):
    assert 0 < len(format.number(value)) <= 18


def test_short_times_and_parts_of_a_whole():
    assert [format.brief(s) for s in (0, 25e-6, 0.1361, 1, 75.04)] == ["0", "25 µs", "136 ms", "1 s", "75 s"]
    shares = (0, 1e-5, 0.0028, 0.0994, 0.0996, 0.374, 1)
    assert [format.part(v) for v in shares] == ["0 %", "< 0.1 %", "0.3 %", "9.9 %", "10 %", "37 %", "100 %"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07 min"), (3599.4, "59:59 min"), (3599.6, "1:00:00 h"), (102914, "28:35:14 h")]
)
def test_a_time_has_the_unit_of_its_first_number(seconds, text):
    assert format.timed(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")])
def test_counted(number, text):
    assert format.count(number, "step") == text
