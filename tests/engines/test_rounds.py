"""Rounds over an engine: however long they are, whatever joins or leaves between two, tokens are those of one drain."""

import numpy as np
import pytest

from tests.engines.reference import Plain, make_engine, make_model, make_requests
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.engines.protocol import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds, RoundLimits

MODEL = make_model()


def of_length(*lengths):
    return [Request(i, [1, 2], SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)]


def same(found, expected):
    return all(
        np.array_equal(found[t.id].tokens, t.tokens) and np.array_equal(found[t.id].logprobs, t.logprobs)
        for t in expected
    )


SELDOM = [pytest.param(one, marks=pytest.mark.slow) for one in (RoundLimits(), RoundLimits(7))]


@pytest.mark.parametrize("limits", [*SELDOM, RoundLimits(200, early=5), RoundLimits(9, 1, 0.0)])
def test_what_joins_between_rounds_of_any_length_is_what_is_said_at_once(limits):
    requests = make_requests(12)
    rounds, found, sent = EngineRounds(make_engine(MODEL, parity=True), limits), {}, 0
    while sent < len(requests) or rounds.busy:
        done = rounds.advance(requests[sent : sent + 5])
        sent += 5
        found |= {t.id: t for t in done.finished}
        assert not done.failed and not done.progress
    assert len(found) == 12 and same(found, make_engine(MODEL, parity=True).generate(requests))


def test_a_round_ends_after_its_steps_or_early_with_what_has_finished():
    def steps(limits, *lengths):
        engine = make_engine(MODEL)
        found = EngineRounds(engine, limits).advance(of_length(*lengths))
        return engine.stats().steps, [t.id for t in found.finished]

    assert steps(RoundLimits(8), 90) == (8, [])
    assert steps(RoundLimits(64, early=1), 4, 90)[1] == [0]
    assert steps(RoundLimits(64, early=20), 4, 9, 90) == (20, [0, 1])
    assert steps(RoundLimits(64, early=20), 4) == (4, [0])
    assert steps(RoundLimits(64, seconds=0.0), 90) == (1, [])
    assert steps(RoundLimits(64)) == (0, [])


def test_what_cannot_be_served_fails_alone_and_what_is_aborted_is_reported():
    rounds = EngineRounds(make_engine(MODEL), RoundLimits(3))
    bad = [Request(5, []), Request(6, [1], adapter="nobody's")]
    done = rounds.advance([*of_length(30, 30), *bad])
    assert {id: error.key for id, error in done.failed.items()} == {5: "request.prompt", 6: "request.adapter"}
    done = rounds.advance(aborted=[1, 1, 99])
    assert [(t.id, t.finish, t.completion_length) for t in done.finished] == [(1, "aborted", 3)]
    assert [(t.id, t.finish) for t in rounds.drain()] == [(0, "length")]
    plain = EngineRounds(Plain())
    assert isinstance(plain.advance([Request(1, [1], adapter="a")]).failed[1], EngineError)


def test_a_submission_is_taken_whole_or_refused():
    rounds = EngineRounds(make_engine(MODEL))
    with raises(DataError, "request.prompt"):
        rounds.submit([*of_length(3), Request(5, [])])
    assert not rounds.busy and [t.id for t in rounds.drain(of_length(3))] == [0]


def test_progress_is_given_once():
    rounds, said = EngineRounds(make_engine(MODEL)), []
    rounds.submit(of_length(9))
    while not (done := rounds.advance().finished):
        said += [new.tokens.tolist() for new in rounds.progress().values()]
    assert not rounds.progress() and [len(part) for part in said] == [1] * 8
    assert [token for part in said for token in part] == done[0].tokens[2:10].tolist()


def test_weights_change_between_rounds_and_each_token_says_which_wrote_it():
    engine = make_engine(MODEL)
    rounds = EngineRounds(engine, RoundLimits(5))
    rounds.advance(of_length(12))
    engine.update_weights(dict(make_model(seed=4).named_parameters()), version=engine.version + 1)
    (found,) = rounds.drain()
    first = engine.version - 1
    assert found.versions == [(2, first), (7, first + 1)] and found.completion_length == 12


def test_what_is_dropped_never_comes_and_another_driver_is_named():
    engine = make_engine(MODEL)
    rounds = EngineRounds(engine)
    rounds.advance(of_length(5, 9))
    rounds.drop()
    assert not rounds.busy and not rounds.advance().finished and [t.id for t in rounds.drain(of_length(2))] == [0]
    engine.submit([Request(50, [5], SamplingParams(max_tokens=1))])
    with raises(DataError, "rounds.id"):
        list(rounds.drain(of_length(5)))


class Turns:
    """Two completions of each id, one behind the other; the first come after this many waits."""

    def __init__(self, ids, late=0):
        self.left, self.ready, self.late, self.unwanted = dict.fromkeys(ids, 2), [*ids], late, []

    @property
    def open(self):
        return bool(self.left)

    def requests(self, *, wait):
        self.late -= wait
        if self.late >= 0 and wait:
            return [], [], []
        ready, self.ready, unwanted, self.unwanted = self.ready, [], self.unwanted, []
        return [Request(i, [3], SamplingParams(max_tokens=3)) for i in ready], unwanted, []

    def take(self, finished):
        ended = []
        for t in finished:
            self.left[t.id] = self.left.get(t.id, 1) - 1
            (self.ready if self.left[t.id] else ended).append(t.id if self.left[t.id] else t)
            if not self.left[t.id]:
                del self.left[t.id]
        return ended

    def drop(self):
        self.left = {}


def test_a_source_asks_behind_what_has_finished_beside_others():
    rounds = EngineRounds(make_engine(MODEL), RoundLimits(50, early=50), Turns([7, 8]))
    assert [t.id for t in rounds.advance(of_length(4)).finished] == [0, 7, 8] and not rounds.busy
    waiting = EngineRounds(make_engine(MODEL), RoundLimits(50, early=50), Turns([7, 8], late=2))
    assert [[t.id for t in waiting.advance().finished] for _ in range(3)] == [[], [], [7, 8]]


def test_what_a_source_wants_no_more_ends_and_is_not_reported():
    rounds = EngineRounds(make_engine(MODEL), RoundLimits(1), source := Turns([7, 8]))
    rounds.advance(of_length(30))
    del source.left[7]
    source.unwanted = [7]
    assert [t.id for t in rounds.drain()] == [8, 0]
    rounds = EngineRounds(make_engine(MODEL), RoundLimits(1), Turns([7, 8]))
    rounds.advance(of_length(4))
    rounds.drop()
    assert not rounds.busy and not len(rounds)
