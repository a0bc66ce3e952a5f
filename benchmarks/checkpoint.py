"""Saving and loading a model of 50M parameters in fp32, beside safetensors, torch.save and torch's own distributed
checkpoint; then the same model saved in one layout of four ranks and loaded in another.

    python benchmarks/checkpoint.py [--quick] [--json PATH] [--folder DIR] [--rounds N]

What is loaded is compared bit for bit with what was saved before anything is timed. All rows are of one process, every
save goes to a new place, and what is loaded goes to tensors that are there already, from the page cache. Tilth waits
for the disk and computes a checksum of every byte when it saves, and compares it when it loads; "synced" is the other
library with an fsync behind it. Ranks run one after another in this process: their times are of a rank, not of a run.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilth.checkpoint import begin_save, commit_save, open_checkpoint, save, write_part
from tilth.core.layout import Layout, Mesh, Placement, Replicate, Shard
from tilth.core.random import fill_normal_, stream

Tensors = dict[str, Tensor]
Call = Callable[[], object]


def model(layers: int, width: int, vocabulary: int) -> Tensors:
    """Weights of a decoder of the usual shape: attention, gated feed-forward, two norms a layer."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "norm": (width,)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{n}": (width, width) for n in ("q", "k", "v", "o")}
        shapes |= {f"layers.{i}.{n}": (3 * width, width) for n in ("gate", "up")}
        shapes |= {f"layers.{i}.down": (width, 3 * width), f"layers.{i}.norm1": (width,), f"layers.{i}.norm2": (width,)}
    return {name: fill_normal_(torch.empty(shape), stream(0, "benchmark", name)) for name, shape in shapes.items()}


def sync(path: Path) -> None:
    """Wait until every file of a folder, or a file, is on disk."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def copy(found: Mapping[str, Tensor], into: Tensors) -> None:
    """Into tensors that are there."""
    for name, target in into.items():
        target.copy_(found[name])


def cases(folder: Path, tensors: Tensors, into: Tensors) -> dict[str, tuple[Call, Call]]:
    """Name -> (save, load)."""
    safe, pickled, distributed = folder / "safe.safetensors", folder / "torch.pt", folder / "dcp"

    def synced(write: Call, path: Path) -> Call:
        return lambda: (write(), sync(path))

    def read_torch() -> None:
        copy(torch.load(pickled, weights_only=True, mmap=True), into)

    writers = {
        "safetensors": (lambda: save_file(tensors, safe), safe, lambda: copy(load_file(safe), into)),
        "torch.save": (lambda: torch.save(tensors, pickled), pickled, read_torch),
        "torch DCP": (
            lambda: dcp.save(tensors, checkpoint_id=distributed, no_dist=True),
            distributed,
            lambda: dcp.load(into, checkpoint_id=distributed, no_dist=True),
        ),
    }
    rows = {
        "tilth": (
            lambda: save(folder / "tilth", 1, {"model": tensors}, {}),
            lambda: open_checkpoint(folder / "tilth/step-000001").restore("model", into),
        )
    }
    for name, (write, path, read) in writers.items():
        rows[name], rows[f"{name}, synced"] = (write, read), (synced(write, path), read)
    return rows


def clear(folder: Path) -> None:
    """So that no save has to replace another one."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def timed(call: Call) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best(folder: Path, rows: dict[str, tuple[Call, Call]], rounds: int) -> dict[str, list[float]]:
    """The shortest seconds of saving and loading of each, in turns so that a busy machine treats them alike."""
    found = {name: [math.inf, math.inf] for name in rows}
    for _ in range(rounds):
        for name, calls in rows.items():
            clear(folder)
            found[name] = [min(before, timed(call)) for before, call in zip(found[name], calls)]
    return found


def layouts(tensors: Tensors, names: tuple[str, str], matrix: tuple[Placement, ...]) -> dict[str, Layout]:
    """Matrices as asked, vectors replicated; on two by two ranks."""
    mesh, vector = Mesh(names, (2, 2)), (Replicate(), Replicate())
    return {n: Layout(mesh, matrix if t.ndim > 1 else vector, tuple(t.shape)) for n, t in tensors.items()}


def reshard(folder: Path, tensors: Tensors) -> dict[str, float]:
    """Saved by dp 2 x fsdp 2, loaded by fsdp 2 x tp 2: seconds of the slowest rank, and how even the writing was."""
    saved = layouts(tensors, ("dp", "fsdp"), (Replicate(), Shard(0)))
    loaded = layouts(tensors, ("fsdp", "tp"), (Shard(0), Shard(1)))
    temporary, parts, writing, reading = begin_save(folder / "four", 1), [], [], []
    for rank in range(4):
        mine = {n: t[saved[n].boxes(rank)[0].slices] for n, t in tensors.items()}
        start = time.perf_counter()
        parts.append(write_part(temporary, "model", str(rank), mine, saved, rank))
        writing.append(time.perf_counter() - start)
    commit = timed(partial(commit_save, temporary, folder / "four", 1, parts, {}))
    path = folder / "four/step-000001"
    for rank in range(4):
        into = {n: torch.empty(loaded[n].boxes(rank)[0].size) for n in tensors}
        reading.append(timed(partial(open_checkpoint(path).restore, "model", into, loaded, rank)))
        assert all(torch.equal(t, tensors[n][loaded[n].boxes(rank)[0].slices]) for n, t in into.items())
    written = [file.stat().st_size for file in path.glob("*.safetensors")]
    return {
        "write_seconds": max(writing), "commit_seconds": commit, "read_seconds": max(reading),
        "bytes_max_over_mean": max(written) * len(written) / sum(written),
        "bytes_over_model": sum(written) / sum(t.nbytes for t in tensors.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3M parameters, two rounds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary directory")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    tensors = model(2, 256, 4096) if options.quick else model(12, 512, 23552)
    rounds, size = options.rounds or (2 if options.quick else 8), sum(t.nbytes for t in tensors.values())
    into = {n: torch.zeros_like(t) for n, t in tensors.items()}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = cases(folder, tensors, into)
        for name, (write, read) in rows.items():
            write()
            read()
            assert all(torch.equal(into[n], t) for n, t in tensors.items()), name
            copy({n: torch.zeros(()) for n in into}, into)
        found = best(folder, rows, rounds)
        print(f"{size / 4e6:.1f}M parameters, {size / 1e6:.0f} MB")
        print(f"{'':22} {'save s':>8} {'GB/s':>6} {'load s':>8} {'GB/s':>6}")
        for name, (s, r) in found.items():
            print(f"{name:22} {s:8.3f} {size / s / 1e9:6.2f} {r:8.3f} {size / r / 1e9:6.2f}")
        four = reshard(folder, tensors)
        print("dp2 x fsdp2 -> fsdp2 x tp2:", ", ".join(f"{k} {v:.3f}" for k, v in four.items()))
    finally:
        shutil.rmtree(folder)
    if options.json:
        table = [{"name": name, "save_seconds": s, "load_seconds": r} for name, (s, r) in found.items()]
        options.json.write_text(json.dumps({"bytes": size, "rows": table, "reshard": four}, indent=1))


if __name__ == "__main__":
    main()
