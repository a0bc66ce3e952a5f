import os
import subprocess
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import forked
from tests.pool import Pool, PoolError
from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims, join

HERE = "tests.parallel.test_dims:"
SQUARE = Mesh(("dp", "fsdp", "tp"), (2, 1, 2))


def test_a_process_alone_has_no_groups_and_its_sums_are_its_own():
    grid = ParallelDims.alone()
    assert [grid.group(name) for name in ("dp", "fsdp", "tp")] == [None] * 3
    vector = torch.tensor([1.5], dtype=torch.float64)
    assert grid.sum(vector) is vector and grid.most(3) == 3 and grid.size("dp", "tp") == 1
    rows = {"a": np.arange(3)}
    assert grid.gather_rows(rows)["a"] is rows["a"]


def test_ranks_along_dimensions_are_those_of_the_mesh():
    mesh = Mesh(("dp", "fsdp", "tp"), (2, 3, 2), tuple(range(100, 112)))
    grid = ParallelDims.of(mesh, 109)
    assert [grid.coordinate(n) for n in ("dp", "fsdp", "tp")] == [1, 1, 1]
    assert grid.ranks("dp") == (103, 109)
    assert grid.ranks("fsdp") == (107, 109, 111)
    assert grid.ranks("tp", "dp") == (102, 103, 108, 109)
    assert grid.size("fsdp", "tp") == 6


def test_an_axis_that_a_mesh_does_not_have_has_size_1():
    grid = ParallelDims.of(Mesh(("tp",), (2,), (8, 9)), 9)
    assert (grid.size("dp", "tp"), grid.coordinate("dp"), grid.ranks("dp", "fsdp")) == (2, 0, (9,))


def test_a_rank_outside_of_the_mesh_is_refused():
    with pytest.raises(ValueError):
        ParallelDims.of(SQUARE, 9)


@pytest.mark.dist
def test_a_pair_of_a_larger_world_sums_and_gathers(pool):
    results = pool.run(2, HERE + "speak", names=("fsdp",), sizes=(2,))
    assert [r["sum"] for r in results] == [[3.0, 20.0]] * 2
    assert [r["most"] for r in results] == [6] * 2
    for r in results:
        assert r["rows"]["id"].tolist() == [0, 100, 101] and r["rows"]["id"].dtype == np.int32
        assert r["rows"]["x"].tolist() == [0.5, 0.5, 0.5] and r["rows"]["flag"].tolist() == [True, False, True]
        assert r["again"]["id"].tolist() == []


@pytest.mark.dist
def test_groups_of_four_along_each_dimension(pool):
    results = pool.run(4, HERE + "dimensions")
    assert [r["tp"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp"] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["data_sum"] for r in results] == [2.0, 4.0, 2.0, 4.0]
    assert all(r["again"] for r in results) and [r["mesh"] for r in results] == [[[0, 1], [2, 3]]] * 4


@pytest.mark.dist
def test_members_that_have_made_other_numbers_of_groups_meet_all_the_same(pool):
    assert pool.run(4, HERE + "groups_of_pools") == [6.0] * 4


def groups_of_pools(rank):
    for mesh in ((0, 1), (0, 1, 3), (0, 3)):
        if rank in mesh:
            ParallelDims.of(Mesh(("dp",), (len(mesh),), mesh), rank).most(rank)
    grid = ParallelDims.of(Mesh(("dp",), (4,), (3, 1, 2, 0)), rank)
    assert grid.group("dp")._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 60.0
    return float(grid.sum(torch.tensor([float(rank)], dtype=torch.float64)))


@pytest.mark.dist
def test_joining_another_world_is_refused(pool):
    assert all("is rank" in said for said in pool.run(2, HERE + "join_twice"))


@pytest.fixture
def own_pool():
    """One that may be ended: the others' processes have imported what they need."""
    made = Pool(3)
    yield made
    made.close()


@pytest.mark.dist
@pytest.mark.slow
def test_what_raises_dies_or_hangs_fails_with_its_rank_and_leaves_nothing(own_pool):
    for function, said in (("raises", "ZeroDivisionError"), ("dies", "rank 1"), ("hangs", "rank 1 did not finish")):
        assert own_pool.run(2, HERE + "fine") == [0, 1]
        before = [p.pid for p in own_pool.processes]
        with pytest.raises(PoolError) as caught:
            own_pool.run(2, HERE + function, timeout=30 if function != "hangs" else 1.0)
        assert said in str(caught.value)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in before) and not own_pool.processes


@pytest.mark.dist
@pytest.mark.slow
def test_all_of_it_at_once_is_told_of_each_rank(own_pool):
    with pytest.raises(PoolError) as caught:
        own_pool.run(3, HERE + "goes_wrong", timeout=30)
    said = str(caught.value)
    assert "rank 0 failed:" in said and "ZeroDivisionError" in said
    assert "rank 1 failed:\nprocess died with exit status 7" in said and "rank 2 did not finish" in said
    assert not own_pool.processes


@pytest.mark.dist
def test_some_processes_of_a_world_work_before_the_others_join(tmp_path):
    """A role on one pool of workers is made before the role on another."""
    code = "import sys; import tilth; from tests.parallel.test_dims import early; early(int(sys.argv[1]), sys.argv[2])"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*forked.python(), "-c", code]
    pair = [
        subprocess.Popen([*command, rank, tmp_path / "meeting"], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in "12"
    ]
    try:
        assert [process.communicate(timeout=60)[0] for process in pair] == ["3.0\n"] * 2
    finally:
        for process in pair:
            process.kill()
            process.wait()


def early(rank, meeting):
    join(rank, 4, f"file://{meeting}", 30.0)
    print(
        float(ParallelDims.of(Mesh(("dp",), (2,), (1, 2)), rank).sum(torch.tensor([float(rank)], dtype=torch.float64)))
    )


def fine(rank):
    return rank


def raises(rank):
    return 1 // (1 - rank)


def dies(rank):
    if rank == 1:
        os._exit(7)


def hangs(rank):
    if rank == 1:
        time.sleep(3600)


def goes_wrong(rank):
    """Each in its way."""
    if rank == 0:
        raises(1)
    os._exit(7) if rank == 1 else time.sleep(3600)


def speak(rank, names, sizes):
    grid = ParallelDims.of(Mesh(names, sizes), rank)
    rows = {"id": np.arange(rank + 1, dtype=np.int32) + 100 * rank, "x": np.full(rank + 1, 0.5)}
    rows["flag"] = rows["id"] % 2 == (0 if rank == 0 else 1)
    return {
        "sum": grid.sum(torch.tensor([1.0 + rank, 10.0], dtype=torch.float64)).tolist(),
        "most": grid.most(5 + rank),
        "rows": grid.gather_rows(rows),
        "again": grid.gather_rows({"id": np.zeros(0, np.int64)}),
    }


def dimensions(rank):
    grid = ParallelDims.of(SQUARE, rank)
    found = {name: dist.get_process_group_ranks(grid.group(name)) for name in ("dp", "tp")}
    total = grid.sum(torch.tensor([float(rank)], dtype=torch.float64))
    mesh = ParallelDims.of(Mesh.of({"dp": 2, "fsdp": 2}), rank).device_mesh().mesh.tolist()
    same = ParallelDims.of(SQUARE, rank).group("dp") is grid.group("dp") is grid.group("fsdp", "dp")
    return found | {"data_sum": float(total), "again": same, "mesh": mesh}


def join_twice(rank):
    join(rank, dist.get_world_size(), "", 1.0)
    try:
        join(rank + 1, dist.get_world_size(), "", 1.0)
    except ValueError as error:
        return str(error)
