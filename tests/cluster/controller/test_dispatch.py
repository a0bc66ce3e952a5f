"""The controller's side without processes: a fleet whose answers the test gives by hand."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from tests.errors import raises
from tilth.cluster.backends.base import Call, Failure, PickledKwargs, Probe, Reply, place_of
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.controller import dispatch
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.dispatch import Dispatch, Totals, together
from tilth.cluster.protocol import Transfer
from tilth.cluster.worker.executor import failure
from tilth.core.batch import Jagged
from tilth.core.errors import CallTimeout, DataError, TilthError, WorkerError, WorkerLost
from tilth.core.layout import Mesh
from tilth.trace.spans import Total, span, total_of


class ByHand:
    """Keeps what is submitted; the test completes it."""

    def __init__(self, workers=2):
        self.workers, self.store = workers, InlineStore()
        self.sent, self.closed = [], []

    def submit(self, rank, call):
        future = Future()
        self.sent.append(future)
        return future

    def probe(self, rank):
        return Probe(rank, 100 + rank, "running", "policy.update (for 3.1 s)" if rank else "", "File one\nFile two")

    def close(self, kill):
        self.closed.append(kill)


CALL = Call("policy", "update")


def total(seconds=1.0, tokens=0, phase=0.0):
    return total_of(sums(seconds, tokens, phase))


def sums(seconds=1.0, tokens=0, phase=0.0):
    return [seconds * 1e9, seconds * 1e9, 1, tokens, 0, 0.0, phase * 1e9, tokens if phase else 0]


def later(seconds, call, *args):
    timer = threading.Timer(seconds, call, args)
    timer.start()
    return timer


@pytest.fixture
def fleet():
    return ByHand()


def test_replies_come_in_the_order_of_the_calls(fleet):
    calls = Dispatch(fleet, 60)
    flights = [calls.submit(rank, CALL) for rank in (0, 1)]
    later(0.05, fleet.sent[1].set_result, Reply("second", {}))
    later(0.1, fleet.sent[0].set_result, Reply("first", {}))
    assert [reply.value for reply in calls.wait(flights)] == ["first", "second"]
    assert not fleet.closed


def test_work_of_a_wait_is_linear_in_the_workers_when_answers_come_one_by_one(monkeypatch):
    """Who waits wakes for the last answer, and does not look at the deadlines of all others at each."""
    looked, due = [], Dispatch._due
    monkeypatch.setattr(Dispatch, "_due", lambda self, rank: looked.append(rank) or due(self, rank))
    fleet = ByHand(workers=64)
    calls = Dispatch(fleet, 60)
    flights = [calls.submit(rank, CALL) for rank in range(64)]

    def answer():
        for future in fleet.sent:
            future.set_result(Reply(None, {}))
            time.sleep(0.001)  # so that who waits could wake

    later(0.05, answer)
    assert len(calls.wait(flights)) == 64
    assert len(looked) <= 2 * 64


def test_a_queued_call_with_an_earlier_deadline_is_noticed(fleet):
    """A worker's next call may have a shorter limit than the one that the wait began with."""
    calls = Dispatch(fleet, 0.2)
    slow, quick = calls.submit(0, Call("policy", "update", least=60)), calls.submit(0, CALL)
    later(0.05, fleet.sent[0].set_result, Reply(None, {}))
    with raises(CallTimeout, "policy.update"):
        calls.wait([slow, quick])


def test_a_death_is_the_cause_of_a_broken_collective_that_is_told_first(fleet):
    calls = Dispatch(fleet, 60)
    flights = [calls.submit(rank, CALL) for rank in (0, 1)]
    fleet.sent[0].set_exception(WorkerError("rank 0: connection closed by peer"))
    later(0.1, fleet.sent[1].set_exception, WorkerLost("rank 1: killed", key="policy.update"))
    with raises(WorkerLost, "policy.update"):
        calls.wait(flights)
    assert fleet.closed == [True]


def test_of_two_that_raise_the_first_is_the_cause_and_the_grace_is_short(fleet):
    calls = Dispatch(fleet, 1e6)
    flights = [calls.submit(rank, CALL) for rank in (0, 1)]
    fleet.sent[1].set_exception(DataError("rank 1: no data", key="data.source"))
    with raises(DataError, "data.source"):
        calls.wait(flights)  # rank 0 waits in its collective for ever


