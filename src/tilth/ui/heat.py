"""A heat map of workers as an SVG file that stands alone: a row a pipeline stage, a column a data-parallel rank."""

from collections.abc import Sequence

import numpy as np

from tilth.ui.html import Html, tag

COOL, WARM = (0xF1, 0xEF, 0xE6), (0xB9, 0x53, 0x2D)
"""Ground and clay of the pages."""
LOW, HIGH = 1.0, 1.5
"""The range of slowdowns that the colours span, as in the study; beyond it the colour stays."""
WIDTH, LEAST, LEFT, TOP = 960.0, 4.0, 70.0, 84.0
"""Pixels: of the picture, least of a cell, beside and above the cells."""


def colour(value: float) -> tuple[int, int, int]:
    """Red, green and blue of a slowdown, 0 to 255."""
    share = min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(COOL, WARM))
    return red, green, blue


def heat_map(title: str, note: str, values: np.ndarray, names: Sequence[Sequence[str]]) -> Html:
    """The picture. values: [stages, dp], 1 where nothing is lost. names: what is shown under the pointer, as many."""
    stages, dp = values.shape
    side = max(min((WIDTH - LEFT - 20) / dp, 56.0), LEAST)
    tall = max(min(side, 40.0), 12.0)
    cells = [_cell(float(values[p, d]), names[p][d], LEFT + d * side, TOP + p * tall, side, tall)
             for p in range(stages) for d in range(dp)]  # fmt: skip
    every = max(1, round(40 / side))
    across = [_text(f"{d}", LEFT + (d + 0.5) * side, TOP - 6, "middle") for d in range(0, dp, every)]
    down = [_text(f"stage {p}", LEFT - 8, TOP + (p + 0.5) * tall + 4, "end") for p in range(stages)]
    size = max(WIDTH, LEFT + dp * side + 20), TOP + stages * tall + 66
    return tag(
        "svg", tag("title", title), tag("rect", width="100%", height="100%", fill="#fbfaf5"),
        _text(title, 16, 28, "start", 17), _text(note, 16, 50, "start"), *across, *down, *cells,
        *_legend(TOP + stages * tall + 24),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {size[0]:g} {size[1]:g}", width=f"{size[0]:g}",
        font_family="system-ui, sans-serif", fill="#37322a", role="img",
    )  # fmt: skip


def _hex(value: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour(value))


def _cell(value: float, name: str, x: float, y: float, side: float, tall: float) -> Html:
    gap = 1 if side > 2 * LEAST else 0
    box = tag("rect", tag("title", f"{name}: {value:.3f}"), x=f"{x:.2f}", y=f"{y:.2f}", width=f"{side - gap:.2f}",
              height=f"{tall - gap:.2f}", fill=_hex(value))  # fmt: skip
    if side < 34:
        return box
    return Html(box + _text(f"{value:.2f}", x + side / 2, y + tall / 2 + 4, "middle", 11))


def _text(text: str, x: float, y: float, anchor: str, size: int = 12) -> Html:
    return tag("text", text, x=f"{x:.2f}", y=f"{y:.2f}", text_anchor=anchor, font_size=size)


def _legend(y: float) -> list[Html]:
    marks = np.linspace(LOW, HIGH, 6)
    boxes = [
        tag("rect", x=f"{LEFT + i * 44:g}", y=f"{y:g}", width="42", height="12", fill=_hex(v))
        for i, v in enumerate(marks)
    ]
    return boxes + [_text(f"{v:.1f}", LEFT + i * 44 + 21, y + 27, "middle", 11) for i, v in enumerate(marks)]
