"""Process groups of meshes that overlap, made by ranks that have made different numbers of groups before."""

import pytest
import torch
import torch.distributed as dist

from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims

HERE = "tests.parallel.test_groups:"


def meet(rank: int) -> float:
    """Ranks 0 and 1 have a group of their own before all three meet."""
    if rank < 2:
        ParallelDims.of(Mesh(("own",), (2,), (0, 1)), rank).group("own")
    group = ParallelDims.of(Mesh(("to",), (3,), (0, 1, 2)), rank).group("to")
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=group)
    return float(value)


def place(rank: int) -> tuple[int, list[int], list[float]]:
    """Where a rank of a mesh that is not in ascending order stands in the group."""
    grid = ParallelDims.of(Mesh(("tp",), (2,), (1, 0)), rank)
    group = grid.group("tp")
    parts = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
    assert group.rank() == grid.coordinate("tp") and dist.get_process_group_ranks(group) == [1, 0]
    return group.rank(), dist.get_process_group_ranks(group), [float(p) for p in parts]


def generations(rank: int) -> tuple[bool, float]:
    """A role that is made again has groups of its own, which do not hear what is said in those of before."""
    mesh = Mesh(("dp",), (2,), (0, 1))
    before, now = (ParallelDims.of(mesh, rank, generation).group("dp") for generation in (0, 1))
    late, value = torch.tensor(100.0), torch.tensor(1.0)
    if rank == 0:
        work = dist.all_reduce(late, group=before, async_op=True)
    dist.all_reduce(value, group=now)
    if rank == 1:
        work = dist.all_reduce(late, group=before, async_op=True)
    work.wait()
    return before is not now, float(value)


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_of_different_roles_meet(pool):
    assert pool.run(3, HERE + "meet", timeout=30.0) == [3.0, 3.0, 3.0]


@pytest.mark.dist
def test_the_order_of_a_group_is_that_of_the_mesh(pool):
    assert pool.run(2, HERE + "place") == [(1, [1, 0], [1.0, 0.0]), (0, [1, 0], [1.0, 0.0])]


@pytest.mark.dist
def test_groups_of_two_generations_are_apart(pool):
    assert pool.run(2, HERE + "generations") == [(True, 2.0), (True, 2.0)]
