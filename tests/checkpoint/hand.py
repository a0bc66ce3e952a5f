"""Checkpoints written by hand: what a reader is held against shares only the plan with the code that saves."""

from pathlib import Path

import torch
import xxhash

from tilth.checkpoint.manifest import FileEntry, assemble, report_of
from tilth.checkpoint.planning import Spec, plan_group, tiles


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tile_sums(values: torch.Tensor) -> list[int]:
    """The checksum of each tile, cut out of the tensor with slices."""
    if not values.numel():
        return []
    cut = tiles(tuple(values.shape), values.element_size())
    table = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    return [
        xxhash.xxh3_64_intdigest(raw(table[r0:r1, c0:c1]))
        for r0, r1 in zip(cut.rows, cut.rows[1:])
        for c0, c1 in zip(cut.columns, cut.columns[1:])
    ]


def write(path: Path, step: int, whole, layouts=None, objects=None) -> Path:
    """A checkpoint of these groups of whole tensors, as ranks with these layouts (default: one process) write it."""
    path.mkdir(parents=True)
    reports = []
    for group, tensors in whole.items():
        by_name = (layouts or {}).get(group) or single(tensors)
        specs = [Spec(n, by_name[n], str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
        plan = plan_group(specs)
        for rank in plan.ranks or (0,):
            pieces = plan.pieces(rank) if plan.ranks else ()
            file = f"{group}.{rank:03d}.safetensors" if layouts else f"{group}.safetensors"
            entry = write_file(path / file, group, plan.header(rank), pieces, tensors) if pieces else None
            reports.append(report_of(path.name, group, rank, plan, file if pieces else "", entry))
    manifest = assemble(path.name, step, reports, objects or {}, saved="2026-11-21T10:00:00+00:00")
    (path / "manifest.json").write_bytes(manifest.dump())
    return path


def write_file(file: Path, group: str, header: bytes, pieces, tensors) -> FileEntry:
    parts = [tensors[piece.name][piece.box.slices] for piece in pieces]
    sums = [s for part in parts for s in tile_sums(part)]
    data = b"".join(map(raw, parts))
    file.write_bytes(header + data)
    return FileEntry(
        group=group, nbytes=len(header) + len(data), header_nbytes=len(header),
        header_checksum=xxhash.xxh3_64_intdigest(header), checksums=sums,
    )  # fmt: skip


def single(tensors):
    from tilth.core.layout import Layout

    return {name: Layout.single(tensor.shape) for name, tensor in tensors.items()}
