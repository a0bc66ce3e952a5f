"""Corrections against the reference vectors, a float64 oracle, splits over workers and micro-batches, and bad input."""

import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.rl import oracle_mismatch as oracle
from tests.rl.fixture import GRPO, LENGTHS, Fixture
from tests.rl.strategies import EXAMPLES, Drawn, batches
from tilth import rl
from tilth.core.errors import ArgumentError, RecipeError, TokenCountError
from tilth.rl import registry
from tilth.rl.metrics import STATISTICS
from tilth.rl.rollout_correction import Corrector, _smallest

PACKINGS = [(0, None), (3, None), (0, 6), (2, 9)]
PRESETS = rl.names()["corrections"]
VERL = {
    *("decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs"),
    *("decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis"),
    *("decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs"),
    *("bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis"),
    "bypass_pg_geo_rs_token_tis",
}


@pytest.fixture(params=PACKINGS, ids=["packed", "prompted", "padded", "both"])
def data(request) -> Fixture:
    return Fixture(*request.param)


def close(actual, expected, tolerance=1.1e-6, relative=0.0):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=relative,
        equal_nan=True,
    )


def correct(data, name, **options):
    columns = {"old_logprobs": data.old, "rollout_logprobs": data.rollout}
    return rl.correct(name, **columns, mask=data.mask, lengths=data.lengths, **options)


def kept(data, found):
    return [int(data.tokens(found.mask, row).sum()) for row in range(7)]


# Reference vectors.


@pytest.mark.parametrize(
    "name, options, row, mean, effective",
    [
        ("decoupled_token_is", {"max_weight": 1.02}, [1.02, 1.02, 1, 0.980199, 0.960789, 1.02], 0.999462, 0.999455),
        (
            "decoupled_token_icepop",
            {"min_weight": 0.97, "max_weight": 1.03},
            [0, 1.020201, 1, 0.980199, 0, 0],
            0.572943,
            0.571262,
        ),
        ("decoupled_seq_is", {"max_weight": 1.05}, [1.040811] * 6, 1.014481, 0.999641),
        (
            "decoupled_seq_is",
            {"min_weight": 0.95, "max_weight": 1.05, "beyond": "zero"},
            [1.040811] * 6,
            0.939481,
            0.928306,
        ),
    ],
)
def test_weights(data, name, options, row, mean, effective):
    found = correct(data, name, **options)
    close(data.tokens(found.weights, 0), row)
    close(float(found.metrics["correction/weight"]), mean)
    close(float(found.metrics["correction/effective"]), effective)
    assert torch.equal(found.mask, data.mask > 0) and not found.bypass
    assert (found.weights[data.mask == 0] == 0).all()


