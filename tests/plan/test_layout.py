"""Roles on ranks and parameters on meshes, against brute force and against what the parallel room does."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.config.errors import RecipeError
from tilth.config.load import from_dict, load_recipe
from tilth.config.schema import ModelConfig
from tilth.core.layout import Mesh, Replicate, Shard
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.parallel import sharded
from tilth.plan.layout import (
    Placed,
    alike,
    check_shape,
    cut,
    elements,
    layouts,
    nested,
    per_rank,
    place,
    ranks_of,
    update_layouts,
)
from tilth.plan.memory import BASE, TOKEN
from tilth.plan.pipeline import stages_of
from tilth.plan.shape import parameter_shapes, parameters


def recipe(workers: int | dict[str, int] = 1, **sections: Any):
    pools = {"pools": workers} if isinstance(workers, dict) else {"workers": workers}
    return from_dict({**sections, "cluster": {"backend": "local", **pools, **sections.pop("cluster", {})}})


def mesh_of(sizes, ranks=()):
    return Mesh.of(dict(zip(("dp", "fsdp", "tp"), sizes)), ranks)


# -- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({"flow": "grpo"}, {"policy", "rollout", "reward", "loader", "writer"}),
        (
            {"flow": "grpo", "algorithm": {"kl_coef": 0.1}},
            {"policy", "reference", "rollout", "reward", "loader", "writer"},
        ),
        ({"flow": "ppo"}, {"policy", "critic", "rollout", "reward", "loader", "writer"}),
        ({"flow": "sft", "supervised": {"steps": 1}}, {"policy", "rollout", "reward", "loader"}),
        ({"flow": "pretrain", "supervised": {"steps": 1}}, {"policy", "loader"}),
    ],
)
def test_roles_of_a_flow(sections, roles):
    assert set(place(recipe(**sections))) == roles


def test_one_worker_has_everything():
    placed = place(from_dict({"flow": "ppo"}))
    assert {p for p in placed.values()} == {Placed("", (0,), mesh_of((1, 1, 1)))}


def test_colocated_roles_have_meshes_of_their_own_over_the_same_workers():
    placed = place(recipe(4, flow="ppo", policy={"layout": {"fsdp": 2, "tp": 2}}, critic={"layout": {"fsdp": 2}}))
    assert placed["policy"].mesh == mesh_of((1, 2, 2))
    assert placed["critic"].mesh == mesh_of((2, 2, 1))
    assert placed["rollout"].mesh == mesh_of((4, 1, 1))
    assert (placed["policy"].data_ranks, placed["critic"].data_ranks, placed["rollout"].data_ranks) == (2, 4, 4)
    assert placed["reward"].ranks == placed["loader"].ranks == placed["writer"].ranks == (0,)


def test_pools_take_neighbouring_ranks_in_their_order():
    placed = place(recipe({"train": 2, "speak": 3}, rollout={"pool": "speak"}, reward={"pool": "speak"}))
    assert placed["policy"] == Placed("train", (0, 1), mesh_of((2, 1, 1), (0, 1)))
    assert placed["rollout"] == Placed("speak", (2, 3, 4), mesh_of((3, 1, 1), (2, 3, 4)))
    assert placed["reward"].ranks == placed["loader"].ranks == placed["writer"].ranks == (2,)
    assert {name: at for name, at in placed["rollout"].mesh.at(3).items() if at} == {"dp": 1}


def test_recipes_that_were_made_without_a_check_are_checked():
    plain = recipe(2)
    broken = plain.model_copy(update={"policy": plain.policy.model_copy(update={"pool": "x"})})
    with raises(RecipeError, "policy.pool"):
        place(broken)
    with raises(RecipeError, "cluster.pools"):
        ranks_of(plain, "x")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_every_rank_of_the_pool_stands_at_one_coordinate(dp, fsdp, tp, before):
    workers = {"first": before, "rest": dp * fsdp * tp} if before else {"rest": dp * fsdp * tp}
    placed = place(recipe(workers, policy={"pool": "rest", "layout": {"fsdp": fsdp, "tp": tp}}))["policy"]
    assert placed.mesh == mesh_of((dp, fsdp, tp), placed.ranks)
    assert placed.ranks == tuple(range(before, before + dp * fsdp * tp))
    assert len({placed.mesh.coordinates(r) for r in placed.ranks}) == len(placed.ranks)


# -- what a shape allows ---------------------------------------------------------------------------------------------


def shape_of(heads=4, kv_heads=4, ffn=384, layers=2, vocab=14, **more):
    model = ModelConfig(heads=heads, kv_heads=kv_heads, head_dim=8, hidden=32, ffn=ffn, layers=layers, **more)
    return new_config(model, vocab)


@pytest.mark.parametrize(
    ("shape", "workers", "tp", "message"),
    [
        (shape_of(4), 3, 3, "policy.layout.tp = 3 does not divide model.heads = 4; on 3 workers tp may be 1"),
        (shape_of(4, ffn=66), 4, 4, "policy.layout.tp = 4 does not divide model.ffn = 66; on 4 workers tp may be 1, 2"),
        (
            shape_of(12, 3, ffn=24),
            12,
            2,
            "policy.layout.tp = 2 does not divide model.kv_heads = 3, nor is it a multiple; on 12 workers tp may be 1, "
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
    with raises(RecipeError, "critic.layout.tp"):
        check_shape(asked, shape_of(4))
    check_shape(recipe(3, critic={"layout": {"tp": 3}}), shape_of(4))  # flow grpo has no critic


@pytest.mark.parametrize(
    ("family", "train", "key"),
    [
        ("qwen3", {"router_balance": 0.1}, "train.router_balance.unused"),
        ("qwen3", {"router_z": 0.1}, "train.router_z.unused"),
        ("qwen3", {"routing": "replay"}, "train.routing.unused"),
        ("qwen3_moe", {"router_correction": 0.1}, "train.router_correction.unused"),
    ],
)
def test_settings_of_routers_need_a_model_with_such_routers(family, train, key):
    with raises(RecipeError, key):
        check_shape(recipe(train=train), shape_of(family=family))
    check_shape(recipe(train=train), shape_of(family="deepseek_v3"))
    check_shape(recipe(), shape_of(family=family))


def test_fewer_key_heads_than_ranks_and_any_vocabulary():
    check_shape(recipe(4, policy={"layout": {"tp": 4}}), shape_of(4, 1, vocab=13))


# -- parameters ------------------------------------------------------------------------------------------------------

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def those_of(model: Decoder) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_decoder(family, tied):
    shape = shape_of(4, 2, family=family, tied=tied)
    assert list(parameter_shapes(shape).items()) == those_of(Decoder(shape))
    assert list(parameter_shapes(shape, value=True).items()) == those_of(value_model(shape))
    assert sum(math.prod(s) for s in parameter_shapes(shape).values()) == parameters(shape)
    assert sum(math.prod(s) for s in parameter_shapes(shape, value=True).values()) == parameters(shape, value=True)


def test_parameters_with_every_bias():
    shape = DecoderConfig(14, 32, 64, 2, 4, 2, 8, o_bias=True, mlp_bias=True, qkv_bias=True)
    assert list(parameter_shapes(shape).items()) == those_of(Decoder(shape))


MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 2, 2)]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_layouts_are_as_megatron_divides(sizes, kv_heads):
    shape, mesh = shape_of(4, kv_heads, vocab=13, tied=False, family="qwen2"), mesh_of(sizes)
    copies = max(1, sizes[2] // kv_heads)
    written = dict.fromkeys(("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), Shard(0))
    written |= {"k_proj": Shard(0, copies), "v_proj": Shard(0, copies), "o_proj": Shard(1), "down_proj": Shard(1)}
    along = {name: written.get(name.split(".")[-2], Replicate()) for name in parameter_shapes(shape)}
    expected = {name: nested(mesh, s, {"tp": along[name]}) for name, s in parameter_shapes(shape).items()}
    found = layouts(shape, mesh)
    for name in found:
        assert [found[name].boxes(r) for r in mesh.ranks] == [expected[name].boxes(r) for r in mesh.ranks], name


def value_model(shape):
    from tilth.models.converters import ValueModel

    return ValueModel(Decoder(shape))


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(5, 20))
def test_ranks_together_hold_each_element_as_often_as_copies_are_meant(dp, fsdp, tp, kv_heads, vocab):
    shape, mesh = shape_of(4, kv_heads, vocab=vocab, layers=1), mesh_of((dp, fsdp, tp))
    shapes = parameter_shapes(shape)
    found = layouts(shape, mesh)
    copies = {
        name: tp if "norm" in name else max(1, tp // kv_heads) if name.split(".")[-2] in "k_proj v_proj" else 1
        for name in shapes
    }
    whole = sum(dp * copies[name] * math.prod(s) for name, s in shapes.items())
    assert sum(elements(found, rank) for rank in mesh.ranks) == whole
    if fsdp * tp == 1:
        assert elements(found, 0) == parameters(shape)


# -- memory ----------------------------------------------------------------------------------------------------------


def item(memory, name):
    return {i.name: i.bytes for i in (*memory.held, *memory.training, *memory.generation)}.get(name, 0)


def workers_of(workers, *overrides, longest=16, **more):
    pools = [f"cluster.pools={workers}"] if isinstance(workers, str) else [f"cluster.workers={workers}"]
    asked = load_recipe("addition-grpo", ["cluster.backend=local", "optimizer.name=adamw", *pools, *overrides])
    return per_rank(asked, new_config(asked.model, 14), longest, **more)


COUNT = parameters(new_config(load_recipe("addition-grpo").model, 14))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("parts", [2, 4])
def test_fsdp_divides_parameters_gradients_and_optimizer(parts, optimizer):
    how = f"optimizer.name={optimizer}"
    (one,), many = workers_of(1, how), workers_of(parts, how, f"policy.layout.fsdp={parts}")
    assert sum(w.seats[0].elements for w in many) == COUNT
    assert [w.memory.gradients for w in many] == pytest.approx([one.memory.gradients / parts] * parts, rel=0.01)
    for name in ("parameters", "optimizer state"):
        assert [item(w.memory, name) for w in many] == pytest.approx([item(one.memory, name) / parts] * parts, rel=0.01)
    assert item(one.memory, "parameters and gradients of other ranks") == 0
    whole, cache = "engine's copy of the weights", "KV cache"
    assert {item(w.memory, whole) for w in many} == {item(one.memory, whole)}
    assert parts * item(many[0].memory, cache) == pytest.approx(item(one.memory, cache), rel=0.2)  # rows are divided


def test_zero_2_keeps_more_of_other_ranks_than_zero_3():
    both = [workers_of(2, "policy.layout.fsdp=2", f"policy.layout.zero={z}")[0].memory for z in (2, 3)]
    two, three = (item(m, "parameters and gradients of other ranks") for m in both)
    assert two == 2 * 4 * COUNT > three > 0
    assert both[0].peak - both[1].peak == two - three


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("keys", ["dp = 4", "fsdp = 4"])
def test_zero_1_divides_optimizer_state_and_averages_alone(optimizer, keys):
    how = f"optimizer.name={optimizer}", "train.ema=0.9"
    (one,), many = workers_of(1, *how), workers_of(4, *how, f"policy.layout={{{keys}, zero = 1}}")
    assert [w.seats[0].elements for w in many] == [COUNT] * 4
    assert [w.memory.gradients for w in many] == [one.memory.gradients] * 4
    for name in ("optimizer state", "average of the weights", "copy being saved"):
        assert [item(w.memory, name) for w in many] == pytest.approx([item(one.memory, name) / 4] * 4, rel=0.01)
    assert item(many[0].memory, "parameters and gradients of other ranks") == 0


def test_zero_1_divides_updates_of_experts_over_the_ranks_that_have_them():
    keys = "cluster.workers=4", "cluster.backend=local", "policy.layout={dp = 2, ep = 2, zero = 1}", *MOE
    asked = load_recipe("addition-grpo", [*keys, "optimizer.name=adamw"])
    shape, placed = new_config(asked.model, 14), place(asked)["policy"]
    part, found = cut(asked, "policy", placed, shape, 0), layouts(shape, placed.mesh, whole=True)
    updates = update_layouts(found, shape.table)
    held = sum(box.numel for layout in updates.values() for box in layout.boxes(0))
    assert part.elements == elements(found, 0) and part.updates == (4, 2)
    assert part.updated == pytest.approx(held, rel=0.02)


def test_replicas_hold_everything_and_less_activations():
    (one,), two = workers_of(1), workers_of(2)
    assert {w.seats[0].elements for w in two} == {COUNT}
    assert item(two[0].memory, "activations") == pytest.approx(item(one.memory, "activations") / 2, rel=1e-6)
    assert two[0].memory == two[1].memory


def test_tp_divides_matrices_and_activations_and_sp_more_of_them():
    (one,), two = workers_of(1), workers_of(2, "policy.layout.tp=2")
    four = [workers_of(4, "policy.layout.tp=4", f"policy.layout.sp={sp}") for sp in ("false", "true")]
    shapes = parameter_shapes(new_config(load_recipe("addition-grpo").model, 14))
    norms = sum(math.prod(s) for n, s in shapes.items() if "norm" in n)
    assert {w.seats[0].elements for w in two} == {(COUNT - norms) // 2 + norms}
    plain, halves, quarters, spread = (item(w[0].memory, "activations") for w in ((one,), two, *four))
    assert 0.5 * plain < halves < 0.75 * plain and spread < quarters < halves


def test_hybrid_is_fsdp_inside_of_replicas():
    hybrid = workers_of(4, "policy.layout={dp=2, fsdp=2}")
    assert [(at["dp"], at["fsdp"]) for at in (w.seats[0].coordinates for w in hybrid)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [w.seats[0].elements for w in hybrid[:2]] == [w.seats[0].elements for w in hybrid[2:]]
    assert hybrid[0].seats[0].elements + hybrid[1].seats[0].elements == COUNT


def test_pools_need_only_what_their_roles_do():
    train, speak = workers_of("{train=1, speak=1}", "rollout.pool=speak", "flow=ppo", "algorithm.kl_coef=0.1")
    assert [s.role for s in train.seats] == ["policy", "reference", "critic", "loader", "reward", "writer"]
    assert [s.role for s in speak.seats] == ["rollout"]
    assert item(train.memory, "KV cache") == item(speak.memory, "parameters") == speak.memory.gradients == 0
    (alone,) = workers_of(1, "flow=ppo", "algorithm.kl_coef=0.1")
    held = sum(i.bytes for w in (train, speak) for i in w.memory.held)
    assert held == sum(i.bytes for i in alone.memory.held) + BASE + 14 * TOKEN  # each process has its libraries


def test_a_reference_of_its_own_scores_in_little():
    split = workers_of("{train=1, judge=1}", "reference.pool=judge", "algorithm.kl_coef=0.1", "rollout.pool=train")
    judge = split[1].memory
    assert item(judge, "reference model") == 4 * COUNT and item(judge, "optimizer state") == 0
    assert 0 < item(judge, "activations of scoring") < 0.5 * item(split[0].memory, "activations")


def test_models_of_their_own_count_by_their_own_shape():
    asked = load_recipe("chain-fapo", ["judge.path=x"])
    policy, judge = new_config(asked.model, 30), new_config(asked.model, 3000)
    (worker,) = per_rank(asked, policy, 64, loaded={"judge.path": judge})
    seat = next(seat for seat in worker.seats if seat.role == "judge")
    held = {item.name: item.bytes for item in seat.need.held}
    assert held["judge's weights"] == 4 * parameters(judge) == 4 * seat.elements and held["judge's KV cache"] > 0
    assert set(seat.need.held) <= set(worker.memory.held) and sum(i.bytes for i in seat.need.generation) > 0


def test_each_of_several_teachers_is_held_and_one_scores_at_a_time():
    named = "reference.teachers={a = {path = 'x', sources = ['p']}, b = {path = 'y', sources = ['q']}}"
    asked = load_recipe("distill", ["reference.path=", "reference.field=kind", named])
    policy, *shapes = (new_config(asked.model.model_copy(update={"hidden": n}), 30) for n in (96, 64, 192))
    loaded = dict(zip(("reference.teachers.a.path", "reference.teachers.b.path"), shapes))

    def need(given):
        (worker,) = per_rank(asked, policy, 64, loaded=given)
        return next(seat for seat in worker.seats if seat.role == "reference").need

    both, small, large = (need(given) for given in (loaded, dict([*loaded.items()][:1]), dict([*loaded.items()][1:])))
    assert {i.name: i.bytes for i in both.held} == {"reference model": 4 * sum(map(parameters, shapes))}
    assert both.training == large.training != small.training
    wide = new_config(asked.model.model_copy(update={"hidden": 96, "heads": 3}), 30)
    workers = ["cluster.backend=local", "cluster.workers=2", "reference.layout.tp=2"]
    split = load_recipe("distill", ["reference.path=", "reference.field=kind", named, *workers])
    check_shape(split, policy, loaded)
    with raises(RecipeError, "reference.layout.tp"):
        check_shape(split, policy, loaded | {"reference.teachers.b.path": wide})


def test_a_worker_without_a_role_and_one_that_generates_nothing():
    idle = workers_of("{train=1, spare=1}")[1]
    assert idle.seats == () and idle.memory.peak == BASE + 14 * TOKEN
    assert all(s.role not in ("rollout", "reward") for s in workers_of(1, generates=False)[0].seats)


def test_a_layout_that_does_not_fit_the_shape_is_refused():
    with raises(RecipeError, "policy.layout.tp"):
        workers_of(8, "policy.layout.tp=8")


@pytest.mark.parametrize("sizes", MESHES)
def test_bytes_of_parameters_are_those_of_the_boxes(sizes):
    dp, fsdp, tp = sizes
    workers = workers_of(math.prod(sizes), f"policy.layout={{dp={dp}, fsdp={fsdp}, tp={tp}}}")
    asked = load_recipe("addition-grpo")
    found = layouts(new_config(asked.model, 14), mesh_of(sizes))
    assert [item(w.memory, "parameters") for w in workers] == [4 * elements(found, w.rank) for w in workers]


MOE = ("model.family=qwen3_moe", "model.experts=6", "model.experts_per_token=2", "model.dense_layers=1")


@pytest.mark.parametrize(
    ("family", "ep", "message"),
    [
        (MOE[0], 4, "policy.layout.ep = 4 does not divide model.experts = 6; on 4 workers ep may be 1, 2"),
        (
            "model.family=qwen3",
            2,
            "policy.layout.ep = 2 does not divide model.experts = 0, as the model has none; on 2 workers ep may be 1",
        ),
    ],
)
def test_experts_that_do_not_divide_name_what_would(family, ep, message):
    with pytest.raises(RecipeError) as caught:
        workers_of(ep, f"policy.layout.ep={ep}", *(MOE if family == MOE[0] else [family]))
    assert (caught.value.key, str(caught.value)) == ("policy.layout.ep", message)


def test_experts_are_divided_along_ep_and_gathered_along_fsdp_alone():
    for layout, experts in (("ep = 2", 3), ("ep = 2, fsdp = 2", 2), ("fsdp = 4", 2), ("dp = 2, ep = 2", 3)):
        workers = workers_of(4 if "," in layout or "4" in layout else 2, f"policy.layout={{{layout}}}", *MOE)
        asked = load_recipe("addition-grpo", [*MOE])
        shape = new_config(asked.model, 14)
        stacks = sum(math.prod(s[1:]) for n, s in parameter_shapes(shape).items() if ".experts." in n)
        rest = parameters(shape) - 6 * stacks
        seat = next(s for s in workers[0].seats if s.role == "policy")
        divided = 2 if layout in ("ep = 2", "dp = 2, ep = 2") else 4
        assert experts * stacks + rest / divided <= seat.elements < experts * stacks + rest / divided + 300


def test_every_stage_gathers_two_of_its_own_layers():
    """Layers of later stages have other numbers; embedding and head are alike, but for the last norm."""
    workers = workers_of(4, "policy.layout={pp = 2, fsdp = 2}", "model.layers=8", "model.tied=false", "flow=sft")
    needs = [next(s for s in worker.seats if s.role == "policy").need.training for worker in workers]
    first, *_, last = [{i.name: i.bytes for i in need}["parameters and gradients of other ranks"] for need in needs]
    asked = load_recipe("addition-grpo", ["model.layers=8"]).model
    assert last == pytest.approx(first, rel=0.01) and last > 4 * 2 * 10 * asked.hidden**2


@pytest.mark.parametrize(
    "layout", ["pp = 2", "pp = 2, fsdp = 2", "pp = 2, ep = 2", "pp = 2, tp = 2", "ep = 2, fsdp = 2"]
)
def test_counting_layers_that_are_alike_once_gives_the_elements_of_all_parameters(layout):
    keys, workers = f"policy.layout={{{layout}}}", 4 if "," in layout else 2
    asked = load_recipe("addition-grpo", [f"cluster.workers={workers}", "cluster.backend=local", keys, *MOE])
    shape, placed = new_config(asked.model, 14), place(asked)["policy"]
    found, stages = layouts(shape, placed.mesh), stages_of(shape, placed.mesh.size("pp"), "1f1b")
    times = alike(shape, stages, False)
    assert sum(times.values()) == len(found) > len(times)
    for rank in placed.ranks:
        part = cut(asked, "policy", placed, shape, rank)
        experts = {name: held for name, held in found.items() if ".experts." in name}
        assert (part.elements, part.experts) == (elements(found, rank), elements(experts, rank))


REAL = ["fsdp = 2", "tp = 2", "tp = 2, sp = true", "dp = 2", "ep = 2", "ep = 2, zero = 1", "fsdp = 2, zero = 1"]


@pytest.mark.dist
@pytest.mark.parametrize("keys", REAL)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_real_ranks_hold_what_was_predicted(pool, keys, role):
    overrides = [f"{role}.layout={{{keys}}}", "flow=ppo", "model.kv_heads=1", "model.tied=false"]
    overrides += MOE if "ep" in keys else ()
    predicted = [next(s for s in w.seats if s.role == role) for w in workers_of(2, *overrides)]
    found = pool.run(2, "tests.plan.test_layout:held_by_a_process", role=role, overrides=overrides)
    assert found == [seat.elements for seat in predicted]


def held_by_a_process(rank, role, overrides):
    from tilth.models.converters import ValueModel
    from tilth.parallel.dims import ParallelDims

    asked = load_recipe(
        "addition-grpo", ["cluster.backend=local", "optimizer.name=adamw", "cluster.workers=2", *overrides]
    )
    config, wanted = new_config(asked.model, 14), getattr(asked, role).layout
    build = (lambda: ValueModel(Decoder(config))) if role == "critic" else (lambda: Decoder(config))
    grid = ParallelDims.of(place(asked)[role].mesh, rank)
    model = sharded.shard(build, grid, sp=wanted.sp, zero=wanted.zero)
    return sum(p.numel() for p in model.parameters.values())


def test_stages_of_a_pipeline_divide_parameters_and_hold_as_many_micro_batches_as_1f1b_says():
    shape = new_config(load_recipe("addition-grpo").model, 14)
    many = "train.micro_tokens=1024"
    (one,), two = workers_of(1, many), workers_of(2, "policy.layout.pp=2", many)
    elements = [worker.seats[0].elements for worker in two]
    assert sum(elements) == COUNT + shape.vocab_size * shape.hidden_size  # both ends have the tied embedding
    first, last = (item(worker.memory, "activations") for worker in two)
    whole = item(one.memory, "activations")
    assert first == pytest.approx(whole, rel=0.2) and last == pytest.approx(whole / 2, rel=0.2)  # 2 x 2 of 4 layers, 2
