"""The terminal view of a running run; where there is no terminal, a plain line every few seconds.

It draws when a step is committed and, in a thread of its own, while one runs; at most four times a second and for about
1 % of the time.
"""

import atexit
import itertools
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tilth.config.flows import FLOWS
from tilth.config.schema import Recipe
from tilth.core.clock import periodically
from tilth.flows.callbacks import Callback, RunView, Say
from tilth.runs.metrics import KEYS
from tilth.runs.progress import EVERY, Doing
from tilth.runs.readers import ACCURACY, REWARD, spread
from tilth.ui import format
from tilth.ui.output import Outlived

LEVELS = "▁▂▃▄▅▆▇█"
CURVES = (
    (ACCURACY, "held-out accuracy", "bold green"), (REWARD, "held-out reward", "bold green"),
    ("loss/heldout", "held-out loss", "bold green"), ("accuracy/pairs", "held-out pairs", "bold green"),
    ("reward/mean", "reward", "cyan"), ("loss", "loss", "blue"), ("entropy", "entropy", "magenta"),
    ("length/mean", "length", "yellow"),
)  # fmt: skip
RATES = (("tokens_per_second/generate", "generation"), ("tokens_per_second/train", "training"))
VERDICTS = {"right": ("✓", "green"), "wrong": ("✗", "red"), "partly": ("◐", "yellow"), "missing": ("?", "yellow")}
COLOURS = (
    "green", "cyan", "yellow", "magenta", "bright_blue", "bright_green", "bright_magenta", "bright_yellow",
    "bright_cyan", "white",
)  # fmt: skip
"""Colours of the parts of a step, the longest first; the others have REST."""
REST = "grey62"
LEAST = 0.005  # parts of the time below this share are not in the legend
NARROW = 64
LABEL, VALUE, SHORT = 17, 32, 20
FASTEST, COST = 0.25, 0.01
"""Shortest time between two pictures in seconds, and the share of the time that drawing may take."""
PLAIN_EVERY = 5.0
QUIET = 15.0
"""Seconds without a plain line after which one tells how far the step is; the next after twice the time."""


class Series:
    """A curve in bounded memory: when it gets long, each pair of neighbours becomes its mean."""

    def __init__(self, limit: int = 256) -> None:
        self.limit, self.stride = limit, 1
        self.values: list[float] = []
        self._waiting: list[float] = []

    def add(self, value: float) -> None:
        self._waiting.append(value)
        if len(self._waiting) < self.stride:
            return
        self.values.append(sum(self._waiting) / len(self._waiting))
        self._waiting = []
        if len(self.values) >= self.limit:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self.stride *= 2


def sparkline(values: list[float], width: int) -> str:
    """Draw a curve by at most ``width`` blocks; each is the mean of its stretch."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    bounds = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round((m - low) / (high - low) * top) if high > low else top // 2] for m in means)


class LiveState:
    """State of a run by its records: phase, steps in it, time, and the history of each metric."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: the recipe as plain data; it may be of a flow or version that this process does not know."""
        flow, supervised = settings.get("flow", "grpo"), settings.get("supervised", {})
        self.planned: dict[str, int] = {flow: supervised.get("steps", 0)}
        if flow in FLOWS and FLOWS[flow].samples:
            self.planned = {"warmup": supervised.get("steps", 0)}
            if FLOWS[flow].critic:
                self.planned["values"] = settings.get("critic", {}).get("steps", 0)
            self.planned[flow] = settings.get("algorithm", {}).get("steps", 0)
        self.until = supervised.get("until", 0.0)
        self.phase = ""
        self.done = 0
        self.seconds = 0.0
        self.record: Mapping[str, Any] = {}
        self.series: dict[str, Series] = {}
        self.first: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.missing = 0
        self.doing = Doing()
        self._pace: float | None = None

    def see(self, doing: Doing) -> None:
        """Note what the running step is at."""
        if doing.phase and doing.phase != self.phase:
            self._enter(doing.phase)
            self.planned[doing.phase] = doing.steps or self.planned.get(doing.phase, 0)
        self.doing = doing

    def _enter(self, phase: str) -> None:
        self.phase, self.done, self._pace, self.first, self.series = phase, 0, None, {}, {}

    def take(self, record: Mapping[str, Any], took: float) -> None:
        """Add a committed step; took: seconds since the one before."""
        phase = record.get("phase", "")
        if phase != self.phase:
            self._enter(phase)
        self.done = record.get("phase_step") or self.done + 1
        self.planned[phase] = record.get("phase_steps") or self.planned.get(phase, 0)
        self.seconds = record.get("seconds") or self.seconds + took
        self._pace = took if self._pace is None else 0.9 * self._pace + 0.1 * took
        self.record = record
        self.missing += int(record.get("reward/missing") or 0)
        # A reward of 0 or 1 is shown as accuracy; after the first other value the accuracy has no meaning.
        shown, hidden = (ACCURACY, REWARD) if ACCURACY in record else (REWARD, ACCURACY)
        for known in (self.series, self.first, self.latest) if shown in record else ():
            known.pop(hidden, None)
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in KEYS and not (name == hidden and shown in record):
                self.series.setdefault(name, Series()).add(value)
                self.first.setdefault(name, value)
                self.latest[name] = value

    @property
    def steps(self) -> int:
        """Return the most steps of the present phase; 0 if unknown."""
        return self.planned.get(self.phase, 0)

    @property
    def left(self) -> float | None:
        """Return the seconds left in the present phase at the recent pace."""
        return None if self._pace is None or not self.steps else max(self.steps - self.done, 0) * self._pace

    @property
    def times(self) -> list[tuple[str, float]]:
        """Return the share of each part of the recent step, the greatest first."""
        spent = {k[5:]: v for k, v in self.record.items() if k.startswith("time/") and k != "time/step" and v}
        whole = sum(spent.values()) or 1.0
        return sorted(((k, v / whole) for k, v in spent.items()), key=lambda kv: -kv[1])


