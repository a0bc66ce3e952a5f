"""The benchmark that shows the parity of layouts: what it counts, and that it fails when it should."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.scripts import SCRIPTS, script
from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims

FILE = SCRIPTS / "layout_parity.py"
GOOD = {
    "layout": "dp2",
    "weights": True,
    "agree": True,
    "first": 1e-6,
    "last": 1e-6,
    "double": 1e-15,
    "off": {"dp": 1.01},
}


def benchmark():
    return script(FILE.name)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"weights": False}, "other initial weights"),
        ({"agree": False}, "ranks disagree"),
        ({"first": 2e-5}, "first 2.0e-05 > 1e-05"),
        ({"last": float("nan")}, "last nan"),
        ({"double": 1e-9}, "double"),
        ({"bytes_per_step": 0.0}, "moved no byte"),
        ({"off": {"dp": 1.0, "ep": 0.85}}, "ep moved 0.85 of its formula"),
        ({"off": {"fsdp": 2.0}}, "fsdp moved 2.00 of its formula"),
    ],
)
def test_a_row_that_misses_a_goal_fails(change, said):
    good = {**GOOD, "bytes_per_step": 1.0}
    assert not benchmark().failures(good)
    (told,) = benchmark().failures({**good, **change})
    assert said in told


def test_one_rank_may_move_nothing():
    assert not benchmark().failures({**GOOD, "layout": "1 rank", "bytes_per_step": 0.0})


@pytest.mark.dist
def test_bytes_are_those_of_a_ring(pool):
    """float32 [100] on 2 ranks: an all-reduce sends 400 bytes, a gather of two such or a scatter of one half of it; an
    all-to-all the rows of the other rank, here 10 of rank 0 and 30 of rank 1."""
    for rank, found in enumerate(pool.run(2, "tests.parallel.test_layout_parity:moves")):
        plain = {"all_reduce": 400.0, "all_gather": 400.0, "gather_into": 400.0, "scatter": 200.0}
        assert found == plain | {"all_to_all": (40.0, 120.0)[rank]}


def moves(rank):
    group = ParallelDims.of(Mesh(("dp",), (2,)), rank).group("dp")
    x, both = torch.ones(100), torch.empty(200)
    sends, takes = (([5, 10], [5, 30]), ([30, 10], [10, 10]))[rank]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: dist.all_gather([torch.empty(100), torch.empty(100)], x, group=group),
        "gather_into": lambda: dist.all_gather_into_tensor(both, x, group=group),
        "scatter": lambda: dist.reduce_scatter_tensor(torch.empty(50), x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(sum(takes)), x[: sum(sends)], takes, sends, group),
    }
    found = {}
    for name, call in calls.items():
        with benchmark().Collectives(Mesh(("dp",), (2,))) as collectives:
            call()
        found[name] = collectives.sent["dp"]
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, FILE, "--quick", "--rows", "fsdp2,tp2", "--steps", "2", "--json", out]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["layout"] for row in rows] == ["1 rank", "fsdp2", "tp2"] and rows[1]["bytes_per_step"] > 0
    assert sum(rows[1]["elements"]) == rows[0]["elements"][0] and len(rows[1]["elements"]) == 2
