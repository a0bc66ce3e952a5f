"""What ``checkpoint.py`` compares: the same state, saved and loaded by Tilth, by torch's distributed checkpoint in its
ways, and by torch.save of each rank's share.

The distributed checkpoint runs as it is best at saving again and again: plans are cached, staged copies are kept (in
shared memory for the process), and the asynchronous ways have a gloo group of their own. It synchronises its files by
itself; the folder is synchronised here.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from tilth.checkpoint import Commit, Group, Saver, begin_save, open_checkpoint
from tilth.core.layout import Layout, Mesh, Replicate, Shard

MOMENTS = ("exp_avg", "exp_avg_sq")
QUARTERS = 4
Groups = dict[str, dict[str, Tensor]]


def shapes(megabytes: float) -> dict[str, tuple[int, ...]]:
    """Weights of a decoder of the usual shape, in fp32 a third of so many bytes: Adam's moments are the rest."""
    width = 256 if megabytes < 200 else 512 if megabytes < 1500 else 1024
    elements = megabytes * 1e6 / 12
    layers = max(1, int(0.85 * elements / (13 * width * width)))
    vocabulary = max(64, int((elements - 13 * layers * width * width) / width) // 64 * 64)
    found: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "norm": (width,)}
    for i in range(layers):
        found |= {f"layers.{i}.{n}": (width, width) for n in ("q", "k", "v", "o")}
        found |= {f"layers.{i}.{n}": (3 * width, width) for n in ("gate", "up")}
        found |= {f"layers.{i}.down": (width, 3 * width), f"layers.{i}.norm1": (width,), f"layers.{i}.norm2": (width,)}
    return found


class State:
    """A rank's share of weights and optimizer state. rows: by fsdp, else by columns, as one of four ranks of tp."""

    def __init__(
        self, megabytes: float, rank: int, ranks: int, *, rows: bool = True, device: torch.device | str = "cpu"
    ) -> None:
        self.rank, self.rows, self.device = rank, rows, torch.device(device)
        mesh = Mesh(("fsdp" if rows else "tp",), (ranks,))
        whole = {"model": shapes(megabytes), "optimizer": dict[str, tuple[int, ...]]()}
        for name, shape in whole["model"].items():
            whole["optimizer"] |= {f"{m}.{name}": shape for m in MOMENTS} | {f"step.{name}": ()}
        self.layouts = {
            group: {name: Layout(mesh, (self._placement(shape),), shape) for name, shape in tensors.items()}
            for group, tensors in whole.items()
        }
        self.tensors: Groups = {
            group: {name: torch.zeros(layout.boxes(rank)[0].size, device=device) for name, layout in layouts.items()}
            for group, layouts in self.layouts.items()
        }
        self.nbytes = sum(t.nbytes for t in self.all())

    def _placement(self, shape: tuple[int, ...]) -> Shard | Replicate:
        dimension = 0 if self.rows else 1
        return Shard(dimension) if len(shape) > dimension else Replicate()

    def all(self) -> Iterator[Tensor]:
        """Every tensor."""
        return (t for tensors in self.tensors.values() for t in tensors.values())

    def fill(self) -> None:
        """Values that no other tensor and, where it is divided, no other rank has."""
        for number, tensor in enumerate(self.all()):
            seed = (number, self.rank if tensor.ndim else 0)
            tensor.copy_(torch.from_numpy(np.random.default_rng(seed).random(tuple(tensor.shape), np.float32)))

    def zero(self) -> None:
        """So that what is there afterwards was loaded."""
        for tensor in self.all():
            tensor.zero_()

    def update(self) -> None:
        """As an optimizer would: every tensor changes in place, if only in one element."""
        for tensor in self.all():
            if tensor.ndim:
                tensor.view(-1)[0] += 1.0

    def prints(self, columns: int = 0, blocks: int = 1) -> list[list[int]]:
        """Checksums of each tensor, for each of so many equal blocks of its rows; of so many of its parts by columns
        the first, unless 0."""
        parts = []
        for tensor in self.all():
            part = tensor[:, : tensor.shape[1] // columns] if columns and tensor.ndim > 1 else tensor
            rows = part.chunk(blocks) if part.ndim else (part,) * blocks
            parts.append([xxhash.xxh3_64_intdigest(p.contiguous().cpu().numpy().data) for p in rows])
        return [list(block) for block in zip(*parts)]

    def distributed(self) -> dict[str, Any]:
        """The same memory as torch's distributed tensors, for its checkpoint."""
        first = next(iter(self.layouts["model"].values()))
        mesh = init_device_mesh(self.device.type, (math.prod(first.mesh.sizes),))
        found: dict[str, Any] = {}
        for group, layouts in self.layouts.items():
            for name, layout in layouts.items():
                local, whole = self.tensors[group][name], torch.empty(layout.shape, device="meta")
                if not layout.shape:
                    found[f"{group}.{name}"] = local
                    continue
                divided = isinstance(layout.placements[0], Shard)
                place = TorchShard(0 if self.rows else 1) if divided else TorchReplicate()
                found[f"{group}.{name}"] = DTensor.from_local(
                    local, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride()
                )
        return found


class Method:
    """One way to save and load. All ranks make the same calls in the same order."""

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, folder: Path) -> None:
        """Save into a new folder; returns when training may go on."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Called before the first change of the state after a save."""

    def wait(self) -> None:
        """Until what this rank has saved is on disk, and on the first rank until all is committed."""

    def load(self, folder: Path) -> int:
        """Fill the state in place: bytes that were asked for, if the library counts them, else 0."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back memory and processes."""


