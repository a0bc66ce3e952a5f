"""Who holds up a job that stands still: by hand-made facts, and by real workers with real faults."""

import threading
from dataclasses import replace

import pytest

from tests.guard import stuck
from tilth.cluster.backends.base import Probe
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.errors import CallTimeout, TilthError, WorkerError
from tilth.core.layout import Mesh
from tilth.guard.diagnosis import HangReport, at_once, diagnosed, explained, place
from tilth.guard.flight_recorder import FlightDump, GroupProgress, RecordedOp
from tilth.guard.recovery import verdict_of

MESH = Mesh.of({"dp": 2, "tp": 2})
WAITS = """Current thread 0x09 (most recent call first):
  File "/py/torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "/x/role.py", line 3 in update
"""
WORKS = """Current thread 0x09 (most recent call first):
  File "/x/model.py", line 7 in forward
"""
BACKWARD = (("call", -1), ("update", -1), ("backward", 3))


def probe(rank, state="sleeping", stack=WAITS, spans=BACKWARD):
    return Probe(rank, 100 + rank, state, "policy.update (for 9.0 s)", stack, spans)


def test_a_place_is_the_innermost_operation_and_a_collective_is_inside_one():
    assert place(probe(0)) == "backward of micro-batch 3"
    assert place(probe(0, spans=(*BACKWARD, ("all_reduce", 3)))) == "all_reduce in backward of micro-batch 3"
    assert place(probe(0, spans=(("call", -1), ("", -1)))) == "policy.update"
    assert place(Probe(0, 1, "running", "", "")) == ""


def dumped(rank, ranks, enqueued, completed):
    """A dump of one group, whose newest collective is not complete if one was enqueued after it."""
    name = f"of {ranks}"
    op = RecordedOp(
        name, enqueued, "all_reduce", False, -1, ((4,),), ((4,),), ("Float",), enqueued > completed, (), 0, 1, "gloo"
    )
    return FlightDump(rank, "2", {name: GroupProgress(name, "", ranks, enqueued, -1, completed)}, (op,))


def waiting(*silent):
    """Dumps of four ranks of which rank 2 has not come to collective 8 of the group of 0 and 2."""
    made = {0: dumped(0, (0, 2), 8, 7), 1: dumped(1, (1, 3), 9, 9), 2: dumped(2, (0, 2), 7, 7)}
    return {rank: one for rank, one in (made | {3: dumped(3, (1, 3), 9, 9)}).items() if rank not in silent}


@pytest.mark.parametrize(
    ("state", "stack", "mute", "words"),
    [
        ("stopped", "", True, "rank 2 stopped in backward of micro-batch 3 since "),
        ("running", WORKS, True, "rank 2 holds the GIL in backward of micro-batch 3 since "),
        ("running", WORKS, False, "rank 2 is busy in backward of micro-batch 3 since "),
        ("sleeping", WORKS, False, "rank 2 waits in backward of micro-batch 3 since "),
    ],
)
def test_the_evidence_names_state_operation_and_the_group_in_which_peers_wait(state, stack, mute, words):
    probes = {rank: probe(rank) for rank in (0, 1, 3)} | {2: probe(2, state, stack)}
    facts = HangReport(probes, waiting(*([2] if mute else [])), mute=frozenset({2} if mute else ()), since={2: 1e9})
    found = explained(facts, (0,), {"policy": MESH})
    assert (found.kind, found.ranks) == ("hang", (2,))
    assert found.evidence.startswith(words)
    assert "rank 0 waits in all_reduce of group dp" in found.evidence
    assert found.details["culprits"]["2"]["micro_batch"] == 3 and found.details["wait"] == [0]


def test_a_worker_whose_answer_is_late_is_not_accused():
    """Rank 2 runs, but its dump did not come: who waits for whom is not known, so the failure's own ranks stand."""
    facts = HangReport({rank: probe(rank) for rank in range(4)}, waiting(2), late=frozenset({2}))
    found = explained(facts, (1,), {"policy": MESH})
    assert found.ranks == (1,)
    assert explained(facts, (), {"policy": MESH}) is None
    known = replace(facts, late=frozenset())  # were that all: ranks 1 and 3 would wait for each other
    assert explained(known, (1,), {"policy": MESH}).kind == "collective"


def test_ranks_that_called_different_collectives_are_a_wrong_call_of_the_code():
    calls = {rank: dumped(rank, (0, 1, 2), 8, 7) for rank in range(3)}
    odd = calls[1].ops[0]._replace(op="all_gather", frames=("/x/role.py:9 in update",))
    calls[1] = FlightDump(1, "2", calls[1].groups, (odd,))
    facts = HangReport({rank: probe(rank) for rank in range(3)}, calls)
    found = explained(facts, (0,), {"policy": Mesh.of({"dp": 3})})
    assert (found.kind, found.ranks) == ("collective", (1,))
    assert "rank 1 calls all_gather" in found.evidence and "/x/role.py:9" in found.evidence


def test_questions_take_no_longer_than_their_limit():
    def ask(rank):
        if rank == 1:
            raise WorkerError("no", key="x")
        if rank == 2:
            answer.wait(60)
            late.append(rank)
        return rank

    answer, late = threading.Event(), []
    assert at_once(ask, range(4), 0.2) == {0: 0, 3: 3} and not late
    answer.set()


CASES = {
    "stop": ("hang", "rank 2 stopped in backward of micro-batch 3 since "),
    "gil": ("hang", "rank 2 holds the GIL in backward of micro-batch 3 since "),
    "busy": ("hang", "rank 2 is busy in backward of micro-batch 3 since "),
    "lock": ("hang", "rank 2 waits in backward of micro-batch 3 since "),
    "pipe": ("hang", "rank 2 waits in backward of micro-batch 3 since "),
    "missing": ("collective", "rank 2 calls all_reduce of [[2]]"),
    "shape": ("collective", "rank 2 calls all_gather"),
    "alone": ("collective", "in _alone"),
}
MESH_OF_FOUR = Mesh.of({"dp": 4})


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["stop", *(pytest.param(k, marks=pytest.mark.slow) for k in list(CASES)[1:])])
def test_a_real_worker_that_hangs_is_named_with_its_operation(kind):
    cluster = open_cluster("local", 4)
    try:
        group = cluster.group("policy", f"{stuck.HERE}:Stuck", {}, MESH_OF_FOUR)
        group.update("none", 0)  # a loop without a fault, so that calls have an order
        cluster.watch(1.5, keep=True)
        with pytest.raises(TilthError) as raised:
            group.update(kind, 2)
        error = raised.value
        found = diagnosed(verdict_of(error), error, cluster)
    finally:
        cluster.backend.close(kill=True)
    assert (found.kind, found.ranks) == (CASES[kind][0], (2,)), found.evidence
    assert CASES[kind][1] in found.evidence
    if kind in stuck.FAULTS:
        assert isinstance(error, CallTimeout)
        assert "ranks 0, 1, 3 wait in all_reduce of group dp" in found.evidence
        assert found.details["culprits"]["2"]["operation"] == "backward"
