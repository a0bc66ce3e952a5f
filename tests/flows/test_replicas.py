"""Replicas that are driven beside a loop, by stand-ins that end their samples after given rounds, and by engines whose
samples go on elsewhere."""

import threading
import time
from concurrent import futures
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.errors import raises
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.controller.lazy import LazyBatch, LazyMap
from tilth.config.schema import Recipe
from tilth.core.batch import Batch, Lease
from tilth.core.errors import DataError, StorageError, WorkerLost
from tilth.engines.protocol import EngineError
from tilth.engines.rounds import RoundLimits
from tilth.flows import replicas as flows_replicas
from tilth.flows.async_sampler import AsyncSampler
from tilth.flows.replicas import Flight, Replicas
from tilth.flows.run import Run
from tilth.plan.repack import LiveRow, ReplicaLimits, ReplicaLoad
from tilth.roles import rollout as roles_rollout
from tilth.roles.relay import Publication
from tilth.roles.rollout import Ended, Resumed


class Part:
    """A replica. A sample ends after as many rounds as its id says; ``lost``: raises in a round."""

    def __init__(self, rank=0):
        self.mesh = SimpleNamespace(ranks=(rank,))
        self.left, self.seen, self.rounds, self.lost, self.go = {}, [], 0, False, threading.Event()
        self.again, self.torn = [], set()
        self.versions = ((1, 0),)
        self.go.set()

    def submit(self, asked, again=None):
        self.seen.append(asked["id"].tolist())
        self.left.update((i, i % 5 + 1) for i in self.seen[-1])
        self.again += [] if again is None else [(self.seen[-1][0], again)]
        return {i: Resumed(3, 7) for i in self.seen[-1]}

    def advance(self, *, texts):
        assert self.go.wait(60)
        if self.lost:
            raise self.loss()
        self.rounds += 1
        time.sleep(0.002)
        self.left = {i: n - 1 for i, n in self.left.items()}
        ended = [i for i, n in self.left.items() if n <= 0]
        for i in ended:
            del self.left[i]
        return {i: Ended(0, i, "", False, self.versions, 2) for i in ended}

    def discard(self, ids):
        self.left = {i: n for i, n in self.left.items() if i not in ids}

    def loss(self, ranks=()):
        error = WorkerLost("gone", key="worker.1")
        error.ranks = ranks or self.mesh.ranks
        return error

    def collect(self, ids):
        if int(ids[0]) not in self.torn:
            return Batch({"id": ids})

        def gone():
            raise self.loss()

        self.torn.remove(int(ids[0]))
        return LazyBatch(gone)


class Beside(Part):
    """A replica whose rounds run beside those of others, each once ``go`` is set."""

    pool, begun = futures.ThreadPoolExecutor(4), 0

    def advance(self, *, texts):
        self.begun += 1
        future = self.pool.submit(super().advance, texts=texts)
        answer = LazyMap(future.result)
        answer.future = future
        return answer

    def discard(self, ids):
        """It comes after the round under way, which has ended them."""


class Rollout:
    """The group of the replicas."""

    def __init__(self, count, kind=Part):
        self.each, self.done = [kind(rank) for rank in range(count)], []

    def parts(self, axis):
        assert axis == "dp"
        return self.each

    def first(self, answers):
        if rounds := [one.future for one in answers if isinstance(one, LazyMap)]:
            futures.wait(rounds, return_when=futures.FIRST_COMPLETED)
        return [not isinstance(one, LazyMap) or one.future.done() for one in answers]

    def begin(self, *, anew):
        assert anew
        self.done.append("begin")

    def set_aside(self):
        self.done.append("aside")

    def take_up(self):
        self.done.append("up")

    def part(self, axis, places):
        return places


class Store:
    def under(self, lease):
        return nullcontext()


def flight(first, size=2):
    asked, lease = Batch({"id": np.arange(first, first + size)}), Lease("", str(first), lambda lease: None)
    return Flight(first, asked, lease, version=7)


@pytest.fixture
def made():
    """Makes replicas, and stops them."""
    found = []

    def make(count=2, room=4, threaded=True, scorers=None, kind=Part, **how):
        rollout = Rollout(count, kind)
        found.append(Replicas(rollout, Store(), room, scorers, threaded=threaded, **how))
        return rollout, found[-1]

    yield make
    for one in found:
        one.stop()
        assert one._thread is None or not one._thread.is_alive()


