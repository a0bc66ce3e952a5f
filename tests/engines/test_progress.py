"""Looking at a running answer: what is seen is what it will have said, and looking changes nothing."""

import numpy as np
import pytest

from tests.engines.reference import make_engine, make_model, make_requests
from tilth.engines.request import Request, SamplingParams

MODEL = make_model()
LONG = SamplingParams(max_tokens=150, temperature=1.2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"max_rows": 5}, marks=pytest.mark.slow),
        pytest.param({"max_rows": 16, "kv_tokens": 320}, marks=pytest.mark.slow),
        {"step_tokens": 23},
    ],
)
def test_progress_is_what_was_chosen_since_and_looking_changes_nothing(options):
    # few rows: some wait; few blocks: some are preempted; long answers: some move to a larger lane
    requests = [*make_requests(8), *(Request(100 + i, [7, i], LONG) for i in range(3))]
    expected = {t.id: t for t in make_engine(MODEL, parity=True, **options).generate(requests)}
    engine = make_engine(MODEL, parity=True, **options)
    engine.submit(requests)
    parts, found = {r.id: [] for r in requests}, {}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
        for i, new in engine.progress({i: sum(len(p.tokens) for p in parts[i]) for i in parts}).items():
            parts[i].append(new)
    seen = {i: sum(len(p.tokens) for p in some) for i, some in parts.items()}
    assert max(seen.values()) == LONG.max_tokens - 1
    for i, t in expected.items():
        mine = t.mask == 1
        for whole, column in ((t.tokens, "tokens"), (t.logprobs, "logprobs")):
            said = np.concatenate([whole[:0], *(getattr(p, column) for p in parts[i])])
            assert np.array_equal(said, whole[mine][: seen[i]]) and np.array_equal(whole, getattr(found[i], column))


def test_a_copy_is_given():
    engine = make_engine(MODEL)
    requests = [Request(0, [1, 2], SamplingParams(max_tokens=6))]
    engine.submit(requests)
    engine.poll()
    engine.progress({0: 0})[0].tokens[:] = 99
    (found,) = [t for _ in range(6) for t in engine.poll()]
    assert np.array_equal(found.tokens, make_engine(MODEL).generate(requests)[0].tokens)


def test_a_request_may_draw_from_another_stream():
    params = SamplingParams(max_tokens=20)
    apart = [make_engine(MODEL, seed=s).generate([Request(i, [5, 6], params)])[0] for s, i in ((3, 0), (3, 1), (9, 0))]
    requests = [Request(70 + i, [5, 6], params, draws=d) for i, d in enumerate([(3, 0), (3, 1), (9, 0), (3, 0)])]
    found = make_engine(MODEL).generate(requests)
    assert [t.tokens.tolist() for t in found] == [apart[i].tokens.tolist() for i in (0, 1, 2, 0)]
    assert len({tuple(t.tokens.tolist()) for t in found}) == 3
