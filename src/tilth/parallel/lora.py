"""Adapters of a sharded model: this rank's part of the weights with them merged in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilth.models.lora import Adapter, merge
from tilth.parallel.sharded import ShardedModel
from tilth.plan.lora import blocks_of, pair_of, weight_of


@torch.no_grad()
def merged_parts(sharded: ShardedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Return this rank's part of these weights, with the change by their adapters; a collective call of the replica.

    Adapters are small: they are assembled, and each rank changes its own block.
    """
    changed = [name for name in names if pair_of(name)[0] in sharded.layouts]
    whole = sharded.assemble([half for name in changed for half in pair_of(name)]) if changed else {}
    found = {name: sharded.parameters[name].detach() for name in names if name in sharded.parameters}
    scales = _scales(sharded) if changed else {}
    for name in changed:
        for box in sharded.boxes(name) if name in found else ():
            a, b = (whole[half] for half in pair_of(name))
            of_a, of_b = blocks_of(box.slices, a.shape[-2])
            found[name] = merge(found[name].view(box.size), a[of_a], b[of_b], scales[name]).view_as(found[name])
    return found


def _scales(sharded: ShardedModel) -> dict[str, float]:
    """Return weight -> scale of its adapter, of the layers on this stage."""
    modules = (one for part in sharded.parts for one in part.named_modules())
    return {weight_of(f"{path}."): module.scale for path, module in modules if isinstance(module, Adapter)}