def waited(replicas, count):
    """Groups that have ended, by their first ids."""
    ended = {}
    while len(ended) < count:
        replicas.wait()
        ended.update((one.first, one) for one in replicas.whole())
    return ended


@pytest.mark.parametrize("threaded", [False, True])
def test_each_group_is_generated_whole_by_one_replica_with_room(made, threaded):
    rollout, replicas = made(threaded=threaded)
    for first in range(0, 40, 2):
        replicas.submit(flight(first))
    ended = waited(replicas, 20)
    assert sorted(ended) == list(range(0, 40, 2)) and rollout.done == ["begin"]
    for first, one in ended.items():
        assert one.ended.keys() == {first, first + 1} == set(one.rows["id"].tolist()) and one.since > 0
    assert sorted(i for part in rollout.each for ids in part.seen for i in ids) == list(range(40))
    assert min(len(part.seen) for part in rollout.each) >= 5


def test_samples_are_with_the_scorers_before_the_loop_may_take_their_group(made):
    class Slow:
        def __init__(self):
            self.seen = set()

        def take(self, ended):
            time.sleep(0.05)
            self.seen.update(ended)

    scorers = Slow()
    _, replicas = made(count=1, scorers=scorers)
    replicas.submit(flight(0))
    waited(replicas, 1)
    assert scorers.seen == {0, 1}


def test_no_replica_gets_more_than_it_has_room_for(made):
    rollout, replicas = made(count=1, room=4)
    rollout.each[0].go.clear()
    for first in range(0, 12, 2):
        replicas.submit(flight(first))
    time.sleep(0.1)
    assert rollout.each[0].seen in ([], [[0, 1]], [[0, 1], [2, 3]])
    rollout.each[0].go.set()
    waited(replicas, 6)


def test_no_replica_waits_for_the_round_of_another_one(made):
    rollout, replicas = made(kind=Beside)
    stuck, other = rollout.each
    stuck.go.clear()
    for first in range(0, 40, 2):
        replicas.submit(flight(first))
    ended = waited(replicas, 18)
    assert len(stuck.seen) == 2 and len(ended) == 18 == len(other.seen) and not stuck.rounds
    stuck.go.set()
    assert ended.keys().isdisjoint(waited(replicas, 2))


def test_who_holds_them_waits_for_all_rounds_under_way(made):
    rollout, replicas = made(kind=Beside)
    for part in rollout.each:
        part.go.clear()
    for first in range(0, 40, 2):
        replicas.submit(flight(first))
    while not all(part.begun for part in rollout.each):
        time.sleep(0.01)
    held = threading.Thread(target=replicas.hold)
    held.start()
    for part, alive in zip(rollout.each, (True, False)):
        part.go.set()
        held.join(0.2 if alive else 60)
        assert held.is_alive() is alive
    assert [part.rounds for part in rollout.each] == [part.begun for part in rollout.each]
    replicas.release()
    assert len(waited(replicas, 20)) == 20


def test_a_sample_that_is_discarded_while_its_round_runs_ends_nowhere(made):
    scored = []
    scorers = SimpleNamespace(take=scored.extend)
    rollout, replicas = made(count=1, threaded=False, scorers=scorers, kind=Beside)
    rollout.each[0].go.clear()
    for first in (0, 5):
        replicas.submit(flight(first, 1))
    replicas._begin_rounds()
    replicas.discard(0)
    replicas._begin_rounds()
    rollout.each[0].go.set()
    replicas._end_rounds()
    assert scored == [5] and {one.first: [*one.ended] for one in replicas.whole()} == {0: [], 5: [5]}


def test_held_replicas_do_nothing_and_go_on_afterwards(made):
    rollout, replicas = made()
    with replicas.aside():
        replicas.submit(flight(0))
        time.sleep(0.05)
        assert rollout.done == ["begin", "aside"] and not any(part.rounds for part in rollout.each)
        replicas.hold()
    time.sleep(0.05)
    assert rollout.done[-1] == "up" and not any(part.rounds for part in rollout.each)
    replicas.release()
    assert waited(replicas, 1)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_block_that_raises_loses_what_was_set_aside_and_is_named_ever_after(made, threaded):
    rollout, replicas = made(threaded=threaded)
    replicas.submit(flight(0))
    with raises(WorkerLost, "block"), replicas.aside():
        raise WorkerLost("gone", key="block")
    assert rollout.done == ["begin", "aside"]
    replicas.wait()
    for ask in (replicas.whole, replicas.hold):
        with raises(WorkerLost, "block"):
            ask()


