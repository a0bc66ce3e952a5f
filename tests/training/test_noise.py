import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.cutting import micros
from tests.training.test_engine import batch, model, nan_loss, weights
from tests.training.test_packed import batch as samples
from tests.training.test_packed import group
from tilth.config.schema import OptimizerConfig
from tilth.rl.metrics import Metric
from tilth.runs.metrics import Metrics
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.noise import NoiseScale, estimate

WATCH = ("noise_scale",)


def engine(watch=WATCH, micro_tokens=9, **more):
    return TrainEngine(model(), OptimizerConfig(lr=0.02), total_steps=9, micro_tokens=micro_tokens, watch=watch, **more)


def learn(e, seed=0, lengths=(5, 3, 9, 4, 7)):
    tokens, mask = batch(lengths, seed)
    return e.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))


# ---- the estimate ----


def drawn(rng, sizes, gradient, spread):
    """Squared norms as a step has them: of parts of these many sequences, and of their sum, the batch's mean."""
    noise = [rng.normal(size=(n, len(gradient))) * spread for n in sizes]
    total = sum(sizes)
    parts = [(gradient + x).sum(0) / total for x in noise]
    return [float(p @ p) for p in parts], float(sum(parts) @ sum(parts))


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4), (1, 2, 13), (30, 2), (5, 0, 11)])
def test_it_is_unbiased_for_gradients_of_known_noise(sizes):
    """Mean over many steps within four standard errors, for parts of any sizes, one of them empty."""
    rng = np.random.default_rng(7)
    gradient = np.array([0.5, -1.0, 0.25, 0.0, 0.75])
    spread = np.array([1.0, 2.0, 0.5, 3.0, 0.1])
    total = sum(sizes)
    found = []
    for _ in range(6000):
        squares, whole = drawn(rng, sizes, gradient, spread)
        found.append(estimate(squares, sizes, whole, total))
    for values, truth in zip(np.array(found).T, (float(spread @ spread), float(gradient @ gradient))):
        error = values.std() / np.sqrt(len(values))
        assert abs(values.mean() - truth) < 4 * error, (values.mean(), truth, error)
        assert 4 * error < 0.5 * truth  # the test could fail


def test_counting_unequal_parts_as_equal_would_be_seen():
    rng = np.random.default_rng(7)
    gradient, spread, sizes = np.ones(3), np.full(3, 0.5), (1, 2, 13)
    found = []
    for _ in range(2000):
        squares, whole = drawn(rng, sizes, gradient, spread)
        found.append(estimate(squares, (1, 1, 1), whole, sum(sizes)).trace)
    assert np.mean(found) > 5 * float(spread @ spread)


@given(
    st.floats(0.01, 100), st.floats(0.01, 100), st.integers(2, 9), st.integers(1, 50), st.sampled_from([1.0, 0.01, 7])
)
def test_equal_parts_give_the_papers_estimates(small, big, parts, each, unit):
    """arXiv 1812.06162, equations A.1 and A.2, with B_small = one part and B_big = the batch."""
    b_big, b_small = parts * each, each
    squares = [small / parts**2] * parts  # of a share; the paper's small gradient is a mean: ``parts`` times the share
    found = estimate(squares, [unit] * parts, big, b_big)
    signal = (b_big * big - b_small * small) / (b_big - b_small)
    trace = (small - big) / (1 / b_small - 1 / b_big)
    assert found.signal == pytest.approx(signal, rel=1e-6, abs=1e-9 * (small + big))
    assert found.trace == pytest.approx(trace, rel=1e-6, abs=1e-7 * b_big * (small + big))


def test_equal_gradients_have_no_noise_and_one_part_says_nothing():
    assert estimate([4.0, 4.0], [1, 1], 16.0, 10) == (0.0, 16.0)
    assert estimate([4.0], [1], 4.0, 10) is None and estimate([4.0, 0.0], [1, 0], 4.0, 10) is None
    assert estimate([], [], 0.0, 0) is None


def test_averages_are_weighted_means_of_the_steps():
    rng = np.random.default_rng(0)
    noise, seen = NoiseScale(decay=0.8), []
    for _ in range(6):
        squares, whole = drawn(rng, (3, 5), np.ones(2), np.ones(2))
        noise._squares, noise._weights = [torch.tensor(s, dtype=torch.float64) for s in squares], [3.0, 5.0]
        found = noise.take(whole**0.5, 8)
        seen.append(estimate(squares, (3, 5), whole, 8))
        kept = 0.8 ** np.arange(len(seen))[::-1]
        expected = (kept[:, None] * np.array(seen)).sum(0) / kept.sum()
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_many_steps_find_the_noise_scale_that_was_put_in():
    rng, noise = np.random.default_rng(3), NoiseScale(decay=0.999)
    gradient, spread = np.full(4, 0.5), np.full(4, 3.0)
    for _ in range(4000):
        squares, whole = drawn(rng, (7, 3, 6, 16), gradient, spread)
        noise._squares, noise._weights = [torch.tensor(s, dtype=torch.float64) for s in squares], [7, 3, 6, 16]
        found = noise.take(whole**0.5, 32)
    assert found.trace / found.signal == pytest.approx(36.0 / 1.0, rel=0.15)


