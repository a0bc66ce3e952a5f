"""Adapters of a sharded model: this rank's part of the weights with them merged in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilth.models.lora import Adapter, merge
from tilth.parallel.sharded import ShardedModel
from tilth.plan.lora import INFIX, is_adapter, pair_of


def has_adapters(sharded: ShardedModel) -> bool:
    """True if adapters of the model are learned instead of its weights."""
    return any(map(is_adapter, sharded.layouts))


@torch.no_grad()
def merged_parts(sharded: ShardedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Return this rank's part of these weights, with the change by their adapters; a collective call of the replica.

    Adapters are small: they are assembled, and each rank changes its own block.
    """
    changed = [name for name in names if pair_of(name)[0] in sharded.layouts]
    whole = sharded.assemble([half for name in changed for half in pair_of(name)]) if changed else {}
    found = {name: sharded.parameters[name].detach() for name in names if name in sharded.parameters}
    for name in changed:
        for box in sharded.boxes(name) if name in found else ():
            (a, b), (*experts, out, width) = (whole[half] for half in pair_of(name)), box.slices
            a, b = a[(*experts, slice(None), width)], b[(*experts, out, slice(None))]
            found[name] = merge(found[name].view(box.size), a, b, _scale(sharded, name)).view_as(found[name])
    return found


def _scale(sharded: ShardedModel, name: str) -> float:
    path = name.removesuffix(".weight")
    for part in sharded.parts:
        modules = dict(part.named_modules())
        if path in modules:
            adapter = modules[path + INFIX.rstrip(".")]
            assert isinstance(adapter, Adapter)
            return adapter.scale
    raise KeyError(name)
