"""The benchmark of saves and loads: what it compares is the same state, and it fails when bits or bytes are wrong."""

import json
import os
import subprocess
import sys

import pytest
import torch
from work import UnequalWork

from tests.scripts import SCRIPTS, script


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def found(**changes):
    """What two ranks may report."""
    one = {
        "same": True,
        "first": 1.0,
        "stored": 60,
        "read": 50,
        "peak": 7,
        "calls": [1.0, 2.0, 3.0],
        "durable": [4.0, 5.0, 6.0],
    }
    one |= {"cpu": [1.0, 1.0, 1.0], "without": [10.0, 11.0, 12.0], "beside": [10.5, 11.5, 12.5], "warm": [1.0] * 3}
    return {**one, "cold": [2.0] * 3, **changes}


def test_a_row_is_of_the_slowest_rank_and_of_the_middle_repeat():
    other = found(calls=[2.0, 9.0, 1.0], without=[10.0, 11.0, 13.0], beside=[10.0, 14.0, 12.0], first=3.0)
    row = script("checkpoint.py").row("tilth", [found(), other], 100)
    assert row["call_s"] == 3.0 and row["ten_steps_s"] == 11.0 and row["stall_s"] == 0.5
    assert row["cpu_s"] == 2.0 and row["first_call_s"] == 3.0 and row["peak_bytes"] == 14 and row["read_share"] == 1.0
    assert row["same"] and not script("checkpoint.py").row("tilth", [found(), found(same=False)], 100)["same"]


def test_the_stall_is_of_pairs_and_comes_with_an_interval():
    """A machine that grows slower changes both of a pair; one pair out of order moves the end of the interval only."""
    without = [float(10 + i) for i in range(20)]
    steady = found(without=without, beside=[value + 0.25 for value in without])
    told = script("checkpoint.py").stall([steady])
    assert told == {"stall_s": 0.25, "stall_low_s": 0.25, "stall_high_s": 0.25}
    noisy = found(without=without, beside=[value + i / 10 for i, value in enumerate(without)])
    told = script("checkpoint.py").stall([noisy])
    assert told["stall_s"] == pytest.approx(0.95) and told["stall_low_s"] < 0.9 and told["stall_high_s"] > 1.0


def rows(**times):
    """A row of each way, all of whose times are one number."""
    work = {"stored_bytes": 100, "same": True}
    columns = script("checkpoint.py").GOALS
    return {name.replace("_", " "): dict.fromkeys(columns, seconds) | work for name, seconds in times.items()}


def test_ratios_are_beside_the_best_of_those_that_are_meant():
    made = script("checkpoint.py").ratios(rows(tilth=1.0, DCP_save=8.0, DCP_thread=4.0, DCP_process=2.0))
    assert made["stall_s"] == {"DCP save": 0.125, "best async": 0.5}
    assert made["durable_s"] == made["warm_s"] == made["cold_s"] == {"best DCP": 0.5}


def test_ratios_of_ways_that_were_not_run_are_left_out():
    assert script("checkpoint.py").ratios(rows(tilth=1.0, DCP_save=8.0))["stall_s"] == {"DCP save": 0.125}
    assert script("checkpoint.py").ratios(rows(tilth=1.0))["durable_s"] == {}


@pytest.mark.parametrize("wrong", [{"stored_bytes": 80}, {"same": False}])
def test_ways_that_store_something_else_have_no_ratios(wrong):
    made = rows(tilth=1.0, DCP_save=8.0)
    made["DCP save"] |= wrong
    with pytest.raises(UnequalWork):
        script("checkpoint.py").ratios(made)


def test_a_missed_goal_is_said():
    said = list(script("checkpoint.py").goals({"stall_s": {"DCP save": 0.3, "best async": 0.4}}))
    assert said == ["stall/DCP save 0.30 (goal 0.2 MISSED)", "stall/best async 0.40 (goal 0.5)"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"same": False}, "same has other bits"),
        ({"columns_same": False}, "columns_same has other bits"),
        ({"columns_read": 40}, "a quarter of the columns read 0.40 of the bytes"),
        ({"columns_asked": 31}, "a quarter of the columns read 0.31 of the bytes"),
    ],
)
def test_wrong_bits_and_too_many_bytes_are_failures(change, said):
    good = {
        "method": "tilth",
        "same": True,
        "columns_same": True,
        "bytes": 100,
        "columns_read": 25,
        "columns_asked": 25,
    }
    assert not script("checkpoint.py").failures(good)
    assert script("checkpoint.py").failures({**good, **change}) == [said]


@pytest.mark.parametrize("megabytes", [50, 500, 4000])
def test_the_state_has_the_size_that_was_asked_for(scripts, megabytes):
    shapes = script("checkpoint_methods.py").shapes(megabytes)
    total = 12 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert total / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_shares_of_ranks_and_the_quarter_of_the_columns_have_the_same_checksums(scripts):
    """Two ranks' rows, put together and divided by columns."""
    State = script("checkpoint_methods.py").State
    shares = [State(1, rank, 2) for rank in range(2)]
    for share in shares:
        share.fill()
    quarter = State(1, 0, 4, rows=False)
    for group, tensors in quarter.tensors.items():
        for name, tensor in tensors.items():
            parts = [share.tensors[group][name] for share in shares]
            whole = torch.cat(parts) if tensor.ndim else parts[0]
            tensor.copy_(whole[:, : tensor.shape[1]] if tensor.ndim > 1 else whole)
    assert quarter.prints(0, 2) == [share.prints(4)[0] for share in shares]
    before = quarter.prints(0, 2)
    quarter.tensors["optimizer"]["exp_avg.embed"][-1, -1] += 1
    after = quarter.prints(0, 2)
    assert before[0] == after[0] and before[1] != after[1]


@pytest.mark.slow
@pytest.mark.dist
def test_it_runs(tmp_path):
    command = [
        sys.executable,
        str(SCRIPTS / "checkpoint.py"),
        "--mb",
        "12",
        "--ranks",
        "2",
        "--rounds",
        "1",
        "--pairs",
        "1",
    ]
    command += ["--methods", "tilth,DCP save,DCP process+,torch.save"]
    command += ["--step", "0.005", "--json", str(tmp_path / "rows.json"), "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    done = subprocess.run(command, cwd=SCRIPTS.parent, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "rows.json").read_text())
    assert len(made) == 4 and all(row["same"] for row in made)
    assert all(row["columns_same"] for row in made if row["method"] in ("tilth", "DCP save"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