def lost(rank):
    error = WorkerLost(f"rank {rank}: killed", key="rollout.advance")
    error.ranks = (rank,)
    return error


def test_the_loss_of_a_worker_apart_is_that_of_who_waits_for_it(fleet):
    """Others go on, and no failure of theirs is hidden by it."""
    calls = Dispatch(fleet, 60, keep=True)
    calls.apart = {1}
    mine, theirs = (calls.submit(rank, CALL) for rank in (0, 1))
    fleet.sent[1].set_exception(lost(1))
    later(0.05, fleet.sent[0].set_result, Reply("there", {}))
    assert calls.wait([mine])[0].value == "there" and calls.idle()
    mine = calls.submit(0, CALL)
    fleet.sent[2].set_exception(lost(0))
    with raises(WorkerLost, "rollout.advance") as caught:
        calls.wait([theirs])
    assert caught.value.ranks == (0,)  # that of all comes first
    with raises(WorkerLost, "rollout.advance") as caught:
        calls.wait([theirs])
    assert caught.value.ranks == (1,) and not fleet.closed


def test_calls_of_a_worker_apart_are_drained_with_its_loss(fleet):
    """Those of the others are waited for, and their failures are raised."""
    calls = Dispatch(fleet, 60, keep=True)
    calls.apart = {1}
    for rank in (0, 1, 1):
        calls.submit(rank, CALL)
    for i in (1, 2):
        later(0.05, fleet.sent[i].set_exception, lost(1))
    later(0.2, fleet.sent[0].set_result, Reply("there", {}))
    calls.drain()
    assert calls.idle()
    for rank in (0, 1):
        calls.submit(rank, CALL)
    fleet.sent[4].set_exception(lost(1))
    later(0.05, fleet.sent[3].set_exception, lost(0))
    with raises(WorkerLost, "rollout.advance") as caught:
        calls.drain()
    assert caught.value.ranks == (0,)


def test_a_loss_from_before_a_worker_was_apart_is_that_of_its_next_call(fleet):
    """The others are drained, also with no call left, and the failures of others stay."""
    calls = Dispatch(fleet, 60, keep=True)
    for rank in (0, 1):
        calls.submit(rank, CALL)
    fleet.sent[1].set_exception(lost(1))
    calls.apart = {1}
    later(0.05, fleet.sent[0].set_result, Reply("there", {}))
    for _ in range(2):
        calls.drain()
    assert calls.idle()
    calls.submit(0, CALL)
    fleet.sent[2].set_exception(lost(0))
    calls.apart = {1}
    with raises(WorkerLost, "rollout.advance") as caught:
        calls.drain()
    assert caught.value.ranks == (0,)


WAITS = """Current thread 0x09 (most recent call first):
  File "/py/torch/_ops.py", line 1 in __call__
  File "/py/torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "/x/role.py", line 3 in update
"""
WORKS = """Current thread 0x09 (most recent call first):
  File "/x/reward.py", line 1 in judge
  File "/py/torch/distributed/fsdp/_state.py", line 2 in hook
"""
MEETS = Call("policy", "update", number=7)


def collective(rank, kind="timeout"):
    return Failure(None, f"RuntimeError: {kind}", "Traceback", kind).error(MEETS, rank)


def failing(monkeypatch, stacks, queues):
    """A fleet whose ranks have these stacks, with these calls sent to each."""
    monkeypatch.setattr(dispatch, "GRACE", 0.05)
    fleet = ByHand(len(stacks))
    fleet.probe = lambda rank: Probe(rank, 100 + rank, "sleeping", "policy.update (for 9.0 s)", stacks[rank])
    calls = Dispatch(fleet, 60)
    flights = [calls.submit(rank, call) for rank, queue in enumerate(queues) for call in queue]
    return fleet, calls, flights


def test_who_did_not_come_is_named_where_all_others_broke_off(monkeypatch):
    """Rank 1 sleeps; what is told first is that of rank 2, whose peer has left."""
    fleet, calls, flights = failing(monkeypatch, ["", WORKS, ""], [[MEETS, CALL], [MEETS, CALL], [MEETS]])
    fleet.sent[4].set_exception(collective(2, "broken"))
    fleet.sent[0].set_exception(collective(0))
    with raises(CallTimeout, "policy.update") as raised:
        calls.wait(flights)
    assert str(raised.value).startswith("role policy, rank 1, ") and "; rank 0 waited for it" in str(raised.value)
    assert "  role policy, rank 0, update: RuntimeError: timeout" in str(raised.value).splitlines()


