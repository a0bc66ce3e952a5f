"""A mesh with processes behind it: where this one stands, and the process groups along named dimensions.

Dimensions are "dp" (replicas), "fsdp" (shards of parameters) and "tp" (shards of the computation). Rows of a batch are
divided over dp and fsdp; ranks along tp see the same rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from tilth.core.layout import Mesh
from tilth.parallel import comm

DATA = ("dp", "fsdp")
"""Dimensions that the rows of a batch are divided over."""
MODEL = ("fsdp", "tp")
"""Dimensions that the elements of a parameter are divided over."""

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""By global ranks, in order: the roles of a process share them, since a process issues its collectives in one order."""

_NO_LIMIT = timedelta(minutes=30)
_limits: dict[str, timedelta] = {}
"""How long a collective of a group may take, as the world was told."""


def join(rank: int, workers: int, init_method: str, timeout: float, device: str = "cpu") -> None:
    """Join the world of ``workers`` processes as number ``rank``; nothing happens if this process is in it already.

    Does not wait for the others: on gloo two processes connect when they first have something to tell each other, so a
    role can be made, and work, on some of the workers before the others know of the world.
    init_method: where torch.distributed meets (file://..., tcp://...); timeout: seconds for one collective.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, workers):
            raise ValueError(f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, not {rank}/{workers}")
    elif workers > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        limit = _limits["group"] = timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=workers, timeout=limit)


def leave() -> None:
    """The inverse of ``join``."""
    _groups.clear()
    comm.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class ParallelDims:
    """One process's place in the mesh of a role. A dimension that the mesh does not have counts as one of size 1.

    What speaks to other ranks must be called by all ranks of the group in the same order, as in torch.distributed.
    """

    mesh: Mesh
    rank: int
    """Number of this process in the world; it is one of ``mesh.ranks``."""

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> "ParallelDims":
        """The place of process ``rank``; ValueError if the mesh does not have it."""
        mesh.coordinates(rank)
        return cls(mesh, rank)

    @classmethod
    def alone(cls) -> "ParallelDims":
        """One process: no group, no collective."""
        return cls(Mesh(("dp", "fsdp", "tp"), (1, 1, 1)), 0)

    def coordinate(self, name: str) -> int:
        """Where this process stands along a dimension."""
        return self.mesh.coordinates(self.rank)[self.mesh.names.index(name)] if name in self.mesh.names else 0

    def size(self, *names: str) -> int:
        """Number of ranks along these dimensions together."""
        sizes = dict(zip(self.mesh.names, self.mesh.sizes))
        return int(np.prod([sizes.get(name, 1) for name in names], dtype=np.int64))

    def ranks(self, *names: str) -> tuple[int, ...]:
        """World numbers of the ranks that differ from this one in these dimensions only, in the mesh's order."""
        grid = np.array(self.mesh.ranks).reshape(self.mesh.sizes)
        at = self.mesh.coordinates(self.rank)
        chosen = tuple(slice(None) if name in names else i for name, i in zip(self.mesh.names, at))
        return tuple(int(r) for r in grid[chosen].flatten())

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """The process group of ``ranks(*names)``; None where that is this process alone. Made at the first call."""
        ranks = self.ranks(*names)
        if len(ranks) == 1:
            return None
        if ranks not in _groups:
            _groups[ranks] = _new_group(ranks, self.rank)
        return _groups[ranks]

    def device_mesh(self, *names: str, device: str = "cpu") -> DeviceMesh:
        """Torch's mesh over those of these dimensions that have more than one rank, for ``fully_shard``."""
        used = tuple(name for name in self.mesh.names if name in names and self.size(name) > 1)
        groups = [group for group in map(self.group, used) if group is not None]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device, mesh_dim_names=used)
        table = torch.tensor(self.ranks(*used)).view([self.size(name) for name in used])
        return DeviceMesh.from_group(groups, device, mesh=table, mesh_dim_names=used)

    def sum(self, vector: Tensor, over: tuple[str, ...] = DATA) -> Tensor:
        """float64 [n] of every rank along these dimensions, added up; the bits are the same on all of them."""
        group = self.group(*over)
        if group is not None:
            vector = vector.clone()
            comm.all_reduce(vector, group)
        return vector

    def most(self, value: int) -> int:
        """The greatest value of the data ranks."""
        group = self.group(*DATA)
        if group is None:
            return value
        found = torch.tensor(value)
        comm.all_reduce(found, group, comm.MAX)
        return int(found)

    def gather_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays [n] of each data rank (n may differ, dtypes may not), one behind another in the order of the ranks."""
        group = self.group(*DATA)
        if group is None:
            return dict(rows)
        n = len(next(iter(rows.values())))
        counts = [torch.zeros((), dtype=torch.int64) for _ in range(group.size())]
        comm.all_gather(counts, torch.tensor(n), group)
        width = sum(column.dtype.itemsize for column in rows.values())
        own = torch.zeros(int(max(counts)) * width, dtype=torch.uint8)
        packed = b"".join(np.ascontiguousarray(column).tobytes() for column in rows.values())
        own[: len(packed)] = torch.from_numpy(np.frombuffer(packed, np.uint8).copy())
        every = [torch.empty_like(own) for _ in counts]
        comm.all_gather(every, own, group)
        parts = [_unpack(blob.numpy(), int(count), rows) for blob, count in zip(every, counts)]
        return {name: np.concatenate([part[name] for part in parts]) for name in rows}


def _new_group(ranks: tuple[int, ...], rank: int) -> dist.ProcessGroup:
    """A group in the order of ``ranks``, named after them; only these ranks take part.

    ``dist.new_group`` sorts the ranks, and names a group after the number of groups that a process has already. Ranks
    of different roles have made different numbers of them, would not meet, and wait for ever.
    """
    world = distributed_c10d._world
    backend, store = world.pg_map[distributed_c10d._get_default_group()]
    place, members, kind = ranks.index(rank), list(ranks), dist.Backend(backend)
    name: Any = "tilth-" + "-".join(map(str, ranks))
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks), place, members, kind, store, name, timeout=_limits.get("group", _NO_LIMIT)
    )
    world.pg_group_ranks[made] = {member: i for i, member in enumerate(ranks)}
    return made


def _unpack(blob: np.ndarray, n: int, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """n rows of columns with the dtypes of ``like``, laid one behind another."""
    found, at = {}, 0
    for name, column in like.items():
        size = n * column.dtype.itemsize
        found[name] = np.frombuffer(blob[at : at + size].tobytes(), column.dtype)
        at += size
    return found
