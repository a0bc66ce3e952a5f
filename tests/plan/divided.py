"""What runs in each rank for the tests of memory: a step of a divided model, and its bytes alive at the peak."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.plan.test_working import allocations, packed
from tilth.config.schema import OptimizerConfig
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.training.engine import TrainEngine, negative_log_likelihood


def step(
    rank: int, folder: Path, config: DecoderConfig, sizes: dict[str, int], modes: dict[str, Any], rows: int, micro: int
) -> int:
    """Bytes at the peak of a step after a first one. rows: of the whole batch, all of 64 tokens."""
    grid = ParallelDims.of(Mesh.of(sizes), rank)
    sharded = shard(lambda: Decoder(config), grid, **modes)
    sharded.init_(0)
    engine = TrainEngine(sharded, OptimizerConfig(name="adamw"), total_steps=9, micro_tokens=micro)
    tokens, mask = packed(rows // grid.mesh.count("rows"), 64, config.vocab_size)
    loss = negative_log_likelihood(float(rows * 63))
    own = folder / str(rank)
    own.mkdir()

    def learn() -> None:
        engine.update(tokens, mask, {}, loss, entropy=False)

    learn()
    return most_freed(allocations(learn, own))


def most_freed(events: list[tuple[int, int]]) -> int:
    """Bytes alive at the peak, of those that are seen freed again: all of a step, but for messages that a thread of
    gloo frees, where no trace sees it."""
    alive, seen = dict[int, int](), np.zeros(len(events), np.int64)
    for i, (address, size) in enumerate(events):
        if size > 0:
            alive[address] = i
        elif address in alive:
            seen[alive.pop(address)], seen[i] = -size, size
    return int(np.cumsum(seen).max())
