"""Looking at a running answer: what is seen is what it will have said, and looking changes nothing."""

import numpy as np
import pytest

from tests.errors import raises
from tests.rollout.reference import make_engine, make_model, make_requests
from tilth.core.errors import DataError
from tilth.rollout.request import Request, SamplingParams

MODEL = make_model()
LONG = SamplingParams(max_tokens=150, temperature=1.2)


def watched(engine, requests):
    """Trajectories, and everything that was seen of each before it was done."""
    engine.submit(requests)
    seen, found = {r.id: [] for r in requests}, {}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
        for i in seen.keys() - found.keys():
            seen[i].append(engine.peek(i))
    return [found[r.id] for r in requests], seen


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"max_rows": 5}, marks=pytest.mark.slow),
        {"max_rows": 16, "kv_tokens": 320},
        {"step_tokens": 23},
    ],
)
def test_what_is_seen_is_a_beginning_of_the_result_and_changes_nothing(options):
    # few rows: some wait; few blocks: some are preempted; long answers: some move to a larger lane
    requests = [*make_requests(12), *(Request(100 + i, [7, i], LONG) for i in range(3))]
    expected = make_engine(MODEL, **options).generate(requests)
    found, seen = watched(make_engine(MODEL, **options), requests)
    for plain, looked, parts in zip(expected, found, seen.values()):
        assert np.array_equal(plain.tokens, looked.tokens) and np.array_equal(plain.logprobs, looked.logprobs)
        completion = looked.tokens[looked.mask == 1]
        assert all(np.array_equal(p, completion[: len(p)]) for p in parts)
        assert [len(p) for p in parts] == sorted(len(p) for p in parts)
    assert max(len(p) for parts in seen.values() for p in parts) == LONG.max_tokens - 1


def test_a_copy_is_given():
    engine = make_engine(MODEL)
    requests = [Request(0, [1, 2], SamplingParams(max_tokens=6))]
    engine.submit(requests)
    engine.poll()
    engine.peek(0)[:] = 99
    (found,) = [t for _ in range(6) for t in engine.poll()]
    assert np.array_equal(found.tokens, make_engine(MODEL).generate(requests)[0].tokens)


def test_nothing_is_seen_of_what_is_not_in_flight():
    engine = make_engine(MODEL)
    with raises(DataError, "trajectory"):
        engine.peek(4)
    engine.submit([Request(4, [1], SamplingParams(max_tokens=2))])
    assert len(engine.peek(4)) == 0
    engine.abort(4)
    with raises(DataError, "trajectory"):
        engine.peek(4)
