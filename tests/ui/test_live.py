"""The terminal view: what it shows, at any width, and that it costs next to nothing."""

import errno
import io
import os
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.examples import examples
from tests.flows.tiny import stand_in
from tests.work import work_of
from tilth.config.load import from_dict
from tilth.runs.progress import Doing
from tilth.ui import live as live_module
from tilth.ui.live import LEVELS, Live, LiveState, Series, _times, line, picture, sparkline

RECIPE = from_dict({"supervised": {"steps": 20}, "algorithm": {"steps": 100}})
SAMPLE = {"prompt": "123+456=", "text": "0579", "answer": "0579", "reward": 1.0}


def record(step, phase="grpo", **more):
    return {
        "step": step, "attempt": 1, "phase": phase, "seconds": step * 0.5,
        "reward/mean": 0.5 + step / 1000, "loss": 0.01, "entropy": 0.4, "length/mean": 4.2, "length/cut": 0.02,
        "mismatch/max": 1.2e-6, "mismatch/mean": 1e-7,
        "tokens_per_second/generate": 15234.0, "tokens_per_second/train": 20123.0, "memory/rss": 8e8,
        "time/generate": 0.25, "time/update": 0.15, "time/other": 0.1, "time/step": 0.5, **more,
    }  # fmt: skip


def view(width=100, terminal=True):
    out = io.StringIO()
    return Live(RECIPE, Console(file=out, width=width, force_terminal=terminal, color_system=None)), out


