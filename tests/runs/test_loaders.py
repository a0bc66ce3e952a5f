"""The record of plans of loaders comes back as it was written, and damage is named."""

import json

import pytest

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.launch.loader_plans import LOADERS, LoaderPlan, read_plans, record_plan


def test_what_is_recorded_comes_back_in_order(tmp_path):
    assert read_plans(tmp_path) == []
    plans = [LoaderPlan(1, 2, [{"a": 1.0, "b": 0.25}, {"b": 0.75}]), LoaderPlan(51, 2, [{"b": 1.0}])]
    for plan in plans:
        record_plan(tmp_path, plan)
    assert read_plans(tmp_path) == plans
    with (tmp_path / LOADERS).open("a") as file:
        file.write('{"step": 90, "mo')  # a kill
    assert read_plans(tmp_path) == plans


@pytest.mark.parametrize(
    "damage", [{"step": "1"}, {"most": None}, {"shares": {}}, {"shares": [1]}, {"shares": [{"a": 2}]}]
)
def test_a_damaged_record_is_named(tmp_path, damage):
    record_plan(tmp_path, LoaderPlan(1, 1, [{"a": 1.0}]))
    (line,) = (tmp_path / LOADERS).read_text().splitlines()
    (tmp_path / LOADERS).write_text(json.dumps(json.loads(line) | damage) + "\n")
    with raises(DataError, f"{LOADERS}.1"):
        read_plans(tmp_path)
