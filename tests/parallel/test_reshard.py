"""From training to generation in processes: the model's bits, the training shard in place, and what is refused."""

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.models.tiny import decoder, shape
from tests.scripts import script
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import ArgumentError
from tilth.core.layout import Layout, Mesh, RaggedShard
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reshard import Part, allocate, parts_of, share
from tilth.parallel.sharded import shard
from tilth.plan.layout import layouts
from tilth.plan.reshard import generation_ranks
from tilth.training.engine import TrainEngine, negative_log_likelihood

CHANGES = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 32}


def moved(rank: int, transition: str, sizes: dict[str, int], tp: int, changes: dict) -> dict:
    """Make generation weights twice, the second time of changed shards; what is right about them."""
    config = shape(**{"family": "qwen3", **CHANGES, **changes})
    source = Mesh.of(sizes)
    order = generation_ranks(source, 1, tp) if transition == "zero-redundancy" else source.ranks
    target = Mesh.of({"dp": len(source) // tp, "tp": tp}, order)
    model = shard(lambda: Decoder(config), ParallelDims.of(source, rank))
    model.init_(5)
    whole, wanted = Decoder(config), layouts(config, target)
    whole.init_weights_(5)
    transitions = script("transitions.py")
    training = transitions.Training(rank, source, model.layouts, model.parameters, bucket=2000)
    into, shared = {}, []
    if transition == "zero-redundancy":
        into = allocate(wanted, rank, torch.empty(0))
        shared = share(model.parameters, training.parts, into, strided=True)
    places, right = {n: p.data_ptr() for n, p in model.parameters.items()}, []
    for added in (0.0, 1.0):
        for p in model.parameters.values():
            p.data.add_(added)
        found = transitions.TRANSITIONS[transition](training, target, wanted, into)
        expected = {n: p.detach()[wanted[n].boxes(rank)[0].slices] + added for n, p in whole.named_parameters()}
        right.append(found.keys() == expected.keys() and all(torch.equal(found[n].values, expected[n]) for n in found))
        values = {n: part.values for n, part in parts_of(model.parameters, model.layouts, rank).items()}
        right.append(
            all(torch.equal(values[n], (whole.get_parameter(n) + added)[model.boxes(n)[0].slices]) for n in values)
        )
    spare = {n for n, p in model.parameters.items() if n in into and storage(p) != storage(into[n].values)}
    still = places == {n: p.data_ptr() for n, p in model.parameters.items()}
    return {"right": right, "still": still, "shared": len(shared), "apart": sorted(spare)}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


EXPERTS = {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "expert_layers": (1,), "family": "qwen3_moe"}
CASES = {
    "full": ("full", {"fsdp": 2}, 1, {}),
    "full, to tp": ("full", {"fsdp": 2}, 2, {}),
    "naive": ("naive", {"tp": 2}, 1, {}),
    "naive, to tp": ("naive", {"tp": 2}, 2, {"num_kv_heads": 1}),
    "zero": ("zero-redundancy", {"tp": 2}, 1, {"tie_embeddings": False}),
    "zero, one key head": ("zero-redundancy", {"tp": 2}, 1, {"num_kv_heads": 1}),
    "zero, experts": ("zero-redundancy", {"tp": 2}, 1, EXPERTS),
    "zero, stages": ("zero-redundancy", {"pp": 2}, 1, {"tie_embeddings": False}),
    "zero, to tp": ("zero-redundancy", {"tp": 2}, 2, {}),
}
FOUR = {
    "zero, 1-4-1 to 1-2": ("zero-redundancy", {"tp": 4}, 2, {}),
    "zero, 1-4-1 to 1-1": ("zero-redundancy", {"tp": 4}, 1, {"num_kv_heads": 4}),
    "zero, 1-2-2 to 1-1": ("zero-redundancy", {"dp": 2, "tp": 2}, 1, {}),
    "zero, 2-2-1 to 1-2": ("zero-redundancy", {"pp": 2, "tp": 2}, 2, {}),
    "naive, 2-2-1 to 1-2": ("naive", {"pp": 2, "tp": 2}, 2, {"tie_embeddings": False}),
    "naive, 1-4-1 to 1-2": ("naive", {"tp": 4}, 2, {}),
    "full, to 1-2": ("full", {"fsdp": 4}, 2, {}),
}


def check(pool, ranks: int, case: tuple) -> None:
    transition, sizes, tp, changes = case
    found = pool.run(
        ranks, "tests.parallel.test_reshard:moved", transition=transition, sizes=sizes, tp=tp, changes=changes
    )
    for rank in found:
        assert rank["right"] == [True] * 4 and rank["still"]
        assert bool(rank["shared"]) == (transition == "zero-redundancy") and not rank["apart"]


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_generation_weights_are_the_model_s_and_training_shards_stay(pool, case):
    check(pool, 2, CASES[case])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("case", FOUR)
def test_generation_weights_on_four_ranks(pool, case):
    check(pool, 4, FOUR[case])


def trained(rank: int) -> float:
    """Greatest difference after three updates between shards that are slices of generation weights and others."""
    config, grid = shape("qwen3", **CHANGES), ParallelDims.of(Mesh.of({"tp": 2}), rank)
    rng, ends = np.random.default_rng(0), []
    tokens = Jagged.of([rng.integers(0, 32, n) for n in (9, 5, 12, 7)])
    mask = np.ones(len(tokens.values), np.float32)
    mask[tokens.offsets[:-1]] = 0
    for shared in (False, True):
        model = shard(lambda: Decoder(config), grid)
        model.init_(5)
        if shared:
            whole = layouts(config, Mesh.of({"dp": 2}))
            into = allocate(whole, rank, torch.empty(0))
            taken = share(model.parameters, parts_of(model.parameters, model.layouts, rank), into)
            assert {name.split(".")[-2] for name in whole if name not in taken} == {"o_proj", "down_proj"}
        engine = TrainEngine(model, OptimizerConfig(lr=1e-2, name="adamw"), total_steps=3, micro_tokens=20)
        loss = negative_log_likelihood(float(mask.sum()))
        for _ in range(3):
            engine.update(tokens, mask, {}, loss, entropy=False)
        ends.append({n: p.detach().clone() for n, p in model.parameters.items()})
    return max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0])


