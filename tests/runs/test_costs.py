"""The record of a run's costs comes back as it was written, and damage is named."""

import json

import pytest

from tests.errors import raises
from tests.launch.laws import costs_of
from tilth.core.errors import DataError
from tilth.runs.costs import COSTS, CostFit, read_costs, record_costs


def test_what_is_recorded_comes_back_in_order(tmp_path):
    assert read_costs(tmp_path) == []
    fits = [CostFit(1, "a profile", costs_of(1e-6)), CostFit(51, "this run", costs_of(2e-6, 1e-9, 1e-3))]
    for fit in fits:
        record_costs(tmp_path, fit)
    assert read_costs(tmp_path) == fits
    with (tmp_path / COSTS).open("a") as file:
        file.write('{"step": 90, "sour')  # a kill
    assert read_costs(tmp_path) == fits


@pytest.mark.parametrize(
    ("damage", "key"), [({"step": "1"}, "1"), ({"source": None}, "1"), ({"costs": {"format": "x"}}, "1.format")]
)
def test_a_damaged_record_is_named(tmp_path, damage, key):
    record_costs(tmp_path, CostFit(1, "a profile", costs_of(1e-6)))
    (line,) = (tmp_path / COSTS).read_text().splitlines()
    (tmp_path / COSTS).write_text(json.dumps(json.loads(line) | damage) + "\n")
    with raises(DataError, f"{COSTS}.{key}"):
        read_costs(tmp_path)