def test_discarded_groups_are_given_back_as_far_as_they_are(made):
    """One that is queued, and one of which a sample has ended."""
    rollout, replicas = made(count=1, room=4, threaded=False)
    for first in (0, 3, 6):
        replicas.submit(flight(first))
    replicas.wait()  # sample 0 ends
    for first in (0, 6):
        replicas.discard(first)
    ended = waited(replicas, 3)
    assert [one.rows is None for _, one in sorted(ended.items())] == [True, False, True]
    assert rollout.each[0].seen == [[0, 1], [3, 4]] and ended[0].ended.keys() == {0}
    assert not any(replicas._flying)


def test_a_group_on_two_replicas_is_given_back_once(made):
    """One of its samples has moved, another one has ended before."""
    rollout, replicas = made(count=2, threaded=False)
    one = flight(0)
    one.ended, one.places = {2: Ended(0, 2, "", False)}, {1}
    for place, part in enumerate(rollout.each):
        replicas._flying[place], part.left = {place: one}, {place: 5, 2: 5}
    replicas.discard(0)
    replicas._end_discarded()
    assert replicas.whole() == [one] and not any(replicas._flying)
    assert [part.left for part in rollout.each] == [{2: 5}, {}]


@pytest.mark.parametrize("hangs", ["advance", "submit"])
def test_rounds_that_outlive_their_stop_ask_no_replica_any_more(made, monkeypatch, hangs):
    """Its workers are those of the next attempt, and so are their logs."""
    monkeypatch.setattr(flows_replicas, "PATIENCE", 0.0)
    rollout, replicas = made(count=1)
    part, calls, inside = rollout.each[0], [], threading.Event()

    def wrapped(name, plain):
        def call(*given, **how):
            calls.append(name)
            if name == hangs:
                inside.set()
                assert part.go.wait(60)
            return plain(*given, **how)

        return call

    for name in ("submit", "advance", "discard", "collect"):
        monkeypatch.setattr(part, name, wrapped(name, getattr(part, name)))
    part.go.clear()
    replicas.submit(flight(0))
    assert inside.wait(60)
    replicas.stop()
    before = [*calls]
    part.go.set()
    replicas._thread.join(60)
    assert not replicas._thread.is_alive() and calls == before and before[-1] == hangs
    if hangs == "submit":  # a round would begin; one that ends after the stop is lost, and no error
        with raises(EngineError, "replicas.stopped"):
            replicas.whole()
        replicas.check_ended()  # the stop has made it raise that


def test_the_thread_ends_no_round_of_a_loop_that_holds_it(made):
    _, replicas = made(threaded=False)
    replicas._holds, replicas._still, replicas._rounds[1] = 1, True, (0.0, {})
    goes = threading.Thread(target=replicas._goes_on, daemon=True)
    goes.start()
    goes.join(0.3)
    assert goes.is_alive() and replicas._still
    replicas.release()
    goes.join(60)
    assert not goes.is_alive() and not replicas._still
    replicas._rounds.clear()


def test_what_a_replica_raises_is_raised_in_the_loop(made):
    rollout, replicas = made()
    rollout.each[0].lost = rollout.each[1].lost = True
    replicas.submit(flight(0))
    replicas.wait()
    for ask in (replicas.whole, replicas.hold):
        with raises(WorkerLost, "worker.1"):
            ask()


def test_samples_of_a_lost_replica_go_on_elsewhere_while_it_is_mended(made):
    """Each group ends once, and the new replica gets others."""
    mended, asked, notes = threading.Event(), [], []

    def mend(place, error):
        asked.append((place, error.ranks))
        assert mended.wait(60)
        rollout.each[place].lost = False
        return Publication(1, 1)

    rollout, replicas = made(kind=Beside, mend=mend, note=lambda kind, **fields: notes.append((kind, fields["id"])))
    gone, other = rollout.each
    gone.lost = True
    for first in range(0, 40, 2):
        replicas.submit(flight(first))
    ended = waited(replicas, 20)
    assert asked == [(0, (0,))] and len(ended) == 20 and replicas.living() == [1]
    torn = [first for first, _ in gone.seen]
    assert torn and other.again == [(first, 7) for first in reversed(torn)] and replicas.resumed == 2 * len(torn)
    assert sorted(notes) == sorted(("resume", i) for first in torn for i in (first, first + 1))
    mended.set()
    with replicas.aside():  # it waits for all of them
        assert replicas.living() is rollout
    seen = len(gone.seen)
    for first in range(40, 60, 2):
        replicas.submit(flight(first))
    assert sorted(waited(replicas, 10)) == [*range(40, 60, 2)] and len(gone.seen) > seen


