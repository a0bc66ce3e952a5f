"""Converters: low-rank additions to one projection, declared here and nowhere else."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.errors import raises
from tests.parallel.layouts import CONFIG
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.models.converters import CONVERTERS, ValueModel, converted
from tilth.models.decoder import Decoder, Layer, Linear
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.plan.rules import Parameter
from tilth.training.engine import TrainEngine, negative_log_likelihood

NAME = "model.layers.*.mlp.up_proj."
ROWS = (
    Parameter(NAME + "lora_a", (3, "hidden_size"), "matrix", "heads", "normal"),
    Parameter(NAME + "lora_b", ("intermediate_size", 3), "matrix", "rows", "zeros"),
)


class LowRank(Linear):
    """x -> W x + B A x; every rank along tp has its rows of W and B, and all of A."""

    def __init__(self, whole):
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        rows, columns = whole.weight.shape
        empty = whole.weight.new_empty
        self.lora_a, self.lora_b = nn.Parameter(empty(3, columns)), nn.Parameter(empty(rows, 3))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))


def low_rank(model):
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    model.table += ROWS
    return model


def without_rows(model):
    table = model.table
    low_rank(model)
    model.table = table
    return model


CONVERTERS |= {"low_rank": low_rank, "without_rows": without_rows}


def trained(rank, sizes, sp=False, converters=("low_rank",)):
    grid = ParallelDims.of(Mesh(("dp", "fsdp", "tp"), sizes), rank)
    sharded = shard(lambda: Decoder(CONFIG, torch.float64).double(), grid, converters=converters, sp=sp)
    sharded.init_(3)
    engine = TrainEngine(sharded, OptimizerConfig(lr=1e-2), total_steps=9, micro_tokens=16)
    rows = [np.arange(i, i + n) % 33 for i, n in enumerate((5, 9, 4, 12))]
    part, parts = (grid.coordinate("dp") + grid.coordinate("fsdp")), grid.size("dp", "fsdp")
    tokens = Jagged.of(rows[part::parts])
    mask = np.concatenate([[0] + [1] * (n - 1) for n in tokens.lengths]).astype(np.uint8)
    for _ in range(3):
        engine.update(tokens, mask, {}, negative_log_likelihood(26.0))
    return sharded.assemble(list(sharded.parameters))


@pytest.mark.dist
@pytest.mark.parametrize(("sizes", "sp"), [((1, 2, 1), False), ((1, 1, 2), False), ((1, 1, 2), True)])
def test_a_converted_model_trains_in_every_layout_as_on_one_device(pool, sizes, sp):
    wanted = trained(0, (1, 1, 1))
    assert wanted["model.layers.1.mlp.up_proj.lora_b"].abs().max() > 0
    for found in pool.run(2, "tests.models.test_converters:trained", sizes=sizes, sp=sp):
        assert found.keys() == wanted.keys()
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-9


def test_what_adds_nothing_at_first_leaves_the_rest_as_it_is():
    plain, more = Decoder(CONFIG), converted(Decoder(CONFIG), ["low_rank"])
    for model in (plain, more):
        model.init_weights_(1)
    own = plain.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in more.state_dict().items() if name in own)
    assert len(more.state_dict()) == len(own) + 2 * CONFIG.num_layers


def test_converters_are_applied_in_their_order():
    model = converted(Decoder(CONFIG), ["value_head", "low_rank", "frozen"])
    assert isinstance(model, ValueModel) and not any(p.requires_grad for p in model.parameters())
    assert {row.name for row in ROWS} < {row.name for row in model.table}
    with pytest.raises(ModelError):  # the value model is a copy of a plain body
        converted(Decoder(CONFIG), ["low_rank", "value_head"])


def test_parameters_without_a_row_and_unknown_names_are_refused():
    with pytest.raises(ModelError) as raised:
        converted(Decoder(CONFIG), ["without_rows"])
    assert "model.layers.0.mlp.up_proj.lora_a" in str(raised.value)
    with raises(ModelError, "converters.lowrank"):
        converted(Decoder(CONFIG), ["lowrank"])
    assert {"value_head", "frozen"} <= set(CONVERTERS)
