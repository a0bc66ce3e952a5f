"""Whole training steps of tensor-parallel models, alone and inside FSDP: shapes that divide badly, and no drift."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.tiny import lively_
from tests.parallel.divided import SMALL, sequences
from tilth.config.schema import OptimizerConfig
from tilth.core.layout import Mesh, Replicate
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.training.engine import TrainEngine, negative_log_likelihood

HERE = "tests.parallel.test_tensor_trained:"


def build(changes: dict[str, Any], dtype: torch.dtype) -> Decoder:
    base = {"vocab_size": 33, "num_kv_heads": 2, "qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return Decoder(DecoderConfig(**{**SMALL, **base, **changes}), dtype).to(dtype)


def train(rank: int, sizes: dict[str, int], changes: dict[str, Any], steps: int, double: bool, **options) -> dict:
    """Losses and norms of steps on one batch, whole weights after them, and what of it this rank holds."""
    dtype = torch.float64 if double else torch.float32
    if sizes:
        grid = ParallelDims.of(Mesh(tuple(sizes), tuple(sizes.values())), rank)
        sharded = shard(lambda: build(changes, dtype), grid, **options)
    else:
        sharded = ShardedModel.alone(build(changes, dtype))
    sharded.load_({n: p.detach() for n, p in lively_(build(changes, dtype)).named_parameters()})
    engine = TrainEngine(sharded, OptimizerConfig(lr=3e-3), total_steps=100, micro_tokens=12)
    tokens, mask = sequences(min(33, changes.get("vocab_size", 33)), False, (5, 2, 7, 4, 6, 3))
    data = sharded.grid
    part, parts = data.coordinate("fsdp"), data.size("fsdp")
    rows = np.arange(6)[part::parts]
    own, mine = tokens.take(rows), np.concatenate([mask[tokens.offsets[r] : tokens.offsets[r + 1]] for r in rows])
    loss = negative_log_likelihood(float(mask.sum()))
    results = [engine.update(own, mine, {}, loss, starts=tokens.offsets[rows]) for _ in range(steps)]
    return {
        "numbers": np.array([(r.loss, r.grad_norm) for r in results]),
        "weights": {n: t.clone() for n, t in sharded.assemble(list(sharded.parameters)).items()},
        "held": {n: ([*map(str, sharded.boxes(n))], p.detach().clone()) for n, p in sharded.parameters.items()},
        "copied": {n for n, l in sharded.layouts.items() if sizes and _copied(l.placements[l.mesh.names.index("tp")])},
    }


def _copied(placement) -> bool:
    return isinstance(placement, Replicate) or getattr(placement, "copies", 1) > 1


def differ(found: dict, wanted: dict) -> float:
    numbers = (np.abs(found["numbers"] - wanted["numbers"]) / np.maximum(wanted["numbers"], 1)).max()
    weights = [float((found["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items()]
    return max([numbers, *weights])


CASES = {
    "one key head": ({"tp": 2}, {"num_kv_heads": 1}, True),
    "three tokens": ({"tp": 2}, {"vocab_size": 3, "tie_embeddings": True}, False),
    "one token": ({"tp": 2}, {"vocab_size": 1}, False),
    "fsdp": ({"fsdp": 2, "tp": 2}, {"num_kv_heads": 1, "tie_embeddings": True}, True),
    "fsdp, one token": ({"fsdp": 2, "tp": 2}, {"vocab_size": 1}, True),
    "fsdp, three tokens": ({"fsdp": 2, "tp": 2}, {"vocab_size": 3}, False),
    "four": ({"tp": 4}, {"vocab_size": 5, "dropout": 0.3}, True),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] if np.prod([*CASES[n][0].values()]) > 2 else []) for n in CASES]
)
def test_three_steps_are_those_of_one_device(pool, case):
    sizes, changes, sp = CASES[case]
    wanted = train(0, {}, changes, 3, double=True)
    for found in pool.run(
        int(np.prod([*sizes.values()])), HERE + "train", sizes=sizes, changes=changes, steps=3, double=True, sp=sp
    ):
        assert differ(found, wanted) < 1e-11


@pytest.mark.dist
@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_ranks_hold_alike_stays_alike_to_the_bit(pool, sp):
    """Norms, biases and copied key heads: fp32, six steps of AdamW; and all ranks put the same whole together."""
    changes = {"num_kv_heads": 1}
    one, two = pool.run(2, HERE + "train", sizes={"tp": 2}, changes=changes, steps=6, double=False, sp=sp)
    assert {n.split(".")[-2] for n in one["copied"]} >= {"k_proj", "v_proj", "q_norm", "norm", "o_proj"}
    for name, (boxes, held) in one["held"].items():
        assert (boxes == two["held"][name][0]) == (name in one["copied"])
        assert name not in one["copied"] or torch.equal(held, two["held"][name][1]), name
        assert torch.equal(one["weights"][name], two["weights"][name])
    assert np.array_equal(one["numbers"], two["numbers"])
    wanted = train(0, {}, changes, 6, double=False)
    assert np.abs(one["numbers"][0] / wanted["numbers"][0] - 1).max() < 1e-5
    assert np.abs(one["numbers"][-1] / wanted["numbers"][-1] - 1).max() < 1e-4