def test_a_split_group_goes_on_once_no_round_draws_its_samples_any_more(made):
    """Replica 0 is lost while a round of 1 draws another sample of the group; what is behind it need not wait."""
    rollout, replicas = made(count=3, threaded=False, kind=Beside, mend=lambda place, error: None)
    split = flight(0)
    replicas._flying[1][1] = split
    rollout.each[1].go.clear()
    replicas._begin_rounds()
    replicas._flying[0][0] = split  # no round of it: that of a stand-in would go on beside the new one
    replicas._lose(rollout.each[0].loss())
    replicas.submit(flight(10))
    replicas._hand_out()
    before = [ids for part in rollout.each for ids in part.seen]
    rollout.each[1].go.set()
    replicas._end_rounds([1])
    replicas._hand_out()
    assert before == [[10, 11]] and [one for part in rollout.each for one in part.again] == [(0, 7)]
    assert waited(replicas, 2)[0].ended.keys() == {0, 1}


def test_a_replica_that_is_alone_is_waited_for(made):
    def mend(place, error):
        time.sleep(0.1)
        rollout.each[place].lost = False
        return Publication(1, 1)

    rollout, replicas = made(count=1, mend=mend)
    rollout.each[0].lost = True
    for first in (0, 2):
        replicas.submit(flight(first))
    assert waited(replicas, 2).keys() == {0, 2} and rollout.each[0].again


def test_a_new_worker_that_is_lost_before_it_takes_samples_is_mended_too(made):
    asked = []

    def mend(place, error):
        asked.append(error)
        if len(asked) < 3:
            raise rollout.each[place].loss()
        rollout.each[place].lost = False
        return Publication(1, 1)

    rollout, replicas = made(count=1, mend=mend)
    rollout.each[0].lost = True
    replicas.submit(flight(0))
    assert waited(replicas, 1).keys() == {0} and len({*map(id, asked)}) == 3


@pytest.mark.parametrize("own", [True, False])
def test_the_log_has_what_a_new_worker_takes_where_replicas_take_weights_in_their_own_time(own):
    done = []
    publisher = SimpleNamespace(leave=done.append, join=lambda place: done.append("join") or Publication(4, 3))
    given = {
        "recipe": Recipe(),
        "state": SimpleNamespace(step=2),
        "_publisher": publisher,
        "_own_time": own,
        "_least": 0,
    }
    sampler = SimpleNamespace(**given)
    sampler._repair = SimpleNamespace(replace=lambda error, step: done.append(step))
    sampler._engines = lambda: SimpleNamespace(part=lambda axis, places: places)
    sampler._log_tokens = lambda part, **how: done.append(part)
    sampler.events = SimpleNamespace(append=lambda kind, **fields: done.append((kind, fields)))
    sampler._pull = partial(AsyncSampler._pull, sampler)
    assert AsyncSampler._mend(sampler, 1, WorkerLost("gone")) == Publication(4, 3)
    assert done == [1, 2, [1], "join", *([("pull", {"replica": 1, "version": 3})] if own else [])]


