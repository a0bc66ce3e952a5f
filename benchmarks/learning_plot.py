"""The learning curves as one SVG: a large panel of the algorithms, small ones of each ablation beside its parent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markup import join, tag
from markupsafe import Markup

from tilth.ui.charts import nice

Band = Sequence[tuple[float, float, float, float]]
"""(tokens, mean, lowest, highest)."""
COLOURS = ("#3c7d40", "#2f70a3", "#b9532d", "#b98113", "#835092", "#22807b", "#8a7057", "#c2477f", "#4a4a9c", "#6b8e23")
QUIET = "#8a8578"
INK, PAPER, GRID = "#2b2820", "#fffdf8", "#e4dfd2"
WIDTH, ACROSS, GAP = 1000, 4, 16


@dataclass(frozen=True)
class Panel:
    """A chart: title, the titles of its lines with their colours; of a small one only the parent is quiet."""

    title: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Frame:
    """Where a panel is and what it spans."""

    left: float
    top: float
    width: float
    height: float
    tokens: float
    ticks: tuple[float, ...]

    def x(self, tokens: float) -> float:
        return self.left + self.width * tokens / self.tokens

    def y(self, accuracy: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.top + self.height * (1 - (accuracy - low) / (high - low))


def panels(parents: Mapping[str, str]) -> tuple[Panel, list[Panel]]:
    """From title -> parent: the algorithms in one, and one for each ablation (of a parent that has itself one)."""
    grown = [title for title, parent in parents.items() if parent and parents.get(parent)]
    algorithms = [title for title in parents if title not in grown]
    large = Panel("", tuple(zip(algorithms, COLOURS * (1 + len(algorithms) // len(COLOURS)))))
    colours = dict(large.lines)
    small = [Panel(t, ((parents[t], QUIET), (t, colours.get(parents[t], COLOURS[0])))) for t in grown]
    return large, small


def draw(bands: Mapping[str, Band], parents: Mapping[str, str], *, title: str) -> str:
    """The whole picture; bands: title -> its band, all to the same number of tokens."""
    large, small = panels({t: p for t, p in parents.items() if t in bands})
    tokens = max(band[-1][0] for band in bands.values())
    every = [value for band in bands.values() for point in band for value in point[2:]]
    ticks = tuple(nice(min(every), max(every)))
    width = (WIDTH - GAP * (ACROSS + 1)) / ACROSS
    whole = Frame(60, 50, WIDTH - 280, 360, tokens, ticks)
    parts = [_text(20, 26, title, size=17, weight=600), _panel(whole, large, bands, labels=True), _legend(large, bands)]
    if small:
        parts.append(_text(20, 452, "Ablations, in colour, beside the whole method, in grey", size=13, weight=600))
    for i, panel in enumerate(small):
        left, top = GAP + (i % ACROSS) * (width + GAP) + 30, 490 + (i // ACROSS) * 200
        frame = Frame(left, top, width - 34, 140, tokens, ticks)
        parts += [_text(left - 26, top - 10, panel.title, size=12), _panel(frame, panel, bands)]
    height = 450 + 200 * -(-len(small) // ACROSS)
    ground = tag("rect", width=WIDTH, height=height, fill=PAPER)
    box = {"viewBox": f"0 0 {WIDTH} {height}", "width": WIDTH, "height": height}
    return str(tag("svg", ground, *parts, xmlns="http://www.w3.org/2000/svg", font_family="sans-serif", **box)) + "\n"


def _panel(f: Frame, panel: Panel, bands: Mapping[str, Band], *, labels: bool = False) -> Markup:
    shown = [(bands[name], colour) for name, colour in panel.lines if name in bands]
    grid = [_level(f, tick) for tick in f.ticks]
    ends = [_text(f.left, f.top + f.height + 16, "0", size=10), _text(
        f.left + f.width, f.top + f.height + 16, f"{f.tokens / 1000:,.0f}k tokens", size=10, anchor="end")]  # fmt: skip
    if labels:
        ends.append(_text(f.left, f.top - 8, "held-out accuracy (greedy); generated tokens across", size=11))
    areas = [_area(f, band, colour) for band, colour in shown]
    return join([*grid, *ends, *areas, *(_line(f, band, colour) for band, colour in shown)])


def _level(f: Frame, tick: float) -> Markup:
    y = f"{f.y(tick):.1f}"
    rule = tag("line", x1=f"{f.left:.1f}", x2=f"{f.left + f.width:.1f}", y1=y, y2=y, stroke=GRID)
    return join([rule, _text(f.left - 5, f.y(tick) + 3, f"{100 * tick:g} %", size=10, anchor="end")])


def _area(f: Frame, band: Band, colour: str) -> Markup:
    """From the lowest seed to the highest."""
    there = [f"{f.x(x):.1f} {f.y(high):.1f}" for x, _, _, high in band]
    back = [f"{f.x(x):.1f} {f.y(low):.1f}" for x, _, low, _ in reversed(band)]
    return tag("path", d="M" + "L".join(there + back) + "Z", fill=colour, fill_opacity=0.12)


def _line(f: Frame, band: Band, colour: str) -> Markup:
    path = "M" + "L".join(f"{f.x(x):.1f} {f.y(mean):.1f}" for x, mean, _, _ in band)
    return tag("path", d=path, fill="none", stroke=colour, stroke_width=2, stroke_linejoin="round")


def _legend(panel: Panel, bands: Mapping[str, Band]) -> Markup:
    """The best at the end first, as the lines are."""
    order = sorted((line for line in panel.lines if line[0] in bands), key=lambda line: -bands[line[0]][-1][1])
    parts = []
    for i, (name, colour) in enumerate(order):
        y = 62 + 20 * i
        parts.append(tag("rect", x=WIDTH - 205, y=y - 8, width=12, height=4, fill=colour))
        parts.append(_text(WIDTH - 188, y, f"{name}  {100 * bands[name][-1][1]:.1f} %", size=12))
    return join(parts)


def _text(x: float, y: float, text: str, *, size: int, weight: int = 400, anchor: str = "start") -> Markup:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font_size": size, "font_weight": weight, "text_anchor": anchor}
    return tag("text", text, fill=INK, **place)
