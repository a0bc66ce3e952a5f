"""Plans of models with experts: what divides, what each rank holds, and what a token costs."""

import pytest

from tests.errors import raises
from tilth.config.errors import RecipeError
from tilth.config.load import load_recipe
from tilth.core.layout import Mesh
from tilth.models.family import new_config
from tilth.plan.layout import check_shape, elements, layouts, per_rank
from tilth.plan.memory import CERTAIN
from tilth.plan.shape import parameters, token_flops

BASE = ["cluster.backend=local", "model.family=qwen3_moe", "model.experts=6", "model.dense_layers=1", "model.hidden=64"]


def planned(*keys):
    recipe = load_recipe("addition-grpo", [*BASE, *keys])
    return recipe, new_config(recipe.model, 14)


def test_a_width_of_experts_that_does_not_divide_is_named_with_values_that_do():
    recipe, shape = planned("cluster.workers=4", "policy.layout.tp=4", "model.expert_ffn=30")
    with raises(RecipeError, key="policy.layout.tp") as caught:
        check_shape(recipe, shape)
    assert "model.expert_ffn = 30" in str(caught.value) and "tp may be 1, 2" in str(caught.value)


def test_the_width_of_dense_layers_counts_where_there_are_some():
    recipe, shape = planned("cluster.workers=4", "policy.layout.tp=4", "model.ffn=90", "model.expert_ffn=32")
    with raises(RecipeError, key="policy.layout.tp"):
        check_shape(recipe, shape)
    recipe, shape = planned(
        "cluster.workers=4", "policy.layout.tp=4", "model.ffn=90", "model.expert_ffn=32", "model.dense_layers=0"
    )
    check_shape(recipe, shape)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4)])
def test_ranks_hold_every_element_once(sizes):
    _, shape = planned()
    mesh = Mesh(("dp", "fsdp", "tp"), sizes)
    parts = layouts(shape, mesh)
    held = {rank: elements(parts, rank) for rank in mesh.ranks}
    whole = {name: layout for name, layout in parts.items() if "experts" in name}
    assert sum(elements(whole, rank) for rank in mesh.ranks) == sizes[0] * sum(
        6 * 3 * 64 * shape.expert_size for _ in shape.expert_layers
    )
    assert max(held.values()) < parameters(shape) or sizes == (1, 1, 1)


def test_memory_counts_all_experts_and_flops_those_of_a_token():
    (few_recipe, few), (many_recipe, many) = (planned(f"model.experts={n}") for n in (6, 24))
    added = 3 * 18 * 3 * 64 * few.expert_size + 3 * 18 * 64
    assert parameters(many) - parameters(few) == added
    held = [
        sum(i.bytes for i in per_rank(recipe, shape, 16)[0].memory.held if i.name.endswith(CERTAIN))
        for recipe, shape in ((few_recipe, few), (many_recipe, many))
    ]
    assert held[1] - held[0] >= 3 * 4 * added
    routers = 2 * 3 * 18 * 64
    assert token_flops(many, 8).forward - token_flops(few, 8).forward == routers
