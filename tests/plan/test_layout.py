"""Roles on ranks and parameters on meshes, against brute force and against what the parallel room does."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.config.errors import RecipeError
from tilth.config.load import from_dict
from tilth.config.schema import Model
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import parameter_shapes as those_of_the_decoder
from tilth.parallel import sharded, tensor
from tilth.plan.layout import NAMES, Placed, check_shape, elements, layouts, misfit, place, ranks_of
from tilth.plan.memory import value_parameters
from tilth.plan.shape import Shape, new_shape, parameter_shapes, parameters


def recipe(workers: int | dict[str, int] = 1, **sections: Any):
    pools = {"pools": workers} if isinstance(workers, dict) else {"workers": workers}
    return from_dict({**sections, "cluster": {"backend": "local", **pools, **sections.pop("cluster", {})}})


# -- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({"flow": "grpo"}, {"policy", "rollout", "reward", "recorder"}),
        ({"flow": "grpo", "algorithm": {"kl_coef": 0.1}}, {"policy", "reference", "rollout", "reward", "recorder"}),
        ({"flow": "ppo"}, {"policy", "critic", "rollout", "reward", "recorder"}),
        ({"flow": "sft", "supervised": {"steps": 1}}, {"policy", "rollout", "reward", "recorder"}),
        ({"flow": "pretrain", "supervised": {"steps": 1}}, {"policy", "recorder"}),
    ],
)
def test_roles_of_a_flow(sections, roles):
    assert set(place(recipe(**sections))) == roles


def test_one_worker_has_everything():
    placed = place(from_dict({"flow": "ppo"}))
    assert {p for p in placed.values()} == {Placed("", (0,), Mesh(NAMES, (1, 1, 1)))}


def test_colocated_roles_have_meshes_of_their_own_over_the_same_workers():
    placed = place(recipe(4, flow="ppo", policy={"layout": {"fsdp": 2, "tp": 2}}, critic={"layout": {"fsdp": 2}}))
    assert placed["policy"].mesh == Mesh(NAMES, (1, 2, 2))
    assert placed["critic"].mesh == Mesh(NAMES, (2, 2, 1))
    assert placed["rollout"].mesh == Mesh(NAMES, (4, 1, 1))
    assert (placed["policy"].data_ranks, placed["critic"].data_ranks, placed["rollout"].data_ranks) == (2, 4, 4)
    assert placed["reward"].ranks == placed["recorder"].ranks == (0,)


def test_pools_take_neighbouring_ranks_in_their_order():
    placed = place(recipe({"train": 2, "speak": 3}, rollout={"pool": "speak"}, reward={"pool": "speak"}))
    assert placed["policy"] == Placed("train", (0, 1), Mesh(NAMES, (2, 1, 1), (0, 1)))
    assert placed["rollout"] == Placed("speak", (2, 3, 4), Mesh(NAMES, (3, 1, 1), (2, 3, 4)))
    assert placed["reward"].ranks == placed["recorder"].ranks == (2,)
    assert placed["rollout"].mesh.coordinates(3) == (1, 0, 0)


def test_recipes_that_were_made_without_a_check_are_checked():
    plain = recipe(2)
    broken = plain.model_copy(update={"policy": plain.policy.model_copy(update={"pool": "x"})})
    with pytest.raises(RecipeError, match=r"policy\.pool = 'x'"):
        place(broken)
    with pytest.raises(RecipeError, match="no pool 'x'"):
        ranks_of(plain, "x")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_every_rank_of_the_pool_stands_at_one_coordinate(dp, fsdp, tp, before):
    workers = {"first": before, "rest": dp * fsdp * tp} if before else {"rest": dp * fsdp * tp}
    placed = place(recipe(workers, policy={"pool": "rest", "layout": {"fsdp": fsdp, "tp": tp}}))["policy"]
    assert placed.mesh.sizes == (dp, fsdp, tp) and placed.ranks == placed.mesh.ranks
    assert placed.ranks == tuple(range(before, before + dp * fsdp * tp))
    assert len({placed.mesh.coordinates(r) for r in placed.ranks}) == len(placed.ranks)


# -- what a shape allows ---------------------------------------------------------------------------------------------


def shape_of(heads=4, kv_heads=4, ffn=384, layers=2, vocab=14, **more):
    model = Model(heads=heads, kv_heads=kv_heads, head_dim=8, hidden=32, ffn=ffn, layers=layers, **more)
    return new_shape(model, vocab)


@pytest.mark.parametrize(
    ("shape", "workers", "tp", "message"),
    [
        (shape_of(4), 3, 3, "policy.layout.tp = 3 does not divide model.heads = 4; on 3 workers tp may be 1"),
        (shape_of(4, ffn=66), 4, 4, "policy.layout.tp = 4 does not divide model.ffn = 66; on 4 workers tp may be 1, 2"),
        (
            shape_of(12, 3, ffn=24),
            12,
            2,
            "policy.layout.tp = 2 does not divide model.kv_heads = 3 (nor divided by it); on 12 workers tp may be 1, "
            "3, 6, 12",
        ),
    ],
)
def test_a_shape_that_does_not_divide_names_what_would(shape, workers, tp, message):
    asked = recipe(workers, policy={"layout": {"tp": tp}})
    with pytest.raises(RecipeError) as caught:
        check_shape(asked, shape)
    assert str(caught.value) == message


def test_each_role_is_looked_at():
    asked = recipe(3, flow="ppo", critic={"layout": {"tp": 3}})
    with pytest.raises(RecipeError, match=r"critic\.layout\.tp = 3 does not divide model\.heads"):
        check_shape(asked, shape_of(4))
    check_shape(recipe(3, critic={"layout": {"tp": 3}}), shape_of(4))  # flow grpo has no critic


def test_fewer_key_heads_than_ranks_and_any_vocabulary():
    check_shape(recipe(4, policy={"layout": {"tp": 4}}), shape_of(4, 1, vocab=13))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40), st.integers(1, 8))
def test_misfit_is_that_of_the_parallel_room(kv_heads, repeat, ffn, tp):
    config = DecoderConfig(10, 32, ffn, 1, kv_heads * repeat, num_kv_heads=kv_heads, head_dim=8)
    assert bool(misfit(config, tp)) == bool(tensor._misfit(config, tp))


# -- parameters ------------------------------------------------------------------------------------------------------

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def config_of(shape: Shape) -> DecoderConfig:
    names = {"vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"}
    names |= {"qk_norm", "qkv_bias", "o_bias", "mlp_bias", "tie_embeddings"}
    return DecoderConfig(**{name: getattr(shape, name) for name in names})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_decoder(family, tied):
    shape = shape_of(4, 2, family=family, tied=tied)
    assert parameter_shapes(shape) == those_of_the_decoder(config_of(shape))
    assert sum(math.prod(s) for s in parameter_shapes(shape).values()) == parameters(shape)
    assert sum(math.prod(s) for s in parameter_shapes(shape, value=True).values()) == value_parameters(shape)


def test_parameters_with_every_bias():
    shape = Shape(14, 32, 64, 2, 4, 2, 8, o_bias=True, mlp_bias=True, qkv_bias=True)
    assert parameter_shapes(shape) == those_of_the_decoder(config_of(shape))


MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 2, 2)]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_layouts_are_those_of_the_parallel_room(sizes, kv_heads):
    shape, mesh = shape_of(4, kv_heads, vocab=13, tied=False, family="qwen2"), Mesh(NAMES, sizes)
    copies = max(1, sizes[2] // kv_heads)
    grid: Any = SimpleNamespace(mesh=mesh)
    expected = {
        name: sharded._layout(grid, s, tensor._placement(name, copies)) for name, s in parameter_shapes(shape).items()
    }
    found = layouts(parameter_shapes(shape), mesh, kv_heads)
    for name in found:
        assert [found[name].boxes(r) for r in mesh.ranks] == [expected[name].boxes(r) for r in mesh.ranks], name


def test_the_critic_as_the_parallel_room_has_it():
    shape = shape_of(4, 2, tied=False)
    assert set(parameter_shapes(shape, value=True)) == {n for n, _ in value_model(shape).named_parameters()}


def value_model(shape):
    from tilth.models.value import ValueModel

    return ValueModel(Decoder(config_of(shape)))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(5, 20))
def test_ranks_together_hold_each_element_as_often_as_copies_are_meant(dp, fsdp, tp, kv_heads, vocab):
    shape, mesh = shape_of(4, kv_heads, vocab=vocab, layers=1), Mesh(NAMES, (dp, fsdp, tp))
    shapes = parameter_shapes(shape)
    found = layouts(shapes, mesh, kv_heads)
    copies = {
        name: tp if "norm" in name else max(1, tp // kv_heads) if name.split(".")[-2] in "k_proj v_proj" else 1
        for name in shapes
    }
    whole = sum(dp * copies[name] * math.prod(s) for name, s in shapes.items())
    assert sum(elements(found, rank) for rank in mesh.ranks) == whole
    if fsdp * tp == 1:
        assert elements(found, 0) == parameters(shape)
