"""The value loss against the reference vector, plain loops in float64 and finite differences; what must not move it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.rl import oracle
from tests.rl.fixture import Fixture
from tests.rl.strategies import EXAMPLES, batches
from tilth import rl
from tilth.core.errors import ArgumentError, RecipeError, TokenCountError
from tilth.rl.metrics import Metric
from tilth.rl.values import Explained

AGGREGATIONS = rl.names()["aggregations"]
many = settings(max_examples=EXAMPLES, deadline=None)
CLIPS = st.sampled_from([0.0, 0.1, 0.5])


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=tolerance,
        equal_nan=True,
    )


def loss(batch, columns, index=None, **options):
    """Loss of some tokens, its gradient scattered into the whole column, and its metrics."""
    index = torch.arange(len(columns[0])) if index is None else index
    values, old, returns = (column[index] for column in columns)
    values.requires_grad_()
    result = rl.value_loss(values, old, returns, batch.mask, batch.lengths, **options)
    result.loss.backward()
    gradient = torch.zeros_like(columns[0])
    gradient[index] = values.grad
    return result.loss.detach(), gradient, result.metrics


def columns_of(batch):
    return [batch.column(i) for i in range(3)]


# ---- the reference vector ----


@pytest.mark.parametrize("packing", [(0, None), (3, None), (0, 6), (2, 9)])
def test_the_published_number(packing):
    """verl's compute_value_loss: values + 0.3, clip 0.2, returns = the rewards reversed in (padded) time."""
    data = Fixture(*packing)
    returns = data.token_rewards.clone()
    for row in range(7):
        reversed_in_time = [0.0] * 6
        reversed_in_time[6 - len(data.tokens(returns, row))] = float(data.tokens(data.token_rewards, row)[-1])
        data.tokens(returns, row)[:] = torch.tensor(reversed_in_time)[: len(data.tokens(returns, row))]
    found = rl.value_loss(data.values + 0.3, data.values, returns, data.mask, data.lengths, clip=0.2)
    close(found.loss, 0.135759, 1.1e-6)


# ---- by hand ----


@pytest.mark.parametrize(
    ("now", "goal", "expected", "gradient"),
    [
        (0.1, 1.0, 0.405, -0.9),  # inside the clip
        (0.5, 1.0, 0.5 * 0.8**2, 0.0),  # moved too far towards the return: held at 0.2
        (-0.5, 1.0, 0.5 * 1.5**2, -1.5),  # moved away from it: must come back
        (0.5, 0.1, 0.5 * 0.4**2, 0.4),  # shot past it
    ],
)
def test_one_token_begun_at_zero(now, goal, expected, gradient):
    value = torch.tensor([now], requires_grad=True)
    one = torch.ones(1, dtype=torch.int64)
    found = rl.value_loss(value, torch.zeros(1), torch.tensor([goal]), one, one, clip=0.2)
    found.loss.backward()
    close(found.loss.detach(), expected, 1e-6)
    close(value.grad[0], gradient, 1e-6)
    assert float(found.metrics["value/clipped"]) == float(gradient == 0)


def test_no_clip_is_plain_regression():
    generator = torch.Generator().manual_seed(0)
    v, old, goal = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    found = rl.value_loss(v, old, goal, torch.ones(5), torch.tensor([2, 3]))
    close(found.loss, 0.5 * torch.nn.functional.mse_loss(v, goal))
    assert float(found.metrics["value/clipped"]) == 0
    close(float(found.metrics["value/mean"]), v.mean())
    close(float(found.metrics["value/return"]), goal.mean())


# ---- plain loops ----


def token_loss(value, old, goal, clip):
    plain = 0.5 * (value - goal) ** 2
    held = min(max(value, old - clip), old + clip)
    return max(plain, 0.5 * (held - goal) ** 2) if clip else plain


