"""The engine records the experts of each token; a pass over whole sequences is the independent way to them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.reference import CONFIG, make_engine, make_model, make_requests
from tests.errors import raises
from tilth.core.errors import RecipeError
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import SamplingParams
from tilth.models.attention import PackedContext
from tilth.models.moe import ExpertContext

MOE = replace(
    CONFIG,
    family="qwen3_moe",
    num_experts=5,
    experts_per_token=2,
    expert_size=24,
    expert_layers=(1,),
    max_positions=256,
)
MODEL = make_model(MOE)
REQUESTS = make_requests(12)
UNKNOWN = 255


def chosen_by(model, tokens):
    ctx = PackedContext([len(tokens)], parity=True, experts=ExpertContext(parity=True, record=True))
    with torch.no_grad():
        model(torch.from_numpy(tokens), ctx)
    return ctx.experts.chosen[1][: len(tokens)].numpy()


def check(found, model=MODEL):
    for t in found:
        assert t.routing.dtype == np.uint8 and t.routing.shape == (len(t.tokens), 2)
        assert (t.routing[-1] == UNKNOWN).all()
        assert np.array_equal(t.routing[:-1], chosen_by(model, t.tokens)[:-1]), t.id


WAYS = {
    "plain": {},
    "few rows and blocks": {"max_rows": 6, "kv_tokens": 320},
    "small chunks": {"step_tokens": 24, "max_rows": 9},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(how, marks=[pytest.mark.slow] * ("kv_tokens" not in how)) for how in WAYS.values()],
    ids=WAYS,
)
def test_recorded_experts_are_those_of_whole_sequences(options):
    """Also of shared prompts, of sequences that were preempted, and of those that moved to another lane."""
    engine = make_engine(MODEL, parity=True, routing=True, **options)
    found = engine.generate(REQUESTS)
    check(found)
    assert ("kv_tokens" in options) == (engine.stats().preemptions > 0)
    assert len({tuple(map(tuple, t.routing)) for t in found}) > 5


def test_partial_trajectories_and_new_weights():
    engine = make_engine(MODEL, parity=True, routing=True)
    engine.submit(REQUESTS[:3])
    for _ in range(4):
        done = {t.id for t in engine.poll()}
    (first, *_) = [r.id for r in REQUESTS[:3] if r.id not in done]
    parked = engine.abort(first)
    check([parked])
    other = make_model(MOE, seed=5)
    engine.update_weights(other.named_parameters(), version=2)
    engine.resume(parked, SamplingParams(max_tokens=len(parked.tokens) + 9))
    while engine.pending:
        check([t for t in engine.poll() if t.id == first], other)


def test_nothing_is_recorded_unasked_or_of_a_dense_model():
    assert all(t.routing is None for t in make_engine(MODEL).generate(REQUESTS[:2]))
    dense = make_engine(make_model(), routing=True)
    assert all(t.routing is None for t in dense.generate(REQUESTS[:2]))


def test_a_compiled_step_is_refused():
    with raises(RecipeError, key="rollout.compile"):
        Engine(MOE, EngineOptions(compile=True))
