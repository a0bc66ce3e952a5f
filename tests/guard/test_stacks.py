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
from tilth.guard.stacks import aggregated, grouped, hosts, parse, shared_group, slow

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
    return [parse(text(place, 10 + rank), rank) for rank, place in enumerate(places)]


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
    assert aggregated([parse("", rank) for rank in range(4)], mesh).ranks == ()  # no stack is no healthy stack


def test_a_rank_without_a_stack_is_an_outlier():
    stacks = [*ranks(["sync"] * 3), parse("", 3)]
    assert aggregated(stacks, Mesh(("dp",), (4,))).ranks == (3,)


def test_roles_are_compared_on_their_own():
    stacks = ranks(["sync"] * 4) + [parse(text("work"), rank, "loader") for rank in range(4)]
    assert aggregated(stacks, Mesh(("dp",), (4,))) is None
    stacks += [parse(text("gather"), 2, "loader")]  # the second loader of rank 2
    assert aggregated(stacks, Mesh(("dp",), (4,))).ranks == (2,)


PY_SPY = """Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3128)
    step (/home/node3/app/train.py:41)
    <module> (/home/node3/app/train.py:3)
Thread 4730 (idle): "QueueFeeder"
    wait (threading.py:327)
"""


def test_py_spy_and_faulthandler_give_the_same_main_thread():
    assert parse(PY_SPY, 0).threads[-1] == parse(text("sync"), 0).threads[-1]
    assert len(parse(PY_SPY, 0).threads) == 2


def test_all_threads_can_be_compared():
    one, other = text("sync"), text("sync").replace("in wait", "in join")
    stacks = [parse(one, 0), parse(one, 1), parse(other, 2)]
    assert grouped(stacks)[0].outliers == () and grouped(stacks, threads=True)[0].outliers == (2,)


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


def test_a_slow_rank_is_accused_most_often():
    mesh = Mesh(("dp", "tp"), (4, 2))
    rounds = []
    for i in range(5):
        places = ["sync"] * 8
        places[5] = "work" if i != 2 else "sync"
        if i in (2, 4):
            places[i] = "irecv"  # another rank, by chance
        rounds.append(ranks(places))
    found = slow(rounds, mesh)
    assert found.kind == "slow" and found.ranks == (5,) and found.details["group"] == [4, 5]
    assert slow([ranks(["sync"] * 8)] * 5, mesh) is None
    tie = [ranks(["work", *["sync"] * 7]), ranks([*["sync"] * 7, "work"])]
    assert slow(tie, mesh) is None
    line = [ranks(["work", "sync", "sync"])] * 3  # one axis: the group would be everybody
    assert slow(line, Mesh(("dp",), (3,))).ranks == (0,)


STALLED = """
import faulthandler, multiprocessing, signal, sys, threading, time
def show(path):
    faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=True)
def loader(path):
    show(path)
    read_shard() if sys.argv[2] == "loader" else next_batch()
def read_shard(): time.sleep(100)
def next_batch(): time.sleep(100)
def wait_for_ranks(): time.sleep(100)
def compute(): time.sleep(100)
if __name__ == "__main__":
    show(sys.argv[1])
    child = multiprocessing.get_context("fork").Process(target=loader, args=(sys.argv[1] + "-loader",), daemon=True)
    child.start()
    print(child.pid, flush=True)
    compute() if sys.argv[2] == "trainer" else wait_for_ranks()
"""


@pytest.mark.dist
@pytest.mark.parametrize("stalled", ["trainer", "loader"])
def test_real_stacks_of_stalled_processes(tmp_path, stalled):
    """Four ranks with a loader each; rank 2 is elsewhere, in the trainer or in the loader's process."""
    (tmp_path / "job.py").write_text(STALLED)
    where = lambda rank: stalled if rank == 2 else "-"  # noqa: E731
    command = [sys.executable, "-S", str(tmp_path / "job.py")]
    jobs = [subprocess.Popen([*command, tmp_path / str(r), where(r)], stdout=subprocess.PIPE) for r in range(4)]
    try:
        loaders = [int(job.stdout.readline()) for job in jobs]
        stacks = []
        for rank, job in enumerate(jobs):
            stacks.append(parse(shown(job.pid, tmp_path / str(rank)), rank))
            stacks.append(parse(shown(loaders[rank], tmp_path / f"{rank}-loader"), rank, "loader"))
    finally:
        for job in jobs:
            job.kill()  # its daemon loader is killed below: a killed parent cannot
            job.wait()
            job.stdout.close()
        for pid in loaders:
            os.kill(pid, signal.SIGKILL)
    found = aggregated(stacks, Mesh(("dp", "tp"), (2, 2)))
    assert found.ranks == (2,) and found.evidence.startswith(f"{stalled}: rank 2 in ")


def shown(pid, path):
    """Stacks of a process that sleeps in its place, once they have two frames of this script."""
    until = time.monotonic() + 20
    while True:
        if path.exists():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.1)
            if "sleep" in (text := path.read_text()) or text.count("job.py") > 1:
                last = text.rsplit("Current thread", 1)[-1]
                if "line 6 in loader" not in last.splitlines()[1:2] and any(
                    name in last for name in ("read_shard", "next_batch", "wait_for_ranks", "compute")
                ):
                    return "Current thread" + last
        assert time.monotonic() < until, "the process does not get to its place"
        time.sleep(0.05)


def test_faulthandler_of_this_process_is_read(tmp_path):
    with (tmp_path / "stack").open("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        frames = parse(file.read(), 0).threads[-1]
    assert frames[0] == "guard/test_stacks.py:test_faulthandler_of_this_process_is_read"
