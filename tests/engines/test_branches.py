"""Drafts that branch at random around what is going to be said change neither tokens nor bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.reference import CONFIG, check_blocks, make_engine, make_model, make_requests
from tests.engines.test_engine import tables
from tests.engines.test_parity import QWEN2
from tests.engines.test_routing import MOE
from tests.engines.test_speculation import DRAFT, same
from tests.models.tiny import FAMILIES, VOCAB, decoder
from tilth.engines.branches import Branches
from tilth.engines.cache import KVCache
from tilth.engines.draft import Draft
from tilth.engines.drafter import Drafter
from tilth.engines.request import SamplingParams

KINDS = [SamplingParams(40, temperature=0.8), SamplingParams(60, stop_tokens=(3,)), SamplingParams(30, temperature=0)]


class Guesser(Drafter):
    """A drafter that knows what each row says, and hides it among other tokens."""

    def __init__(self, completions, vocab):
        self.completions, self.vocab, self.rng, self.said = completions, vocab, np.random.default_rng(0), {}

    def begin(self, row, prompt, completion, drawn):
        self.said[row] = len(completion)

    def propose(self, rows, budget, least):
        return [self.tree(row, most) for row, most in zip(rows, budget)]

    def tree(self, row, most):
        right = self.completions[row][self.said[row] :].tolist()
        tokens, parents, path = [], [], {0: 0}  # place -> tokens before it, of places where all is right
        children = {0: set()}
        while len(tokens) < most:
            parent = int(self.rng.choice([*children][-3:]))
            depth = path.get(parent)
            token = int(self.rng.integers(self.vocab))
            if depth is not None and depth < len(right) and self.rng.random() < 0.6:
                token = right[depth]
            if token in children[parent]:
                continue
            children[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            children[len(tokens)] = set()
            if depth is not None and right[depth : depth + 1] == [token]:
                path[len(tokens)] = depth + 1
        return Draft(tokens, parents)

    def accept(self, rows, said):
        for row, tokens in zip(rows, said):
            self.said[row] += len(tokens)

    def forget(self, row):
        self.said.pop(row, None)


@pytest.fixture
def moves(monkeypatch):
    """Slots that were moved, of each row that said tokens out of their place."""
    found, move = [], KVCache.move

    def moved(self, row, slots, to):
        found.append(slots.tolist())
        move(self, row, slots, to)

    monkeypatch.setattr(KVCache, "move", moved)
    return found


def drafted(monkeypatch, model, requests, plain, **options):
    """Results of an engine whose drafts branch at random."""
    guesser = Guesser({t.id: t.tokens[t.prompt_length :] for t in plain}, model.config.vocab_size)
    monkeypatch.setattr("tilth.engines.engine.SuffixDrafter", lambda *_, **__: guesser)
    engine = make_engine(model, draft=DRAFT, branches=True, **options)
    engine.submit(requests)
    found = {}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
        assert not check_blocks(engine._blocks, tables(engine))
    assert engine.stats().accepted_tokens > 50
    return [found[r.id] for r in requests]


MODELS = {
    "full": lambda: make_model(CONFIG),
    "bf16": lambda: make_model(CONFIG, dtype=torch.bfloat16),
    "window": lambda: make_model(replace(QWEN2, sliding_window=5), scale=4),
    "experts": lambda: make_model(MOE),
    "sinks": lambda: decoder(FAMILIES["gpt-oss"]),
    "latents": lambda: decoder(FAMILIES["deepseek-v3"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("bf16", "window"))) for n in MODELS]
)
def test_parity_has_the_bits_of_plain_decoding(name, monkeypatch, moves):
    model = MODELS[name]()
    options = {"parity": True, "routing": name == "experts", "max_rows": 9, "max_length": 128}
    requests = make_requests(12, vocab=min(VOCAB, model.config.vocab_size), kinds=KINDS, longest=30)
    plain = make_engine(model, **options).generate(requests)
    found = drafted(monkeypatch, model, requests, plain, **options)
    same(found, plain)
    assert len(moves) > 30 and any(np.ptp(np.diff(slots)) for slots in moves)
    if name == "experts":
        assert all(np.array_equal(a.routing, b.routing) for a, b in zip(found, plain))


@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(n, marks=pytest.mark.slow) for n in ("window", "sinks")), "latents"]
)
def test_the_mask_has_the_log_probs_of_plain_decoding(name, monkeypatch, moves):
    model = MODELS[name]()
    requests = make_requests(12, vocab=min(VOCAB, model.config.vocab_size), kinds=KINDS, longest=30)
    plain = make_engine(model, max_length=128).generate(requests)
    found = drafted(monkeypatch, model, requests, plain, max_length=128)
    for a, b in zip(found, plain):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
    assert len(moves) > 30


def test_a_cache_that_is_not_moved_is_seen(monkeypatch):
    model = MODELS["full"]()
    requests = make_requests(8, kinds=KINDS, longest=30)
    plain = make_engine(model, parity=True).generate(requests)
    monkeypatch.setattr(KVCache, "move", lambda *_: None)
    with pytest.raises(AssertionError):
        same(drafted(monkeypatch, model, requests, plain, parity=True), plain)


def naive_hidden(parents, start, length, window):
    """By a walk from each token to the first."""
    found = np.ones((len(parents), 1 + len(parents[0]), length), bool)
    for row, (draft, first) in enumerate(zip(parents, start)):
        for place in range(1 + len(draft)):
            at, path = place, [place]
            while at:
                at = draft[at - 1]
                path.append(at)
            position = first + len(path) - 1
            seen = {slot: slot for slot in range(first)} | {first + p: position - i for i, p in enumerate(path)}
            for slot, own in seen.items():
                if slot < length and (window is None or own > position - window):
                    found[row, place, slot] = False
    return found


@pytest.mark.parametrize("window", [None, 2, 4])
def test_a_token_sees_what_it_follows(window):
    rng = np.random.default_rng(0)
    for _ in range(20):
        parents = np.array([[rng.integers(0, place + 1) for place in range(5)] for _ in range(4)])
        start, there = rng.integers(0, 9, 4), np.ones((4, 6), bool)
        order = Branches.of(parents, there, torch.device("cpu"))
        found = order.hidden(torch.from_numpy(start), 16, window).numpy()
        assert np.array_equal(found, naive_hidden(parents.tolist(), start.tolist(), 16, window))
    assert Branches.of(np.tile(np.arange(5), (4, 1)), there, torch.device("cpu")) is None