@many
@given(batches(), st.sampled_from(AGGREGATIONS), CLIPS)
def test_loss_and_metrics_equal_loops(batch, aggregation, clip):
    columns = columns_of(batch)
    rows = [[t[:3] for t in zip(*row) if t[3]] for row in oracle.rows_of(batch.lengths, *columns, batch.mask)]
    losses = [[token_loss(*t, clip) for t in row] for row in rows]
    total, _, metrics = loss(batch, columns, clip=clip, aggregation=aggregation)
    close(total, oracle.aggregate(aggregation, losses))
    flat = [t for row in rows for t in row]
    if not flat:
        assert all(math.isnan(float(m)) for m in metrics.values())
        return
    held = [clip and token_loss(*t, clip) > token_loss(*t, 0) for t in flat]
    close(float(metrics["value/loss"]), oracle.mean([token_loss(*t, clip) for t in flat]))
    close(float(metrics["value/clipped"]), sum(held) / len(flat))
    close(float(metrics["value/mean"]), oracle.mean([t[0] for t in flat]))
    close(float(metrics["value/return"]), oracle.mean([t[2] for t in flat]))
    if len(flat) > 1:
        explained = 1 - oracle.deviation([t[2] - t[0] for t in flat]) ** 2 / oracle.deviation([t[2] for t in flat]) ** 2
        close(float(metrics["value/explained"]), explained, 1e-8)


@settings(max_examples=examples(40), deadline=None)
@given(batches(), st.sampled_from(AGGREGATIONS), CLIPS)
def test_gradient_equals_finite_differences(batch, aggregation, clip):
    columns = columns_of(batch)
    _, gradient, _ = loss(batch, columns, clip=clip, aggregation=aggregation)
    assert torch.isfinite(gradient).all() and not gradient[~batch.mask].any()
    for at in torch.nonzero(batch.mask).flatten()[:5]:
        ends = []
        for step in (1e-6, -1e-6):
            moved = columns[0].clone()
            moved[at] += step
            ends.append(loss(batch, [moved, *columns[1:]], clip=clip, aggregation=aggregation)[0])
        close((ends[0] - ends[1]) / 2e-6, gradient[at], 1e-6)


# ---- what must not change it ----


@many
@given(batches(), st.data(), st.sampled_from(AGGREGATIONS), CLIPS)
def test_loss_gradient_and_metrics_are_the_sum_over_any_split(batch, data, aggregation, clip):
    columns, n = columns_of(batch), len(batch.lengths)
    how = {"clip": clip, "aggregation": aggregation}
    whole = rl.denominator(aggregation, batch.mask, batch.lengths)
    total, gradient, metrics = loss(batch, columns, **how)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    parts = [
        loss(batch.pick(rows), columns, batch.token_index(rows), denominator=whole, **how)
        for rows in torch.tensor_split(order, cuts)
    ]
    close(sum(p[0] for p in parts), total)
    close(sum(p[1] for p in parts), gradient)
    merged = rl.merge_metrics(p[2] for p in parts)
    assert set(merged) == set(metrics)
    for name, metric in metrics.items():
        close(float(merged[name]), float(metric), 1e-7)


def test_a_wrong_denominator_would_be_seen():
    values, zero, lengths = torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.zeros(4), torch.tensor([1, 3])
    right = rl.value_loss(values, zero, zero, torch.ones(4), lengths).loss
    alone = [
        rl.value_loss(values[s], zero[s], zero[s], torch.ones(len(values[s])), lengths[i : i + 1]).loss
        for i, s in enumerate((slice(0, 1), slice(1, 4)))
    ]
    assert float(right) == 0.5 and float(sum(alone) / 2) == 1.0


@pytest.mark.parametrize("hole", [float("nan"), float("inf"), 1e30])
def test_what_lies_at_masked_tokens_reaches_nothing(hole):
    values, mask = torch.tensor([hole, 0.5, hole], requires_grad=True), torch.tensor([0, 1, 0])
    other = torch.tensor([hole, 0.25, hole])
    found = rl.value_loss(values, other, other, mask, torch.tensor([3]), clip=0.1)
    found.loss.backward()
    assert torch.isfinite(found.loss) and values.grad.tolist() == [0.0, 0.25, 0.0]
    assert all(math.isfinite(float(m)) for k, m in found.metrics.items() if k != "value/explained")