def test_weights_of_mean_one(data):
    plain = correct(data, "decoupled_token_is")
    scaled = correct(data, "decoupled_token_is", normalise=True)
    close(float(scaled.metrics["correction/scale"]), 1.004715)
    close(scaled.weights * 1.004715, plain.weights, 3e-6)
    close(scaled.weights[scaled.mask].mean(), 1)
    rows = correct(data, "decoupled_seq_is", normalise=True)
    close(sum(data.tokens(rows.weights, row)[0] for row in range(7)), 7, 1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("reject", [{}, {"token_k2": 1e-9}])
def test_weights_of_mean_one_over_what_is_left(level, reject):
    """What is out of bounds is not in the loss, so its weight is not in the mean; other tests change no weight."""
    rho = torch.tensor([1.0, 1.0, 9.0, 1.5])
    found = rl.correct(
        "custom", old_logprobs=rho.log(), rollout_logprobs=torch.zeros(4), mask=torch.ones(4),
        lengths=torch.ones(4, dtype=torch.int64), level=level, max_weight=2.0, beyond="reject", normalise=True,
        reject=reject,
    )  # fmt: skip
    close(found.weights, torch.tensor([1, 1, 0, 1.5]) * 3 / 3.5)
    close(float(found.metrics["correction/scale"]), 3.5 / 3)
    assert found.mask.tolist() == [True, True, False, not reject]


@pytest.mark.parametrize(
    "statistic, bounds, expected",
    [
        ("token_k1", [0.98, 1.03], [3, 2, 3, 1, 4, 1, 2]),
        ("token_k2", 5e-4, [3, 2, 3, 1, 4, 1, 2]),
        ("token_k3", 5e-4, [3, 2, 3, 1, 4, 1, 2]),
        ("seq_sum_k1", [0.97, 1.05], [0, 4, 5, 3, 4, 0, 4]),
        ("seq_mean_k1", [0.995, 1.01], [0, 4, 5, 0, 4, 0, 4]),
        ("seq_mean_k3", 4e-4, [0, 0, 0, 0, 4, 0, 0]),
        ("seq_max_k2", 6e-4, [0, 0, 0, 0, 4, 0, 0]),
    ],
)
def test_rejection(data, statistic, bounds, expected):
    found = correct(data, "custom", reject={statistic: bounds})
    assert kept(data, found) == expected and found.weights is None
    share = 1 - sum(expected) / 28
    close(float(found.metrics["correction/rejected"]), share)
    close(float(found.metrics[f"correction/rejected/{statistic}"]), share)
    lost = sum(k < n for k, n in zip(expected, [6, 4, 5, 3, 4, 2, 4])) / 7
    close(float(found.metrics["correction/rejected_rows"]), lost)


def test_bounds_of_k1_are_of_the_inverse_ratio(data):
    """The ratio of row 0, 1.0408, is inside [0.97, 1.05]; its inverse, 0.9608, is not, and decides, as in verl."""
    close(data.tokens(correct(data, "decoupled_seq_is").weights, 0), [1.040811] * 6)
    assert kept(data, correct(data, "custom", reject={"seq_sum_k1": [0.97, 1.05]}))[0] == 0
    assert kept(data, correct(data, "custom", reject={"seq_sum_k1": [0.95, 1.03]}))[0] == 6


def test_diagnostics(data):
    found = rl.mismatch(old_logprobs=data.old, rollout_logprobs=data.rollout, mask=data.mask, lengths=data.lengths)
    expected = {
        "training_ppl": 1.821334,
        "kl": -0.004286,
        "k3": 0.000429,
        "rollout_ppl": 1.833295,
        "log_ppl_diff": -0.00619,
        "ppl_ratio": 0.99388,
        "chi2_token": 0.010293,
        "chi2_seq": 0.035942,
        "max": 0.04,
        "mean": 0.72 / 28,
    }
    for name, value in expected.items():
        close(float(found[f"mismatch/{name}"]), value)
    assert set(found) == {f"mismatch/{name}" for name in (*expected, "effective")}


def loss(data, found, name, logprobs, old, **options):
    advantages = torch.repeat_interleave(GRPO, data.lengths)
    result = rl.policy_loss(
        name, logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=found.mask, lengths=data.lengths,
        weights=found.weights, **options,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return float(result.loss.detach()), gradient


@pytest.mark.parametrize(
    "preset, options, name, loss_options, expected",
    [
        ("decoupled_token_is", {}, "ppo_clip", {"dual_clip": 3.0}, (-0.222004, 0.710468)),
        ("bypass_ppo_clip", {}, "ppo_clip", {"dual_clip": 3.0}, (-0.222004, 0.710468)),
        ("bypass_pg_is", {"level": "token", "max_weight": 1.05}, "reinforce", {}, (0.138040, 0.701392)),
    ],
)
def test_losses_with_a_correction(data, preset, options, name, loss_options, expected):
    logprobs = data.new.clone().requires_grad_()
    if preset == "bypass_pg_is":  # verl weighs with the policy that moves
        data.old = data.new
    found = correct(data, preset, **options)
    old = data.rollout if found.bypass else data.old
    value, gradient = loss(data, found, name, logprobs, old, **loss_options)
    close([value, gradient.abs().sum()], expected)
    if preset == "decoupled_token_is":
        close([gradient[data.at(0, 0)], gradient[data.at(5, 1)]], [-0.019614, 0.037758])


def test_denominators_are_those_of_what_is_left_or_of_all(data):
    logprobs = data.new.clone().requires_grad_()
    rejecting = {"reject": {"seq_mean_k3": 4e-4}}  # only row 4 is left
    for how, tokens, rows in (("kept", 4, 1), ("all", 28, 7)):
        found = correct(data, "custom", denominators=how, **rejecting)
        value, gradient = loss(data, found, "reinforce", logprobs, data.old)
        own = -float(GRPO[4]) * float(data.tokens(torch.where(data.mask > 0, data.new, 0), 4).sum())
        close(value, own / tokens)
        close(gradient.abs().sum(), 4 * float(GRPO[4]) / tokens)
        value, _ = loss(data, found, "reinforce", logprobs, data.old, aggregation="seq-mean-token-sum")
        close(value, own / rows)
        close(float(found.metrics["correction/rejected"]), 24 / 28)
    weighted = correct(data, "decoupled_token_is", denominators="all", **rejecting)
    assert float(weighted.weights.sum()) == float(data.tokens(weighted.weights, 4).sum()) > 3.8


# The float64 oracle.

thresholds = st.sampled_from([0.7, 0.9, 1.05, 1.5, 4.0])
chosen_statistics = st.dictionaries(st.sampled_from(STATISTICS), st.sampled_from([0.02, 0.3, 2.0]), max_size=3)
chosen_options = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence", "geometric"]),
        "max_weight": st.sampled_from([0.0, 1.1, 2.0]),
        "min_weight": st.sampled_from([0.0, 0.5, 0.95]),
        "beyond": st.sampled_from(["clip", "zero", "reject"]),
        "normalise": st.booleans(),
        "denominators": st.sampled_from(["kept", "all"]),
        "reject_negative": st.sampled_from([None, 0.0, 0.2]),
        "second_moment": st.sampled_from([None, 1e-3, 0.04, 0.5]),
    }
)


