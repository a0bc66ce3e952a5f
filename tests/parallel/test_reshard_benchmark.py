"""The benchmark of transitions: its formulas are those of the plans, and it fails when it should."""

import pytest

from tests.scripts import script
from tilth.core.layout import Replicate
from tilth.parallel.reshard import whole_layout
from tilth.plan.layout import layouts
from tilth.plan.reshard import ReshardPlan

GOOD = {"moved": 1e6, "moved_formula": 1e6, "weights": 2e6, "weights_formula": 2e6, "equal": True, "kept": True}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"moved": 1.1e6}, "moved 1100000, not 1000000"),
        ({"weights": 2.1e6}, "weights 2100000"),
        ({"equal": False}, "other bits"),
        ({"kept": False}, "have moved"),
    ],
)
def test_a_row_that_misses_its_formula_fails(change, said):
    failures = script("reshard.py").failures
    assert not failures(GOOD)
    (told,) = failures({**GOOD, **change})
    assert said in told


@pytest.mark.parametrize("transition", ["full", "naive", "zero-redundancy"])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 2), (1, 2, 2, 1, 1), (1, 8, 1, 1, 4)])
def test_formulas_are_those_of_the_plans(transition, sizes):
    case = script("reshard.py").Case("quick", transition, *sizes)
    held, target = layouts(case.config, case.training), case.generation
    wanted = layouts(case.config, target)
    if transition != "zero-redundancy":
        target, wanted = case.training, {name: whole_layout(layout, case.training) for name, layout in held.items()}
    plans = [ReshardPlan.of(rank, case.training, held, target, wanted) for rank in case.training.ranks]
    assert {4 * plan.elements(rank) for rank, plan in zip(case.training.ranks, plans)} == {case.received}
    divided, copied = case.sizes
    assert copied == 0 or all(isinstance(p, Replicate) for p in held["model.norm.weight"].placements)
    assert divided + copied > case.received
