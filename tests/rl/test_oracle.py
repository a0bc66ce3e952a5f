"""Everything against plain loops in float64, over random shapes, masks and edge rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl import oracle
from tests.rl.strategies import EXAMPLES, batches
from tilth import rl

ROW_ESTIMATORS = ["grpo", "grpo_no_std", "rloo"]
AGGREGATIONS = rl.names()["aggregations"]
many = settings(max_examples=EXAMPLES, deadline=None)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=tolerance,
    )


@many
@given(batches(), st.sampled_from(ROW_ESTIMATORS))
def test_row_estimators(batch, name):
    result = rl.estimate(name, rewards=batch.rewards, lengths=batch.lengths, mask=batch.mask, groups=batch.groups)
    some = rl.token_counts(batch.mask, batch.lengths) > 0
    alive = torch.where(some, batch.rewards, math.nan)
    rows = torch.tensor(oracle.row_advantages(name, alive.tolist(), batch.groups.tolist()))
    expected = torch.where(batch.mask, torch.repeat_interleave(rows, batch.lengths), 0.0)
    close(result.advantages, expected, 2e-6)
    there = torch.repeat_interleave(~torch.isnan(batch.rewards), batch.lengths)
    assert torch.equal(result.mask, batch.mask & there)
    close(rl.estimate_rows(name, rewards=alive, groups=batch.groups), rows, 2e-6)
    close(rl.estimate_rows(name, rewards=batch.rewards, groups=batch.groups, counts=some), rows, 2e-6)


@many
@given(batches(), st.booleans(), st.booleans(), st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)]))
def test_gae(batch, whiten, per_token, discounts):
    gamma, lam = discounts
    values, dense = batch.column(1), batch.column(2)
    masks = [m for (m,) in oracle.rows_of(batch.lengths, batch.mask)]
    if per_token:
        rewards = dense
        rows = [r for (r,) in oracle.rows_of(batch.lengths, dense)]
    else:
        rewards = batch.rewards
        rows = []
        for reward, mask in zip(batch.rewards.tolist(), masks):
            last = max((t for t, m in enumerate(mask) if m), default=None)
            rows.append(None if math.isnan(reward) else [reward if t == last else 0.0 for t in range(len(mask))])
    result = rl.estimate(
        "gae",
        rewards=rewards,
        lengths=batch.lengths,
        mask=batch.mask,
        groups=batch.groups,
        values=values,
        gamma=gamma,
        lam=lam,
        whiten=whiten,
    )
    value_rows = [v for (v,) in oracle.rows_of(batch.lengths, values)]
    advantages, returns = oracle.gae(rows, value_rows, masks, gamma, lam, whiten)
    close(result.advantages, oracle.packed(advantages), 1e-5)
    close(result.returns, oracle.packed(returns), 1e-5)


@many
@given(batches(), st.sampled_from(AGGREGATIONS), st.sampled_from([None, 3, 50]))
def test_aggregation(batch, name, norm_length):
    column = batch.column(3)
    options = {"norm_length": norm_length} if name == "seq-mean-token-sum-norm" else {}
    rows = [[v for v, m in zip(*row) if m] for row in oracle.rows_of(batch.lengths, column, batch.mask)]
    expected = oracle.aggregate(name, rows, norm_length)
    close(rl.aggregate(name, column, mask=batch.mask, lengths=batch.lengths, **options), expected)


def losses_by_loop(batch, columns, low, high, dual):
    rows = []
    for logp, old, advantage, mask in oracle.rows_of(batch.lengths, *columns, batch.mask):
        terms = zip(logp, old, advantage, mask)
        rows.append([oracle.clip_term(x, y, a, low, high, dual) for x, y, a, m in terms if m])
    return rows


def run_loss(batch, columns, aggregation, **options):
    logprobs = columns[0].clone().requires_grad_()
    result = rl.policy_loss(
        "ppo_clip",
        logprobs=logprobs,
        old_logprobs=columns[1],
        advantages=columns[2],
        mask=batch.mask,
        lengths=batch.lengths,
        aggregation=aggregation,
        **options,
    )
    return result, logprobs


@many
@given(batches(), st.sampled_from(AGGREGATIONS), st.sampled_from([0.0, 1.1, 3.0]))
def test_ppo_clip_value_and_gradient(batch, aggregation, dual):
    """Value against the loop; gradient against the formula A * r where no clip is active, 0 elsewhere."""
    columns = [batch.column(4), batch.column(5), batch.column(6, 1.0)]
    result, logprobs = run_loss(batch, columns, aggregation, clip_low=0.2, clip_high=0.3, dual_clip=dual)
    rows = losses_by_loop(batch, columns, 0.2, 0.3, dual)
    close(result.loss.detach(), oracle.aggregate(aggregation, rows))
    result.loss.backward()
    assert torch.isfinite(logprobs.grad).all() and not logprobs.grad[~batch.mask].any()
    ratio, advantages = torch.exp(columns[0] - columns[1]), columns[2]
    active = torch.where(advantages > 0, ratio <= 1.3, ratio >= 0.8)
    if dual:
        active &= (advantages > 0) | (ratio <= dual)
    slope = torch.where(batch.mask & active, -advantages * ratio, 0.0)
    counts = rl.token_counts(batch.mask, batch.lengths)
    weight = 1.0 / counts.clamp(min=1).double() if aggregation == "seq-mean-token-mean" else counts.double() * 0 + 1
    whole = rl.denominator(aggregation, batch.mask, batch.lengths)
    close(logprobs.grad, slope * torch.repeat_interleave(weight, batch.lengths) / whole)


@many
@given(batches())
def test_metrics_by_loop(batch):
    columns = [batch.column(4), batch.column(5), batch.column(6, 1.0)]
    rollout, ref = batch.column(7), batch.column(8)
    result, _ = run_loss(batch, columns, "token-mean", rollout_logprobs=rollout, ref_logprobs=ref, dual_clip=1.5)
    d = (columns[0] - columns[1])[batch.mask].tolist()
    a = columns[2][batch.mask].tolist()
    gap = (columns[1] - rollout)[batch.mask].tolist()
    count = len(d)
    if count == 0:
        assert all(math.isnan(float(m)) for m in result.metrics.values())
        return
    expected = {
        "ratio": sum(map(math.exp, d)) / count,
        "approx_kl_k1": -sum(d) / count,
        "approx_kl_k3": sum(math.exp(x) - 1 - x for x in d) / count,
        "clip_low": sum(x < 0 and math.exp(y) < 0.8 for x, y in zip(a, d)) / count,
        "clip_high": sum(x > 0 and math.exp(y) > 1.2 for x, y in zip(a, d)) / count,
        "clip_dual": sum(x < 0 and math.exp(y) > 1.5 for x, y in zip(a, d)) / count,
        "mismatch/mean": sum(map(abs, gap)) / count,
        "mismatch/max": max(map(abs, gap)),
        "mismatch/k3": sum(min(math.exp(x) - 1 - x, 10) for x in gap) / count,
        "kl_ref": sum(min(math.exp(-x) - 1 + x, 10) for x in (columns[0] - ref)[batch.mask].tolist()) / count,
    }
    others = {name for name in result.metrics if name.startswith("mismatch/")}  # in test_correction
    assert set(expected) == set(result.metrics) - (others - set(expected))
    for name, value in expected.items():
        assert float(result.metrics[name]) == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("dual", [None, 1.05])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck(aggregation, dual):
    """Autograd against finite differences in float64, KL penalty included."""
    generator = torch.Generator().manual_seed(3)
    lengths, mask = torch.tensor([3, 1, 4]), torch.tensor([0, 1, 1, 1, 1, 1, 0, 1])
    old, advantages, ref, start = torch.randn(4, 8, generator=generator, dtype=torch.float64) * 0.3
    logprobs = start.clone().requires_grad_()

    def loss(x):
        return rl.policy_loss(
            "ppo_clip",
            logprobs=x,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            lengths=lengths,
            aggregation=aggregation,
            ref_logprobs=ref,
            kl_coef=0.1,
            dual_clip=dual,
        ).loss

    assert torch.autograd.gradcheck(loss, (logprobs,))