def bounds_of(statistics):
    """Numbers above 0 become bounds that each statistic can have."""
    return {k: ([1 / (1 + v), 1 + 2 * v] if k.endswith("_k1") else v) for k, v in statistics.items()}


def columns_of(batch: Drawn, scale: float = 0.4):
    """Log-probs of the trainer and the engine (some -inf), and advantages; NaN where masked."""
    old = batch.column(1, 1.0)
    wild = batch.column(4, 1.0)
    rollout = old + batch.column(2, scale)
    old = torch.where(wild > 2, -math.inf, old)
    rollout = torch.where(wild.abs() > 2.2, -math.inf, rollout)
    return {"old_logprobs": old, "rollout_logprobs": rollout, "advantages": batch.column(3)}


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(batches(), chosen_options, chosen_statistics)
def test_oracle(batch, options, statistics):
    columns, reject = columns_of(batch), bounds_of(statistics)
    found = rl.correct("custom", **columns, mask=batch.mask, lengths=batch.lengths, reject=reject, **options)
    weights, mask, metrics = oracle.correct(batch, columns, reject=reject, **options)
    assert found.mask.tolist() == mask
    close(found.weights, weights, 1e-9, 1e-12)
    assert {k for k in found.metrics if k.startswith("correction/")} == set(metrics)
    for name, value in metrics.items():
        close(float(found.metrics[name]), value, 1e-9, 1e-9)
    assert not found.weights.requires_grad and torch.isfinite(found.weights).all()


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(batches())
def test_oracle_of_the_diagnostics(batch):
    columns = columns_of(batch)
    del columns["advantages"]
    found = rl.mismatch(**columns, mask=batch.mask, lengths=batch.lengths)
    for name, value in oracle.diagnostics(batch, columns).items():
        torch.testing.assert_close(float(found[f"mismatch/{name}"]), value, rtol=1e-9, atol=1e-9, equal_nan=True)


# Splits.