class Ours(Method):
    """Tilth: snapshot, then everything else in threads; the first rank is the controller."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.saver = Saver()
        self.commit: Commit | None = None
        self.groups = {g: Group(tensors, state.layouts[g]) for g, tensors in state.tensors.items()}

    def save(self, folder: Path) -> None:
        """As in ``Method``."""
        rank, ranks = self.state.rank, range(dist.get_world_size())
        said = [str(begin_save(folder, 1)) if rank == 0 else ""]
        dist.broadcast_object_list(said)
        self.saver.start(said[0], self.groups, rank, f"{rank:05d}")
        if rank == 0:
            self.commit = Commit(said[0], dict.fromkeys(self.groups, ranks), {})

    def wait(self) -> None:
        """As in ``Method``."""
        self.saver.wait()
        if self.commit is not None:
            self.commit.wait()

    def load(self, folder: Path) -> int:
        """As in ``Method``."""
        checkpoint = open_checkpoint(folder / "step-000001")
        for name, group in self.groups.items():
            checkpoint.restore(name, group.tensors, group.layouts, self.state.rank)
        return checkpoint.bytes_read


class Distributed(Method):
    """torch.distributed.checkpoint. kind: none waits; asynchronous in a thread, or in a process. later: staged in a
    thread, too, until the first change of the state."""

    def __init__(self, state: State, kind: AsyncCheckpointerType | None = None, later: bool = False) -> None:
        super().__init__(state)
        forget_plans()
        self.kind, self.tensors = kind, state.distributed()
        self.alone = dist.get_backend() == "fake"
        self.group = None if self.alone else dist.new_group(backend="gloo")
        shared, gpu = kind is AsyncCheckpointerType.PROCESS, state.device.type != "cpu"
        options = StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=shared, use_async_staging=later, use_non_blocking_copy=gpu
        )
        self.stager = None if kind is None else DefaultStager(options)
        self.saved: Any = None
        self.folder = Path()

    def save(self, folder: Path) -> None:
        """As in ``Method``."""
        self.folder = folder
        writer, planner = dcp.FileSystemWriter(folder), dcp.DefaultSavePlanner(enable_plan_caching=True)
        if self.kind is None:
            dcp.save(self.tensors, storage_writer=writer, planner=planner, process_group=self.group)
            return
        self.saved = dcp.async_save(
            self.tensors,
            storage_writer=writer,
            planner=planner,
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )

    def before_update(self) -> None:
        """As in ``Method``."""
        if isinstance(self.saved, AsyncSaveResponse):
            self.saved.staging_completion.result()

    def wait(self) -> None:
        """As in ``Method``."""
        saved, self.saved = self.saved, None
        if saved is not None:
            (saved.upload_completion if isinstance(saved, AsyncSaveResponse) else saved).result()
        sync(self.folder)

    def load(self, folder: Path) -> int:
        """As in ``Method``."""
        where: dict[str, Any] = {"no_dist": True} if self.alone else {"process_group": self.group}
        dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(folder), **where)
        return 0

    def close(self) -> None:
        """As in ``Method``."""
        if self.stager is not None:
            self.stager.close()
        if self.kind is AsyncCheckpointerType.PROCESS:
            import torch.distributed.checkpoint._async_process_executor as executor

            executor._CHECKPOINT_PROCESS = None  # its __del__ ends it
        forget_plans()


def forget_plans() -> None:
    """Empty what torch keeps in the class for all planners."""
    for name in vars(SavePlanner):
        if name.startswith("_cached"):
            getattr(SavePlanner, name).clear()


class Pickled(Method):
    """torch.save of what a rank holds, synchronised; each rank loads its own file."""

    def save(self, folder: Path) -> None:
        """As in ``Method``."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(self._file(folder), "wb") as file:
            torch.save(self.state.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)

    def load(self, folder: Path) -> int:
        """As in ``Method``."""
        found = torch.load(self._file(folder), weights_only=True, mmap=True, map_location="cpu")
        for group, tensors in self.state.tensors.items():
            for name, tensor in tensors.items():
                tensor.copy_(found[group][name])
        return 0

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.state.rank}.pt"


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
METHODS: dict[str, Callable[[State], Method]] = {
    "tilth": Ours,
    "DCP save": Distributed,
    "DCP thread": lambda state: Distributed(state, THREAD),
    "DCP thread+": lambda state: Distributed(state, THREAD, later=True),
    "DCP process": lambda state: Distributed(state, PROCESS),
    "DCP process+": lambda state: Distributed(state, PROCESS, later=True),
    "torch.save": Pickled,
}