class Live(Callback):
    """Show a run in the terminal; ``stop`` (also at exit) restores the terminal.

    If the output cannot be written any more (closed pipe or terminal, full disk), the run's log reports it once.
    """

    def __init__(self, recipe: Recipe, console: Console | None = None) -> None:
        self._out = sys.stdout if isinstance(sys.stdout, Outlived) else sys.stdout and Outlived(sys.stdout)
        self._notebook = console is None and Console().is_jupyter
        self.console = console or Console(file=cast(Any, self._out), force_jupyter=False if self._notebook else None)
        self._say: Say | None = None
        self._run: RunView | None = None
        self._lock, self._following = threading.RLock(), ExitStack()
        self._quiet, self._said = QUIET, ""
        self.progress = LiveState(recipe.dump())
        self.sample: dict[str, Any] | None = None
        self._live: RichLive | None = None
        self._wanted = self.console.is_terminal and not self.console.is_jupyter and not self._notebook
        self._stepped = self._told = time.monotonic()
        self._next = 0.0

    def start(self) -> None:
        """Show in a terminal that the run is on its way, before there is anything to tell."""
        if self._wanted:
            self._draw(Text("starting: loading torch, model and data", "dim"))

    def on_run_start(self, run: RunView) -> None:
        """Use the run's log from now on, and show what it does between its steps."""
        self._say, self._run = run.say, run
        self._note_loss()
        self._following.enter_context(periodically("live", FASTEST, self._follow))

    def _follow(self) -> None:
        """Show how far the running step is."""
        with self._lock:
            if not self._lost:
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        assert self._run is not None
        self.progress.see(self._run.directory.progress.now)
        if (self._wanted or self._notebook) and now >= self._next:
            self._show()
        elif not self._wanted and now - self._told >= self._quiet:
            self._quiet *= 2
            self._print(between(self.progress))

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Draw, if enough time has passed."""
        with self._lock:
            now = time.monotonic()
            self.progress.take(metrics, now - self._stepped)
            self._stepped = now
            self.sample = run.sample or self.sample
            self.progress.doing = Doing()
            if now >= self._next and not self._lost:
                self._show()
        self._note_loss()

    def on_message(self, text: str) -> None:
        """Print a line above the view."""
        with self._lock:
            self._write(text)
            self._stepped = self._told = time.monotonic()
            self._quiet = QUIET
        self._note_loss()

    @property
    def _lost(self) -> OSError | None:
        return self._out.lost if self._out else None

    def _note_loss(self) -> None:
        if self._lost and self._say is not None:
            say, self._say = self._say, None
            say(f"nobody reads the terminal's view any more ({self._lost.strerror}); the run goes on, this log too")

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        """Draw the last picture, which stays; restore the terminal."""
        with self._lock:
            if self.progress.record:
                self._show()
        self.stop()

    def stop(self) -> None:
        """Restore the terminal; a second call does nothing."""
        self._following.close()
        if self._live is not None:
            if not self.progress.phase:
                self._live.update(Text(), refresh=True)
            self._live.stop()
            self._live = None
            atexit.unregister(self.stop)
        elif self._notebook and self._said:
            self._write(self._said)
            self._said = ""

    def _print(self, text: str) -> None:
        """Print a plain line, unless it is that of before; in a notebook the next one takes its place."""
        self._told = time.monotonic()
        if text != self._said:
            self._write(text, end="\r" if self._notebook else "\n")
        self._said = text

    def _write(self, text: str, end: str = "\n") -> None:
        padded = text.ljust(len(self._said)) if self._notebook else text
        self.console.print(Text(padded), soft_wrap=True, end=end)

    def _show(self) -> None:
        began = time.monotonic()
        if self._notebook:
            told = line(self.progress) if self.progress.record else between(self.progress)
            self._print(f"{told}  {self.progress.doing}" if self.progress.record else told)
            self._next = began + EVERY
            return
        if not self._wanted:
            self._print(line(self.progress))
            self._next, self._quiet = began + PLAIN_EVERY, QUIET
            return
        self._draw(picture(self.progress, self.sample, self.console.width))
        took = time.monotonic() - began
        self._next = began + max(FASTEST, took / COST)

    def _draw(self, shown: RenderableType) -> None:
        if self._live is None:
            self._live = RichLive(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
            atexit.register(self.stop)
        self._live.update(shown, refresh=True)


def line(p: LiveState) -> str:
    """Return the state of a run in one plain line."""
    parts = [f"{format.phase_name(p.phase)} {p.done}/{p.steps or '?'}"]
    for name, label, _ in CURVES:
        known = p.latest if label.startswith("held-out") else p.record
        if known.get(name) is not None:
            parts.append(f"{label} {format.ranged(name, known[name], spread(known, name))}")
    parts += [f"{label} {p.record[n]:,.0f} tokens/s" for n, label in RATES if p.record.get(n)]
    if p.record.get("mismatch/max") is not None:
        parts.append(f"mismatch {p.record['mismatch/max']:.1e}")
    if p.record.get("staleness/max") is not None:
        parts.append(f"behind {p.record['staleness/mean']:.1f}")
    if p.missing:
        parts.append(f"rewards missing {p.missing}")
    left = f", {_left(p)}" if p.left is not None else ""
    return "  ".join(parts) + f"  {format.duration(p.seconds)}{left}"


def between(p: LiveState) -> str:
    """Return what the running step does in one plain line."""
    step = f"{format.phase_name(p.phase)} step {p.doing.step:,} of {p.steps:,}"
    step = step if p.doing.step else "before the first step"
    return f"{step}: {str(p.doing) or 'working'}"


def picture(p: LiveState, sample: dict[str, Any] | None, width: int, *, times: bool = True) -> RenderableType:
    """Draw the whole view for a terminal of this width. times: with the time of the recent step."""
    width = min(width, 110)
    doing = Text(str(p.doing), "dim")
    parts: list[RenderableType] = [Text(), _head(p, width), _bar(p, width), doing, _curves(p, width), Text()]
    parts += [_rates(p), _times(p, width)] if times else [_rates(p)]
    if sample is not None:
        parts += [Text(), _sample(sample, width)]
    return Group(*parts, Text())


def _left(p: LiveState) -> str:
    last = p.phase == list(p.planned)[-1] or not p.planned.get(list(p.planned)[-1])
    return f"{format.duration(p.left or 0)} left" if last else f"at most {format.duration(p.left or 0)} left of it"


def _head(p: LiveState, width: int) -> RenderableType:
    grid = Table.grid(expand=False)
    grid.width = width
    grid.add_column(justify="left", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    title = Text()
    for phase, steps in p.planned.items():
        if not steps and phase != p.phase:
            continue
        current = phase == p.phase
        over = list(p.planned).index(phase) < list(p.planned).index(p.phase) if p.phase in p.planned else False
        title.append(
            f" {format.phase_name(phase)}{' ✓' if over else ''} ", "bold white on dark_green" if current else "dim"
        )
    grid.add_row(title, Text(f"step {p.done:,} of {p.steps:,}" if p.steps else f"step {p.done:,}", "bold"))
    return grid


def _bar(p: LiveState, width: int) -> RenderableType:
    when = Text(f"  {format.duration(p.seconds)}" + (f", {_left(p)}" if p.left is not None else ""), "dim")
    grid = Table.grid()
    bar = ProgressBar(
        p.steps or 1, min(p.done, p.steps or p.done), width=max(width - when.cell_len, 8),
        complete_style="green", finished_style="bold green",
    )  # fmt: skip
    grid.add_row(bar, when)
    return grid


def _curves(p: LiveState, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    wide = width >= NARROW
    taken = VALUE if wide else SHORT
    room = width - LABEL - taken - 6
    for column in (LABEL, taken, max(room, 1)):
        grid.add_column(no_wrap=True, width=column)
    for name, label, style in CURVES:
        values = p.series[name].values if name in p.series else []
        if not values and not (name in (ACCURACY, REWARD) and name in p.latest):
            continue
        grid.add_row(Text(label), Text(_value(p, name), style), Text(sparkline(values, room), style))
    if p.record.get("mismatch/max") is not None:
        text = f"max {p.record['mismatch/max']:.1e}  mean {p.record.get('mismatch/mean') or 0:.1e}"
        grid.add_row(Text("log-prob mismatch"), Text(text if wide else text[:11], "dim"), Text())
    if p.record.get("staleness/max") is not None:
        text = f"{p.record['staleness/mean']:.1f} versions, at most {p.record['staleness/max']:.0f}"
        grid.add_row(Text("behind"), Text(text if wide else text[:11], "dim"), Text())
    if p.missing:
        grid.add_row(Text("rewards missing"), Text(f"{p.missing:,}", "bold yellow"), Text())
    return grid


def _value(p: LiveState, name: str) -> str:
    value = p.latest[name]
    if name in (ACCURACY, REWARD, "accuracy/pairs"):
        first = p.first.get(name, value)
        return format.ranged(name, value, spread(p.latest, name)) + (
            f" from {format.figure(name, first)}" if first != value else ""
        )
    if name == "length/mean":
        cut = p.record.get("length/cut")
        return f"{value:.1f} tokens" + (f", {cut:.0%} cut" if cut else "")
    return f"{value:.4f}" if abs(value) < 10 else format.number(value)


def _rates(p: LiveState) -> RenderableType:
    text = Text()
    for name, label in RATES:
        if p.record.get(name):
            text.append(f"{label} ", "dim").append(f"{p.record[name]:,.0f} tokens/s   ")
    if p.record.get("memory/rss"):
        text.append("memory ", "dim").append(format.size(p.record["memory/rss"]) + "   ")
    for label, value in format.generation(p.record):
        text.append(f"{label} ", "dim").append(f"{value}   ")
    return text


def _times(p: LiveState, width: int) -> RenderableType:
    return Group(Text(), *divided(p.times, width)) if p.times else Text()


def divided(parts: Sequence[tuple[str, float]], width: int, fixed: Mapping[str, str] | None = None) -> list[Text]:
    """Draw parts of the time, (name, share), as one split bar and its legend. fixed: colours of some parts."""
    free = itertools.chain(COLOURS, itertools.repeat(REST))
    coloured = [(name, share, (fixed or {}).get(name) or next(free)) for name, share in parts]
    legend = [Text()]
    for name, share, colour in coloured:
        if share >= LEAST:
            key = Text.assemble(("■ ", colour), (f"{name} {format.part(share)}   ", "dim"))
            if legend[-1] and len(legend[-1]) + len(key) > width:
                legend.append(Text())
            legend[-1].append_text(key)
    return [split_bar([(share, colour) for _, share, colour in coloured], width), *legend]


def split_bar(parts: Sequence[tuple[float, str]], width: int) -> Text:
    """Draw a bar in parts: (share of the width, colour)."""
    bar, filled = Text(), 0.0
    for share, colour in parts:
        filled += share * width
        bar.append("█" * (round(filled) - len(bar)), colour)
    return bar[:width]


def _sample(sample: dict[str, Any], width: int) -> RenderableType:
    kind = format.verdict(sample)
    mark, colour = VERDICTS[kind]
    reward = "reward missing" if kind == "missing" else f"reward {format.number(sample['reward'])}"
    text = Text(no_wrap=width >= NARROW, overflow="ellipsis")
    text.append("a sampled answer  ", "dim").append(_one_line(sample.get("prompt"), width // 2)).append(" → ", "dim")
    text.append(_one_line(sample.get("text"), width // 2), f"bold {colour}")
    text.append(f"  {mark} {reward}", colour)
    if kind != "right" and sample.get("answer"):
        text.append(f"  right: {_one_line(sample['answer'], 24)}", "dim")
    return text


def _one_line(text: Any, limit: int) -> str:
    """Make a model's text safe for the terminal: one line, no control characters, only its end if it is long."""
    plain = format.plain(str(text or ""), "⏎").replace("\t", " ")
    return plain if len(plain) <= limit else "…" + plain[-limit + 1 :]