def over_workers(name, parts, columns, **options):
    """What workers find, each in its thread, whose ``reduce`` adds up; each calls it as often as the others."""
    given: dict[int, torch.Tensor] = {}
    meet = threading.Barrier(len(parts), timeout=10)

    def one(worker):
        rows, tokens = parts[worker]

        def reduce(vector):
            given[worker] = vector
            meet.wait()
            total = torch.stack([given[w] for w in range(len(parts))]).sum(0)
            meet.wait()
            return total

        mine = {k: v[tokens] for k, v in columns.items()}
        return rl.correct(name, **mine, mask=rows.mask, lengths=rows.lengths, reduce=reduce, **options)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, range(len(parts))))


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(batches(), chosen_options, chosen_statistics, st.data())
def test_two_workers_find_what_one_finds(batch, options, statistics, data):
    columns, reject = columns_of(batch), bounds_of(statistics)
    whole = rl.correct("custom", **columns, mask=batch.mask, lengths=batch.lengths, reject=reject, **options)
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 1), min_size=len(batch.lengths), max_size=len(batch.lengths)))
    )
    rows = [torch.where(owner == worker)[0] for worker in (1, 0)]
    parts = [(batch.pick(r), batch.token_index(r)) for r in rows]
    found = over_workers("custom", parts, columns, reject=reject, **options)
    for (_, tokens), mine in zip(parts, found):
        assert torch.equal(mine.mask, whole.mask[tokens])
        close(mine.weights, whole.weights[tokens], 1e-12, 1e-12)
    merged = rl.merge_metrics(mine.metrics for mine in found)
    assert list(merged) == list(whole.metrics)
    for name, metric in whole.metrics.items():
        close(float(merged[name]), float(metric), 1e-9 * max(1, abs(float(metric))))


def test_without_reduce_the_mean_would_be_of_one_worker():
    """The test above can fail: what ``reduce`` is for."""
    data = Fixture()
    alone = rl.correct(
        "decoupled_token_is", normalise=True, old_logprobs=data.old[:6], rollout_logprobs=data.rollout[:6],
        mask=data.mask[:6], lengths=data.lengths[:1],
    )  # fmt: skip
    assert abs(float(alone.metrics["correction/scale"]) - 1.004715) > 1e-3


@settings(max_examples=examples(20), deadline=None)
@given(batches(), st.permutations(range(9)))
def test_diagnostics_of_micro_batches_in_any_order_are_those_of_the_batch(batch, order):
    columns = columns_of(batch)
    del columns["advantages"]
    whole = rl.mismatch(**columns, mask=batch.mask, lengths=batch.lengths)
    parts = []
    for row in [torch.tensor([r]) for r in order if r < len(batch.lengths)]:
        mine, tokens = batch.pick(row), batch.token_index(row)
        parts.append(rl.mismatch(**{k: v[tokens] for k, v in columns.items()}, mask=mine.mask, lengths=mine.lengths))
    for name, metric in rl.merge_metrics(parts).items():
        close(float(metric), float(whole[name]), 1e-9 * max(1, abs(float(metric))))
        close(float(pickle.loads(pickle.dumps(metric))), float(metric), 0)


def test_an_effective_sample_size_merges_with_its_like_only():
    found = correct(Fixture(), "decoupled_token_is").metrics
    with raises(ArgumentError, "other"):
        found["correction/effective"].merge(found["correction/weight"])


# Edges.


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("case", ["no rows", "empty rows", "all masked", "one token"])
def test_batches_with_next_to_nothing(name, case):
    lengths = torch.tensor({"no rows": [], "empty rows": [0, 0], "all masked": [2, 1], "one token": [0, 2]}[case])
    total = int(lengths.sum())
    mask = torch.zeros(total, dtype=torch.bool)
    if case == "one token":
        mask[1] = True
    column = torch.where(mask, -0.5, torch.nan)
    found = rl.correct(
        name, old_logprobs=column, rollout_logprobs=column, advantages=column, mask=mask, lengths=lengths.long()
    )
    assert found.mask.tolist() == mask.tolist()
    if found.weights is not None:
        assert found.weights.tolist() == mask.float().tolist()
    same = float(found.metrics["mismatch/kl"])
    assert same == 0 if case == "one token" else math.isnan(same)


