"""Decisions about failures: what is retried, who is replaced, and that it always ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.core import errors
from tilth.core.write_queue import LATEST, PATIENCE
from tilth.guard.recovery import EVICTS, ROOM, WINDOW, Nodes, Recovery, verdict_of
from tilth.guard.verdict import Verdict
from tilth.process.child import MEMORY_RAN_OUT


def failed(kind, message="it", key="policy.update", ranks=()):
    error = kind(message, key=key)
    error.ranks = ranks
    return verdict_of(error)


def test_a_dead_or_hanging_worker_is_replaced_and_nobody_else():
    for kind, name in ((errors.WorkerLost, "crash"), (errors.CallTimeout, "hang")):
        verdict = failed(kind, ranks=(2,))
        action = Recovery(3).decide(verdict, 1, 0.0)
        assert (verdict.kind, action.step, action.ranks) == (name, "replace", (2,))


KILLED = f"was killed by SIGKILL {MEMORY_RAN_OUT}...)"


def crashed(*failures, message="it"):
    """Steps of actions on losses: (seconds, ranks), or the end of a recovery: (seconds,) or (seconds, [rank])."""
    recovery, steps = Recovery(8), []
    for at, *ranks in failures:
        if ranks and isinstance(ranks[0], tuple):
            lost = failed(errors.WorkerLost, message, ranks=ranks[0], key="rollout.advance")
            steps.append(recovery.decide(lost, 4, float(at)).step)
        else:
            recovery.end(float(at), *map(tuple, ranks))
    return steps


@pytest.mark.parametrize("message", ["it", KILLED], ids=["crash", "out-of-memory"])
def test_workers_that_die_at_once_are_all_replaced_and_are_one_failure(message):
    at_once = [(0, (1,)), (2, [1]), (1, (2,)), (4, [2]), (1, (3,)), (6, [3])]  # noticed before the first was replaced
    assert crashed(*at_once, message=message) == ["replace"] * 3
    assert crashed(*at_once, (8, (4,)), (9, [4]), (10, (4,)), message=message) == [*["replace"] * 4, "stop"]
    assert crashed((0, (1,)), (1, (2,)), (2, (3,)), (3,), message=message) == ["replace"] * 3  # by one recovery


@pytest.mark.parametrize("message", ["it", KILLED], ids=["crash", "out-of-memory"])
def test_what_kills_whichever_worker_takes_it_ends_the_run_like_one_worker_that_dies_again(message):
    for beside in (True, False):
        ends = [[(2 * at + 1, [at])] if beside else [(2 * at + 1,)] for at in range(3)]
        one_by_one = [one for at in range(3) for one in ((2 * at, (at,)), *ends[at])]
        assert crashed(*one_by_one, message=message) == ["replace", "replace", "stop"]
    for same in ([(1,)] * 3, [(1, 2), (2, 3), (2,)]):  # also while it is replaced
        assert crashed(*enumerate(same), message=message)[2] == "stop", same
    assert crashed((0, (2,)), (1,), (2, ()), (3,), (4, (1,)), message=message)[2] == "stop"
    assert crashed((0, ()), (1, (1,)), (2, ()), message=message)[2] == "stop"  # without ranks it may be anybody's


def test_memory_that_the_kernel_took_is_told_from_a_crash():
    assert failed(errors.WorkerLost, KILLED, ranks=(1,)).kind == "out-of-memory"
    assert failed(errors.WorkerLost, "(not since memory ran out: ...)", ranks=(1,)).kind == "crash"


def test_an_error_of_a_role_replaces_nobody_and_ends_the_run_when_it_comes_back():
    recovery, verdict = Recovery(8), failed(errors.WorkerError, ranks=(1,))
    assert recovery.decide(verdict, 4, 0.0).step == "retry"
    assert recovery.decide(verdict, 4, 1.0).step == "stop"
    assert recovery.decide(verdict, 5, 2.0).step == "retry"  # at another step it is another one


def test_what_would_be_the_same_again_ends_the_run():
    for kind in (errors.RecipeError, errors.PluginError, errors.DataError, errors.OutOfMemory, errors.RewardError):
        assert failed(kind) is None
    assert Recovery(8).decide(None, 1, 0.0).step == "stop"
    assert Recovery(0).decide(failed(errors.WorkerLost, ranks=(1,)), 1, 0.0).step == "stop"


def test_the_budget_is_of_one_hour():
    recovery = Recovery(2)
    verdicts = [failed(errors.WorkerLost, ranks=(1,), key=str(i)) for i in range(4)]
    steps = [recovery.decide(v, i, at).step for i, (v, at) in enumerate(zip(verdicts, (0.0, 1.0, 2.0, WINDOW + 1.0)))]
    assert steps == ["replace", "replace", "stop", "replace"]


def test_a_step_that_is_not_finite_goes_back_twice_and_then_ends_the_run():
    recovery, verdict = Recovery(8), failed(errors.NonFiniteError, key="loss")
    assert [recovery.decide(verdict, at, float(at)).step for at in (5, 5, 9)] == ["rollback", "rollback", "stop"]
    assert Recovery(8, "stop").decide(verdict, 1, 0.0).step == "stop"
    assert Recovery(0).decide(verdict, 1, 0.0).step == "stop"
    assert Recovery(8).decide(failed(errors.NonFiniteError, key="norm.weight"), 1, 0.0).step == "stop"
    assert Recovery(8).decide(failed(errors.NonFiniteError, key="logits"), 1, 0.0).step == "retry"


def test_corruption_that_comes_back_replaces_the_workers_that_differ():
    recovery, verdict = Recovery(8), failed(errors.ReplicaMismatch, key="policy.copies", ranks=(1,))
    assert [recovery.decide(verdict, 4, float(i)).step for i in range(3)] == ["retry", "replace", "stop"]


TWO = Nodes({0: "a", 1: "a", 2: "b", 3: "b"}, ("a", "b"))


def decided(*failures, nodes=TWO, seconds=1.0):
    """Actions on (kind, ranks, step), one after the other."""
    recovery = Recovery(100)
    verdicts = [(Verdict(kind, ranks, "it", {"key": "policy.update"}), step) for kind, ranks, step in failures]
    return [recovery.decide(v, step, i * seconds, nodes) for i, (v, step) in enumerate(verdicts)]


def test_a_node_whose_workers_crash_at_several_steps_is_evicted_with_all_its_workers():
    *first, last = decided(("crash", (2,), 1), ("hang", (3,), 5), ("crash", (2, 3), 9))
    assert EVICTS == 3 and [(one.step, one.evict) for one in first] == [("replace", "")] * 2
    assert (last.step, last.ranks, last.evict) == ("replace", (2, 3), "b")


def test_a_symptom_is_not_mapped_to_a_node():
    same_step = [("crash", (2,), 4), ("hang", (2,), 4), ("crash", (3,), 4)]
    both_nodes = [("crash", (rank,), step) for step, rank in enumerate((0, 2, 0, 2, 0, 2, 2))]
    across = [("crash", (1, 2), step) for step in range(5)]
    for failures in (same_step, both_nodes, across):
        assert not any(action.evict for action in decided(*failures)), failures
    thrice = [("crash", (2,), step) for step in range(3)]
    assert not decided(*thrice, nodes=Nodes(TWO.of, ("a",)))[-1].evict  # nowhere to go
    assert not decided(*thrice, nodes=Nodes())[-1].evict  # one machine
    assert not decided(*thrice, seconds=WINDOW)[-1].evict
    assert decided(*thrice)[-1].evict == "b"


@given(
    st.sampled_from(["error", "storage", "out-of-memory", "corruption", "not-finite", "slow", "odd-machine"]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30),
)
def test_what_a_program_does_evicts_no_node(kind, failures):
    assert not any(action.evict for action in decided(*((kind, (rank,), step) for rank, step in failures)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_at_most_one_node_is_suspected_and_it_fails_more_than_the_others(failures):
    for count, action in enumerate(decided(*(("crash", (rank,), step) for rank, step in failures)), 1):
        if action.evict:
            steps = {node: {s for r, s in failures[:count] if TWO.of[r] == node} for node in "ab"}
            other = "ab".replace(action.evict, "")
            assert len(steps[action.evict]) >= EVICTS and len(steps[other]) <= 1
            assert action.ranks == ((0, 1) if action.evict == "a" else (2, 3))


KINDS = st.sampled_from(["crash", "hang", "error", "corruption", "storage", "not-finite", "out-of-memory"])
VERDICTS = st.builds(
    Verdict, KINDS, st.sampled_from([(), (0,), (1, 3)]), st.just("it"), st.just({"key": "policy.update"})
)


@given(st.lists(VERDICTS, min_size=1, max_size=40), st.integers(0, 10))
def test_failures_at_one_step_end_the_run_within_the_budget(verdicts, restarts):
    recovery, taken = Recovery(restarts), 0
    for number, verdict in enumerate(verdicts):
        action = recovery.decide(verdict, 7, float(number))
        assert set(action.ranks) <= set(verdict.ranks)
        assert action.step != "replace" or verdict.kind in ("crash", "hang", "out-of-memory", "corruption", "storage")
        if action.step == "stop":
            assert action.why
            return
        taken += verdict.kind != "storage"
    assert taken <= restarts


def test_a_disk_that_takes_nothing_is_tried_for_a_known_time_and_costs_no_restart():
    recovery, verdict, now = Recovery(1), failed(errors.StorageError, key="tokens"), 0.0
    waits = []
    while (action := recovery.decide(verdict, 7, now)).step == "retry":
        assert action.again == bool(waits)
        waits.append(action.wait)
        now += action.wait
    assert waits[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LATEST] and PATIENCE <= now < PATIENCE + LATEST
    assert recovery.decide(failed(errors.WorkerLost, ranks=(1,)), 7, now).step == "replace"
    assert recovery.decide(verdict, 7, now).wait == ROOM.backoff  # it is trouble of its own


def test_a_worker_that_alone_cannot_write_is_replaced_once():
    recovery, verdict = Recovery(8), failed(errors.StorageError, key="tokens", ranks=(1,))
    actions = [recovery.decide(verdict, 7, float(at)) for at in range(8)]
    assert [(one.step, one.ranks) for one in actions if one.step != "retry"] == [("replace", (1,))]
    assert actions[3].step == "replace" and actions[3].wait == 4.0


def test_a_step_that_is_long_is_tried_several_times():
    recovery, verdict = Recovery(8), failed(errors.StorageError, key="tokens")
    steps = [recovery.decide(verdict, 7, 2 * PATIENCE * i).step for i in range(4)]
    assert steps == ["retry"] * 3 + ["stop"]
