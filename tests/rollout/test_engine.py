"""The engine says what a naive generator says, whatever is in the batch and whatever happens on the way."""

import numpy as np
import pytest

from tests.rollout.reference import make_engine, make_model, make_requests, naive

MODEL = make_model()
REQUESTS = make_requests(40)
WANTED = {r.id: naive(MODEL, r) for r in REQUESTS}


def check(found, requests=REQUESTS, wanted=WANTED):
    for request, t in zip(requests, found, strict=True):
        tokens, raw, filtered = wanted[request.id]
        n = len(request.prompt)
        assert t.id == request.id
        assert t.tokens.tolist() == tokens
        assert t.loss_mask.tolist() == [0] * n + [1] * (len(tokens) - n)
        np.testing.assert_allclose(t.logprobs[n:], raw, atol=2e-5)
        assert not t.logprobs[:n].any()
        assert (t.sampling_logprobs is not None) == request.params.filtered
        if request.params.filtered:
            np.testing.assert_allclose(t.sampling_logprobs[n:], filtered, atol=2e-5)
        assert t.finish == ("stop" if tokens[-1] in request.params.stop_tokens else "length")
        assert t.versions == [(n, 1)]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 5}, {"max_rows": 16, "kv_tokens": 320}, {"step_tokens": 23, "max_rows": 9}, {"parity": True}],
    ids=["plain", "few-rows", "preemption", "small-chunks", "parity"],
)
def test_same_tokens_as_a_naive_generator(options):
    engine = make_engine(MODEL, **options)
    check(engine.generate(REQUESTS))
    assert engine.pending == 0
    assert ("kv_tokens" in options) == (engine.stats().preemptions > 0)