def one_row(old, rollout, **options):
    old, rollout = torch.tensor(old, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    columns = {"old_logprobs": old, "rollout_logprobs": rollout, "mask": torch.ones(len(old))}
    return rl.correct("custom", **columns, lengths=torch.tensor([len(old)]), **options)


def test_log_ratios_are_clamped():
    far = one_row([-50.0, -1.0, -1.0], [-1.0, -50.0, -30.0], level="token", max_weight=0)
    close(far.weights, [math.exp(-20), math.exp(20), math.exp(20)], 1e-3)
    assert float(far.metrics["mismatch/max"]) == 49.0  # that one is not
    both = one_row([-1.0, -1.0], [-50.0, -50.0], level="sequence", max_weight=0)
    close(both.weights, [math.exp(20)] * 2, 1e-3)


def test_impossible_tokens():
    never = -math.inf
    found = one_row([never, -1.0, never, -1.0], [-1.0, never, never, -1.0], level="token", max_weight=0)
    close(found.weights, [math.exp(-20), math.exp(20), 1.0, 1.0], 1e-3)
    assert float(found.metrics["mismatch/max"]) == math.inf
    assert all(math.isfinite(float(found.metrics[f"mismatch/{k}"])) for k in ("kl", "k3", "chi2_token", "ppl_ratio"))
    left = one_row([never, -1.0, never, -1.0], [-1.0, never, never, -1.0], reject={"token_k2": 1.0})
    assert left.mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_nan_that_counts_is_never_rejected_in_silence(statistic):
    bounds = bounds_of({statistic: 0.1})
    found = one_row([math.nan, -1.0], [-1.0, -1.0], level="token", reject=bounds)
    assert found.mask[0] and math.isnan(float(found.weights[0]))
    assert math.isnan(float(found.metrics["mismatch/max"]))


def test_negative_sequences():
    """Three rows that mu finds likelier by 0.5 a token; only the one with a negative advantage goes."""
    old, rollout = torch.full((7,), -1.0), torch.full((7,), -0.5)
    rollout[6] = -1.0
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, 0.0, -1.0])
    lengths = torch.tensor([2, 2, 2, 1])
    given = {"old_logprobs": old, "rollout_logprobs": rollout, "mask": torch.ones(7), "lengths": lengths}
    found = rl.correct("decoupled_negative", reject_negative=0.4, advantages=advantages, **given)
    assert found.mask.tolist() == [False, False, True, True, True, True, True]
    close(float(found.metrics["correction/rejected/negative"]), 2 / 7)
    kept_all = rl.correct("decoupled_negative", reject_negative=0.6, advantages=advantages, **given)
    assert kept_all.mask.all()
    with raises(RecipeError, "advantages"):
        rl.correct("decoupled_negative", **given)


def farthest_left_out(log_ratios, advantages, bound):
    """M2PO in numpy: by size, the largest first, until the mean of the others is within the bound."""
    kept = np.ones(len(log_ratios), dtype=bool)
    order = np.argsort(-(log_ratios**2))
    for place in order[(advantages * log_ratios > 0)[order]]:
        pushed = kept & (advantages * log_ratios > 0)
        if np.mean(log_ratios[pushed] ** 2) <= bound:
            break
        kept[place] = False
    return kept


@pytest.mark.parametrize("bound", [1e-5, 0.04, 0.3, 100.0])
@pytest.mark.parametrize("stale", [1e-3, 0.2, 3.0])
def test_second_moment(bound, stale):
    """Weights, and value and gradient of sum(M * pi / mu * A) / all tokens, against numpy in float64."""
    random = np.random.default_rng(3)
    old, advantages = random.normal(-2, 1, 400), random.normal(0, 1, 400)
    rollout = old - stale * random.standard_t(2, 400)
    log_ratios = np.clip(old - rollout, -20, 20)
    mask = farthest_left_out(log_ratios, advantages, bound)
    given = {"mask": torch.ones(400), "lengths": torch.full((40,), 10), "advantages": torch.from_numpy(advantages)}
    columns = {"old_logprobs": torch.from_numpy(old), "rollout_logprobs": torch.from_numpy(rollout)}
    found = rl.correct("decoupled_m2po", second_moment=bound, **columns, **given)
    assert found.mask.all()  # what is left out stays in the denominator
    close(found.weights, mask * np.exp(log_ratios), 0, 1e-12)
    close(float(found.metrics["correction/rejected/second_moment"]), np.mean(~mask))
    logprobs = columns["old_logprobs"].clone().requires_grad_()
    loss = rl.policy_loss(
        "ppo_clip", logprobs=logprobs, old_logprobs=columns["old_logprobs"], weights=found.weights, **given
    )
    loss.loss.backward()
    each = mask * np.exp(log_ratios) * advantages / 400
    close(-loss.loss.item(), each.sum(), 1e-12, 1e-12)
    close(-logprobs.grad, each, 1e-12, 1e-12)


