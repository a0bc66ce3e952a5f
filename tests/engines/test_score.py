"""Log-probs of texts, and alternatives of tokens, beside a plain forward pass."""

import numpy as np
import pytest
import torch

from tests.engines.reference import Plain, make_engine, make_model
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.engines.protocol import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.models.attention import PackedContext

MODEL = make_model()
TEXTS = [np.array(text) for text in ([5, 6, 7, 8, 9], [1], [9] * 40, [3, 4])]


def plain(tokens):
    with torch.no_grad():
        return MODEL.logits(MODEL(torch.from_numpy(tokens), PackedContext([len(tokens)]))).log_softmax(-1).numpy()


@pytest.mark.parametrize("parity", [False, True])
def test_scores_are_log_probs_of_a_plain_pass(parity):
    engine = make_engine(MODEL, parity=parity)
    for text, found in zip(TEXTS, engine.score(TEXTS, likeliest=3)):
        logp = plain(text)[:-1]
        assert np.allclose(found.logprobs, logp[np.arange(len(text) - 1), text[1:]], atol=2e-4)
        assert np.array_equal(found.likeliest.ids, np.argsort(-logp, axis=1, kind="stable")[:, :3].reshape(-1, 3))
        assert np.allclose(found.likeliest.logprobs, -np.sort(-logp, axis=1)[:, :3], atol=2e-4)
    with raises(DataError, "request.prompt.vocab_size"):
        engine.score([np.array([1, 100])])


def test_scores_change_nothing_in_flight():
    request = Request(1, [5, 6], SamplingParams(max_tokens=30))
    (wanted,) = make_engine(MODEL).generate([request])
    engine = make_engine(MODEL)
    engine.submit([request])
    done = []
    while not done:
        done = engine.poll()
        engine.score(TEXTS)
    assert np.array_equal(done[0].tokens, wanted.tokens) and np.array_equal(done[0].logprobs, wanted.logprobs)


@pytest.mark.parametrize("options", [{}, {"max_rows": 4, "kv_tokens": 320}])
def test_alternatives_are_the_likeliest_tokens_at_the_temperature(options):
    params = [SamplingParams(max_tokens=40, temperature=t, top_k=k) for t, k in ((0.0, 0), (1.0, 0), (0.7, 5))]
    requests = [Request(i, [5, 6, i], params[i % 3], likeliest=(0, 2, 4)[i // 3]) for i in range(9)]
    for request, found in zip(requests, make_engine(MODEL, **options).generate(requests)):
        if not request.likeliest:
            assert found.likeliest is None
            continue
        logits = plain(found.tokens)[2:-1] / (request.params.temperature or 1.0)
        logp = torch.from_numpy(logits).log_softmax(-1).numpy()
        top = found.likeliest
        assert top.ids.shape == (40, request.likeliest)
        assert np.array_equal(top.ids[:, 0], logp.argmax(1))
        assert np.allclose(top.logprobs, -np.sort(-logp, axis=1)[:, : request.likeliest], atol=5e-4)
        own = top.ids == found.tokens[3:, None]
        assert np.array_equal(top.logprobs[own], found.logprobs[3:][own.any(1)])
        assert own.any(1).all() or request.params.temperature


def test_an_engine_that_scores_nothing_says_so():
    with raises(EngineError, "request.likeliest.engine"):
        Plain().score(TEXTS)
    with raises(EngineError, "request.likeliest.engine"):
        Plain().check_served([Request(1, [2], likeliest=1)])
