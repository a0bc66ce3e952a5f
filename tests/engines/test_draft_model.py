"""A drafting model against what it would say by whole forward passes; the tokens of the target stay its own."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.engines.reference import draw, make_engine, make_model
from tests.engines.test_apart import SOME, amid, up
from tests.engines.test_engine import MODEL
from tests.engines.test_speculation import same
from tests.errors import raises
from tilth.config.load import load_recipe
from tilth.config.schema import DraftConfig
from tilth.core.random import stream
from tilth.engines.draft_model import MEASURED, PAUSE, ModelDrafter
from tilth.engines.drafter import DraftError, Drawn
from tilth.engines.request import SamplingParams
from tilth.models.attention import PackedContext
from tilth.plan.layout import per_rank
from tilth.plan.memory import BASE, DRAFTER

OTHER = make_model(seed=1)
RULES = [Drawn((7, 0)), Drawn((7, 1), 0.0), Drawn((3, 2), 0.7, 10, 0.9), Drawn((7, 3), 1.3, 0, 1.0, 0.05)]


def made(seed=0, layers=1000):
    """A drafter by a random model; of seed 0 by the target itself, but for the layers that it is told of."""
    model = make_model(seed=seed)
    own = {"dtype": torch.float32, "device": "cpu", "tokens": 6, "layers": layers}
    return ModelDrafter(model.config, dict(model.named_parameters()), **own)


def follows(model, text, count, drawn):
    """What a model says behind a text, by a forward pass over all of it for each token."""
    (seed, number), *rules = drawn
    params, text = SamplingParams(1, *rules), list(text)
    for _ in range(count):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor(text), PackedContext([len(text)]))[-1:])[0].double().numpy()
        text.append(draw(logits, stream(seed, "sample", number).uniform(len(text), 1).item(), params)[0])
    return text[-count:] if count else []


@pytest.mark.parametrize("grows", [0, pytest.param(1, marks=pytest.mark.slow), 9])
def test_drafts_are_what_the_model_would_say(grows):
    """Rows come and go, say some of their draft or all of it and more, and begin again."""
    rng, drafter = np.random.default_rng(grows), made(seed=1)
    drafter._hits = drafter._tries = 1e9  # no guess is too unlikely
    texts, count = {}, 0
    for _ in range(9):
        while len(texts) < 4:
            prompt = rng.integers(0, 100, int(rng.integers(1, 90)))
            texts[count] = prompt.tolist()
            drafter.begin(count, prompt, np.zeros(0, np.int64), RULES[count % 4])
            count += 1
        budget = rng.integers(0, 5, len(texts)).tolist()
        drafts = drafter.propose(list(texts), budget, 0.5)
        for id, draft, most in zip(texts, drafts, budget):
            assert draft.tokens == follows(OTHER, texts[id], most, RULES[id % 4])
            assert list(draft.parents) == list(range(most))
        for _ in range(grows):
            drafter.grow()
        for id, draft in zip(list(texts), drafts):
            stands = int(rng.integers(0, len(draft.tokens) + 1))
            said = [*draft.tokens[:stands], *follows(OTHER, [*texts[id], *draft.tokens[:stands]], 1, RULES[id % 4])]
            if rng.random() < 0.4:
                said[-1] = int(rng.integers(0, 100))
            drafter.accept([id], [np.array(said)])
            texts[id] += said
            if rng.random() < 0.2:
                texts[id].append(5)
                drafter.begin(id, np.array(texts[id][:1]), np.array(texts[id][1:]))
            if rng.random() < 0.15:
                drafter.forget(id)
                del texts[id]
    assert sorted([*drafter._free, *(row.slot for row in drafter._rows.values())]) == list(range(drafter._slab.rows))


def test_a_chain_that_grew_is_the_next_draft_without_a_pass():
    drafter = made()
    drafter._hits = drafter._tries = 1e9
    drafter.begin(0, np.array([3, 4, 5]), np.zeros(0, np.int64), RULES[0])
    (draft,) = drafter.propose([0], [3], 0.5)
    while drafter.grow():
        pass
    chain = drafter._rows[0].chain
    assert len(chain) == 3 + 6 and chain[:3] == draft.tokens
    drafter.accept([0], [np.array(chain[:4])])
    drafter._extend = None
    assert drafter.propose([0], [3], 0.5)[0].tokens == chain[4:7]
    with raises(DraftError, "draft.open"):
        drafter.propose([0], [3], 0.5)


def test_drafts_that_are_not_worth_it_end_but_for_a_measure():
    drafter = made()
    drafter.begin(0, np.array([3, 4, 5]), np.zeros(0, np.int64), Drawn((7, 0), 0.0))
    drafted = []
    for _ in range(20 * PAUSE):
        (draft,) = drafter.propose([0], [4], 0.2)
        drafted.append(len(draft.tokens))
        drafter.accept([0], [np.array([(draft.tokens or [0])[0] + 1]) % 100])
        drafter._rows[0].text, drafter._rows[0].computed = [3], 0  # no longer than the context
    assert drafted[0] == 2 and 0 < sum(drafted[PAUSE:]) < 20
    assert max(drafted[PAUSE:]) == 1


def test_a_drafter_as_slow_as_its_target_drafts_only_to_measure():
    """A guess of chance 1/2 pays beside passes that are much longer, not if it takes as long as one."""
    drafted = []
    for drafter in (made(), made(layers=MODEL.config.num_layers)):
        drafter.begin(0, np.array([3, 4, 5]), np.zeros(0, np.int64), Drawn((7, 0), 0.0))
        drafted.append([])
        for _ in range(PAUSE):
            (draft,) = drafter.propose([0], [4], 0.2)
            drafted[-1].append(len(draft.tokens))
            drafter.accept([0], [np.array([*draft.tokens[:1], 0])])
    assert drafted[0][0] == 2 and sum(drafted[1]) == 1
    for row in range(1, 9):
        drafter.begin(row, np.array([3, row]), np.zeros(0, np.int64))
    drafter.accept([0], [np.array([0])])
    for _ in range(PAUSE + 1):
        drafts = drafter.propose([*range(9)], [4] * 9, 0.2)
        drafted.append(sum(len(draft.tokens) > 0 for draft in drafts))
        drafter.accept([*range(9)], [np.array([0])] * 9)
    assert sorted(drafted[2:]) == [0] * PAUSE + [MEASURED]


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_those_of_plain_decoding(seed):
    plain = make_engine(MODEL, parity=True).generate(SOME)
    engine = make_engine(MODEL, parity=True, draft=DraftConfig(tokens=6), drafter=partial(made, seed))
    same(engine.generate(SOME), plain)
    stats = engine.stats()
    assert stats.drafted_tokens and not engine._speculation._drafter._rows
    assert stats.acceptance > 0.95 if seed == 0 else 0 < stats.acceptance < 0.9


def test_a_sleeping_engine_has_no_cache_of_drafts_and_goes_on_with_the_same_tokens():
    plain = make_engine(MODEL, parity=True).generate(SOME)
    engine = make_engine(MODEL, parity=True, draft=DraftConfig(tokens=6), drafter=made)
    drafter = engine._speculation._drafter

    def sleeps():
        assert drafter._slab.nbytes > 0
        engine.sleep()
        assert drafter._slab.nbytes == 0
        engine.wake_up()

    same(amid(engine, sleeps), plain)
    assert engine.stats().acceptance > 0.95 and drafter._slab.nbytes > 0


def test_the_plan_of_memory_has_the_drafting_model():
    """Its weights, and its cache as it is with so many rows of this length."""
    shape = drafter = MODEL.config
    keys = ["rollout.speculate=model", "rollout.draft.path=x", "rollout.max_rows=9", "model.context=200"]
    recipe = load_recipe("addition-grpo", keys)
    (worker,) = per_rank(recipe, shape, 150, loaded={DRAFTER: drafter})
    found = {item.name: item.bytes for item in worker.memory.held}
    own = made()
    assert found["drafting model"] == sum(p.nbytes for p in make_model(seed=0).parameters())
    for row in range(9):
        own.begin(row, np.zeros(1, np.int64), np.zeros(0, np.int64))
    for length in range(64, 151):
        own._fit(length)
    assert own._slab.nbytes <= found["drafting model's KV cache"] < 1.3 * own._slab.nbytes
    assert "process of the drafting model" not in found
    (alone,) = per_rank(recipe, shape, 150)
    assert worker.memory.certain(gpu=False) - alone.memory.certain(gpu=False) == found["drafting model"]
    recipe = load_recipe("addition-grpo", [*keys, "rollout.draft.apart=true"])
    (apart,) = per_rank(recipe, shape, 150, loaded={DRAFTER: drafter})
    assert apart.memory.peak >= worker.memory.peak + BASE


@pytest.mark.slow
def test_a_drafting_model_apart_leaves_the_tokens(monkeypatch):
    plain = make_engine(MODEL, parity=True).generate(SOME)
    draft = DraftConfig(tokens=6, apart=True)
    engine = make_engine(MODEL, parity=True, draft=draft, drafter=made)
    up(engine._speculation._drafter)
    monkeypatch.setattr("tilth.engines.apart.PATIENCE", 60.0)
    same(engine.generate(SOME), plain)
    assert engine.stats().acceptance > 0.95 and engine.stats().accepted_tokens > 100
    engine._speculation._drafter._pool.close()
