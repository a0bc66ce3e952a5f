"""Tensors and checkpoints for the tests of this room."""

import json
from pathlib import Path

import torch

from tilth.checkpoint import Group, Saver, begin_save, commit_save, save
from tilth.checkpoint.planning import SAFETENSORS_NAMES
from tilth.core.layout import Layout, Mesh, RaggedShard
from tilth.core.random import stream

DTYPES = list(SAFETENSORS_NAMES)


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: str = "") -> torch.Tensor:
    """Arbitrary bits (NaNs and denormals too) of any dtype."""
    count = int(torch.Size(shape).numel())
    raw = stream(0, "tensor", salt).bits(0, count * dtype.itemsize + 1)[:-1].to(torch.uint8)
    return (raw > 127).view(shape) if dtype == torch.bool else raw.clone().view(dtype).view(shape)


def groups(salt: str = "") -> dict[str, dict[str, torch.Tensor]]:
    """A model and an optimizer."""
    model = {"embed.weight": tensor((7, 4), torch.bfloat16, salt), "norm.weight": tensor((5,), salt=salt)}
    return {"model": model, "optimizer": {"step": tensor((), torch.int64, salt), "m": tensor((3, 2), salt=salt)}}


def save_step(root: Path, step: int) -> Path:
    """A checkpoint whose contents tell its step."""
    return save(root, step, groups(str(step)), {"step": step, "seed": [1, 2.5, None]})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def cut(whole: torch.Tensor, layout: Layout, rank: int, flat: bool = False) -> torch.Tensor:
    """What a rank holds of a tensor: a block, or (ragged, and where ``flat``) its boxes one after another."""
    boxes = layout.boxes(rank)
    if flat or len(boxes) > 1 or any(isinstance(p, RaggedShard) for p in layout.placements):
        return torch.cat([whole[b.slices].reshape(-1) for b in boxes] or [whole.new_empty(0)])
    return whole[boxes[0].slices].clone() if boxes else whole.new_empty((0, *layout.shape[1:]))


def ranks_of(layouts: dict[str, Layout]) -> list[int]:
    """All ranks of all meshes."""
    return sorted({rank for layout in layouts.values() for rank in layout.mesh.ranks})


def shares(tensors: dict[str, torch.Tensor], layouts: dict[str, Layout], rank: int, flat: bool = False):
    """What a rank holds of each tensor whose mesh it is in."""
    return {n: cut(t, layouts[n], rank, flat) for n, t in tensors.items() if rank in layouts[n].mesh.ranks}


def group_of(tensors, layouts, rank: int, flat: bool = False) -> Group:
    """What a rank holds of whole tensors, as it saves it."""
    return Group(shares(tensors, layouts, rank, flat), layouts, {n: t.dtype for n, t in tensors.items()})


def parts_of(folder: Path, whole: dict[str, dict[str, torch.Tensor]], layouts: dict[str, dict[str, Layout]]):
    """Every rank writes its part of every group, one after another; their reports after a journey as JSON."""
    made = [
        Saver().write(folder, {group: group_of(tensors, layouts[group], rank)}, rank, f"rank{rank}")[0]
        for group, tensors in whole.items()
        for rank in ranks_of(layouts[group])
    ]
    return [json.loads(report.model_dump_json()) for report in made]


def save_sharded(root: Path, step: int, whole, layouts, objects=None, mesh: Mesh | None = None) -> Path:
    """A checkpoint that several ranks wrote."""
    folder = begin_save(root, step)
    return commit_save(folder, parts_of(folder, whole, layouts), objects or {}, mesh)
