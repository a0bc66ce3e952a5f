"""Replicas that are driven beside a loop, by stand-ins that end their samples after given rounds."""

import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.batch import Batch, Lease
from tilth.core.errors import WorkerLost
from tilth.flows.replicas import Flight, Replicas
from tilth.roles.rollout import Ended


class Part:
    """A replica. A sample ends after as many rounds as its id says; ``lost``: raises in a round."""

    def __init__(self):
        self.left, self.seen, self.rounds, self.lost, self.go = {}, [], 0, False, threading.Event()
        self.go.set()

    def submit(self, asked):
        self.seen.append(asked["id"].tolist())
        self.left.update((i, i % 5 + 1) for i in self.seen[-1])

    def advance(self, *, texts):
        assert self.go.wait(60)
        if self.lost:
            raise WorkerLost("gone", key="worker.1")
        self.rounds += 1
        time.sleep(0.002)
        self.left = {i: n - 1 for i, n in self.left.items()}
        ended = [i for i, n in self.left.items() if n <= 0]
        for i in ended:
            del self.left[i]
        return {i: Ended(0, i, "", False, ((1, 0),), 1, 2) for i in ended}

    def discard(self, ids):
        self.left = {i: n for i, n in self.left.items() if i not in ids}

    def collect(self, ids):
        return Batch({"id": ids})


class Rollout:
    """The group of the replicas."""

    def __init__(self, count):
        self.each, self.done = [Part() for _ in range(count)], []

    def parts(self, axis):
        assert axis == "dp"
        return self.each

    def begin(self):
        self.done.append("begin")

    def set_aside(self):
        self.done.append("aside")

    def take_up(self):
        self.done.append("up")


class Store:
    def under(self, lease):
        return nullcontext()


def flight(first, size=2):
    return Flight(first, Batch({"id": np.arange(first, first + size)}), Lease("", str(first), lambda lease: None))


@pytest.fixture
def made():
    """Makes replicas, and stops them."""
    found = []

    def make(count=2, room=4, threaded=True, scorers=None):
        rollout = Rollout(count)
        found.append(Replicas(rollout, Store(), room, scorers, threaded=threaded))
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


def test_what_a_replica_raises_is_raised_in_the_loop(made):
    rollout, replicas = made()
    rollout.each[0].lost = rollout.each[1].lost = True
    replicas.submit(flight(0))
    replicas.wait()
    for ask in (replicas.whole, replicas.hold):
        with raises(WorkerLost, "worker.1"):
            ask()


def test_replicas_that_have_nothing_are_idle(made):
    _, replicas = made()
    time.sleep(0.05)
    assert replicas.idle_share() == 1.0
    for first in range(0, 20, 2):
        replicas.submit(flight(first))
    waited(replicas, 10)
    assert replicas.idle_share() < 1.0