def test_a_rank_that_is_busy_with_another_call_is_not_named(monkeypatch):
    other = Call("rollout", "generate", number=8)
    fleet, calls, flights = failing(monkeypatch, ["", WORKS, WORKS], [[MEETS], [MEETS], [other]])
    fleet.sent[0].set_exception(collective(0))
    with raises(CallTimeout, "policy.update") as raised:
        calls.wait(flights)
    first = str(raised.value).splitlines()[0]
    assert first.startswith("role policy, rank 1, ") and "rank 2" not in first


def test_a_collective_over_two_calls_waits_for_a_rank_of_the_other(monkeypatch):
    other = Call("rollout", "receive", number=8)
    fleet, calls, flights = failing(monkeypatch, ["", WAITS, WORKS], [[MEETS], [MEETS], [other]])
    fleet.sent[0].set_exception(collective(0))
    with raises(CallTimeout, "rollout.receive"):
        calls.wait(flights)


def test_where_all_wait_the_error_is_the_one_that_was_raised(monkeypatch):
    fleet, calls, flights = failing(monkeypatch, ["", WAITS], [[MEETS], [MEETS]])
    fleet.sent[0].set_exception(collective(0))
    with raises(WorkerError, "policy.update") as raised:
        calls.wait(flights)
    assert raised.value.collective == "timeout"


def test_an_error_of_a_rank_s_own_is_the_cause_of_collectives_that_broke_or_ran_out_of_time(monkeypatch):
    fleet, calls, flights = failing(monkeypatch, ["", "", WORKS], [[MEETS], [MEETS], [MEETS]])
    fleet.sent[0].set_exception(collective(0))
    fleet.sent[1].set_exception(DataError("rank 1: no data", key="data.source"))
    with raises(DataError, "data.source"):
        calls.wait(flights)


def test_of_a_limit_of_the_controller_those_are_named_that_the_others_wait_for(monkeypatch):
    _, calls, flights = failing(monkeypatch, [WAITS, WORKS, WAITS], [[MEETS]] * 3)
    calls.timeout = 0.1
    with raises(CallTimeout, "policy.update") as raised:
        calls.wait(flights)
    head, first = str(raised.value).splitlines()[:2]
    assert head.startswith("role policy, rank 1, update: no answer within 0.1 s") and first.startswith("  rank 1 ")
    assert head.endswith("; ranks 0, 2 waited for it in a collective")


def test_the_first_failure_is_raised_by_every_later_call(fleet):
    calls = Dispatch(fleet, 60)
    calls.submit(0, CALL)
    fleet.sent[0].set_exception(DataError("first", key="data.source"))
    with pytest.raises(DataError):
        calls.drain()
    for again in (lambda: calls.submit(1, CALL), lambda: calls.wait([]), calls.drain):
        with raises(DataError, "data.source"):
            again()
    assert fleet.closed == [True] and len(fleet.sent) == 1


def test_a_failure_elsewhere_ends_a_wait(fleet):
    calls = Dispatch(fleet, 60)
    calls.submit(1, Call("critic", "update"))
    mine = calls.submit(0, CALL)
    later(0.05, fleet.sent[0].set_exception, DataError("of the critic", key="data.source"))
    with raises(DataError, "data.source"):
        calls.wait([mine])


def test_a_wait_for_the_first_of_several_groups_ends_when_all_calls_of_one_have_answers():
    fleet = ByHand(3)
    calls = Dispatch(fleet, 60)
    a, b, c = [calls.submit(rank, CALL) for rank in range(3)]
    later(0.02, fleet.sent[1].set_result, Reply("b", {}))
    later(0.1, fleet.sent[2].set_result, Reply("c", {}))
    calls.wait_first([[a, b], [c]])
    assert [one.landed for one in (a, b, c)] == [False, True, True]
    calls.wait_first([[a], [b]])
    later(0.02, fleet.sent[0].set_exception, DataError("of rank 0", key="data.source"))
    with raises(DataError, "data.source"):
        calls.wait_first([[a, b]])