def within_a_cap(squares, bound):
    """Its authors' code: those up to the greatest t of the given squares with mean(min(squares, t)) <= bound."""
    caps = [t for t in squares if np.minimum(squares, t).mean() <= bound]
    return squares <= max(caps, default=-1.0)


@pytest.mark.parametrize("stale", [0.05, 0.2, 1.0, 3.0])
def test_second_moment_keeps_what_its_authors_code_keeps(stale):
    """Its clip is nowhere farther out than our mask; both let all pass where the second moment is within the bound."""
    random = np.random.default_rng(5)
    gaps = stale * random.standard_t(3, 600)
    columns = {"old_logprobs": torch.from_numpy(gaps), "rollout_logprobs": torch.zeros(600, dtype=torch.float64)}
    given = {"mask": torch.ones(600), "lengths": torch.full((60,), 10), "advantages": torch.ones(600)}
    ours = rl.correct("decoupled_m2po", **columns, **given).weights.numpy() > 0
    further = gaps > 0
    theirs = within_a_cap(gaps[further] ** 2, 0.04)
    assert ours[~further].all() and (ours[further] >= theirs).all()
    assert ours.all() == theirs.all() == (np.mean(gaps[further] ** 2) <= 0.04) == (stale == 0.05)


def test_second_moment_learns_from_what_clipping_hides():
    """A stale batch, log ratios of 0.2: a ratio to mu clipped at 0.2 masks half of the tokens that count, M2PO none;
    one outlier goes, and no token that the update brings back to mu, however far."""
    random = np.random.default_rng(0)
    gaps = random.normal(0, 0.2, 2000)
    gaps[:2] = 9.0, -9.0
    advantages = np.ones(2000)
    columns = {"old_logprobs": torch.from_numpy(gaps), "rollout_logprobs": torch.zeros(2000, dtype=torch.float64)}
    given = {"mask": torch.ones(2000), "lengths": torch.tensor([2000]), "advantages": torch.from_numpy(advantages)}
    found = rl.correct("decoupled_m2po", second_moment=0.05, **columns, **given)
    assert (found.weights == 0).nonzero().flatten().tolist() == [0]
    assert np.mean(np.exp(gaps[gaps > 0]) > 1.2) > 0.3


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.lists(st.floats(0, 400) | st.sampled_from([0.0, 0.25, 1e-300, 400.0]), max_size=30), st.floats(1e-6, 500))
def test_smallest_values_within_a_mean(values, bound):
    """Of any values, ties among them: all that are kept are below all that are not, and one more is too many."""
    found = _smallest(torch.tensor(values, dtype=torch.float64), bound, lambda vector: vector).tolist()
    kept = [v for v, k in zip(values, found) if k]
    lost = [v for v, k in zip(values, found) if not k]
    if kept:
        assert math.fsum(kept) / len(kept) <= bound * (1 + 1e-12)
    if lost:
        more = kept + [v for v in lost if v == min(lost)]
        assert max(kept, default=-1) < min(lost) and math.fsum(more) / len(more) > bound * (1 - 1e-12)


def test_masked_importance_leaves_out_what_truncation_holds():
    data = Fixture()
    truncated = correct(data, "decoupled_seq_is", max_weight=1.03)
    masked = correct(data, "decoupled_seq_mis", max_weight=1.03)
    held = [float(data.tokens(truncated.weights, row).max()) == pytest.approx(1.03) for row in range(7)]
    assert held == [kept == 0 for kept in kept(data, masked)] and any(held) and not all(held)
    assert float(masked.metrics["correction/above"]) == float(masked.metrics["correction/rejected"])
    again = torch.where(masked.mask, masked.weights, 0)
    close(again, torch.where(masked.mask, truncated.weights, 0), 0)