def text_of(live, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(picture(live.progress, live.sample, width))
    return console.file.getvalue()


def test_it_shows_what_a_person_asks():
    live, _ = view()
    live.on_step_end(stand_in(), 0, record(1, "warmup"))
    live.on_step_end(stand_in(), 0, record(21, **{"accuracy/heldout": 0.612}))
    engines = {"kv_cache_usage/mean": 0.25, "fully_async/trainer/idle_ratio": 0.0}
    more = {"accuracy/heldout": 0.941, "reward/missing": 3, **engines}
    live.on_step_end(stand_in(sample=SAMPLE), 0, record(22, **more))
    shown = text_of(live)
    live.stop()
    for want in (
        "warm-up ✓", "GRPO", "step 2 of 100", "94.1 % from 61.2 %", "0.5220", "4.2 tokens, 2% cut", "max 1.2e-06",
        "generation 15,234 tokens/s", "training 20,123 tokens/s", "generate 50 %", "update 30 %", "123+456= → 0579",
        "✓ reward 1", "rewards missing", "0:11", "actor stall 0 %",
    ):  # fmt: skip
        assert want in shown, want
    assert "KV in use 25 %" in " ".join(shown.split())


def test_a_reward_that_was_neither_0_nor_1_was_never_an_accuracy():
    live, _ = view(terminal=False)
    live.on_step_end(stand_in(), 0, record(21, **{"accuracy/heldout": 0.0, "reward/heldout": 0.0}))
    assert "held-out accuracy" in text_of(live) and " 0.0 % " in text_of(live)
    assert "held-out reward" not in text_of(live)
    live.on_step_end(stand_in(), 0, record(22, **{"reward/heldout": 0.25}))
    shown = text_of(live)
    assert "accuracy" not in shown and "held-out reward" in shown and " 0.25 " in shown
    assert "held-out reward 0.25" in line(live.progress) and "accuracy" not in line(live.progress)


def test_every_part_of_a_step_is_drawn():
    live, _ = view(terminal=False)
    live.on_step_end(stand_in(), 0, record(1) | {f"time/{name}": 1.0 for name in "abcdefghijkl"})
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(_times(live.progress, 100))
    assert all(f"■ {name} " in console.file.getvalue() for name in "abcdefghijkl")


@pytest.mark.parametrize("width", [20, 30, 46, 64, 100, 200])
def test_it_fits_any_terminal(width):
    live, out = view(width)
    for step in range(1, 30):
        live._next = 0
        live.on_step_end(stand_in(sample=SAMPLE | {"text": "x" * 500, "reward": 0.0}), 0, record(step))
    live.on_run_end(stand_in(), {})
    assert max(len(row) for row in text_of(live, width).splitlines()) <= width
    assert "\x1b[?25h" in out.getvalue()


@pytest.mark.parametrize(
    ("reward", "want"), [(1.0, "✓ reward 1"), (0.0, "✗ reward 0"), (0.5, "◐ reward 0.5"), (None, "? reward missing")]
)
def test_a_sampled_answer_is_marked(reward, want):
    live, _ = view(terminal=False)
    live.on_step_end(stand_in(sample=SAMPLE | {"reward": reward}), 0, record(1))
    shown = text_of(live)
    assert want in shown and ("right: 0579" in shown) == (reward != 1.0)


def test_what_a_model_writes_cannot_steer_the_terminal():
    live, _ = view(terminal=False)
    live.on_step_end(stand_in(sample=SAMPLE | {"text": "\x1b[2J[bold]a\nb\x07"}), 0, record(1))
    shown = text_of(live)
    assert "\x1b" not in shown and "\x07" not in shown and "�[2J[bold]a⏎b�" in shown


def test_plain_lines_come_seldom(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    live, out = view(terminal=False)
    live.on_message("new run in runs/demo-001")
    for step in range(1, 41):
        clock[0] += 0.5
        live.on_step_end(stand_in(sample=SAMPLE), 0, record(step))
    live.on_run_end(stand_in(), {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "new run in runs/demo-001"
    assert len(lines) == 1 + 4 + 1 and len(set(lines)) == 6 and "\x1b" not in out.getvalue()
    assert lines[-1].startswith("GRPO 40/100  reward 0.54  loss 0.01") and "0:20, 0:30 left" in lines[-1]


def test_pictures_come_at_most_four_times_a_second_and_for_one_percent_of_the_time(monkeypatch):
    live, _ = view()
    shown = []
    show = live._show
    monkeypatch.setattr(live, "_show", lambda: (shown.append(1), show()))
    clock = [0.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: clock[0])
    for step in range(1, 101):
        clock[0] += 0.01
        live.on_step_end(stand_in(sample=SAMPLE), 0, record(step))
    assert 1 <= len(shown) <= 5
    live.stop()


def test_the_terminal_is_given_back():
    live, out = view()
    live.on_step_end(stand_in(), 0, record(1))
    assert live._live is not None and "\x1b[?25l" in out.getvalue()
    live.stop()
    live.stop()
    assert live._live is None and out.getvalue().rstrip().endswith("\x1b[?25h")


class Vanished(io.TextIOBase):
    """A terminal that is closed after ``left`` writes."""

    def __init__(self, left):
        self.left, self.tried = left, 0

    def isatty(self):
        return True

    def write(self, text):
        self.tried += 1
        if self.tried > self.left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return len(text)


@pytest.mark.parametrize("left", [0, 1, 3, 10])
def test_a_terminal_that_vanishes_is_told_once_and_not_written_to_again(monkeypatch, left):
    said, out = [], Vanished(left)

    def say(text):
        said.append(text)
        live.on_message(text)

    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(live_module, "COST", 1e9)
    monkeypatch.setattr(live_module, "FASTEST", 0.0)
    live = Live(RECIPE)
    live.on_message("before the run has a log")
    live.on_run_start(stand_in(say=say))
    for step in range(1, 30):
        live.on_step_end(stand_in(), 0, record(step))
        live.on_message("a line")
    live.on_run_end(stand_in(), {})
    assert len(said) == 1 and os.strerror(errno.EIO) in said[0] and out.tried == left + 1


def doing(what, done=0, of=0, phase="grpo", step=1):
    run = stand_in()
    run.directory.progress.now = Doing(phase, step, 100, what, done, of)
    return run


@pytest.fixture
def unhurried(monkeypatch):
    """A clock of the test's own, and no thread beside it."""
    clock = [100.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Live, "_follow", lambda self: None)
    return clock


def test_a_step_shows_how_far_it_is_before_the_first_one_ends(unhurried):
    live, out = view()
    live.start()
    assert "starting" in out.getvalue()
    live.on_run_start(doing("evaluating", 12, 32, step=0))
    live._tick(unhurried[0])
    assert "evaluating 12 of 32" in out.getvalue() and "step 0 of 100" in out.getvalue()
    live.on_step_end(stand_in(), 1, record(21))
    assert "evaluating" not in text_of(live)
    live.stop()


def test_the_thread_of_the_view_shows_what_the_run_does():
    live, out = view()
    live.on_run_start(doing("generating", 31, 64))
    until = time.monotonic() + 20
    while "generating 31 of 64" not in out.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    assert "generating 31 of 64" in out.getvalue()
    live.stop()
    assert "live" not in {thread.name for thread in threading.enumerate()}


def test_a_plain_log_tells_of_a_long_step_ever_more_seldom(unhurried):
    live, out = view(terminal=False)
    live.on_run_start(doing("generating", 31, 64))
    told = []
    for second in range(1, 200):
        unhurried[0] += 1.0
        live._run = doing("generating", second, 200)
        before = out.getvalue()
        live._tick(unhurried[0])
        told += [second] if out.getvalue() != before else []
    assert told == [15, 45, 105]
    assert out.getvalue().splitlines()[0] == "GRPO step 1 of 100: generating 15 of 200"


def test_a_notebook_has_one_line_that_changes(unhurried, monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    live = Live(RECIPE)
    live.on_message("new run in runs/a")
    live.on_run_start(doing("generating", 1, 64))
    for done in (1, 2):
        unhurried[0] += 2.0
        live._run = doing("generating", done, 64)
        live._tick(unhurried[0])
    unhurried[0] += 2.0
    live.on_step_end(stand_in(), 1, record(1))
    live.on_run_end(stand_in(), {})
    shown = capsys.readouterr().out
    step = "GRPO step 1 of 100: generating"
    assert shown.startswith(f"new run in runs/a\n{step} 1 of 64\r{step} 2")
    assert shown.count("\n") == 2 and shown.endswith("\n") and "\x1b" not in shown


def test_an_end_without_a_step():
    live, out = view(terminal=False)
    live.on_run_end(stand_in(), {})
    assert out.getvalue() == ""


def test_time_left_is_that_of_the_phase():
    p = LiveState(RECIPE.dump())
    for step in range(1, 5):
        p.take(record(step, "warmup"), 2.0)
    assert p.left == pytest.approx(32.0) and "at most 0:32 left of it" in line(p)
    p.take(record(5, "grpo"), 1.0)
    assert p.done == 1 and p.left == pytest.approx(99.0) and "1:39 left" in line(p)
    p.take(record(6, "grpo", phase_step=50), 1.0)
    assert p.done == 50


def test_an_unknown_phase_and_empty_records():
    p = LiveState(RECIPE.dump())
    p.take({"step": 1, "phase": "other"}, 1.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(p, None, 80))
    assert "step 1" in console.file.getvalue() and line(p).startswith("other 1/?")


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(0, 60))
def test_sparkline_is_as_wide_as_asked_and_reaches_both_ends(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values)) and set(drawn) <= set(LEVELS)
    if len(set(values)) > 1 and width >= len(values):
        assert LEVELS[0] in drawn and LEVELS[-1] in drawn


def test_sparkline_by_hand():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == LEVELS
    assert sparkline([0, 0, 7, 7], 2) == "▁█" and sparkline([3.0], 5) == "▄"


@settings(max_examples=examples(30))
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3000))
def test_series_are_bounded_and_keep_their_mean(values):
    series = Series(limit=16)
    for v in values:
        series.add(v)
    assert len(series.values) < 16
    whole = len(series.values) * series.stride
    if whole:
        mean = sum(values[:whole]) / whole
        assert sum(series.values) / len(series.values) == pytest.approx(mean, abs=1e-6)


def test_a_step_without_a_picture_costs_an_eightieth_of_one_and_no_more_than_the_first():
    live, _ = view()

    def price(step):
        return work_of(lambda: live.on_step_end(stand_in(sample=SAMPLE), 0, record(step)))

    live._next = float("inf")
    early, *_, late = (price(step) for step in range(1, 400))
    live._next = 0
    picture = price(400)
    live.stop()
    assert late <= 2 * early and 80 * late < picture


def test_supervised_flows_have_one_phase_of_as_many_steps_as_the_record_says():
    from tilth.config.load import from_dict

    recipe = from_dict({"flow": "pretrain", "supervised": {"epochs": 2.0}})
    progress = LiveState(recipe.dump())
    assert progress.planned == {"pretrain": 0}  # how many pieces there are is not known to the recipe
    record = {"step": 3, "phase": "pretrain", "phase_step": 3, "phase_steps": 40, "loss/heldout": 5.25, "loss": 5.5}
    progress.take(record, 2.0)
    assert progress.steps == 40 and progress.left == 74.0
    assert line(progress).startswith("pre-training 3/40  held-out loss 5.25  loss 5.5")
