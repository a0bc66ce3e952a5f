"""The benchmark of the data plane writes no row for contenders whose samples differ."""

from pathlib import Path

import numpy as np
import pytest

from tests.scripts import script

SEEN = [[[4, 40], [7, 70]]]


@pytest.mark.parametrize("other", [[[[4, 40], [7, 71]]], [[[4, 40], [8, 70]]], [[[4, 40]]]])
def test_other_tokens_and_other_samples_are_seen(other):
    plane = script("dataplane.py")
    sources = plane.Sources(Path("nowhere"), [], np.array([[7, 4]]))
    plane.equal({"a": plane.Figures({}, SEEN), "b": plane.Figures({}, SEEN)}, sources)
    with pytest.raises(AssertionError):
        plane.equal({"a": plane.Figures({}, SEEN), "b": plane.Figures({}, other)}, sources)


def test_the_rising_source_has_its_weight_from_half_way_on():
    plane = script("dataplane.py")
    sources = plane.Sources(Path("nowhere"), ["s0.jsonl", "s1.jsonl", "s2.jsonl"], np.array([[29]]))
    order, weights = plane.ramp(sources, 6)
    assert order.shape == (6, plane.BATCH) and [set(own) for own in weights[:3]] == [{"s0"}] * 3
    assert all(own["s2"] > plane.BATCH / 2 for own in weights[3:])
