"""The benchmark that shows the parity of layouts: what it counts, and that it fails when it should."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.scripts import SCRIPTS, script
from tilth.config.axes import AXES
from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims
from tilth.plan.rules import rule_of
from tilth.plan.shape import parameter_shapes

FILE = SCRIPTS / "layout_parity.py"
GOOD = {
    "layout": "fsdp2xep2",
    "optimizer": "adamw",
    "axes": {"fsdp": 2, "ep": 2},
    "initial_weights_equal": True,
    "ranks_agree": True,
    "first_relative": 1e-6,
    "last_relative": 1e-6,
    "double_relative": 1e-15,
    "bytes_by_axes": {
        "fsdp+ep": {"bytes": 101.0, "formula": 100.0},
        "ep": {"bytes": 50.0, "formula": 50.0},
        "fsdp": {"bytes": 1.0, "formula": 0.0},
    },
}

OF_HDP = {"bytes_by_axes": {"hdp": {"bytes": 1.0, "formula": 1.0}}}


def benchmark():
    return script(FILE.name)


def with_bytes(**changes):
    """Bytes along axes, changed."""
    table = {axes: {**GOOD["bytes_by_axes"].get(axes, {"formula": 0.0}), **both} for axes, both in changes.items()}
    return {"bytes_by_axes": GOOD["bytes_by_axes"] | table}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"initial_weights_equal": False}, "other initial weights"),
        ({"ranks_agree": False}, "ranks disagree"),
        ({"first_relative": 2e-5}, "first_relative 2.0e-05 > 1e-05"),
        ({"last_relative": float("nan")}, "last_relative nan"),
        ({"double_relative": 1e-9}, "double_relative"),
        ({"last_relative": 2e-5, "axes": {"hdp": 2}, **OF_HDP}, "last_relative 2.0e-05 > 1e-05"),
        ({"axes": {"fsdp": 2, "ep": 2, "tp": 2}}, "tp moved no byte"),
        ({"axes": {"dp": 2}, "bytes_by_axes": {}}, "dp moved no byte"),
        (with_bytes(ep={"bytes": 42.0}), "ep moved 0.84 of its formula"),
        ({"optimizer": "muon", **with_bytes(ep={"bytes": 42.0})}, "ep moved 0.84 of its formula"),
        (with_bytes(ep={"bytes": 0.0}), "ep moved 0.00 of its formula"),
        (with_bytes(fsdp={"bytes": 40.0}), "fsdp moved 40 bytes of which no formula says"),
    ],
)
def test_a_row_that_misses_a_goal_fails(change, said):
    assert not benchmark().failures(GOOD)
    (told,) = benchmark().failures({**GOOD, **change})
    assert said in told


def test_one_rank_may_move_nothing():
    assert not benchmark().failures({**GOOD, "axes": {}, "bytes_by_axes": {}})


def test_every_axis_and_kind_of_product_has_a_row():
    """Of two and three axes that a person would use, on up to 8 ranks; the quick form has every axis too."""
    rows, quick = benchmark().ROWS, benchmark().QUICK
    used = {frozenset(key for key in row if key in AXES) for row in rows.values()}
    apart = {frozenset(["hdp", axis]) for axis in ("dp", "cp")}  # which it replaces
    assert {frozenset([axis]) for axis in AXES} | {frozenset(two) for two in combinations(AXES, 2)} - apart <= used
    assert any(len(row) == 3 for row in used) and set().union(*(rows[name] for name in quick)) >= set(AXES)
    assert all(math.prod(row[axis] for axis in row if axis in AXES) <= 8 for row in rows.values())


@pytest.mark.parametrize(
    ("layout", "axes", "ranks"), [({"fsdp": 2, "ep": 2}, "fsdp+ep", 4), ({"dp": 2, "tp": 2, "zero": 1}, "tp", 2)]
)
def test_the_formula_has_the_matrices_that_muon_gathers(layout, axes, ranks):
    """All ranks together send each matrix to the others that divide it or, with ``zero``, to its owners; no experts."""
    formulas, task = script("layout_formulas.py"), benchmark().Task("quick", 1, experts="ep" in layout, layout=layout)
    sent, how = [], (task.config, 4, task.modes, 1, np.array([8]), 0, {})
    for muon in (True, False):
        each = (formulas.formula(formulas.Step(task.mesh, rank, *how, matrices=muon)) for rank in task.mesh.ranks)
        sent.append(sum(map(Counter, each), Counter()))
    whole = {n: s for n, s in parameter_shapes(task.config).items() if rule_of(task.config.table, n).kind == "matrix"}
    elements = sum(math.prod(shape) for shape in whole.values() if len(shape) == 2)
    assert sent[0] - sent[1] == {axes: (ranks - 1) * 4 * elements}


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
    assert [row["layout"] for row in rows] == ["1 rank", "fsdp2", "tp2"] and rows[1]["bytes_per_step_and_rank"] > 0
    assert all(row["predicted_mib"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert sum(rows[1]["elements"]) == rows[0]["elements"][0] and len(rows[1]["elements"]) == 2
