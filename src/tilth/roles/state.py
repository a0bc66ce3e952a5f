"""What a role keeps between steps: its tensors with their layouts, into a checkpoint and back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilth.checkpoint import open_checkpoint, state_layouts, write_part
from tilth.core.layout import Layout
from tilth.parallel.grid import Grid
from tilth.parallel.sharded import Sharded
from tilth.training.engine import TrainEngine

Saved = dict[str, Any]
"""What one worker wrote, for the manifest: part by group of tensors."""


class Group(NamedTuple):
    """A group of tensors of a checkpoint: this worker's pieces, and where they belong."""

    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]


Groups = dict[str, Group]


def engine_groups(engine: TrainEngine, model: str, optimizer: str) -> Groups:
    """Weights, optimizer state and, where there is one, the average of the weights; by these names."""
    sharded, state = engine.sharded, engine.optimizers.state_tensors()
    found = {
        model: Group({n: p.detach() for n, p in sharded.parameters.items()}, sharded.layouts),
        optimizer: Group(state, state_layouts(sharded.layouts, state)),
    }
    return found | ({"ema": Group(engine.ema.tensors, sharded.layouts)} if engine.ema.tensors else {})


def write_state(folder: str, groups: Groups, grid: Grid) -> Saved:
    """Write what this worker owns of these groups; a tensor that several hold is written by one of them."""
    part = f"{grid.rank:05d}" if len(grid.mesh) > 1 else ""
    return {
        name: write_part(Path(folder), name, part, dict(group.tensors), dict(group.layouts), grid.rank)
        for name, group in groups.items()
    }


def read_state(path: str, groups: Groups, sharded: Sharded) -> None:
    """Fill these tensors of a model's, in place, from a checkpoint of any layout. CheckpointError."""
    checkpoint = open_checkpoint(Path(path))
    for name, group in groups.items():
        checkpoint.restore(name, group.tensors, group.layouts, sharded.grid.rank)
    sharded.reshard()


def whole_tensors(sharded: Sharded) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other, put together; a collective call of its replica."""
    with torch.no_grad():
        for name in sharded.layouts:
            yield from sharded.assemble([name]).items()
