"""A heat map of workers as an SVG file: a row for each pipeline stage, a column for each data-parallel rank."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from tilth.ui.html import render

COOL, WARM = (0xF1, 0xEF, 0xE6), (0xB9, 0x53, 0x2D)  # colours of the report: ground and clay
LOW, HIGH = 1.0, 1.5  # slowdowns at both ends of the colours, as in the study; values outside are clamped
WIDTH, LEAST, LEFT, TOP = 960.0, 4.0, 70.0, 84.0
"""Pixels: width of the picture, least size of a cell, margins left of and above the cells."""


def colour(value: float) -> tuple[int, int, int]:
    """Return red, green and blue of a slowdown, 0 to 255."""
    share = min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(COOL, WARM))
    return red, green, blue


def heat_map(title: str, note: str, values: np.ndarray, names: Sequence[Sequence[str]]) -> Markup:
    """Draw the picture. values: [stages, dp], 1: nothing is lost. names: tooltips [stages, dp]."""
    stages, dp = values.shape
    side = max(min((WIDTH - LEFT - 20) / dp, 56.0), LEAST)
    tall = max(min(side, 40.0), 12.0)
    return render(
        "heat.svg", title=title, note=note, values=values.tolist(), names=names, hex=_hex,
        marks=np.linspace(LOW, HIGH, 6), side=side, tall=tall, left=LEFT, top=TOP, gap=1 if side > 2 * LEAST else 0,
        across=range(0, dp, max(1, round(40 / side))),
        size=(max(WIDTH, LEFT + dp * side + 20), TOP + stages * tall + 66),
    )  # fmt: skip


def _hex(value: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour(value))
