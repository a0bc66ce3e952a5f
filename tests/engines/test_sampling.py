"""Sampling against brute force in float64, its distribution, and that a row never depends on its neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.reference import draw
from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.engines import sampling
from tilth.engines.request import SamplingParams
from tilth.engines.sampling import Rules, argmax, choose, choose_from, group_mass, inverse_cdf, largest, thresholds


def logits_of(seed, rows, vocab, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def uniform_of(seed, rows):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 10_000), st.sampled_from([7, 64, 100, 700]))
def test_choices_and_both_logprobs_equal_brute_force(params, seed, vocab):
    logits, u = logits_of(seed, len(params), vocab), uniform_of(seed + 1, len(params))
    chosen = choose(logits, u, Rules.of(params))
    assert (chosen.sampling is None) == (not any(p.filtered for p in params))
    for i, p in enumerate(params):
        row = logits[i].double().numpy()
        token, q = draw(row, u[i].item(), p)
        got = int(chosen.tokens[i])
        if got != token:  # only where the draw falls on the edge of a slice, within rounding
            neighbours = [draw(row, min(max(u[i].item() + d, 0), 1 - 1e-9), p)[0] for d in (-2e-6, 2e-6)]
            assert got in neighbours
            continue
        scaled = row / (p.temperature or 1.0)
        assert chosen.logprobs[i].item() == pytest.approx(scaled[token] - np.logaddexp.reduce(scaled), abs=1e-5)
        if p.filtered:
            assert chosen.sampling[i].item() == pytest.approx(np.log(q), abs=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(PARAMS, min_size=2, max_size=9), st.integers(0, 10_000), st.data())
def test_a_row_does_not_depend_on_the_others(params, seed, data):
    vocab = 300
    logits, u = logits_of(seed, len(params), vocab).round(decimals=1), uniform_of(seed, len(params))  # many ties
    together = choose(logits, u, Rules.of(params))
    i = data.draw(st.integers(0, len(params) - 1))
    alone = choose(logits[i : i + 1], u[i : i + 1], Rules.of(params[i : i + 1]))
    assert together.tokens[i] == alone.tokens[0]
    assert together.logprobs[i] == alone.logprobs[0]
    if params[i].filtered:
        assert together.sampling[i] == alone.sampling[0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=150, top_p=0.9)], ids=["plain", "filtered"])
def test_draws_on_the_edge_of_a_token_do_not_depend_on_the_other_rows(params):
    """Rows with other filters add steps to the sampling of all, of which no bit may show."""
    logits = logits_of(7, 1, 300).expand(301, -1)
    ends = torch.softmax(logits[0].double(), -1).cumsum(-1).float().clamp(max=1 - 2.0**-24)
    rows = [params] * 300
    alone = choose(logits[:300], ends, Rules.of(rows))
    for other in (SamplingParams(top_k=250, min_p=0.1), SamplingParams(top_p=0.999, top_k=290)):
        together = choose(logits, torch.cat([ends, ends[:1]]), Rules.of([*rows, other]))
        assert torch.equal(together.tokens[:300], alone.tokens)
        assert not params.filtered or torch.equal(together.sampling[:300], alone.sampling)
    mass = torch.zeros(301, 5).index_fill(1, torch.tensor(3), 1.0)
    known = choose_from(torch.log_softmax(logits, -1), mass, torch.zeros(301), Rules.of([*rows, other]))
    assert (known.tokens[:300] // 64).eq(0 if params.filtered else 3).all()  # by the mass that it has without others


def test_rows_beside_a_changed_one_are_drawn_by_the_kernel_too(monkeypatch):
    """A schema changes the log-probs of its row alone; what is returned are those before."""
    asked = []

    class Kernel:
        @staticmethod
        def choose(logp, uniform, *rules):
            asked.append(logp)
            return torch.arange(3), torch.full((3,), 7.0), uniform

    monkeypatch.setattr(sampling, "chosen", lambda name, x: Kernel)
    logp, change, u = torch.log_softmax(logits_of(0, 3, 100), -1), torch.zeros(3, 100), uniform_of(0, 3)
    change[1, :50] = -torch.inf
    rules = Rules.of([SamplingParams(top_p=0.9)] * 3)
    found = choose_from(logp, None, u, rules, change)
    assert torch.equal(asked[0][::2], logp[::2]) and torch.equal(asked[0][1], torch.log_softmax(logp + change, -1)[1])
    assert torch.equal(found.logprobs, logp.diagonal()) and torch.equal(found.sampling, u)
    assert choose_from(logp, None, u, rules).logprobs.eq(7).all()


@pytest.mark.parametrize("vocab", [pytest.param(n, marks=[pytest.mark.slow] * (n != 65)) for n in (5, 64, 65, 200)])
def test_samples_follow_the_distribution(vocab):
    """Chi-square of 200,000 draws: under the 99.9th percentile (Wilson-Hilferty)."""
    p = torch.softmax(logits_of(3, 1, vocab, 1.0), -1)
    n = 200_000
    counts = torch.bincount(inverse_cdf(p.log().expand(n, -1), None, uniform_of(4, n)), minlength=vocab).double()
    expected = p[0].double() * n
    chi = ((counts - expected) ** 2 / expected).sum().item()
    df = vocab - 1
    assert chi < df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3


def test_filtered_samples_follow_the_renormalised_distribution():
    params, n = SamplingParams(top_k=5, top_p=0.9), 50_000
    logits = logits_of(5, 1, 50, 1.0)
    chosen = choose(logits.expand(n, -1), uniform_of(6, n), Rules.of([params] * n))
    kept = torch.unique(chosen.tokens)
    top = torch.softmax(logits[0].topk(5).values, -1)
    assert len(kept) == int((top.cumsum(-1) - top < 0.9).sum())
    share = torch.bincount(chosen.tokens, minlength=50)[kept] / n
    p = torch.softmax(logits[0][kept], -1)
    assert torch.allclose(share, p, atol=0.01)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("hot", [0, 63, 64, 130])
def test_the_ends_of_the_interval_never_choose_an_impossible_token(u, hot):
    p = torch.zeros(3, 131)
    p[:, hot] = 1.0
    p[1, hot] = 0.3  # sums need not be 1
    p[2] = torch.softmax(torch.randn(131, generator=torch.Generator().manual_seed(hot)), -1)
    p[2, :5] = p[2, -5:] = 0.0
    tokens = inverse_cdf(p.log(), None, torch.full((3,), u))
    assert tokens[:2].tolist() == [hot, hot]
    assert tokens[2] == (5 if u == 0 else 125)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True, width=32), st.integers(1, 300))
def test_never_a_token_of_probability_zero(seed, u, vocab):
    p = torch.softmax(logits_of(seed, 1, vocab, 30.0), -1)
    p[p < p.median()] = 0
    token = inverse_cdf(p.log(), None, torch.tensor([u]))
    assert p[0, token] > 0


def test_top_p_sorts_the_vocabulary_only_if_it_must(monkeypatch):
    """A flat distribution over 1,000 tokens needs more than the 256 likeliest; a steep one does not."""
    widths = []
    monkeypatch.setattr(sampling, "largest", lambda values, k: widths.append(k) or largest(values, k))
    rules = Rules.of([SamplingParams(top_p=0.9)])
    flat, steep = (torch.log_softmax(logits_of(0, 1, 1000, spread), -1) for spread in (0.1, 8.0))
    assert (flat >= thresholds(flat, rules)[:, None]).sum() > 800
    assert widths == [256, 1000]
    assert (steep >= thresholds(steep, rules)[:, None]).sum() < 100
    assert widths == [256, 1000, 256]


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert thresholds(logits, Rules.of([SamplingParams(top_k=2)])).item() == 1.0


def test_scaling_by_a_row_of_temperatures_equals_scaling_by_a_number():
    """The trainer divides by a number, the engine by one per row: same bits, or parity would be lost."""
    logits = logits_of(1, 64, 1000)
    for t in (0.7, 0.9, 1.0, 1.3):
        assert torch.equal(logits / torch.full((64, 1), t), logits / t)


@pytest.mark.parametrize(
    "key, value",
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", 1e-300), ("top_k", -1), ("top_p", 0.0),
     ("top_k", 2**63), ("stop_tokens", (2**63,)), ("top_p", 1e-300), ("min_p", 1.5), ("stop", ("",)), ("stop", "text")],
)  # fmt: skip
def test_impossible_params_are_named(key, value):
    with raises(DataError, key):
        SamplingParams(**{key: value})


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 5, 64, 100, 700]), st.integers(1, 5))
def test_argmax_is_the_first_greatest(seed, vocab, rows):
    values = logits_of(seed, rows, vocab, 1.0).round()  # many ties
    assert argmax(values).tolist() == [int(np.argmax(row)) for row in values.numpy()]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([64, 700, 4096]), st.sampled_from([1, 5, 60]))
def test_largest_is_topk(seed, vocab, count):
    values = logits_of(seed, 3, vocab, 2.0).round(decimals=1)
    assert torch.equal(largest(values, count), values.topk(count).values)


def test_mass_known_already_or_computed_in_pieces_is_the_same():
    logp, u = torch.log_softmax(logits_of(0, 300, 1000), -1), uniform_of(1, 300)
    assert torch.equal(inverse_cdf(logp, group_mass(logp), u), inverse_cdf(logp, None, u))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_summed_up_by_parts_on_a_cpu_only(monkeypatch, device):
    """Elsewhere, of a large vocabulary, every row would be kernels of its own."""
    seen = []
    monkeypatch.setattr(sampling, "group_mass", lambda logp: seen.append(len(logp)) or group_mass(logp))
    inverse_cdf(torch.full((6, 1 << 16), -11.0, device=device), None, torch.zeros(6, device=device))
    assert seen == ([2, 2, 2] if device == "cpu" else [6])
