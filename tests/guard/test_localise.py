"""Culprits of hung jobs by their flight recorders: given dumps of real ones, simulated ones, and rules one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guard.simulated import Job
from tilth.guard.flight_recorder import read_dumps
from tilth.guard.localise import localise

SHARED = "shared/data/faults/flight_recorder"
GIVEN = next((p / SHARED for p in Path(__file__).resolve().parents if (p / SHARED).is_dir()), Path(SHARED))
CALLS = [("tp", "all_reduce", 8), ("tp", "all_gather", 4), ("pp", "broadcast", 2), ("dp", "all_reduce", 16)]
KINDS = ("stop", "sleep", "missing", "shape")


@pytest.mark.parametrize(("name", "ranks"), [("gpu_error_1st", (12, 14)), ("lock_gil_1st", (9, 14))])
def test_culprits_of_real_jobs(name, ranks):
    if not (GIVEN / name).is_dir():
        pytest.skip("the dumps of real jobs are not beside this checkout (shared/data/faults)")
    dumps = read_dumps(GIVEN / name)
    assert localise(dumps).ranks == ranks and localise(dumps).kind == "hang"
    for rank in dumps:  # and with any one dump lost
        rest = {r: dump for r, dump in dumps.items() if r != rank}
        assert set(localise(rest, silent=[rank]).ranks) == {*ranks, rank}


@st.composite
def jobs(draw, kinds=KINDS, most=2, devices=False):
    sizes = {"dp": draw(st.integers(1, 4)), "pp": draw(st.integers(1, 2)), "tp": draw(st.integers(1, 4))}
    if sizes["dp"] * sizes["pp"] * sizes["tp"] not in range(2, 17):
        sizes = {"dp": 2, "pp": 1, "tp": 2}
    wide = [call for call in CALLS if sizes[call[0]] > 1] + [("world", "all_reduce", 1)]
    program = [*draw(st.lists(st.sampled_from(wide), min_size=0, max_size=4)), wide[0], wide[-1]]
    world = sizes["dp"] * sizes["pp"] * sizes["tp"]
    job = Job(sizes, program, seed=draw(st.integers(0, 99)), devices=devices, steps=16 if devices else 6)
    culprits = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=most, unique=True)) if kinds else []
    last = (2 if devices else job.steps - 1) * len(program) - 1
    for rank in culprits[: world - 1]:
        kind = draw(
            st.sampled_from(kinds if len(culprits) == 1 else [k for k in kinds if k not in ("missing", "shape")])
        )
        job.faults[rank] = (kind, draw(st.integers(2 * len(program) if not devices else 1, last)))
    return job


def verdict(job):
    dumps = job.run()
    return localise(dumps, [rank for rank in range(job.world) if rank not in dumps])


@given(jobs())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_culprit_is_in_the_answer(job):
    found = verdict(job)
    first = min(at for _, at in job.faults.values())
    expected = {rank for rank, (_, at) in job.faults.items() if at == first}
    assert found and expected & set(found.ranks), (job, found)


@given(jobs(kinds=("stop", "sleep"), most=1))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_one_stopped_rank_is_the_whole_answer(job):
    found = verdict(job)
    assert (found.kind, found.ranks) == ("hang", tuple(job.faults)), (job, found)


@given(jobs(kinds=("frozen",), devices=True, most=2))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_stopped_device_is_the_answer(job):
    found = verdict(job)
    assert found and set(found.ranks) <= set(job.faults), (job, found)
    assert {row["rule"] for row in found.details["culprits"].values()} == {"A"}


@given(jobs(kinds=()), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_nobody_is_named_when_all_is_well(job, devices):
    assert verdict(replace(job, devices=devices)) is None


@given(jobs(), st.randoms())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_other_numbers_of_ranks_name_the_same(job, random):
    dumps, order = job.run(), list(range(job.world))
    random.shuffle(order)
    silent = [rank for rank in range(job.world) if rank not in dumps]
    moved = {}
    for rank, dump in dumps.items():
        groups = {n: g._replace(ranks=tuple(order[r] for r in g.ranks)) for n, g in dump.groups.items()}
        moved[order[rank]] = replace(dump, rank=order[rank], groups=groups)
    one, other = localise(dumps, silent), localise(moved, [order[rank] for rank in silent])
    assert (one.kind, {order[rank] for rank in one.ranks}) == (other.kind, set(other.ranks))
