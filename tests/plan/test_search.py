"""The search for a recipe: what it finds passes the recipe's own checks, and its memory is that of the plan."""

from dataclasses import replace
from functools import cache

import pytest

from tests.errors import raises
from tests.launch.laws import costs_of
from tests.plan.test_mapping import brute_force
from tilth.config.checks import check_cluster
from tilth.config.load import dump_toml, from_dict
from tilth.config.schema import LayoutConfig
from tilth.core.errors import RecipeError
from tilth.models.family import new_config
from tilth.plan.devices import DEVICES
from tilth.plan.layout import per_rank
from tilth.plan.mapping import Option
from tilth.plan.search import STAGES, SearchInput, applied, find_mapping

SMALL = {"family": "llama", "hidden": 64, "layers": 2, "heads": 4, "context": 64}


def asked(devices, *, kind="a100-80g", shape=None, **sections):
    sections = {"flow": "ppo", "model": SMALL, "algorithm": {"kl_coef": 0.1}, **sections}
    recipe = from_dict({"optimizer": {"name": "adamw"}, "cluster": {"backend": "local"}, **sections})
    return SearchInput(recipe, shape or new_config(recipe.model, 50), 64, DEVICES[kind], devices)


@cache
def mapped(devices, kind="a100-80g"):
    return find_mapping(asked(devices, kind=kind))


@pytest.mark.parametrize("kind", ["a100-80g", "cpu"])
@pytest.mark.parametrize("devices", [1, 3])
def test_it_equals_brute_force_over_all_layouts(kind, devices):
    given, found = asked(devices, kind=kind), mapped(devices, kind)
    assert found.best.total == pytest.approx(brute_force(given.problem))
    assert set(role for pool in found.best.pools for role in pool.roles) == {"policy", "critic", "reference", "rollout"}


def test_the_recipe_that_it_gives_has_the_pools_and_passes_the_checks():
    given, found = asked(4, kind="cpu"), mapped(4, "cpu")
    for mapping in filter(None, (found.best, found.second)):
        recipe = applied(given.recipe, mapping, given.device.per_node)
        check_cluster(recipe)
        assert not recipe.cluster.search and recipe.cluster.workers == mapping.devices
        assert sorted(recipe.cluster.pools.values()) in ([], sorted(pool.devices for pool in mapping.pools))
        for pool in mapping.pools:
            for role, option in zip(pool.roles, pool.options):
                assert recipe.section(role).layout == option.layout
        assert "search = false" in dump_toml(recipe)


def test_its_memory_is_that_of_the_plan():
    given, found = asked(4), mapped(4)
    recipe = found.recipe.replaced("train", device="cuda")
    planned = max(worker.memory.on_gpu() for worker in per_rank(recipe, given.shape, given.longest))
    assert max(pool.memory for pool in found.best.pools) + given.problem.base == planned


def test_more_devices_than_one_machine_has_take_ray():
    given = asked(2)
    assert find_mapping(given).recipe.cluster.backend == "local"
    small = replace(given, device=replace(given.device, per_node=1), whole=True)
    assert find_mapping(small).recipe.cluster.backend == "ray"


def test_more_devices_are_not_slower_and_memory_is_kept():
    totals = [mapped(n).best.total for n in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True)
    large = asked(4)
    tight = replace(large, device=replace(large.device, memory=large.problem.base + 250_000_000))
    found = find_mapping(tight)
    assert all(pool.memory + tight.problem.base <= tight.device.memory for pool in found.best.pools)
    assert found.best.total >= mapped(4).best.total


def test_engines_decode_as_many_sequences_together_as_is_fastest_and_fits():
    given = asked(1, flow="grpo", algorithm={}, rollout={"prompts": 64, "group": 8, "max_tokens": 32})
    best = find_mapping(given)
    assert best.recipe.rollout.max_rows == 512
    memory = given.problem.base + best.best.pools[0].memory - 1
    tight = find_mapping(replace(given, device=replace(given.device, memory=memory)))
    assert 8 <= tight.recipe.rollout.max_rows < 512 and tight.best.total > best.best.total
    kept = asked(1, flow="grpo", algorithm={}, rollout={"prompts": 64, "group": 8, "max_tokens": 32, "max_rows": 48})
    assert find_mapping(kept).recipe.rollout.max_rows == 48


def test_a_layout_that_is_set_is_kept():
    given = asked(4, policy={"layout": {"dp": 2, "fsdp": 2}}, cluster={"backend": "local", "workers": 4})
    layout = find_mapping(given).recipe.policy.layout
    assert (layout.dp, layout.fsdp, layout.tp) == (2, 2, 1)


def test_layouts_may_be_left_out():
    found = find_mapping(replace(asked(4), tried=lambda layout: layout.pp * layout.dp == 1))
    assert all(o.layout.pp * o.layout.dp == 1 for pool in found.best.pools for o in pool.options)


