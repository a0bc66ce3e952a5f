"""Looking at a running answer: what is seen is what it will have said, and looking changes nothing."""

import numpy as np
import pytest

from tests.engines.reference import make_engine, make_model, make_requests
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.engines.request import Request, SamplingParams

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
    expected = make_engine(MODEL, parity=True, **options).generate(requests)
    found, seen = watched(make_engine(MODEL, parity=True, **options), requests)
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


def test_progress_is_what_was_chosen_since():
    requests = [*make_requests(12), *(Request(100 + i, [7, i], LONG) for i in range(3))]
    expected = {t.id: t for t in make_engine(MODEL, parity=True).generate(requests)}
    engine = make_engine(MODEL, parity=True, max_rows=16, kv_tokens=320)
    engine.submit(requests)
    parts, found = {r.id: [] for r in requests}, {}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
        for i, new in engine.progress({i: sum(len(p.tokens) for p in parts[i]) for i in parts}).items():
            parts[i].append(new)
    assert max(len(seen) for seen in parts.values()) == LONG.max_tokens - 1
    for i, t in expected.items():
        mine = t.mask == 1
        for whole, column in ((t.tokens, "tokens"), (t.logprobs, "logprobs")):
            seen = np.concatenate([whole[:0], *(getattr(p, column) for p in parts[i])])
            assert np.array_equal(seen, whole[mine][: len(seen)]) and np.array_equal(whole, getattr(found[i], column))


def test_a_request_may_draw_from_another_stream():
    params = SamplingParams(max_tokens=20)
    apart = [make_engine(MODEL, seed=s).generate([Request(i, [5, 6], params)])[0] for s, i in ((3, 0), (3, 1), (9, 0))]
    requests = [Request(70 + i, [5, 6], params, draws=d) for i, d in enumerate([(3, 0), (3, 1), (9, 0), (3, 0)])]
    found = make_engine(MODEL).generate(requests)
    assert [t.tokens.tolist() for t in found] == [apart[i].tokens.tolist() for i in (0, 1, 2, 0)]
    assert len({tuple(t.tokens.tolist()) for t in found}) == 3