def test_a_replica_that_is_being_replaced_holds_up_no_end_of_a_run(made, monkeypatch):
    """Its worker is killed; if that ends nothing either, it is named."""
    monkeypatch.setattr(flows_replicas, "MENDING", 0.01)
    monkeypatch.setattr(flows_replicas, "PATIENCE", 0.5)
    killed, given = threading.Event(), []

    def mend(place, error):
        assert killed.wait(60)
        raise rollout.each[place].loss()

    rollout, replicas = made(count=1, mend=mend, give_up=given.append)
    rollout.each[0].lost = True
    replicas.submit(flight(0))
    while not replicas._menders:
        time.sleep(0.01)
    with raises(EngineError, "replicas.mend"):
        replicas.stop()
    replicas._give_up = lambda ranks: killed.set()
    replicas.stop()
    assert given == [[0]] and not replicas._menders[0].is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_mender_raises_at_the_end_of_a_phase_is_raised_there(made, fails):
    """The new worker has no log and no weights: the next phase would ask it for samples."""

    def mend(place, error):
        while not replicas._stopped:
            time.sleep(0.01)
        if fails:
            raise StorageError("full", key="recoveries")
        rollout.each[place].lost = False
        return Publication(1, 1)

    rollout, replicas = made(count=1, mend=mend)
    rollout.forget = rollout.done.append
    rollout.each[0].lost = True
    replicas.submit(flight(0))
    while not replicas._menders:
        time.sleep(0.01)
    state = SimpleNamespace(drawn={"samples": 2})
    sampler = SimpleNamespace(ledger=None, replicas=replicas, _publisher=None, state=state, _freed=[], _leases={})
    sampler.halt, sampler._free = partial(AsyncSampler.halt, sampler), lambda: None
    with raises(StorageError, "recoveries") if fails else nullcontext():
        AsyncSampler.leave(sampler)
    assert (sampler.replicas is None) is not fails and rollout.done == ["begin", *([] if fails else [2, "begin"])]


def test_a_call_of_the_loop_that_reaches_a_replica_which_is_lost_fails_no_step(made):
    def answer(engines):
        raise rollout.each[0].loss(ranks)

    rollout, replicas = made(mend=lambda place, error: None)
    sampler = SimpleNamespace(replicas=replicas)
    sampler.ask_engines = partial(AsyncSampler.ask_engines, sampler)
    group = SimpleNamespace(compile_seconds=lambda: answer(None))
    rollout.compile_seconds, ranks = group.compile_seconds, (0,)
    assert Run._compile_seconds(SimpleNamespace(sampler=sampler), "rollout", group) == 0
    ranks = (0, 9)
    for role in ("rollout", "policy"):
        with raises(WorkerLost, "worker.1"):
            Run._compile_seconds(SimpleNamespace(sampler=sampler), role, group)


def test_rows_that_are_lost_with_a_replica_are_generated_again(made):
    forgotten = []
    scorers = SimpleNamespace(take=lambda ended: None, forget=lambda ended: forgotten.extend(ended))
    rollout, replicas = made(count=1, scorers=scorers, mend=lambda place, error: None)
    rollout.each[0].torn = {2}
    for first in (0, 2):
        replicas.submit(flight(first))
    ended = waited(replicas, 2)
    assert {first: one.rows["id"].tolist() for first, one in ended.items()} == {0: [0, 1], 2: [2, 3]}
    assert rollout.each[0].again == [(2, 7)] and forgotten == [2, 3]


@pytest.mark.parametrize("ranks", [(0,), (9,), (0, 9)])
def test_a_loss_that_the_run_has_to_recover_from_is_raised_in_the_loop(made, ranks):
    """The mender raises it, or it is not one of replicas alone."""

    def mend(place, error):
        raise error

    rollout, replicas = made(count=1, mend=mend)
    rollout.each[0].lost, loss = True, rollout.each[0].loss(ranks)
    rollout.each[0].loss = lambda: loss
    replicas.submit(flight(0))
    replicas.wait()
    with raises(WorkerLost, "worker.1"):
        replicas.whole()


def test_replicas_that_have_nothing_are_idle(made):
    _, replicas = made()
    time.sleep(0.05)
    assert replicas.idle_share() == 1.0
    for first in range(0, 20, 2):
        replicas.submit(flight(first))
    waited(replicas, 10)
    assert replicas.idle_share() < 1.0


# ---- samples that go on elsewhere ----

