"""The heat map of workers as a picture."""

import xml.dom.minidom

import numpy as np
import pytest
from tilth_studies.trace_whatif import heat_map

from tilth.ui.heat import COOL, WARM, colour


def test_colours_span_one_to_one_and_a_half():
    assert colour(0.5) == colour(1.0) == COOL
    assert colour(1.5) == colour(9.0) == WARM
    assert all(min(a, b) <= c <= max(a, b) for a, b, c in zip(COOL, WARM, colour(1.2)))


@pytest.mark.parametrize("stages, dp", [(1, 1), (4, 4), (8, 100), pytest.param(8, 1000, marks=pytest.mark.slow)])
def test_every_worker_has_a_cell_inside_the_picture(stages, dp):
    names = [[f"{p} {d}" for d in range(dp)] for p in range(stages)]
    page = xml.dom.minidom.parseString(heat_map("S <2>", "a & b", np.full((stages, dp), 1.25), names))
    wide, tall = map(float, page.documentElement.getAttribute("viewBox").split()[2:])
    cells = [t.parentNode for t in page.getElementsByTagName("title")][1:]
    assert len(cells) == stages * dp
    for cell in cells:
        assert float(cell.getAttribute("x")) + float(cell.getAttribute("width")) <= wide
        assert float(cell.getAttribute("y")) + float(cell.getAttribute("height")) <= tall
        assert float(cell.getAttribute("width")) >= 3
    texts = [t.firstChild.data for t in page.getElementsByTagName("text")]
    assert "S <2>" in texts and "a & b" in texts and texts.count("1.25") == (stages * dp if dp <= 4 else 0)
