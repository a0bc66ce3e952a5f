"""Culprits of hung jobs by their flight recorders: given dumps of real ones, simulated ones, and rules one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.guard.simulated import Job, recorded
from tilth.guard.flight_recorder import FlightDump, GroupProgress, read_dumps
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
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_the_culprit_is_in_the_answer(job):
    found = verdict(job)
    first = min(at for _, at in job.faults.values())
    expected = {rank for rank, (_, at) in job.faults.items() if at == first}
    assert found and expected & set(found.ranks), (job, found)


@given(jobs(kinds=("stop", "sleep"), most=1))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_one_stopped_rank_is_the_whole_answer(job):
    found = verdict(job)
    assert (found.kind, found.ranks) == ("hang", tuple(job.faults)), (job, found)


@given(jobs(kinds=("frozen",), devices=True, most=2))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_a_stopped_device_is_the_answer(job):
    found = verdict(job)
    assert found and set(found.ranks) <= set(job.faults), (job, found)
    assert {row["rule"] for row in found.details["culprits"].values()} == {"A"}


@given(jobs(kinds=()), st.booleans())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_nobody_is_named_when_all_is_well(job, devices):
    assert verdict(replace(job, devices=devices)) is None


@given(jobs(), st.randoms())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
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


def dump(rank, *ops, **groups):
    """A dump with these operations; groups: name -> (ranks, enqueued, completed)."""
    known = {name: GroupProgress(name, name, ranks, last, -1, done) for name, (ranks, last, done) in groups.items()}
    return FlightDump(rank, "2", known, ops)


def test_two_call_sites_of_a_wrong_collective():
    right = recorded("tp", 3, "all_reduce", 8, True, site="train.py:40 in forward")
    wrong = recorded("tp", 3, "all_reduce", 9, True, site="train.py:44 in forward")
    ranks = (0, 1, 2)
    dumps = {r: dump(r, wrong if r == 2 else right, tp=(ranks, 3, 2)) for r in ranks}
    found = localise(dumps)
    assert (found.kind, found.ranks) == ("collective", (2,))
    assert found.details["sites"] == {"0": right.site, "1": right.site, "2": wrong.site}
    assert right.site in found.evidence and wrong.site in found.evidence


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"op": "broadcast"}, True),
        ({"dtypes": ("BFloat16",)}, True),
        ({"sizes": ((2, 4),)}, False),  # 8 elements as well
        ({"op": "all_to_all", "sizes": ((5,),)}, True),
    ],
)
def test_what_is_a_different_call(change, differs):
    one = recorded("tp", 3, "all_reduce", 8, True)
    dumps = {r: dump(r, one._replace(**change) if r else one, tp=((0, 1), 3, 2)) for r in (0, 1)}
    assert (localise(dumps) is not None) == differs


def test_sizes_of_all_to_all_may_differ():
    dumps = {r: dump(r, recorded("ep", 1, "all_to_all", 8 + r, True), ep=((0, 1), 1, 0)) for r in (0, 1)}
    assert localise(dumps) is None


def waiting():
    """Rank 0 has sent nothing, which gloo does not record; 1 waits for it, 2 for 1 in a collective."""
    dp = (1, 2)
    call = recorded("dp", 5, "all_reduce", 4, True)
    return {
        0: dump(0, recorded("pp", 1, "broadcast", 1, False), pp=((0, 1), 1, 1)),
        1: dump(1, recorded("pp", 1, "broadcast", 1, False), pp=((0, 1), 1, 1), dp=(dp, 4, 4)),
        2: dump(2, call, dp=(dp, 5, 4)),
    }


def test_a_rank_in_a_receive_that_is_not_recorded_is_no_culprit():
    assert localise(waiting()).ranks == (1,)  # as far as the recorder knows
    assert localise(waiting(), hosts={0: "works", 1: "waits", 2: "waits"}).ranks == (0,)


def test_a_rank_whose_collective_failed_is_no_culprit():
    dumps = {r: dump(r, recorded("dp", 5, "all_reduce", 4, r == 1), dp=((0, 1, 2), 5, 5 - (r == 1))) for r in (0, 1)}
    dumps[3] = dump(3, recorded("tp", 2, "all_reduce", 4, True), tp=((0, 3), 2, 1))  # rank 0 will not come any more
    dumps[0].groups["tp"] = GroupProgress("tp", "tp", (0, 3), 1, -1, 1)
    assert localise(dumps, silent=[2]).ranks == (0, 2)
    assert localise(dumps, silent=[2], hosts={0: "failed"}).ranks == (2,)


def test_the_other_side_of_a_wrong_shape_may_be_gone():
    """gloo aborts who receives more than it expects: the culprit is the rank whose call is not its usual one."""
    steps = [recorded(g, s, op, 4, False, 3 * s + i) for s in (1, 2, 3) for i, (g, op) in enumerate(CALLED)]
    usual = recorded("tp", 4, "all_gather", 4, True, 12)
    wrong = recorded("tp", 4, "all_gather", 5, True, 12)
    groups = {"tp": ((0, 1), 4, 3), "dp": ((0, 2), 3, 3)}
    dumps = {0: dump(0, *steps, wrong, **groups), 2: dump(2, *steps, usual, **groups), 3: dump(3, *steps, **groups)}
    found = localise(dumps, silent=[1])
    assert (found.kind, found.ranks) == ("collective", (0,)) and "[[5]]" in found.evidence
    dumps[0] = dump(0, *steps, usual, **groups)
    assert localise(dumps, silent=[1]).ranks == (1,)


CALLED = (("tp", "all_gather"), ("tp", "all_reduce"), ("dp", "all_reduce"))


def test_a_circle_names_the_rank_that_skipped_what_other_groups_did():
    """Rank 0 left out its dp call; nobody has a history."""
    world, titles = (0, 1, 2, 3), {"a": (0, 2), "b": (1, 3)}
    last = {r: recorded("w", 5, "all_reduce", 1, True) for r in (0, 1, 3)} | {
        2: recorded("a", 4, "all_gather", 1, True)
    }
    dumps = {}
    for r in world:
        mine = "a" if r % 2 == 0 else "b"
        done = {0: (3, 3), 2: (4, 3)}.get(r, (4, 4))
        groups = {
            "w": GroupProgress("w", "world", world, 4 if r == 2 else 5, -1, 4),
            mine: GroupProgress(mine, "dp", titles[mine], done[0], -1, done[1]),
        }
        dumps[r] = FlightDump(r, "2", groups, (last[r],))
    found = localise(dumps)
    assert (found.kind, found.ranks, found.details["circle"]) == ("collective", (0,), [0, 2])


def test_a_dump_without_some_groups_accuses_nobody_in_them():
    dumps = {0: dump(0, recorded("tp", 2, "all_reduce", 1, True), tp=((0, 1), 2, 1)), 1: replace(dump(1), unnamed=(4,))}
    assert localise(dumps) is None
    assert localise(dumps | {1: dump(1)}).ranks == (1,)


def test_a_call_left_out_has_both_call_sites():
    """Rank 0 left out an all_gather, went on, and is at work; nothing tells but its own history."""
    steps = [
        recorded(g, s, op, 4, False, 3 * s + i, site=f"train.py:{i} in step")
        for s in (1, 2, 3)
        for i, (g, op) in enumerate(CALLED)
    ]
    late = recorded("tp", 4, "all_gather", 4, True, 12, site="train.py:0 in step")
    other = recorded("dp", 4, "all_reduce", 4, False, 12, site="train.py:2 in step")
    groups = {"tp": ((0, 1), 3, 3), "dp": ((0, 2), 4, 4)}
    dumps = {0: dump(0, *steps, other, **groups), 1: dump(1, *steps, late, tp=((0, 1), 4, 3))}
    found = localise(dumps)
    assert (found.kind, found.ranks) == ("collective", (0,))
    assert "train.py:2" in found.details["calls"][0] and "train.py:0" in found.details["calls"][0]
