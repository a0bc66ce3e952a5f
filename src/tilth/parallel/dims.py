"""Process groups along the axes of a mesh (``config.axes``), and this process's place in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from tilth.config.axes import DATA, Split
from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Layout, Mesh
from tilth.parallel import comm

_groups: dict[tuple[int, tuple[int, ...], str], dist.ProcessGroup] = {}
"""Groups by generation, global ranks in order, and name; the roles of a process share them."""

_NO_LIMIT = timedelta(minutes=30)
_limits: dict[str, timedelta] = {}
"""Time limit of a collective."""


def join(rank: int, workers: int, init_method: str, timeout: float, device: str = "cpu") -> None:
    """Join the world of ``workers`` processes as number ``rank``; does nothing if this process has joined already.

    Does not wait for the others: on gloo two processes connect at their first communication, so a role can work on some
    workers before the others join. init_method: where torch.distributed meets (file://..., tcp://...); timeout: seconds
    for one collective.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, workers):
            raise ArgumentError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, not {rank}/{workers}", key="rank"
            )
    elif workers > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        limit = _limits["group"] = timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=workers, timeout=limit)


def leave() -> None:
    """Leave the world; the inverse of ``join``."""
    _groups.clear()
    comm.forget()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class ParallelDims:
    """Place of one process in the mesh of a role. A missing axis counts as one of size 1.

    All ranks of a group must call its collectives in the same order, as in torch.distributed.
    """

    mesh: Mesh
    rank: int
    """Number of this process in the world; it is one of ``mesh.ranks``."""
    generation: int = 0
    """Generation of the role. A group that lost a rank is never used again: the next generation has its own groups."""

    @classmethod
    def of(cls, mesh: Mesh, rank: int, generation: int = 0) -> "ParallelDims":
        """Return the place of process ``rank``; ValueError if the mesh does not have it."""
        mesh.coordinates(rank)
        return cls(mesh, rank, generation)

    @classmethod
    def alone(cls) -> "ParallelDims":
        """Return the place of a single process: no group, no collective."""
        return cls(Mesh.of({}), 0)

    def coordinate(self, name: str) -> int:
        """Coordinate of this process along an axis."""
        return self.mesh.coordinate(name, self.rank)

    def first(self, *splits: Split) -> bool:
        """True on the one rank, of those that divide these, that reports what all of them share."""
        return not any(map(self.coordinate, self.mesh.over(*splits)))

    def size(self, *names: str) -> int:
        """Number of ranks along these axes together."""
        return self.mesh.size(*names)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """World numbers of the ranks that differ from this one along these axes only, in the mesh's order."""
        return self.mesh.along(self.rank, *names)

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """Return the process group of ``ranks(*names)``, made at the first call; None for this process alone."""
        return self.group_of(self.ranks(*names))

    def group_of(self, ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup | None:
        """Return the process group of these ranks, of which this is one; name: distinguishes groups of equal ranks."""
        if len(ranks) == 1:
            return None
        key = self.generation, ranks, name
        if key not in _groups:
            _groups[key] = _new_group(ranks, self.rank, self.generation, name)
        return _groups[key]

    def channel(self, source: int, target: int, name: str) -> comm.Channel:
        """Return what carries messages between two ranks, of which this is one; name: of which kind they are."""
        group = self.group_of((source, target), name)
        assert group is not None  # two ranks
        return comm.Channel(group, source, target, name)

    def group_over(self, *splits: Split, without: tuple[Split, ...] = ()) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that divide any of these, along axes that split none of ``without``;
        None for this process alone."""
        return self.group(*self.mesh.over(*splits, without=without))

    def device_mesh(self, device: str = "cpu", shards: Sequence[str] | None = None) -> DeviceMesh:
        """Return torch's mesh for ``fully_shard``: [copies, shards], without a dimension of one rank.

        shards: axes with several ranks together, by default all of ``mesh.shards``.
        """
        copies, shards = self.mesh.copies, self.mesh.shards if shards is None else shards
        group, peers = self.group(*copies), self.group(*shards)
        assert peers is not None  # else nothing is sharded
        if group is None:
            return DeviceMesh.from_group(peers, device, mesh_dim_names=("shards",))
        table = torch.tensor([self.mesh.along(rank, *shards) for rank in self.ranks(*copies)])
        return DeviceMesh.from_group([group, peers], device, mesh=table, mesh_dim_names=("copies", "shards"))

    def sum(self, vector: Tensor, *splits: Split, without: tuple[Split, ...] = ()) -> Tensor:
        """Sum a vector [n] over the ranks that divide any of these; the same bits on all of them.

        splits: by default rows. Ranks that divide tokens without rows have the same numbers of the same rows. without:
        of axes that split none of these.
        """
        group = self.group_over(*splits or ("rows",), without=without)
        if group is not None:
            vector = vector.clone()
            comm.all_reduce(vector, group).wait()
        return vector

    def most(self, value: int) -> int:
        """Return the greatest value of the data ranks."""
        group = self.group_over(*DATA)
        if group is None:
            return value
        found = torch.tensor(value)
        comm.all_reduce(found, group, comm.MAX).wait()
        return int(found)

    def gather_boxes(
        self, axes: Sequence[str], layouts: Mapping[str, Layout], own: Mapping[str, Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """Put tensors together from what the ranks along these axes have of them: each the least box around it.

        own: this rank's parts, of the dtype of ``like``.
        """
        ranks, group = self.ranks(*axes), self.group(*axes)
        assert group is not None  # several ranks
        boxes = {rank: [(name, box) for name in layouts for box in layouts[name].boxes(rank)] for rank in ranks}
        longest = max(sum(box.numel for _, box in held) for held in boxes.values())
        blob = torch.zeros(longest, dtype=like.dtype, device=like.device)
        held = [own[name].flatten() for name in layouts if name in own]
        torch.cat(held, out=blob[: sum(t.numel() for t in held)]) if held else None
        every = blob.new_empty(len(ranks) * longest)
        comm.all_gather(every, blob, group)
        parts = {name: [box for rank in ranks for box in layouts[name].boxes(rank)] for name in layouts}
        around = {n: Box.around(found or [Box.whole((0, *layouts[n].shape[1:]))]) for n, found in parts.items()}
        whole = {name: blob.new_empty(box.size) for name, box in around.items()}
        for rank, blob in zip(ranks, every.view(len(ranks), -1)):
            at = 0
            for name, box in boxes[rank]:
                whole[name][box.within(around[name]).slices] = blob[at : at + box.numel].view(box.size)
                at += box.numel
        return whole

    def gather_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Concatenate arrays [n] of each rank that divides rows (n may differ, dtypes may not) in rank order."""
        group = self.group_over("rows")
        if group is None:
            return dict(rows)
        n, kinds = len(next(iter(rows.values()))), [(name, column.dtype) for name, column in rows.items()]
        counts = torch.zeros(group.size(), dtype=torch.int64)
        comm.all_gather(counts, torch.tensor([n]), group)
        own = np.zeros(int(counts.max()), kinds)
        for name, column in rows.items():
            own[name][:n] = column
        every = torch.empty(group.size() * own.nbytes, dtype=torch.uint8)
        comm.all_gather(every, torch.from_numpy(own.view(np.uint8)), group)
        table = every.numpy().view(own.dtype).reshape(group.size(), -1)
        filled = np.arange(table.shape[1]) < counts.numpy()[:, None]
        return {name: table[name][filled] for name in rows}


def _new_group(ranks: tuple[int, ...], rank: int, generation: int, label: str = "") -> dist.ProcessGroup:
    """Return a group in the order of ``ranks``, named after them and their generation; only these ranks take part.

    ``dist.new_group`` sorts the ranks, and names a group by a per-process counter. Ranks of different roles have
    different counters, so they would wait for each other for ever.
    """
    world = distributed_c10d._world
    backend, store = world.pg_map[distributed_c10d._get_default_group()]
    place, members, kind = ranks.index(rank), list(ranks), dist.Backend(backend)
    name: Any = f"tilth-{generation}-{label}of-" + "-".join(map(str, ranks))
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks), place, members, kind, store, name, timeout=_limits.get("group", _NO_LIMIT)
    )
    world.pg_group_ranks[made] = {member: i for i, member in enumerate(ranks)}
    return made