def test_targets_get_no_gradient():
    columns = [torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    rl.value_loss(*columns, torch.ones(2), torch.tensor([2]), clip=0.2).loss.backward()
    assert columns[0].grad is not None and columns[1].grad is None and columns[2].grad is None


def test_a_batch_without_tokens_has_loss_zero_with_a_graph():
    values = torch.ones(2, requires_grad=True)
    found = rl.value_loss(values, torch.zeros(2), torch.ones(2), torch.zeros(2), torch.tensor([2]), clip=0.2)
    found.loss.backward()
    assert float(found.loss.detach()) == 0 and not values.grad.any()


# ---- explained variance ----


def explained(values, returns):
    count = len(values)
    return rl.explained_variance(torch.tensor(values), torch.tensor(returns), torch.ones(count), torch.tensor([count]))


def test_explained_variance_of_known_critics():
    returns = [0.0, 1.0, 1.0, 0.0]
    assert float(explained(returns, returns)) == 1
    assert float(explained([0.5] * 4, returns)) == 0
    assert float(explained([7.0] * 4, returns)) == pytest.approx(0)  # a constant error is bias, not variance
    assert float(explained([1.0, 0.0, 0.0, 1.0], returns)) == -3


@pytest.mark.parametrize("reward", [0.0, 0.7, 0.1, -3.3])
def test_equal_returns_have_nothing_to_explain(reward):
    found = explained([0.0, 0.3, 0.9, 0.1, 0.2, 0.4, 0.8], [reward] * 7)
    assert math.isnan(float(found)) and float(found.count) == 0
    # ... alone; beside others they count like any
    other = explained([1.0, 2.0], [1.5, 2.5])
    together = explained([0.0, 0.3, 0.9, 0.1, 0.2, 0.4, 0.8, 1.0, 2.0], [reward] * 7 + [1.5, 2.5])
    assert float(found.merge(other)) == pytest.approx(float(together), abs=1e-5)
    assert float(together.count) == 9


def test_a_mean_of_explained_variances_would_be_another_number():
    a, b = explained([0.0, 1.0], [0.0, 1.0]), explained([5.0, 5.0], [4.0, 6.0])
    whole = float(explained([0.0, 1.0, 5.0, 5.0], [0.0, 1.0, 4.0, 6.0]))
    assert float(a.merge(b)) == pytest.approx(whole) and abs((float(a) + float(b)) / 2 - whole) > 0.1


def test_it_merges_with_its_like_only():
    with raises(ArgumentError, "other"):
        explained([0.0, 1.0], [0.0, 1.0]).merge(Metric(1.0, 1, "mean"))
    assert isinstance(explained([0.0], [1.0]), Explained)


# ---- returns of a value model ----


@many
@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_monte_carlo_returns_do_not_depend_on_the_values(batch, gamma, lam):
    """lam 1: the target at every token is the discounted final reward, whatever the critic says; so it is unbiased."""

    def returns(values, lam):
        columns = {"rewards": batch.rewards, "lengths": batch.lengths, "mask": batch.mask, "groups": None}
        return rl.estimate("gae", values=values, gamma=gamma, lam=lam, **columns).returns

    target = returns(batch.column(1), 1.0)
    close(target, returns(batch.column(2), 1.0), 1e-5)
    expected = []
    for reward, (mask,) in zip(batch.rewards.tolist(), oracle.rows_of(batch.lengths, batch.mask)):
        left = sum(mask)
        for chosen in mask:
            left -= chosen
            expected.append(reward * gamma**left if chosen and not math.isnan(reward) else 0.0)
    close(target, torch.tensor(expected), 1e-5)
    zero = torch.zeros(len(batch.mask))
    whole = rl.estimate(
        "gae",
        rewards=batch.rewards,
        lengths=batch.lengths,
        mask=batch.mask,
        groups=None,
        values=zero,
        gamma=gamma,
        lam=lam,
        whiten=False,
    )
    close(whole.advantages, whole.returns)


# ---- what it refuses ----


def test_a_negative_clip_and_columns_of_another_size():
    three, two = torch.zeros(3), torch.zeros(2)
    with raises(RecipeError, "clip"):
        rl.value_loss(three, three, three, torch.ones(3), torch.tensor([3]), clip=-0.1)
    with raises(RecipeError, "clip"):
        rl.value_loss(three, three, three, torch.ones(3), torch.tensor([3]), clip=math.nan)
    for columns, name in (((two, three, three), "values"), ((three, two, three), "old_values")):
        with raises(TokenCountError, f"{name}.shape"):
            rl.value_loss(*columns, torch.ones(3), torch.tensor([3]))
    with raises(TokenCountError, "returns.shape"):
        rl.value_loss(three, three, two, torch.ones(3), torch.tensor([3]))
    with raises(RecipeError, "aggregations"):
        rl.value_loss(three, three, three, torch.ones(3), torch.tensor([3]), aggregation="token_mean")
