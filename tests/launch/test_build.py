"""Roles are made with what a recipe says of their calls."""

from types import SimpleNamespace

from tests.analysis.test_costs import passes, table
from tests.flows import tiny
from tilth.analysis.costs import fit_costs
from tilth.core.layout import Mesh
from tilth.launch.build import make_roles
from tilth.plan.costs import save_costs


def made_with(recipe):
    """What each group of a run is made with."""
    found = {}
    cluster = SimpleNamespace(group=lambda role, factory, kwargs, **how: found.setdefault(role, how))
    make_roles(cluster, {"policy": Mesh.of({})}, {"recipe": recipe, "config": None, "tokenizer": None})
    return found


def test_plans_balance_the_costs_of_a_file(tmp_path):
    costs = fit_costs(table(passes()), {"run": "one"})
    save_costs(costs, tmp_path / "costs.json")
    assert made_with(tiny.recipe(tmp_path, cluster={"costs": str(tmp_path / "costs.json")}))["policy"]["costs"] == costs
    assert made_with(tiny.recipe(tmp_path))["policy"]["costs"] is None