# ---- in the engine ----


def test_it_equals_gradients_taken_one_micro_batch_at_a_time():
    e, plain = engine(), model()
    start = {n: p.detach().clone() for n, p in e.model.named_parameters()}
    found = learn(e)
    from tilth.training.packed import model_input, score

    tokens, mask = batch()
    plain.load_state_dict(start)
    squares, shares, whole = [], [], 0.0
    for _, micro in micros(tokens, mask, {}, 9, torch.device("cpu")):
        plain.zero_grad()
        score(plain, micro, plain(*model_input(micro)), temperature=1.0, entropy=False)
        (-micro.logprobs.sum() / mask.sum()).backward()
        g = torch.cat([p.grad.flatten() for p in plain.parameters()]).double()
        squares.append(float(g @ g))
        shares.append(int(micro.mask.sum()))
        whole = whole + g
    expected = estimate(squares, shares, float(whole @ whole), 5)
    assert len(squares) >= 3
    assert float(found.metrics["noise/trace"]) == pytest.approx(expected.trace, rel=1e-4)
    assert float(found.metrics["noise/signal"]) == pytest.approx(expected.signal, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("extra", [{}, {"ema": 0.9}, {"on_nan": "skip"}])
def test_watching_changes_no_bit_where_the_split_is_the_same(extra):
    plain, watched = engine((), **extra), engine(**extra)
    for seed in range(4):
        a, b = learn(plain, seed), learn(watched, seed)
        assert (a.loss, a.grad_norm, a.lr, a.computed) == (b.loss, b.grad_norm, b.lr, b.computed)
        assert "noise/trace" in b.metrics and "noise/trace" not in a.metrics
    assert torch.equal(weights(plain), weights(watched))


def test_a_single_micro_batch_is_split_in_two():
    e = engine(micro_tokens=10_000)
    found = learn(e)
    assert float(found.metrics["noise/trace"]) > 0
    whole = learn(engine((), micro_tokens=10_000))
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)


def test_one_tree_is_split_too():
    tokens, mask = samples(group([1, 2, 3, 4, 5, 6], [[7] * 6, [8] * 6, [9] * 6, [7, 8, 9] * 2]))
    found = engine(micro_tokens=10_000).update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    assert float(found.metrics["noise/trace"]) > 0 and found.computed == 36  # the prompt twice


def test_one_sequence_cannot_be_split_and_says_nothing():
    e = engine(micro_tokens=10_000)
    found = learn(e, lengths=(8,))
    assert not found.skipped and "noise/trace" not in found.metrics
    assert "noise/trace" in learn(e).metrics


def test_what_a_loss_says_it_weighs_is_taken():
    """A loss that means over sequences is shared out by sequences, not by tokens."""
    tokens, mask = batch((4, 4, 4, 14))

    def by_sequence(told):
        def loss(micro):
            starts = torch.repeat_interleave(torch.arange(len(micro.lengths)), micro.lengths)
            count = torch.zeros(len(micro.lengths)).index_add(0, starts, micro.mask.float())
            value = -(micro.logprobs / count[starts]).sum() / 4
            return value, {"weight": Metric(len(micro.lengths) / 4, 1, "sum")} if told else {}

        return loss

    told, silent = (engine(micro_tokens=14).update(tokens, mask, {}, by_sequence(t)) for t in (True, False))
    assert float(told.metrics["noise/trace"]) != pytest.approx(float(silent.metrics["noise/trace"]), rel=0.01)
    assert told.loss == silent.loss


def test_a_step_that_is_not_finite_leaves_the_averages_alone():
    e = engine(on_nan="skip")
    learn(e)
    before = e.position()
    assert e.update(*batch(), {}, nan_loss).skipped
    after = e.position()
    assert {k: v for k, v in before.items() if "noise" in k} == {k: v for k, v in after.items() if "noise" in k}
    tokens, mask = batch()
    assert e.update(tokens, np.zeros_like(mask), {}, negative_log_likelihood(0.0)).skipped


def test_averages_are_part_of_the_position_and_a_phase_begins_without_them():
    e, other = engine(), engine()
    for seed in range(3):
        learn(e, seed)
    other.model.load_state_dict(e.model.state_dict())
    other.restore(e.position())
    assert other.noise.position() == e.noise.position()
    a, b = learn(e, 5).metrics["noise/trace"], learn(other, 5).metrics["noise/trace"]
    assert float(a) == float(b)
    e.begin(0.1, 3)
    assert set(e.noise.position().values()) == {0.0}
    assert not [name for name in engine(()).position() if "noise" in name]


def test_a_signal_lost_in_the_noise_gives_no_ratio():
    e = engine()
    e.noise._squares, e.noise._weights = [torch.tensor(1.0), torch.tensor(1.0)], [1.0, 1.0]
    found = e._noise_scale(1e-3, 2)
    assert found["noise/signal"] < 0 < found["noise/trace"] and "noise_scale" not in found


def test_they_are_declared():
    metrics = Metrics()
    metrics.take(learn(engine()).metrics)
    assert {"noise/trace", "noise/signal"} <= set(metrics.values())
