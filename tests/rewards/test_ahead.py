"""Scoring in the background gives the outcomes of scoring at the end, and passes on what goes wrong."""

import threading

from tests.errors import raises
from tilth.core.errors import RewardError
from tilth.rewards.ahead import ScoringAhead
from tilth.rewards.process_pool import Outcome, RewardPool


class Slow:
    """A pool that scores when it is told to."""

    def __init__(self):
        self.calls, self.go = [], threading.Semaphore(0)

    def score(self, items):
        assert self.go.acquire(timeout=60)
        self.calls.append([item[0] for item in items])
        return [Outcome(float(item[0])) for item in items]


def items(ids):
    return {(i, 7): (i, "", "", {}) for i in ids}


def test_what_waits_is_scored_in_order_and_what_has_not_begun_is_left():
    pool = Slow()
    ahead = ScoringAhead(pool)
    ahead.begin(items([3]), 2)
    while ahead._waiting:
        pass
    ahead.begin(items([5, 1, 4]), 2)  # while the first is scored
    pool.go.release(2)
    while len(ahead._outcomes) < 3:
        pass
    pool.go.release(9)
    with ahead.taking([(i, 7) for i in (1, 3, 5)]) as found:
        calls = len(pool.calls)
    assert pool.calls[:2] == [[3], [5, 1]] and found == {(i, 7): Outcome(float(i)) for i, _ in found}
    assert {i for i, _ in found} == {3, 5, 1} and calls <= 3
    while (4, 7) not in ahead._outcomes:  # what is not asked for goes on
        pass


def test_what_is_asked_for_before_it_has_begun_is_left_to_the_asker():
    pool = Slow()
    ahead = ScoringAhead(pool)
    ahead.begin(items([1, 2, 3]), 1)
    while len(ahead._waiting) > 2:
        pass
    threading.Timer(0.1, pool.go.release).start()
    with ahead.taking([(1, 7), (2, 7)]) as found:
        assert found.keys() == {(1, 7)} and ahead._waiting.keys() == {(3, 7)} and pool.calls == [[1]]
        ahead.begin(items([4]), 1)
        assert ahead._thread is None
    pool.go.release(2)
    while len(ahead._outcomes) < 2:
        pass
    assert pool.calls == [[1], [3], [4]]


def test_a_thread_that_has_ended_begins_again():
    pool = Slow()
    ahead = ScoringAhead(pool)
    for i in range(3):
        ahead.begin(items([i]), 8)
        pool.go.release()
        while (i, 7) not in ahead._outcomes:
            pass
    with ahead.taking(list(items(range(3)))) as found:
        assert found.keys() == items(range(3)).keys() and pool.calls == [[0], [1], [2]]


def test_what_nobody_asks_for_is_forgotten_wherever_it_is():
    """Scored, being scored, or waiting."""
    pool = Slow()
    ahead = ScoringAhead(pool)
    ahead.begin(items([1]), 1)
    pool.go.release()
    while (1, 7) not in ahead._outcomes:
        pass
    ahead.begin(items([2, 3, 4]), 1)
    while len(ahead._waiting) > 2:
        pass
    ahead.forget([(1, 7), (2, 7), (3, 7)])
    pool.go.release(3)
    while (4, 7) not in ahead._outcomes:
        pass
    assert ahead._outcomes.keys() == items([4]).keys() and pool.calls == [[1], [2], [4]]
    ahead.forget_all()
    assert not ahead._outcomes


def test_without_anything_to_score_there_is_no_thread():
    ahead = ScoringAhead(Slow())
    ahead.begin({}, 1)
    with ahead.taking([(1, 7)]) as found:
        assert ahead._thread is None and found == {}


def test_an_error_of_the_pool_is_raised_where_its_outcomes_are_asked_for():
    pool = RewardPool("exact")
    pool.close()
    ahead = ScoringAhead(pool)
    ahead.begin(items([1]), 4)
    while ahead._waiting:
        pass
    for _ in range(2):
        with raises(RewardError, "closed"), ahead.taking([]):
            pass
    ahead.forget_all()
    with ahead.taking([]) as found:
        assert found == {}