COLUMNS = ("tokens", "rollout_logprobs", "versions", "mask")


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Makes two replicas with real engines of the same weights, whose rounds are one step."""
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(1))
    monkeypatch.setattr(flows_replicas, "STAY", 1)
    store, policy = InlineStore(), small.policy()

    def make(limits=None, note=lambda kind, **fields: None, attempt=1, version=0):
        rollout = Rollout(2)
        how = {"parity": True, "max_tokens": 11, "stop": ("0", "2")}
        rollout.each = [small.rollout(store, rank=rank, **how) for rank in range(2)]
        made = Replicas(rollout, Store(), 8, None, threaded=False, note=note, version=version, limits=limits)
        for one in rollout.each:
            one.receive(policy.weights(), version)
            one.log_to(str(tmp_path), attempt, version)
        return rollout, made

    def submit(replicas, again=None):
        for first, prompt in zip(range(0, 16, 2), (3, 77, 12, 50, 9, 41, 8, 60)):
            asked = small.asked(store, [prompt], 2, first)
            lease = Lease("", str(first), lambda lease: None)
            replicas.submit(Flight(first, asked, lease, again or 0, again is not None))

    def columns(replicas):
        """Columns of each sample of all groups."""
        found = {}
        for one in waited(replicas, 8).values():
            read = one.rows.read(store, *COLUMNS)
            for row, i in enumerate(one.rows["id"].tolist()):
                found[i] = [read[name].row(row).tolist() for name in COLUMNS]
            assert one.rows["id"].tolist() == [one.first, one.first + 1]
        return found

    return make, submit, columns


def test_samples_that_move_say_the_same_as_others(engines):
    make, submit, columns = engines
    _, still = make()
    submit(still)
    expected, events = columns(still), []
    note = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
    rollout, replicas = make(ReplicaLimits(tokens=128, rows=8), note, attempt=2)
    submit(replicas)
    assert columns(replicas) == expected and len(expected) == 16
    assert {kind for kind, _ in events} == {"move"} and replicas.moved == len(events) > 0
    for _, move in events:
        assert {move["from"], move["to"]} == {0, 1} and 0 < move["tokens"] < 11
    assert not any(one._log._flying or one._ended for one in rollout.each)


def test_samples_of_replicas_that_are_lost_twice_go_on_with_the_tokens_that_they_have(engines):
    """On replicas with the weights of the same version, then with those of another one."""
    make, submit, columns = engines
    _, whole = make()
    submit(whole)
    expected, events = columns(whole), []
    note = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
    for attempt in (2, 3):
        _, lost = make(attempt=attempt)
        submit(lost, again=0 if attempt > 2 else None)
        for _ in range(3):
            lost._round()
    _, found = make(note=note, attempt=4, version=1)
    submit(found, again=0)
    after = columns(found)
    assert {kind for kind, _ in events} == {"resume"} and len(events) == found.resumed == 16
    assert max(fields["tokens"] for _, fields in events) > 3
    for _, fields in events:
        one, same = after[fields["id"]], expected[fields["id"]]
        count, end = sum(same[3]), fields["tokens"]
        assert [one[0], one[1], one[3]] == [same[0], same[1], same[3]] and end > 0 and fields["version"] == 1
        assert one[2][len(same[0]) - count :] == [0] * end + [1] * (count - end)


@pytest.mark.parametrize("then", ["aside", "discarded"])
def test_samples_that_had_ended_before_are_told_or_discarded_whatever_comes_first(engines, then):
    """A group that is whole in the log comes to a replica whose round is under way, then others are drawn."""
    make, submit, columns = engines
    _, whole = make()
    submit(whole)
    columns(whole)
    rollout, again = make(attempt=2)
    submit(again, again=0)
    asked, part = again._queue[0].asked, rollout.each[0]
    part.submit(asked, again=0)
    ids = asked["id"].tolist()
    if then == "discarded":
        part.discard(ids[:1])
        ids = ids[1:]
    else:
        part.set_aside()
        part.begin()
        part.take_up()
    assert sorted(part.advance()) == ids and not part.advance()


def test_a_sample_of_which_nothing_is_known_begins_from_its_prompt(engines):
    make, submit, columns = engines
    _, whole = make(version=1)
    submit(whole)
    whole._round()
    events = []
    _, other = make(note=lambda kind, **fields: events.append(fields["tokens"]), attempt=2)
    submit(other, again=0)
    assert columns(other).keys() == set(range(16)) and not events


class Moving:
    """A replica in its tail with one sample."""

    def __init__(self, id, version=0):
        self.id, self.rows, self.version, self.keeps, self.given = id, {id}, version, True, []

    def load(self):
        return ReplicaLoad(self.version, tuple(LiveRow(i, 10, 50) for i in self.rows), 0, 100)

    def submit(self, asked, again=None):
        self.rows |= {*asked["id"].tolist()}
        return dict.fromkeys(asked["id"].tolist(), Resumed(5, 0)) if self.keeps else {}

    def give_up(self, ids):
        self.rows -= {*ids}
        self.given += ids
        return dict.fromkeys(ids, 5)

    def advance(self, *, texts):
        return {}


@pytest.fixture
def tails():
    """Two replicas that are to be one, and what drives them."""
    rollout = Rollout(0)
    rollout.each = [Moving(0), Moving(1)]
    made = Replicas(rollout, Store(), 4, None, threaded=False, limits=ReplicaLimits(30, 4))
    for place, one in enumerate(rollout.each):
        made._flying[place] = {one.id: flight(one.id, 1)}
    return rollout.each, made


def test_the_last_samples_go_to_one_replica(tails):
    (one, other), replicas = tails
    replicas._round()
    assert (one.rows, other.rows, replicas.moved) == (set(), {0, 1}, 1) or (one.rows, other.rows) == ({0, 1}, set())
    assert sorted(map(len, replicas._flying)) == [0, 2]


def test_nothing_moves_while_something_waits(tails):
    (one, other), replicas = tails
    replicas._queue.append(flight(6, 8))
    replicas._round()
    assert not one.given + other.given and replicas.moved == 0


def test_samples_of_replicas_that_wait_for_weights_move_whatever_is_queued(tails):
    """Those replicas take nothing of it, and the one that is emptied then takes weights."""
    (one, other), replicas = tails
    newest = Publication(2, 2)
    replicas._pull = lambda place: newest
    replicas.offer(newest)
    replicas._queue.append(flight(6, 8))
    replicas._has[1] = newest
    replicas._repack(replicas.limits)
    assert not one.given + other.given
    replicas._has[1] = None
    replicas._repack(replicas.limits)
    assert sorted(map(len, replicas._flying)) == [0, 2] and replicas._due() == [replicas._flying.index({})]


def test_capacity_and_version_are_looked_at_again_before_a_move(tails):
    (one, other), replicas = tails
    for change in ({"version": 1}, {"rows": {1, 7, 8}}):
        plain = {name: getattr(other, name) for name in change}
        vars(other).update(change)
        replicas._move(0, 1, [0], replicas.limits)
        vars(other).update(plain)
        assert not one.given
    replicas._move(0, 1, [0], replicas.limits)
    assert one.given == [0] and replicas._flying[1].keys() == {0, 1}


def test_a_sample_that_loses_tokens_on_its_way_is_named(tails):
    (_, other), replicas = tails
    other.keeps = False
    with raises(DataError, "move.tokens"):
        replicas._move(0, 1, [0], replicas.limits)


def test_a_replica_pulls_weights_when_its_samples_have_ended_and_begins_none_before(made):
    """Others go on: the first replica's sample takes five rounds, the second's one."""
    second, pulled = Publication(2, 2), []
    rollout, replicas = made(room=2, threaded=False, pull=lambda place: pulled.append(place) or second)
    for first in (4, 0):
        replicas.submit(flight(first, 1))
    replicas.wait()
    replicas.offer(second)
    for first in (10, 15, 20):
        replicas.submit(flight(first, 1))
    replicas.wait()
    assert pulled == [1] and [part.seen for part in rollout.each] == [[[4]], [[0], [10], [15]]]
    for rounds in range(2, 5):
        assert pulled == [1] and len(rollout.each[0].seen) == 1 and rollout.each[0].rounds == rounds
        replicas.wait()
    replicas.wait()
    assert pulled == [1, 0] and rollout.done == ["begin"]


@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_generated_aside_has_the_newest_weights(made, threaded):
    """Samples in flight end first, those that are queued stay there, and a replica without any pulls too."""
    newest, pulled = Publication(5, 3), []
    rollout, replicas = made(room=2, threaded=threaded, pull=lambda place: pulled.append(place) or newest)
    replicas.hold()
    for first in (0, 2, 4):
        replicas.submit(flight(first))
    replicas._round()
    replicas.offer(newest)
    with replicas.aside():
        assert sorted(pulled) == [0, 1] and rollout.done == ["begin", "aside"]
        assert not any(part.left for part in rollout.each) and sum(len(part.seen) for part in rollout.each) == 2
    replicas.release()
    assert len(waited(replicas, 3)) == 3 and len(pulled) == 2


def test_a_sample_of_two_versions_is_an_error_where_each_has_one(made):
    for pull in (None, lambda place: Publication(1, 1)):
        rollout, replicas = made(count=1, threaded=False, pull=pull)
        rollout.each[0].versions = ((1, 0), (2, 1))
        replicas.submit(flight(0, 1))
        with raises(EngineError, "rollout.inflight.versions") if pull else nullcontext():
            replicas.wait()