@pytest.mark.dist
def test_shards_in_generation_weights_train_as_others_do(pool):
    assert pool.run(2, "tests.parallel.test_reshard:trained") == [0.0, 0.0]


# ---- refused, or left where it is ----


def test_a_full_gather_needs_shards_on_all_ranks():
    config, mesh = shape("qwen3", **CHANGES), Mesh.of({"dp": 2, "tp": 2})
    transitions = script("transitions.py")
    training = transitions.Training(0, mesh, layouts(config, mesh), dict(decoder(config).named_parameters()))
    with raises(ArgumentError, "training.mesh"):
        transitions.TRANSITIONS["full"](training, mesh, layouts(config, mesh), {})


def test_a_part_of_several_boxes_is_refused():
    mesh = Mesh(("fsdp",), (2,))
    layout = Layout(mesh, (RaggedShard((1, 3)),), (4, 2))
    assert parts_of({"w": torch.zeros(2)}, {"w": layout}, 0)["w"].box.size == (1, 2)
    several = Layout(mesh, (RaggedShard((3, 5)),), (4, 2))
    with raises(ArgumentError, "w"):
        parts_of({"w": torch.zeros(3)}, {"w": several}, 0)


def test_shards_of_another_dtype_or_outside_of_the_generation_shard_stay():
    layout = layouts(shape("qwen3", **CHANGES), Mesh.of({}))["model.norm.weight"]
    (box,) = layout.boxes(0)
    own = {"w": Part(box, torch.ones(32))}
    assert share({"w": torch.ones(32)}, own, {"w": Part(box, torch.zeros(32, dtype=torch.bfloat16))}) == []
    assert share({"w": torch.ones(32)}, own, {}) == []
    parameter = torch.nn.Parameter(torch.ones(32))
    home = torch.zeros(32)
    assert share({"w": parameter}, own, {"w": Part(box, home)}) == ["w"]
    assert parameter.data_ptr() == home.data_ptr() and bool((home == 1).all())
