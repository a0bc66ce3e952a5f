"""Decisions about failures: what is retried, who is replaced, and that it always ends."""

from hypothesis import given
from hypothesis import strategies as st

from tilth.cluster.backends.base import MEMORY_RAN_OUT
from tilth.core import errors
from tilth.guard.recovery import WINDOW, Recovery, verdict_of
from tilth.guard.verdict import Verdict


def failed(kind, message="it", key="policy.update", ranks=()):
    error = kind(message, key=key)
    error.ranks = ranks
    return verdict_of(error)


def test_a_dead_or_hanging_worker_is_replaced_and_nobody_else():
    for kind, name in ((errors.WorkerLost, "crash"), (errors.CallTimeout, "hang")):
        verdict = failed(kind, ranks=(2,))
        action = Recovery(3).decide(verdict, 1, 0.0)
        assert (verdict.kind, action.step, action.ranks) == (name, "replace", (2,))


def test_memory_that_the_kernel_took_is_told_from_a_crash():
    assert failed(errors.WorkerLost, f"was killed by SIGKILL {MEMORY_RAN_OUT}...)", ranks=(1,)).kind == "out-of-memory"
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
        assert action.step != "replace" or verdict.kind in ("crash", "hang", "out-of-memory", "corruption")
        if action.step == "stop":
            assert action.why
            return
        taken += 1
    assert taken <= restarts