def test_weights_in_the_precision_of_the_log_probs():
    data = Fixture()
    assert correct(data, "decoupled_token_is").weights.dtype == torch.float32
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        data.old, data.rollout = data.old.to(dtype), data.rollout.to(dtype)
        assert correct(data, "decoupled_token_is").weights.dtype == expected


def test_nothing_has_a_gradient():
    data = Fixture()
    data.old.requires_grad_()
    found = correct(data, "decoupled_token_is", normalise=True)
    assert not found.weights.requires_grad
    assert not any(isinstance(m.total, torch.Tensor) and m.total.requires_grad for m in found.metrics.values())


# Presets, and what is wrong.


def test_presets():
    assert set(PRESETS) == VERL | {"none", "custom", "decoupled_seq_mis", "decoupled_negative", "decoupled_m2po"}
    assert len(VERL) == 18
    for name in PRESETS:
        assert registry.lookup("corrections", name).__doc__
    assert rl.options("corrections", "none") == {}
    icepop = rl.options("corrections", "decoupled_token_icepop")
    assert (icepop["min_weight"], icepop["max_weight"], icepop["beyond"]) == (0.5, 5.0, "zero")
    assert rl.options("corrections", "decoupled_seq_is_rs")["reject"] == {"seq_sum_k1": (0.5, 2.0)}
    assert rl.options("corrections", "decoupled_geo_rs")["reject"] == {"seq_mean_k1": (0.999, 1.001)}
    assert rl.options("corrections", "bypass_ppo_clip_k3_rs")["reject"] == {"seq_mean_k3": 0.01}


