"""Speculation changes when tokens are computed, never which."""

import functools
import itertools

import numpy as np
import pytest
import torch

from tests.engines.reference import LORAS, WAYS, check_blocks, halves, make_engine, make_model, make_requests
from tests.engines.test_engine import MODEL, REQUESTS, check, naively, tables
from tests.engines.test_routing import MOE
from tests.errors import raises
from tilth.config.schema import DraftConfig
from tilth.engines import draft as drafting
from tilth.engines.blocks import BlockManager
from tilth.engines.draft import HOLE, Draft, DraftError, Drafts, Said, check_said, price, said_by
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig

DRAFT = DraftConfig(tokens=6, depth=4)
CHAINS, TREES = {"draft": DRAFT}, {"draft": DRAFT, "branches": True}
both = pytest.mark.parametrize("drafts", [CHAINS, TREES], ids=["chains", "trees"])


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Guesses pay from a small chance on, so that many are wrong."""
    monkeypatch.setattr(drafting, "FREE", {("cpu", torch.float32): 1000, ("cpu", torch.bfloat16): 1000})


def again(requests, engine):
    """Results of the same requests one and two times later: the same random numbers say the same again."""
    engine.generate(requests)
    engine.stats(reset=True)
    return engine.generate(requests)


def same(found, wanted):
    """Bits of every column."""
    for a, b in zip(found, wanted, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish and a.versions == b.versions
        assert np.array_equal(a.logprobs, b.logprobs)
        assert (a.sampling_logprobs is None) == (b.sampling_logprobs is None)
        assert a.sampling_logprobs is None or np.array_equal(a.sampling_logprobs, b.sampling_logprobs)


SELDOM = ("few-rows", "small-chunks", "other-blocks")


@both
@pytest.mark.parametrize(
    "options", [pytest.param(how, id=name, marks=[pytest.mark.slow] * (name in SELDOM)) for name, how in WAYS.items()]
)
def test_same_tokens_as_a_naive_generator(options, drafts):
    """Filters, temperatures, stops; tokens that are guessed right and wrong."""
    engine = make_engine(MODEL, **drafts, **options)
    check(engine.generate(REQUESTS), REQUESTS, naively())
    engine.stats(reset=True)
    check(engine.generate(REQUESTS), REQUESTS, naively())
    stats = engine.stats()
    assert stats.accepted_tokens > 50 and stats.passes_per_token < 0.8
    assert 0 < stats.acceptance < 1 and stats.drafted_tokens > stats.accepted_tokens
    assert stats.undrafted_rows == 0
    assert not check_blocks(engine._blocks, [])
    assert not engine._speculation._drafter._rows and not engine._speculation._drafter._trees


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@both
def test_parity_has_the_bits_of_plain_decoding(dtype, drafts):
    model = make_model(dtype=dtype)
    plain = make_engine(model, parity=True).generate(REQUESTS)
    engine = make_engine(model, parity=True, **drafts)
    same(engine.generate(REQUESTS), plain)
    same(engine.generate(REQUESTS), plain)
    assert engine.stats().accepted_tokens > 100


def caches(engine):
    """KV of the tokens of every row that a plain engine has computed."""
    found = {}
    for lane in engine._lanes.values():
        for row in lane.rows.tolist():
            done = int(lane.columns.position[row])
            kept = [tensor[row, :, :done].clone() for tensor in lane.slab.tensors]
            found[lane.answer(row).request.id, done] = (kept, len(lane.answer(row).table.blocks))
    return found


@both
def test_the_cache_and_its_blocks_are_those_of_plain_decoding(drafts):
    plain, engine = make_engine(MODEL, parity=True), make_engine(MODEL, parity=True, **drafts)
    engine.generate(REQUESTS)
    engine.reset_prefix_cache()
    plain.submit(REQUESTS)
    engine.submit(REQUESTS)
    held, compared = {}, 0
    while plain.pending:
        plain.poll()
        held |= caches(plain)
    while engine.pending:
        engine.poll()
        assert not check_blocks(engine._blocks, tables(engine))
        for key, (kept, blocks) in caches(engine).items():
            wanted, number = held[key]
            assert blocks == number
            assert all(map(torch.equal, kept, wanted))
            compared += 1
    assert compared > 50 and engine.stats().accepted_tokens > 60


@pytest.mark.slow
def test_abort_resume_and_new_weights_between_polls():
    """Rows stop half-way and go on in an engine of the other kind; weights change under both alike."""
    other, rng = make_model(seed=1), np.random.default_rng(0)
    engines = [make_engine(MODEL, parity=True, draft=one, max_rows=6) for one in (None, DRAFT)]
    engines[1].generate(REQUESTS)
    for r in REQUESTS[:12]:
        for engine in engines:
            engine.submit([r])
    cut = []
    for engine in engines:
        while sum(len(lane.rows) for lane in engine._lanes.values()) < 6:
            engine.poll()
        for _ in range(3):
            engine.poll()
        id = engine._rows()[0][0].answer(engine._rows()[0][1]).request.id
        cut.append(engine.abort(id))
    params = {r.id: r.params for r in REQUESTS}
    for engine, t in zip(engines, reversed(cut)):
        engine.resume(t, params[t.id]) if t.id not in engine._known else None
    ended = [dict(), dict()]
    for engine, found in zip(engines, ended):
        while engine.pending:
            found |= {t.id: t for t in engine.poll()}
            assert not check_blocks(engine._blocks, tables(engine))
    for id in ended[0].keys() & ended[1].keys():
        same([ended[1][id]], [ended[0][id]])
    for engine in engines:
        engine.update_weights(other.named_parameters(), version=2)
    some = [REQUESTS[i] for i in rng.permutation(len(REQUESTS))[:8]]
    same(engines[1].generate(some), engines[0].generate(some))


def test_new_weights_amid_a_completion():
    """Tokens behind an update are of the new weights, with their version, where drafts are of the old ones."""
    requests, other = [Request(0, [3, 4, 5], SamplingParams(60, temperature=0.3))], make_model(seed=1)
    engine = make_engine(MODEL, parity=True, draft=DRAFT)
    engine.generate(requests)
    engine.submit(requests)
    while not engine.progress({0: 0}) or len(engine.progress({0: 0})[0].tokens) < 20:
        engine.poll()
    engine.update_weights(other.named_parameters(), version=2)
    (t,) = [t for _ in range(80) for t in engine.poll()]
    (_, _), (at, version) = t.versions
    assert version == 2 and 20 <= at - 3 < 40
    plain = make_engine(MODEL, parity=True)
    plain.submit(requests)
    while not plain.progress({0: 0}) or len(plain.progress({0: 0})[0].tokens) < at - 3:
        plain.poll()
    plain.update_weights(other.named_parameters(), version=2)
    same([t], [t for _ in range(80) for t in plain.poll()])


def test_alternatives_adapters_and_kept_rows():
    requests = [
        Request(i, [7, i // 2, 9], SamplingParams(30, temperature=0.5), adapter=("", "a", "b")[i % 3], likeliest=3,
                keeps=i % 2 == 0)
        for i in range(9)
    ]  # fmt: skip
    found = []
    for drafts in ({}, CHAINS, TREES):
        engine = make_engine(MODEL, parity=True, **drafts)
        for name in ("a", "b"):
            engine.load_adapter(name, LORAS[name], halves(name))
        found.append(again(requests, engine))
        assert not drafts or engine.stats().accepted_tokens > 50
    same(found[1], found[0])
    same(found[2], found[0])
    for a, b in [*zip(*found[:2]), *zip(found[0], found[2])]:
        assert np.array_equal(a.likeliest.ids, b.likeliest.ids)
        assert np.array_equal(a.likeliest.logprobs, b.likeliest.logprobs)


@both
def test_experts_of_tokens_are_recorded(drafts):
    model, requests = make_model(MOE), make_requests(8, longest=9)
    plain = again(requests, make_engine(model, parity=True, routing=True, max_length=128))
    engine = make_engine(model, parity=True, routing=True, max_length=128, **drafts)
    found = again(requests, engine)
    assert engine.stats().accepted_tokens > 20
    same(found, plain)
    assert all(np.array_equal(a.routing, b.routing) for a, b in zip(found, plain))


def test_rows_with_changed_logits_have_no_drafts():
    biased = SamplingParams(20, temperature=0.5, presence_penalty=1.0)
    requests = [Request(i, [5, 6], biased if i % 2 else SamplingParams(20, temperature=0.5)) for i in range(6)]
    plain = again(requests, make_engine(MODEL, parity=True))
    engine = make_engine(MODEL, parity=True, draft=DRAFT)
    same(again(requests, engine), plain)
    assert engine.stats().undrafted_rows == 3 * 19 and engine.stats().accepted_tokens > 20


def test_a_pass_keeps_to_the_budget_of_a_step():
    engine = make_engine(MODEL, draft=DRAFT, step_tokens=12, max_rows=4)
    engine.generate(REQUESTS[:6])
    before = engine.stats().decode_rows
    engine.submit(REQUESTS[:6])
    while engine.pending:
        engine.poll()
        assert engine.stats().decode_rows - before <= 12
        before = engine.stats().decode_rows


def test_prompts_that_wait_are_computed_beside_drafts():
    """Without them, three rows would fill the step with drafts."""
    engine = make_engine(MODEL, draft=DRAFT, step_tokens=12, max_rows=4)
    rows = [Request(i, [5, 6], SamplingParams(60, temperature=0)) for i in range(3)]
    engine.generate(rows)
    engine.submit(rows)
    while engine.running < 3:
        engine.poll()
    engine.stats(reset=True)
    engine.poll()
    assert engine.stats().drafted_tokens == 9
    engine.submit([Request(3, range(12), SamplingParams(2))])
    for prefilled in (6, 12):
        engine.poll()
        assert engine.stats().prefilled_tokens == prefilled
    assert engine.stats().drafted_tokens == 9 + 2 * 3


# The distribution


FIVE = DecoderConfig(vocab_size=5, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, max_positions=32)
WORDS = 3


@functools.cache
def exact():
    """Probability of every completion of WORDS tokens, by a forward pass over each."""
    model, every = make_model(FIVE), [np.array([1, 2, *words]) for words in itertools.product(range(5), repeat=WORDS)]
    scores = make_engine(model, max_length=32).score(every)
    return np.exp([score.logprobs[-WORDS:].astype(float).sum() for score in scores])


def chi_square(counts):
    wanted = exact() * counts.sum()
    some = wanted >= 5
    parts = [((counts[some] - wanted[some]) ** 2 / wanted[some]).sum()]
    if (~some).any():
        rest, few = counts[~some].sum(), wanted[~some].sum()
        parts.append((rest - few) ** 2 / few)
    return sum(parts), some.sum() + (~some).any() - 1


def completions(engine, count):
    requests = [Request(i, [1, 2], SamplingParams(WORDS + 1)) for i in range(count)]
    words = np.array([t.tokens[2 : 2 + WORDS] for t in engine.generate(requests)])
    return np.bincount(words @ np.array([25, 5, 1]), minlength=5**WORDS)


@both
def test_completions_have_the_exact_distribution(drafts):
    engine = make_engine(make_model(FIVE), max_length=32, max_rows=64, **drafts)
    value, degrees = chi_square(completions(engine, 2000))
    assert engine.stats().accepted_tokens > 250
    assert value < degrees + 4 * np.sqrt(2 * degrees)


def all_stands(chosen, drafts, stops):
    return Said(np.tile(np.arange(chosen.shape[1]), (len(chosen), 1)), (chosen != HOLE).sum(1))


@pytest.fixture
def credulous(monkeypatch):
    """A verifier that lets wrong guesses stand."""
    monkeypatch.setattr("tilth.engines.engine.said_by", all_stands)


@both
def test_a_verifier_that_lets_wrong_guesses_stand_is_named(credulous, drafts):
    engine = make_engine(make_model(FIVE), max_length=32, max_rows=64, **drafts)
    with raises(DraftError, "draft.verdict"):
        completions(engine, 300)


@pytest.mark.slow
@both
def test_without_its_name_the_distribution_would_be_wrong(credulous, monkeypatch, drafts):
    monkeypatch.setattr("tilth.engines.engine.check_said", lambda *_: None)
    engine = make_engine(make_model(FIVE), max_length=32, max_rows=64, **drafts)
    value, degrees = chi_square(completions(engine, 4000))
    assert value > degrees + 20 * np.sqrt(2 * degrees)


# Parts


def said(chosen, drafts, stops):
    """By a walk from each token to the one that follows it."""
    found = []
    for row, draft, ends in zip(chosen, drafts, stops):
        tokens, places, at = [row[0]], [0], 0
        while tokens[-1] not in ends:
            follows = [i + 1 for i, (t, p) in enumerate(zip(*draft)) if (t, p) == (tokens[-1], at)]
            if not follows:
                break
            (at,) = follows
            tokens.append(row[at])
            places.append(at)
        found.append((tokens, places))
    return found


CHAIN = Draft([5, 6], [0, 1])
TREE = Draft([5, 6, 5, 6, 9], [0, 1, 2, 0, 4])
CASES = [
    ([5, 6, 7], CHAIN, [], 3), ([5, 6], Draft([5], [0]), [], 2), ([5, 9, 7], CHAIN, [7], 2), ([5], Draft(), [], 1),
    ([5, 6, 7], Draft([2, 6], [0, 1]), [5], 1), ([5, 6, 7], CHAIN, [5], 1), ([5, 6, 7], CHAIN, [6], 2),
    ([6, 6, 5, 1, 9, 7], TREE, [], 3), ([5, 6, 5, 2, 9, 7], TREE, [], 4), ([6, 6, 5, 1, 4, 7], TREE, [], 2),
    ([9, 6, 5, 1, 9, 7], TREE, [], 1), ([6, 6, 5, 1, 9, 7], TREE, [9], 2),
]  # fmt: skip


def table(rows, other):
    width = max(map(len, rows))
    return np.array([[*row, *[other] * (width - len(row))] for row in rows], np.int64)


def test_what_stands_of_a_draft():
    chosen = table([case[0] for case in CASES], HOLE)
    drafts, stops = (
        Drafts.of(len(CASES), dict(enumerate(case[1] for case in CASES))),
        table([[*case[2], -1] for case in CASES], -1),
    )
    found = said_by(chosen, drafts, stops)
    assert found.counts.tolist() == [case[3] for case in CASES]
    walked = said([case[0] for case in CASES], [case[1] for case in CASES], [case[2] for case in CASES])
    for row, (tokens, places) in enumerate(walked):
        assert found.path[row, : len(places)].tolist() == places
        assert found.along(chosen)[row, : len(tokens)].tolist() == tokens
    check_said(chosen, drafts, found)
    for row in (2, 9, 10):
        more = found.counts + (np.arange(len(CASES)) == row)
        with raises(DraftError, "draft.verdict"):
            check_said(chosen, drafts, found._replace(counts=more))
    other = found.path.copy()
    other[7, 1:3] = [4, 3]  # token 3 follows token 2
    with raises(DraftError, "draft.verdict"):
        check_said(chosen, drafts, found._replace(path=other))
    assert drafts.depths()[7].tolist() == [0, 1, 2, 3, 1, 2]


def test_a_guess_costs_more_the_more_rows_there_are():
    prices = [price(rows, drafting.free_positions(torch.device("cpu"), torch.float32)) for rows in (1, 4, 16, 64)]
    assert prices == sorted(prices) and prices[-1] < 1
    assert drafting.free_positions(torch.device("cuda"), torch.float32) == drafting.FREE_ELSEWHERE


@pytest.mark.parametrize("rows, pays", [(8, True), (64, False)])
def test_many_rows_of_a_small_model_have_no_drafts(rows, pays, monkeypatch):
    """A guess takes half a position there, so with 64 rows not even a sure one is a gain."""
    monkeypatch.setattr(drafting, "FREE", {("cpu", torch.float32): 32})
    prompts = np.random.default_rng(0).integers(3, MODEL.config.vocab_size, (64, 5))
    asked = [Request(i, prompt, SamplingParams(12)) for i, prompt in enumerate(prompts)]
    engine = make_engine(MODEL, draft=DRAFT, max_rows=rows)
    again(asked, engine)
    assert (engine.stats().drafted_tokens > 0) == pays
    fewer = [Request(i, r.prompt, SamplingParams(3 if i % 4 else 16)) for i, r in enumerate(asked)]
    engine = make_engine(MODEL, draft=DRAFT, max_rows=rows, parity=True)
    same(again(fewer, engine), make_engine(MODEL, max_rows=rows, parity=True).generate(fewer))
    assert engine.stats().accepted_tokens > 100 and not engine._speculation._behind  # those of the few long ones
    monkeypatch.setattr(drafting, "LAYER", {"cpu": 1.0})  # of a model whose positions take long, they are worth it
    engine = make_engine(MODEL, draft=DRAFT, max_rows=rows)
    again(asked, engine)
    assert engine.stats().drafted_tokens > 0


def test_blocks_behind_a_row_are_free_again():
    blocks = BlockManager(8, 4)
    table = blocks.open(np.arange(9), 0)
    assert blocks.extend(table, 20) and blocks.free == 3
    blocks.trim(table, 12)
    assert blocks.free == 5 and len(table.blocks) == 3
    blocks.trim(table, 12)
    assert not check_blocks(blocks, [table])