def test_the_limit_of_a_call_counts_in_a_wait_for_the_first_of_several(fleet):
    calls = Dispatch(fleet, 0.1)
    flights = [calls.submit(0, Call("policy", "update", least=60)), calls.submit(1, CALL)]
    with raises(CallTimeout, "policy.update"):
        calls.wait_first([[flight] for flight in flights])


def test_a_failure_is_raised_by_each_thread_that_waits_for_its_call(monkeypatch):
    """And the thread that waits for another call goes on, if somebody else has raised it."""
    monkeypatch.setattr(dispatch, "GRACE", 0.02)
    fleet, found = ByHand(3), {}
    calls = Dispatch(fleet, 5, keep=True)
    flights = [calls.submit(rank, CALL) for rank in range(3)]

    def wait(name, *some):
        try:
            found[name] = calls.wait(some)
        except TilthError as error:
            found[name] = error

    waits = [(name, *flights[:2]) for name in "abcd"] + [("other", flights[2])]
    threads = [threading.Thread(target=wait, args=given) for given in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    fleet.sent[0].set_exception(DataError("of rank 0", key="data.source"))
    time.sleep(0.2)
    fleet.sent[2].set_result(Reply("there", {}))
    for thread in threads:
        thread.join(1)
    assert all(isinstance(found.get(name), DataError) for name in "abcd")
    other = found["other"]
    assert isinstance(other, DataError) or other[0].value == "there"


def test_a_call_that_exceeds_its_limit_tells_what_every_rank_does(fleet, monkeypatch):
    monkeypatch.setattr(dispatch, "GRACE", 0.05)
    calls = Dispatch(fleet, 0.2)
    flights = [calls.submit(rank, CALL) for rank in (0, 1)]
    fleet.sent[0].set_result(Reply(None, {}))
    with pytest.raises(CallTimeout) as raised:
        calls.wait(flights)
    assert str(raised.value).splitlines() == [
        "role policy, rank 1, update: no answer within 0.2 s (cluster.timeout)",
        "  rank 1 (process 101, running): in policy.update (for 3.1 s)",
        "    File one",
        "    File two",
        "  rank 0 (process 100, running): between calls",
        "    File one",
        "    File two",
    ]
    assert fleet.closed == [True]


def test_the_limit_of_a_call_begins_when_the_one_before_it_ended(fleet, monkeypatch):
    monkeypatch.setattr(dispatch, "GRACE", 0.05)
    calls = Dispatch(fleet, 0.4)
    flights = [calls.submit(0, CALL) for _ in range(4)]
    timers = [later(0.25 * (i + 1), fleet.sent[i].set_result, Reply(i, {})) for i in range(4)]
    assert [reply.value for reply in calls.wait(flights)] == [0, 1, 2, 3]
    for timer in timers:
        timer.join()


def test_a_call_may_have_longer_than_others_and_they_have_their_own_time_after_it(fleet, monkeypatch):
    monkeypatch.setattr(dispatch, "GRACE", 0.05)
    calls = Dispatch(fleet, 0.3)
    imports = calls.submit(0, Call("", "import", ("policy", "m"), least=60.0))
    create = calls.submit(0, CALL)
    later(0.7, fleet.sent[0].set_result, Reply("imported", {}))
    later(0.8, fleet.sent[1].set_result, Reply("made", {}))
    assert [reply.value for reply in calls.wait([imports, create])] == ["imported", "made"]
    short = calls.submit(1, Call("", "import", ("policy", "m"), least=0.5))
    with raises(CallTimeout, "policy.import"):
        calls.wait([short])


def test_an_answer_within_the_grace_is_an_answer(fleet):
    calls = Dispatch(fleet, 0.1)
    flight = calls.submit(0, CALL)
    later(0.1 + dispatch.GRACE / 2, fleet.sent[0].set_result, Reply("late", {}))
    assert calls.wait([flight])[0].value == "late"


class Shown(ByHand):
    """Shows signs of life of workers that stand still; the second look holds the controller for a while."""

    scratch, files, held = "", None, 0

    def life(self, rank):
        self.held += 1
        time.sleep(1.4 if self.held == 2 else 0.0)
        return 1, 1

    def control(self, *_):
        raise AssertionError

    kill = replace = nodes = pids = control


def test_time_in_which_the_controller_stood_still_counts_for_no_worker():
    calls = Dispatch(Shown(), 1e6)
    calls.hang_after = 1.0
    flight = calls.submit(0, CALL)
    timer = later(1.4 + 0.6, calls.backend.sent[0].set_result, Reply("read late", {}))
    assert calls.wait([flight])[0].value == "read late"
    timer.join()
    with raises(CallTimeout, "policy.update"):
        calls.wait([calls.submit(0, CALL)])


def test_a_message_that_cannot_be_sent_is_a_call_over_its_limit(fleet):
    def full(rank, call):
        raise TimeoutError

    fleet.submit = full
    with raises(CallTimeout, "policy.update"):
        Dispatch(fleet, 60).submit(1, CALL)
    assert fleet.closed == [True]


def test_time_is_that_of_the_slowest_rank_and_work_is_counted_once():
    totals = Totals(3)
    totals.add(0, {"update": sums(1.0, 10, 1.0)}, True)
    totals.add(1, {"update": sums(2.0, 10, 2.0)}, False)  # a copy along tp
    totals.add(2, {"update": sums(1.5, 7, 1.5)}, True)
    totals.add(2, {"update": sums(1.5, 7, 1.5), "read": sums(0.5)}, True)
    found = totals.take()
    assert found["update"] == Total(3.0, 3.0, 2, 24, 0, 0.0, 3.0, 24) and found["read"].seconds == 0.5
    assert totals.take() == {}


def test_controller_and_workers_come_after_one_another():
    found = together({"publish": total(1.0), "step": total(5.0)}, {"publish": total(2.0), "update": total(3.0)})
    assert {op: t.seconds for op, t in found.items()} == {"publish": 3.0, "step": 5.0, "update": 3.0}
    assert found["publish"].count == 2


def test_a_call_inside_a_phase_adds_no_phase_of_its_own(fleet):
    calls = Dispatch(fleet, 60)
    with span("evaluate"):
        inside = calls.submit(0, CALL)
    outside = calls.submit(0, CALL)
    for future in fleet.sent:
        future.set_result(Reply(None, {"generate": sums(1.0, 5, 1.0)}))
    calls.wait([inside, outside])
    found = calls.totals.take()["generate"]
    assert (found.seconds, found.tokens, found.phase_seconds, found.phase_tokens) == (2.0, 10, 1.0, 5)


def test_names_of_calls():
    create = Call("", "create", ("policy", "m:f", PickledKwargs({}), None))
    assert (CALL.name, place_of(CALL, 3)) == ("policy.update", "role policy, rank 3, update")
    assert (create.name, place_of(create, 0)) == ("create policy", "role policy, rank 0, create")
    assert (Call("", "end").name, place_of(Call("", "end"), 1)) == ("end", "rank 1, end")


def test_a_failure_is_the_worker_s_own_class_or_a_worker_error():
    own = Failure(DataError, "file x: empty", "Traceback ...").error(CALL, 1)
    assert type(own) is DataError and str(own) == "role policy, rank 1, update: file x: empty"
    assert "Traceback ..." in own.__notes__[0]
    other = Failure(None, "ValueError: x", "Traceback ...").error(CALL, 1)
    assert type(other) is WorkerError and str(other) == "role policy, rank 1, update: ValueError: x\nTraceback ..."


class Custom(TilthError):
    """Made from something else than its message."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


def test_an_error_that_another_process_could_not_make_comes_up_as_a_worker_error():
    class Here(TilthError):
        pass

    for error, told in ((Custom(5), "Custom: code 5"), (Here("local"), "Here: local")):
        raised = failure(error)
        assert raised.kind is None and raised.message == told
    assert failure(DataError("x"))[:2] == (DataError, "x")


def test_what_a_backend_raises_itself_ends_the_cluster_too(fleet):
    calls = Dispatch(fleet, 60)
    flights = [calls.submit(0, CALL)]
    error = OSError("the network is gone")
    fleet.sent[0].set_exception(error)
    with pytest.raises(OSError) as raised:
        calls.wait(flights)
    assert raised.value is error
    assert fleet.closed == [True]


def done(_):
    future = Future()
    future.set_result(Reply(None, {}))
    return future


def test_idle_workers_end_in_good_order(fleet):
    fleet.submit = lambda rank, call: done(fleet.sent.append(call))
    assert Dispatch(fleet, 60).end(5.0)
    assert [call.name for call in fleet.sent] == ["end", "end"] and not fleet.closed


def test_workers_that_are_at_work_or_have_failed_are_not_asked_to_end(fleet):
    calls = Dispatch(fleet, 60)
    calls.submit(0, CALL)
    assert not calls.end(5.0) and len(fleet.sent) == 1
    fleet.sent[0].set_exception(DataError("first", key="data.source"))  # nobody has waited for it
    assert not calls.end(5.0) and len(fleet.sent) == 1


def test_workers_that_do_not_end_in_time_are_not_waited_for(fleet):
    assert not Dispatch(fleet, 1e6).end(0.3)
    assert len(fleet.sent) == 2


def test_workers_that_take_no_message_are_an_end_out_of_order_and_no_other_error(fleet):
    def full(rank, call):
        raise TimeoutError

    fleet.submit = full
    assert not Dispatch(fleet, 60).end(5.0)


class Interrupt(Exception):
    """What a flow raises when it has saved."""


@pytest.mark.parametrize("busy", [False, True])
def test_an_exception_of_the_controller_kills_only_workers_that_are_at_work(fleet, busy):
    with pytest.raises(Interrupt), Cluster(fleet) as cluster:
        if busy:
            cluster.dispatch.submit(0, CALL)
        fleet.submit = lambda rank, call: done(fleet.sent.append(call))
        raise Interrupt
    cluster.close()
    assert fleet.closed == [busy]


def test_a_second_interrupt_while_they_end_kills(fleet):
    def again(rank, call):
        raise KeyboardInterrupt

    fleet.submit = again
    with pytest.raises(KeyboardInterrupt), Cluster(fleet):
        raise Interrupt
    assert fleet.closed == [True]


def test_payload_that_came_after_its_lease_was_closed_is_freed_with_all_other(fleet):
    cluster = Cluster(fleet)
    left = cluster.store.lease("left")
    for key in (left.key, "closed long ago"):
        fleet.store.lease = key
        fleet.store.put("tokens", Jagged(np.arange(3), np.array([0, 3])))
    assert cluster.store.nbytes
    cluster.store.clear()
    assert not cluster.store.nbytes
    cluster.store.check_released()


def in_thread(function):
    """Run in another thread and return what it returns."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


def test_each_thread_has_a_lease_of_its_own(fleet):
    cluster = Cluster(fleet, 60)
    with cluster.store.under(cluster.store.lease("a step")):
        assert cluster.dispatch.lease.name == "a step" and in_thread(lambda: cluster.dispatch.lease) is None

        def other():
            with cluster.store.under(cluster.store.lease("a group")):
                return cluster.dispatch.lease.name

        assert in_thread(other) == "a group" and cluster.dispatch.lease.name == "a step"


class Slowly(ByHand):
    """Takes long to send, and notes which rank got which call."""

    def __init__(self, workers):
        super().__init__(workers)
        self.order = []

    def submit(self, rank, call):
        time.sleep(0.01)
        self.order.append((rank, call.method))
        future = super().submit(rank, call)
        future.set_result(Reply({"same": Transfer("all", "first"), "other": Transfer("all", "first")}, {}))
        return future


def test_calls_of_two_threads_reach_all_ranks_in_one_order():
    """Else one rank would wait in one collective, and the other rank in the other."""
    cluster = Cluster(Slowly(3), 60)
    group = cluster.group("echo", "tests:none", {}, Mesh.of({"dp": 3}))
    cluster.backend.order.clear()
    threads = [threading.Thread(target=getattr(group, name)) for name in ("same", "other") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sent = cluster.backend.order
    assert len(sent) == 18
    assert all(len({method for _, method in sent[i : i + 3]}) == 1 for i in range(0, 18, 3))


def test_a_part_of_a_group_calls_the_ranks_of_one_coordinate():
    cluster = Cluster(Slowly(4), 60)
    group = cluster.group("echo", "tests:none", {}, Mesh.of({"dp": 2, "tp": 2}))
    first, second = group.parts("dp")
    cluster.backend.order.clear()
    second.same()
    first.other()
    assert cluster.backend.order == [(2, "same"), (3, "same"), (0, "other"), (1, "other")]
    assert first.changed_by is group.changed_by and group.parts("cp")[0].mesh == group.mesh
