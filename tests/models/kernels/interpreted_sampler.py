"""The sampler's kernel in Triton's interpreter, against brute force and the plain functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines import test_sampling as plain_tests
from tests.engines.test_sampling import PARAMS, logits_of, uniform_of
from tests.examples import examples
from tilth.engines import sampling
from tilth.engines.request import SamplingParams
from tilth.engines.runner import Decoded
from tilth.engines.sampling import Rules, choose, choose_from
from tilth.models.kernels import sampler

SOME = [
    SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.3), SamplingParams(temperature=0.0),
    SamplingParams(top_k=40, top_p=0.95, min_p=0.02), SamplingParams(temperature=1.7, top_k=1000, top_p=0.01),
    SamplingParams(temperature=0.0, top_p=0.5), SamplingParams(),
]  # fmt: skip


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch):
    """Choose the kernel on a CPU, in several blocks; return the names that were asked for."""
    asked = []
    monkeypatch.setattr(sampling, "chosen", lambda name, x: asked.append(name) or sampler)
    monkeypatch.setattr(sampler, "BLOCK", 256)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [7, 300])
def test_choices_and_log_probs_are_those_of_brute_force(vocab):
    plain_tests.test_choices_and_both_logprobs_equal_brute_force.hypothesis.inner_test(SOME, 3, vocab)


def check_against_the_plain_functions(params, seed, vocab):
    """Ties, and tokens of probability 0."""
    logits, u = logits_of(seed, len(params), vocab).round(decimals=1), uniform_of(seed, len(params))
    logits[:, 1::3] = -torch.inf
    ours = choose(logits, u, Rules.of(params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "chosen", lambda name, x: None)
        plain = choose(logits, u, Rules.of(params))
    assert torch.equal(ours.tokens, plain.tokens) and torch.equal(ours.logprobs, plain.logprobs)
    assert (ours.sampling is None) == (plain.sampling is None)
    if plain.sampling is not None:
        assert torch.allclose(ours.sampling, plain.sampling, atol=1e-5)


@pytest.mark.parametrize("params", [SOME[4:6], pytest.param(SOME, marks=pytest.mark.slow)], ids=["few", "all"])
def test_choices_are_those_of_the_plain_functions(params):
    check_against_the_plain_functions(params, 0, 300)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 10_000), st.sampled_from([1, 7, 256, 300, 700]))
def test_choices_of_any_rules_are_those_of_the_plain_functions(params, seed, vocab):
    check_against_the_plain_functions(params, seed, vocab)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours():
    logits, u = logits_of(0, len(SOME), 300), uniform_of(0, len(SOME))
    together = choose(logits, u, Rules.of(SOME))
    for i, params in enumerate(SOME):
        alone = choose(logits[i : i + 1], u[i : i + 1], Rules.of([params]))
        assert together.tokens[i] == alone.tokens[0] and together.logprobs[i] == alone.logprobs[0]
        assert not params.filtered or together.sampling[i] == alone.sampling[0]


def test_rows_beside_a_changed_one_have_the_bits_that_they_have_alone(by_kernel):
    logp, u = torch.log_softmax(logits_of(0, 4, 300), -1), uniform_of(0, 4)
    rows = [SamplingParams(), SamplingParams(min_p=0.3), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
    change = torch.zeros(4, 300)
    change[2, ::2] = -torch.inf
    together = choose_from(logp, None, u, Rules.of(rows), change)
    others = [0, 1, 3]
    alone = choose_from(logp[others], None, u[others], Rules.of([rows[i] for i in others]))
    assert torch.equal(together.tokens[others], alone.tokens) and torch.equal(together.logprobs[others], alone.logprobs)
    assert torch.equal(together.sampling[others], alone.sampling)
    token = together.tokens[2]
    assert token % 2 and together.logprobs[2] == logp[2, token] < together.sampling[2]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_interval_never_choose_an_impossible_token(u):
    p = torch.zeros(3, 300)
    p[0, 7], p[1, 130] = 1.0, 0.3  # sums need not be 1
    p[2] = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(0)), -1)
    p[2, :5] = p[2, -5:] = 0.0
    tokens = choose_from(p.log(), None, torch.full((3,), u), Rules.of([SamplingParams()] * 3)).tokens
    assert tokens.tolist() == [7, 130, 5 if u == 0 else 294]


@pytest.mark.slow
def test_what_is_not_a_number_is_seen():
    logp = torch.full((2, 200), torch.nan)
    logp[1] = torch.log_softmax(logits_of(0, 1, 200), -1)
    params = [SamplingParams(top_p=0.9, top_k=3)] * 2
    chosen = choose_from(logp, None, torch.full((2,), 0.5), Rules.of(params))
    assert chosen.logprobs.isfinite().tolist() == [False, True]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), pytest.param(SamplingParams(top_p=0.5), marks=pytest.mark.slow)],
    ids=["plain", "filtered"],
)
def test_a_pass_that_draws_serves_filters_too(params, by_kernel):
    """Drawn in the pass by rules that hold for any row; without filters there are no log-probs after them."""
    logp, u = torch.log_softmax(logits_of(0, 3, 200), -1), uniform_of(0, 3)
    rules = Rules.of([params] * 3)
    any_row = Rules.of([SamplingParams(top_p=0.5), *[params] * 3])
    drawn = choose_from(logp, None, u, Rules(**{**vars(rules), "filtered": any_row.filtered, "any_greedy": True}))
    asked = len(by_kernel)
    found = Decoded(logp, None, u, rules, drawn).choose(None)
    assert len(by_kernel) == asked and torch.equal(found.tokens, choose_from(logp, None, u, rules).tokens)
    assert (found.sampling is None) == (not params.filtered)


def test_no_row_is_no_launch():
    assert choose_from(torch.empty(0, 5), None, torch.empty(0), Rules.of([])).tokens.tolist() == []