def test_the_mask_of_negative_sequences_says_how_it_differs_from_its_source():
    """It knows mu and old alone: a policy that moves on changes nothing, where DeepSeek-V3.2's would."""
    entry = registry.lookup("corrections", "decoupled_negative")
    assert set(entry().needs) == {"rollout_logprobs", "old_logprobs", "advantages"}
    said = (entry.__doc__ or "", entry.model_fields["reject_negative"].description or "")
    assert all("DeepSeek-V3.2" in text and "the policy that moves" in text for text in said)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_a_step(name):
    data = Fixture(2)
    advantages = torch.repeat_interleave(GRPO, data.lengths)
    entry = rl.check(name, ["rollout_logprobs", "old_logprobs", "advantages"], kind="corrections")
    found = correct(data, name, advantages=advantages)
    assert found.bypass == name.startswith("bypass")
    assert (found.weights is not None) == any(part in name for part in ("_is", "tis", "icepop", "mis", "m2po"))
    loss_name = "reinforce" if name.startswith("bypass_pg") else "ppo_clip"
    entry.fits(rl.loss_entry(loss_name))
    logprobs = data.new.clone().requires_grad_()
    value, gradient = loss(data, found, loss_name, logprobs, data.rollout if found.bypass else data.old)
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    assert (gradient[~found.mask] == 0).all()
    assert bool(found.mask.any()) == bool(gradient.abs().sum() > 0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_every_option(name):
    if name == "none":
        with raises(RecipeError, "none.max_weight"):
            rl.check(name, [], {"max_weight": 2.0})
        return
    options = {
        "level": "geometric",
        "max_weight": 3.0,
        "min_weight": 0.1,
        "beyond": "reject",
        "normalise": True,
        "bypass": False,
    }
    options |= {"reject": {"token_k2": 2.0}, "reject_negative": 1.0, "denominators": "all", "made_for": ""}
    options |= {"second_moment": 0.1}
    columns = ["rollout_logprobs", "old_logprobs", "advantages"]
    assert rl.check(name, columns, options).model_dump() == rl.check("custom", columns, options).model_dump()


@pytest.mark.parametrize(
    "name, needs, scope, bypasses",
    [
        ("none", (), "token-local", True),
        ("custom", ("rollout_logprobs", "old_logprobs"), "token-local", False),
        ("decoupled_token_is", ("rollout_logprobs", "old_logprobs"), "token-local", False),
        ("bypass_ppo_clip", ("rollout_logprobs",), "token-local", True),
        ("bypass_ppo_clip_k3_rs", ("rollout_logprobs", "old_logprobs"), "token-local", False),
        ("decoupled_negative", ("rollout_logprobs", "old_logprobs", "advantages"), "token-local", False),
        ("decoupled_m2po", ("rollout_logprobs", "old_logprobs", "advantages"), "global moments", False),
    ],
)
def test_what_they_need(name, needs, scope, bypasses):
    entry = rl.check(name, ["rollout_logprobs", "old_logprobs", "advantages"])
    assert (entry.needs, entry.scope, rl.bypasses(name)) == (needs, scope, bypasses)
    assert isinstance(entry, Corrector) == (name != "none")
    for column in needs:
        with raises(RecipeError, column):
            rl.check(name, [c for c in needs if c != column])


def test_normalised_weights_are_of_the_global_batch():
    columns = ["rollout_logprobs", "old_logprobs"]
    assert rl.check("decoupled_token_is", columns, {"normalise": True}).scope == "global moments"


def test_a_bypass_without_the_trainers_log_probs():
    data = Fixture()
    given = {"rollout_logprobs": data.rollout, "mask": data.mask, "lengths": data.lengths, "old_logprobs": None}
    found = rl.correct("bypass_ppo_clip", **given)
    assert found.bypass and found.weights is None and found.metrics == {}
    assert torch.equal(found.mask, data.mask > 0)
    with raises(RecipeError, "old_logprobs"):
        rl.correct("bypass_pg_is", **given)
    with raises(RecipeError, "rollout_logprobs"):
        rl.correct("decoupled_token_is", **given | {"rollout_logprobs": None, "old_logprobs": data.old})
    assert rl.correct("none", **given | {"rollout_logprobs": None}).metrics == {}


@pytest.mark.parametrize(
    "name, options, key",
    [
        ("decoupled_token_iss", {}, "corrections"),
        (
            "decoupled_token_is",
            {"max_weights": 2},
            "decoupled_token_is.max_weights",
        ),
        ("decoupled_token_is", {"max_weight": -1}, "decoupled_token_is.max_weight"),
        ("decoupled_token_is", {"max_weight": math.nan}, "decoupled_token_is.max_weight"),
        ("decoupled_token_is", {"level": "row"}, "decoupled_token_is.level"),
        (
            "decoupled_token_is",
            {"min_weight": 3},
            "decoupled_token_is.min_weight",
        ),
        ("decoupled_geo_rs", {"max_weight": 3}, "decoupled_geo_rs.max_weight"),
        ("custom", {"normalise": True}, "custom.normalise"),
        ("custom", {"reject": {"seq_mean_k4": 1}}, "custom.reject.seq_mean_k4"),
        ("custom", {"reject": {"seq_max_k1": 2}}, "custom.reject.seq_max_k1"),
        ("custom", {"reject": {"token_k1": 0.9}}, "custom.reject.token_k1"),
        ("custom", {"reject": {"token_k1": 0}}, "custom.reject.token_k1"),
        ("custom", {"reject": {"token_k1": [1.2, 0.9]}}, "custom.reject.token_k1"),
        ("custom", {"reject": {"token_k1": [0, 2]}}, "custom.reject.token_k1"),
        (
            "custom",
            {"reject": {"token_k3": [0.1, 2]}},
            "custom.reject.token_k3",
        ),
        ("custom", {"reject": {"token_k3": 0}}, "custom.reject.token_k3"),
        ("custom", {"reject": {"token_k3": "x"}}, "custom.reject.token_k3.float"),
        ("custom", {"reject_negative": -1}, "custom.reject_negative"),
        ("custom", {"second_moment": 0}, "custom.second_moment"),
    ],
)
def test_what_is_wrong_is_named(name, options, key):
    with raises(RecipeError, key) as error:
        rl.check(name, ["rollout_logprobs", "old_logprobs"], options, kind="corrections")
    assert "\n" not in str(error.value)


def test_a_column_of_another_size_is_named():
    data = Fixture()
    data.rollout = data.rollout[1:]
    with raises(TokenCountError, "rollout_logprobs.shape"):
        correct(data, "decoupled_token_is")
    data = Fixture()
    with raises(TokenCountError, "advantages.shape"):
        correct(data, "none", advantages=torch.zeros(len(LENGTHS)))
