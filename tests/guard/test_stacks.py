"""Stacks of all ranks: parsed, grouped, outliers and the parallel group that they share."""

import faulthandler
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.core.layout import Mesh
from tilth.guard.diagnosis import aggregated, hosts, main_thread, shared_group

FRAMES = {
    "sync": 'File "/venv/torch/distributed/distributed_c10d.py", line 3128 in all_reduce',
    "irecv": 'File "/venv/torch/distributed/distributed_c10d.py", line 2400 in irecv',
    "isend": 'File "/venv/torch/distributed/distributed_c10d.py", line 2350 in isend',
    "gather": 'File "/venv/torch/distributed/distributed_c10d.py", line 3900 in all_gather_into_tensor',
    "work": 'File "/app/train.py", line 80 in forward',
}


def text(inner, line=10):
    """faulthandler's, of a helper thread and the main thread; the line of the caller differs between ranks."""
    return f"""Thread 0x00007f{line:06x} (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 629 in _bootstrap

Current thread 0x00007fff{line:04x} (most recent call first):
  {FRAMES[inner]}
  File "/home/node{line}/app/train.py", line {line} in step
  File "/home/node{line}/app/train.py", line 3 in <module>
"""


def ranks(places):
    return {rank: main_thread(text(place, 10 + rank)) for rank, place in enumerate(places)}


def test_the_worked_case_of_byterobust():
    """Machines 0-11 synchronise gradients, 12-13 receive, 14 sends, 15 gathers; a machine is a tensor-parallel pair."""
    mesh = Mesh(("dp", "pp", "tp"), (4, 4, 2))
    machines = ["sync"] * 12 + ["irecv"] * 2 + ["isend", "gather"]
    found = aggregated(ranks([place for place in machines for _ in range(2)]), mesh)
    assert found.ranks == tuple(range(24, 32)) and found.kind == "hang"
    assert found.details["axis"] == "pp x tp" and found.details["group"] == list(range(24, 32))
    alone = aggregated(ranks(machines), Mesh(("dp", "pp"), (4, 4)))
    assert (alone.details["axis"], alone.details["group"]) == ("pp", [12, 13, 14, 15])


def test_what_hosts_do():
    texts = {0: text("sync"), 1: text("work"), 2: "", 3: "no stack: the process is stopped"}
    assert hosts(texts) == {0: "waits", 1: "works"}


def test_no_majority_names_nobody():
    mesh = Mesh(("dp",), (4,))
    found = aggregated(ranks(["sync", "sync", "work", "irecv"]), mesh)
    assert found.ranks == () and found.details["groups"]
    assert aggregated(ranks(["sync"] * 4), mesh) is None
    assert aggregated(dict.fromkeys(range(4), main_thread("")), mesh).ranks == ()  # no stack is no healthy stack


def test_a_rank_without_a_stack_is_an_outlier():
    stacks = ranks(["sync"] * 3) | {3: main_thread("")}
    assert aggregated(stacks, Mesh(("dp",), (4,))).ranks == (3,)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_the_shared_group_has_all_outliers_and_no_smaller_one_does(dp, pp, tp, data):
    mesh = Mesh(("dp", "pp", "tp"), (dp, pp, tp))
    odd = data.draw(st.lists(st.sampled_from(mesh.ranks), min_size=1, unique=True))
    axis, members = shared_group(mesh, odd)
    if not axis:
        assert not members and (len(odd) > 1 or max(mesh.sizes) == len(mesh))
        return
    assert set(odd) <= set(members) and len(members) < len(mesh)
    names = axis.split(" x ")
    assert len({tuple(mesh.at(r)[n] for n in mesh.names if n not in names) for r in members}) == 1
    assert len(odd) == 1 or all(len({mesh.at(r)[n] for r in odd}) > 1 for n in names)


STALLED = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=True)
def wait_for_ranks(): time.sleep(100)
def compute(): time.sleep(100)
compute() if sys.argv[2] == "stalled" else wait_for_ranks()
"""


@pytest.mark.dist
def test_real_stacks_of_a_stalled_process(tmp_path):
    (tmp_path / "job.py").write_text(STALLED)
    command = [sys.executable, "-S", str(tmp_path / "job.py")]
    jobs = [subprocess.Popen([*command, tmp_path / str(r), "stalled" if r == 2 else "-"]) for r in range(4)]
    try:
        stacks = {rank: main_thread(shown(job.pid, tmp_path / str(rank))) for rank, job in enumerate(jobs)}
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    found = aggregated(stacks, Mesh(("dp", "tp"), (2, 2)))
    assert found.ranks == (2,) and found.evidence.startswith("rank 2 in ")


def shown(pid, path):
    """Stacks of a process that sleeps in its place."""
    until = time.monotonic() + 20
    while True:
        if path.exists():  # its handler is there
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.1)
            last = path.read_text().rsplit("Current thread", 1)[-1]
            if "wait_for_ranks" in last or "compute" in last:
                return "Current thread" + last
        assert time.monotonic() < until, "the process does not get to its place"
        time.sleep(0.05)


def test_faulthandler_of_this_process_is_read(tmp_path):
    with (tmp_path / "stack").open("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        frames = main_thread(file.read())
    assert frames[0] == "guard/test_stacks.py:test_faulthandler_of_this_process_is_read"
