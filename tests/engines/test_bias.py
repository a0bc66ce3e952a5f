"""Completions from changed logits: biases, penalties, least lengths."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.engines.reference import Plain, make_engine, make_model
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.engines.protocol import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.models.attention import PackedContext

BIASED = [
    {"logit_bias": ((4, 3.0), (7, -100.0))},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.7},
    {"min_tokens": 8, "stop_tokens": tuple(range(10)), "frequency_penalty": -1.0},
    {"logit_bias": ((4, 3.0),), "temperature": 0.0, "presence_penalty": 2.0},
]


def asked(params, id=0):
    return Request(id, [5, 6, 7], SamplingParams(**{"max_tokens": 20, **params}))


def expected_change(params, drawn, vocabulary):
    """By the definition of OpenAI: logits - count * frequency - (count > 0) * presence + bias."""
    change, counts = np.zeros(vocabulary), Counter(drawn)
    for token, count in counts.items():
        change[token] -= count * params.get("frequency_penalty", 0) + params.get("presence_penalty", 0)
    for token, value in params.get("logit_bias", ()):
        change[token] += value
    if len(drawn) < params.get("min_tokens", 0):
        change[list(params["stop_tokens"])] = -np.inf
    return torch.from_numpy(change)


@pytest.mark.parametrize("params", BIASED)
def test_tokens_are_drawn_from_the_changed_logits_and_log_probs_are_the_policys(params):
    model = make_model()
    (t,) = make_engine(model, parity=True).generate([asked(params)])
    heat, mine = params.get("temperature", 1.0) or 1.0, t.tokens[t.prompt_length :].tolist()
    with torch.no_grad():
        logits = model.logits(model(torch.from_numpy(t.tokens), PackedContext([len(t.tokens)]))).double()
    for at, token in enumerate(mine):
        own = logits[t.prompt_length + at - 1]
        changed = own + expected_change(params, mine[:at], len(own))
        if params.get("temperature") == 0:
            assert token == int(changed.argmax())
        wanted = [(x / heat).log_softmax(-1)[token] for x in (own, changed)]
        found = [x[t.prompt_length + at] for x in (t.logprobs, t.sampling_logprobs)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert len(mine) > params.get("min_tokens", 0)


@pytest.mark.slow
def test_company_changes_nothing_and_a_pause_neither():
    requests = [asked(params, i) for i, params in enumerate([*BIASED, {}])]
    together = make_engine(make_model(), parity=True).generate(requests)
    for request, t in zip(requests, together):
        engine = make_engine(make_model(), parity=True)
        (first,) = engine.generate([asked({**vars(request.params), "max_tokens": 5, "min_tokens": 0}, request.id)])
        if first.finish == "length" and not request.params.min_tokens:
            rounds = EngineRounds(engine)
            rounds.resume(first, request.params)
            (rest,) = rounds.drain()
            assert rest.tokens.tolist() == t.tokens.tolist()
        (alone,) = make_engine(make_model(), parity=True).generate([request])
        assert np.array_equal(alone.tokens, t.tokens) and np.array_equal(alone.logprobs, t.logprobs)


def test_engines_that_draw_elsewhere_refuse():
    with raises(EngineError, "request.bias.engine"):
        Plain().generate([asked(BIASED[0])])


@pytest.mark.parametrize(
    "params, key",
    [
        ({"logit_bias": ((10**6, 1.0),)}, "request.bias.vocab_size"),
        ({"min_tokens": 2, "stop_tokens": (10**6,)}, "request.bias.vocab_size"),
        ({"stop_tokens": (-1,)}, "stop_tokens"),
        ({"min_tokens": 2, "stop_tokens": tuple(range(100))}, "request.min_tokens"),
        ({"min_tokens": 21}, "min_tokens"),
        ({"min_tokens": 1, "schema": "{}"}, "min_tokens"),
    ],
)
def test_what_cannot_be_is_refused(params, key):
    with raises(DataError, key):
        make_engine(make_model()).generate([asked(params)])
