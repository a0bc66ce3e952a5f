"""Run-ahead fills idle rows of passes, leads later drafts, and changes nothing else."""

import numpy as np
import pytest
import torch

from tests.engines.reference import check_blocks, make_engine, make_model
from tests.engines.test_engine import tables
from tests.engines.test_speculation import DRAFT, MODEL, same
from tilth.engines.ahead import SHARE
from tilth.engines.draft import FREE
from tilth.engines.request import Request, SamplingParams
from tilth.engines.suffix import SuffixDrafter

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 100, int(RNG.integers(1, 30))) for _ in range(24)]
GREEDY = SamplingParams(40, temperature=0.0, stop_tokens=(3,))


def requests(first, count, longest=60, temperature=0.3):
    """Samples of these prompts, some much longer than others."""
    ends = [longest if i % 4 == 0 else 10 for i in range(first, first + count)]
    return [Request(i, PROMPTS[i], SamplingParams(ends[i - first], temperature)) for i in range(first, first + count)]


def expected(first, count):
    return [Request(i, PROMPTS[i], GREEDY) for i in range(first, first + count)]


def played(engine, asked, ahead=()):
    """Completions of these requests in the order of their ids, and the poll in which each has ended."""
    engine.submit(asked)
    engine.run_ahead(list(ahead))
    found, ended, polls = {}, {}, 0
    while engine.pending:
        before = engine.stats().decode_rows
        for t in engine.poll():
            found[t.id], ended[t.id] = t, polls
        polls += 1
        assert not check_blocks(engine._blocks, tables(engine))
        assert engine.running <= engine._max_rows
        assert engine.stats().decode_rows - before <= engine.step_tokens
    return [found[r.id] for r in asked], ended


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        pytest.param({}, 60, marks=pytest.mark.slow),
        pytest.param({"max_rows": 6}, 160, marks=pytest.mark.slow),
        ({"max_rows": 8, "kv_tokens": 320}, 100),
        ({"step_tokens": 12, "max_rows": 8}, 60),
    ],
    ids=str,
)
def test_nobody_is_delayed_by_a_pass_and_all_bits_stay(options, longest):
    """Samples wait for rows, outgrow a lane, and wait for blocks."""
    engines = [make_engine(MODEL, parity=True, draft=DRAFT, **options) for _ in range(2)]
    for engine in engines:
        engine.generate(requests(0, 8, longest))
        engine.stats(reset=True)
    plain, when = played(engines[0], requests(0, 12, longest))
    found, same_polls = played(engines[1], requests(0, 12, longest), expected(12, 12))
    same(found, plain)
    assert same_polls == when
    quiet, busy = (engine.stats().dump() for engine in engines)
    assert busy.pop("ahead_tokens") > 20 and quiet.pop("ahead_tokens") == 0
    assert busy["accepted_tokens"] > 40
    for name in ("decoded_tokens", "decode_passes", "useful_rows", "drafted_tokens", "accepted_tokens", "finished",
                 "undrafted_rows", "prefilled_tokens", "preemptions", "passes_per_token"):  # fmt: skip
        assert busy[name] == quiet[name], name


def test_greedy_answers_of_expected_prompts_come_in_few_passes():
    asked = expected(12, 6)
    passes = []
    for ahead in ((), asked):
        engine = make_engine(MODEL, draft=DRAFT)
        played(engine, requests(0, 4, longest=200), ahead)
        engine.stats(reset=True)
        found = engine.generate(asked)
        passes.append(engine.stats().passes_per_token)
    assert passes[1] < 0.6 * passes[0]
    plain = make_engine(MODEL).generate(asked)
    assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in plain]


def test_the_drafter_gets_the_greedy_answer_of_each_prompt(monkeypatch):
    """Also the beginning of one that has to end early."""
    noted = []
    monkeypatch.setattr(
        SuffixDrafter, "note", lambda self, prompt, said: noted.append((prompt.tolist(), said.tolist()))
    )
    engine = make_engine(MODEL, draft=DRAFT)
    plain = {t.tokens.tolist()[: t.prompt_length].__str__(): t for t in make_engine(MODEL).generate(expected(12, 12))}
    played(engine, requests(0, 4, longest=120), expected(12, 12))
    whole = 0
    engine.run_ahead([])
    for prompt, said in noted:
        wanted = plain[str(prompt)].tokens[len(prompt) :].tolist()
        assert said == wanted[: len(said)]
        whole += said == wanted
    assert whole >= 4 and len(noted) > whole
    assert engine.stats().ahead_tokens == sum(len(said) for _, said in noted)
    assert not check_blocks(engine._blocks, []) and not engine._rows()


def test_it_ends_when_others_wait_and_when_weights_come():
    engine = make_engine(MODEL, draft=DRAFT, max_rows=4)
    engine.submit(requests(0, 1, longest=100))
    engine.run_ahead(expected(12, 8))
    for _ in range(5):
        engine.poll()
    assert engine.running == 4
    engine.submit(requests(1, 3))
    for _ in range(2):
        engine.poll()
    assert engine.running == 4 and not any(lane.answer(row).ahead for lane, row in engine._rows())
    engine.run_ahead(expected(12, 8))
    while engine.pending > 1:
        engine.poll()
    engine.poll()
    assert engine.running == 4
    engine.update_weights(make_model(seed=1).named_parameters(), version=2)
    assert engine.pending == engine._scheduler.queued == 1


def test_where_a_position_costs_what_a_pass_does_there_is_none():
    model = make_model(dtype=torch.bfloat16)
    engine = make_engine(model, draft=DRAFT)
    assert FREE["cpu", torch.bfloat16] // SHARE < 2
    played(engine, requests(0, 4, longest=100), expected(12, 12))
    assert engine.stats().ahead_tokens == 0


def test_what_can_not_be_served_is_left_out():
    engine = make_engine(MODEL, draft=DRAFT)
    engine.run_ahead([Request(1, [1000], GREEDY), Request(2, range(90), SamplingParams(200)), *expected(12, 1)])
    assert [request.id for request in engine._ahead._next] == [12]
    make_engine(MODEL).run_ahead(expected(12, 1))
