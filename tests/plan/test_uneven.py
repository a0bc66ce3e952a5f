"""Steps of unequal sequences: the busiest rank's work by its definition, and layouts that such data makes faster."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.launch.laws import costs_of
from tilth.config.load import from_dict
from tilth.core.errors import PlanError
from tilth.core.layout import Mesh
from tilth.models.family import new_config
from tilth.plan.devices import DEVICES
from tilth.plan.search import STAGES, SearchInput, StepCosts, StepShare, find_mapping, policy_options

MODEL = {"family": "llama", "hidden": 512, "layers": 4, "heads": 8, "context": 8192}


def squares(lengths):
    return lengths.astype(np.float64) ** 2


def asked(lengths, devices=4, **sections):
    given = {"flow": "sft", "model": MODEL, "supervised": {"steps": 1, "batch": 32}, "train": {"micro_tokens": 2048}}
    made = from_dict({**given, "data": {"source": "addition"}, "optimizer": {"name": "adamw"}, **sections})
    shape = new_config(made.model, 1000)
    return SearchInput(made, shape, 8192, DEVICES["cpu"], devices, generates=False, lengths=lengths)


def heavy(count=256):
    """Most are short; one in 32, of each batch, has most of the work."""
    lengths = np.random.default_rng(0).integers(20, 200, count)
    lengths[::32] = 8192
    return lengths


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 4), st.booleans())
def test_work_is_that_of_the_sequences_however_ranks_divide_them(lengths, ranks, units):
    mesh = Mesh.of({"hdp" if units else "dp": ranks})
    costs = StepCosts(squares, "cost", 300)
    loads = costs.loads(np.array(lengths), mesh)
    assert sum(load.cost.sum() for load in loads) == pytest.approx(sum(n * n for n in lengths))
    share = StepShare.of(np.array(lengths), len(lengths), 300, mesh, costs)
    greatest = max(load.cost.sum() for load in loads)
    assert share.busiest == pytest.approx(greatest / (-(-len(lengths) // ranks) * 300**2))
    assert share.tokens == pytest.approx(sum(lengths) / len(lengths) / 300) and share.divided == 0


def test_a_gang_costs_its_ring_and_a_sequence_that_no_ranks_hold_is_refused():
    mesh, lengths = Mesh.of({"hdp": 2}), np.array([100, 10])
    for ring, cost in ((0.0, 5000.0), (60.0, 6000.0)):
        loads = StepCosts(squares, "cost", 50, ring).loads(lengths, mesh)
        assert [load.cost[0] for load in loads] == [cost, cost]
    with raises(PlanError, "layout.hdp"):
        StepCosts(squares, "cost", 49).loads(lengths, mesh)
    assert StepShare.of(lengths, 2, 100, mesh, StepCosts(squares, "cost", 50)).divided == 0.5


def test_data_with_a_heavy_tail_gets_units_of_ranks_and_even_data_does_not():
    """The 8192 tokens of a few sequences divide over four ranks; the others stay on one each."""
    units = find_mapping(asked(heavy())).recipe.policy.layout
    assert units.hdp == 4 and units.cp == units.dp == 1
    for lengths in (np.full(256, 200), None):
        layout = find_mapping(asked(lengths)).recipe.policy.layout
        assert layout.hdp == 1, lengths


def test_units_are_tried_alone_and_where_a_sequence_takes_several_ranks():
    found = [option.layout for option in policy_options(asked(heavy()))]
    assert {layout.hdp for layout in found} == {1, 4}  # two ranks do not hold the longest
    assert all(max(layout.dp, layout.cp) == 1 for layout in found if layout.hdp > 1)
    assert {o.layout.hdp for o in policy_options(asked(np.minimum(heavy(), 2048)))} == {1}
    assert {o.layout.hdp for o in policy_options(asked(None))} == {1}


def test_times_are_those_of_the_data_and_without_lengths_all_are_longest():
    def seconds(lengths):
        given = replace(asked(lengths, 1), costs=costs_of(0.0, 1.0))
        return policy_options(given)[0].seconds[STAGES.index("train")]

    every, half = seconds(None), seconds(np.full(7, 4096))
    assert every == pytest.approx(32 * 8192.0**2, rel=1e-2) and half == pytest.approx(every / 4, rel=1e-2)
    assert seconds(np.full(3, 8192)) == pytest.approx(every)
