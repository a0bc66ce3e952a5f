"""A run's calls are balanced as its recipe says."""

import pytest

from tests.flows import tiny
from tilth.launch import life


@pytest.mark.parametrize(
    ("sections", "by"),
    [
        ({}, "tokens"),
        ({"train": {"balance": "cost"}}, "cost"),
        ({"train": {"balance": "none"}}, "none"),
        ({"cluster": {"costs": "costs.json"}}, "cost"),
    ],
)
def test_calls_are_balanced_as_the_recipe_says(tmp_path, sections, by):
    with life._cluster(tiny.recipe(tmp_path, **sections), None) as cluster:
        assert cluster.balance.by == by and cluster.balance.measures