def test_pools_that_are_set_are_refused():
    with raises(RecipeError, "cluster.search.pools"):
        from_dict({"cluster": {"backend": "local", "pools": {"a": 1, "b": 1}, "search": True}})
    with raises(RecipeError, "cluster.search.pools"):
        find_mapping(asked(2, cluster={"backend": "local", "pools": {"a": 1, "b": 1}}))


def test_what_fits_nowhere_is_named_with_what_it_needs():
    given = asked(2)
    small = replace(given, device=replace(given.device, memory=given.problem.base + 1000))
    with raises(RecipeError, "cluster.search") as found:
        find_mapping(small)
    assert "policy does not fit on 2 devices" in str(found.value)
    heads = asked(2, policy={"layout": {"tp": 8}}, cluster={"backend": "local", "workers": 8})
    with raises(RecipeError, "cluster.search") as found:
        find_mapping(heads)
    assert "policy.layout" in str(found.value)


def test_measured_costs_replace_the_rate_of_the_device():
    """One device has all sequences of a step, each as long as it can be."""
    given = asked(1, kind="cpu", flow="sft", supervised={"steps": 1, "batch": 8}, algorithm={})
    found = find_mapping(replace(given, costs=costs_of(1e-2, 1e-4))).best.seconds[STAGES.index("train")]
    assert found == pytest.approx(8 * (64 * 1e-2 + 64**2 * 1e-4), rel=0.01)
    assert found > 10 * find_mapping(given).best.seconds[STAGES.index("train")]


def test_all_devices_are_used_if_asked():
    given = replace(asked(5, kind="cpu"), whole=True)
    assert find_mapping(given).best.devices == 5


def test_the_reason_names_the_stage_that_loses():
    found = mapped(4, "cpu")
    assert found.why.startswith("it loses") and any(stage in found.why for stage in STAGES)
    assert find_mapping(asked(1, flow="sft", supervised={"steps": 1}, algorithm={})).why in (
        "no other placement fits",
        "it is as fast and has more pools",
    )


LLAMA_7B = {"family": "llama", "hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008, "context": 2048, "tied": False}
"""Shapes of HybridFlow's evaluation; 1,024 prompts and answers of 1,024 tokens, 8 updates."""


def evaluation(devices):
    given = asked(
        devices,
        model=LLAMA_7B,
        rollout={"prompts": 1024, "group": 1, "max_tokens": 1024, "max_rows": 16},
        algorithm={"kl_coef": 0.1, "minibatches": 8},
        train={"precision": "bf16", "device": "cuda", "micro_tokens": 8192, "checkpointing": True},
        cluster={"backend": "ray"},
    )
    slow = replace(given.device, inter=25e9 / 8)  # 200 Gb/s for a machine of eight
    return replace(given, longest=2048, shape=new_config(given.recipe.model, 32_000), device=slow)


@pytest.mark.slow
def test_roles_share_16_gpus():
    """One half of the shape in HybridFlow's section 8.3 (arXiv 2409.19256); docs/benchmarks.md has the other one."""
    assert len(find_mapping(evaluation(16)).best.pools) == 1


@pytest.mark.parametrize("seconds, axis", [(1.02, "fsdp"), (1.04, "tp")])
def test_shards_alone_are_taken_where_they_are_nearly_as_fast(seconds, axis):
    given = replace(asked(2, flow="sft", supervised={"steps": 1}, algorithm={}), generates=False)

    def options(role, devices, beside):
        found = (("tp", 1.0), ("fsdp", seconds))
        return [Option(LayoutConfig(**{name: devices}), (0.0, 0.0, s, 0.0), 0) for name, s in found]

    given.__dict__["problem"] = replace(given.problem, options=options, sizes=(2,))
    [pool] = find_mapping(given).best.pools
    assert getattr(pool.options[pool.roles.index("policy")].layout, axis) == 2


def test_copies_of_what_is_trained_divide_their_updates():
    given = asked(4, model={**SMALL, "family": "qwen3_moe", "experts": 4})
    tried = {
        role: {(o.layout.dp, o.layout.fsdp, o.layout.ep, o.layout.zero) for o in given.problem.options(role, 4, some)}
        for role in ("policy", "reference")
        for some in [frozenset([role])]
    }
    assert {(4, 1, 1, 1), (1, 4, 1, 3), (1, 4, 1, 2), (2, 1, 2, 1), (2, 1, 2, 3)} <= tried["policy"]
    assert not {(4, 1, 1, 3), (1, 4, 1, 1)} & tried["policy"]
    assert {(4, 1, 1, 3), (1, 4, 1, 2)} <= tried["reference"] and 1 not in {zero for *_, zero in tried["reference"]}
