"""Every family trains in FSDP and under tensor parallelism as on one device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.tiny import FAMILIES, VOCAB
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.training.engine import TrainEngine, negative_log_likelihood

HERE = "tests.parallel.test_families:trained"
FAST = ["gpt-oss", "deepseek-v3"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", "olmo3", "gemma3", "deepseek-v3-direct")]
LAYOUTS = [{"fsdp": 2}, {"tp": 2}]
MORE = [{"pp": 2}, {"cp": 2}, {"cp": 2, "cp_style": "ulysses"}]
EXPERTS = [
    ("gpt-oss", {"ep": 2}),
    pytest.param("deepseek-v3", {"ep": 2}, marks=pytest.mark.slow),
    *(
        pytest.param(name, layout, marks=pytest.mark.slow)
        for name in ("gpt-oss", "deepseek-v3", "mixtral")
        for layout in ({"ep": 2, "tp": 2}, {"ep": 2, "fsdp": 2}, {"ep": 2, "pp": 2}, {"ep": 2, "cp": 2})
    ),
]


def trained(rank, name, **layout):
    """Initial weights, and those after two steps: float64, whole."""
    axes = ("pp", "fsdp", "ep", "cp", "tp")
    mesh = Mesh(axes, tuple(layout.pop(axis, 1) for axis in axes))

    def build():
        config = FAMILIES[name]
        divides = {"num_experts": 8} if config.num_experts else {}
        return Decoder(replace(config, **divides), torch.float64).double()

    sharded = ShardedModel.alone(build()) if len(mesh) == 1 else shard(build, ParallelDims.of(mesh, rank), **layout)
    sharded.init_(3)
    names = list(sharded.layouts)
    start = {name: whole.clone() for name, whole in sharded.assemble(names).items()}
    engine = TrainEngine(sharded, OptimizerConfig(name="adamw", lr=1e-3), total_steps=9, micro_tokens=24)
    rows = [np.arange(i, i + n) * 5 % VOCAB for i, n in enumerate((5, 19, 4, 12))]
    part, parts = mesh.index(rank, *mesh.over("rows")), mesh.count("rows")
    tokens = Jagged.of(rows[part::parts])
    mask = np.concatenate([[0] + [1] * (n - 1) for n in tokens.lengths]).astype(np.uint8)
    for _ in range(2):
        engine.update(tokens, mask, {}, negative_log_likelihood(36.0))
    return start, sharded.assemble(names)


def far(found, wanted):
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.dist
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_two_ranks_train_as_one_device(pool, name):
    start, end = trained(0, name)
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    assert all("correction" in name for name in end.keys() - moved)
    for layout in LAYOUTS:
        for first, last in pool.run(2, HERE, name=name, **layout):
            assert far(first, start) == 0 and far(last, end) < 1e-9


@pytest.mark.dist
def test_blanks_have_the_gradients_of_other_micro_batches(pool):
    """Two ranks sum the gradients of a layer that they have, and a correction of routers has none."""
    _, end = trained(0, "deepseek-v3")
    for _, last in pool.run(2, HERE, timeout=60.0, name="deepseek-v3", ep=2, zero=2):
        assert far(last, end) < 1e-9


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", MORE, ids=str)
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_two_ranks_that_divide_layers_or_tokens_train_as_one_device(pool, name, layout):
    start, end = trained(0, name)
    for first, last in pool.run(2, HERE, name=name, **layout):
        assert all(torch.equal(whole, start[own]) for own, whole in first.items())
        assert last and far(end, last) < 1e-9


@pytest.mark.dist
@pytest.mark.parametrize(("name", "layout"), EXPERTS, ids=str)
def test_ranks_that_divide_experts_train_as_one_device(pool, name, layout):
    start, end = trained(0, name)
    for first, last in pool.run(2 * 2 ** (len(layout) - 1), HERE, name=name, **layout):
        assert far(first, start) == 0 and far(last, end) < 1e-9
