"""What must not change a result: micro-batch splits, order of rows, names of groups, padding, number of workers."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.rl.strategies import EXAMPLES, batches
from tilth import rl

AGGREGATIONS = rl.names()["aggregations"]
ESTIMATORS = ["gae", "grpo", "grpo_no_std", "rloo"]  # all others: test_estimators
many = settings(max_examples=EXAMPLES, deadline=None)


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def loss(batch, columns, index, aggregation, denominator):
    """Loss of some rows (token index given), its gradient scattered into the whole column, and its metrics."""
    part = {k: v[index] for k, v in columns.items()}
    part["logprobs"].requires_grad_()
    result = rl.policy_loss(
        "ppo_clip",
        mask=batch.mask,
        lengths=batch.lengths,
        aggregation=aggregation,
        denominator=denominator,
        kl_coef=0.05,
        dual_clip=2.0,
        **part,
    )
    result.loss.backward()
    gradient = torch.zeros_like(columns["logprobs"])
    gradient[index] = part["logprobs"].grad
    return result.loss.detach(), gradient, result.metrics


def columns_of(batch):
    names = ["logprobs", "old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs"]
    return {name: batch.column(i) for i, name in enumerate(names)}


@many
@given(batches(), st.data(), st.sampled_from(AGGREGATIONS))
def test_loss_is_the_sum_over_any_split(batch, data, aggregation):
    columns, n = columns_of(batch), len(batch.lengths)
    whole = rl.denominator(aggregation, batch.mask, batch.lengths)
    total, gradient, metrics = loss(batch, columns, torch.arange(len(batch.mask)), aggregation, None)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    parts = []
    for rows in torch.tensor_split(order, cuts):
        parts.append(loss(batch.pick(rows), columns, batch.token_index(rows), aggregation, whole))
    close(sum(p[0] for p in parts), total)
    close(sum(p[1] for p in parts), gradient)
    merged = rl.merge_metrics(p[2] for p in parts)
    assert set(merged) == set(metrics)
    for name, metric in metrics.items():
        assert float(merged[name]) == pytest.approx(float(metric), rel=1e-9, abs=1e-12, nan_ok=True), name


def test_a_wrong_denominator_would_be_seen():
    """The same split, each part with a mean of its own: the classical mistake gives another number."""
    lengths, mask = torch.tensor([1, 3]), torch.ones(4)
    values = torch.tensor([4.0, 0.0, 0.0, 0.0])
    right = rl.aggregate("token-mean", values, mask=mask, lengths=lengths)
    first = rl.aggregate("token-mean", values[:1], mask=mask[:1], lengths=lengths[:1])
    second = rl.aggregate("token-mean", values[1:], mask=mask[1:], lengths=lengths[1:])
    assert float(right) == 1.0 and float((first + second) / 2) == 2.0


def run(name, batch, **more):
    return rl.estimate(
        name,
        rewards=batch.rewards,
        lengths=batch.lengths,
        mask=batch.mask,
        groups=batch.groups,
        values=batch.column(1) if name == "gae" and "values" not in more else more.pop("values", None),
        **more,
    )


@many
@given(batches(), st.data(), st.sampled_from(ESTIMATORS))
def test_estimates_follow_the_rows(batch, data, name):
    """Another order of rows, other names of groups: the same advantages, bit for bit where statistics are by group."""
    order = torch.tensor(data.draw(st.permutations(range(len(batch.lengths)))))
    index = batch.token_index(order)
    values = batch.column(1)
    before = run(name, batch, values=values)
    shuffled = batch.pick(order)
    shuffled.groups = -7 * shuffled.groups + 1000
    after = run(name, shuffled, values=values[index])
    if name == "gae":
        close(after.advantages, before.advantages[index], 1e-5)
    else:
        assert torch.equal(after.advantages, before.advantages[index])
    assert torch.equal(after.mask, before.mask[index])


@many
@given(batches(), st.sampled_from(ESTIMATORS), st.integers(0, 3), st.integers(0, 3))
def test_padding_changes_nothing(batch, name, left, right):
    """Masked tokens put around every row (prompt, padding)."""
    pieces, inside = [], []
    for mask in torch.split(batch.mask, batch.lengths.tolist()):
        pieces.append(torch.cat([torch.zeros(left), mask, torch.zeros(right)]).bool())
        inside.append(torch.cat([torch.zeros(left), torch.ones(len(mask)), torch.zeros(right)]).bool())
    padded_mask, inside = torch.cat(pieces), torch.cat(inside)
    values = torch.full((len(padded_mask),), torch.nan, dtype=torch.float64)
    values[inside] = batch.column(1)
    before = run(name, batch)
    batch.mask, batch.lengths = padded_mask, batch.lengths + left + right
    after = run(name, batch, values=values)
    close(after.advantages[inside], before.advantages, 1e-6)
    assert not after.advantages[~padded_mask].any()


class TwoWorkers:
    """A sum over two threads, as an all-reduce would make it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.parts: dict[int, torch.Tensor] = {}

    def reducer(self, rank):
        def reduce(vector):
            self.parts[rank] = vector
            self.barrier.wait(10)
            total = self.parts[0] + self.parts[1]
            self.barrier.wait(10)
            return total

        return reduce


@settings(max_examples=examples(60), deadline=None)
@given(batches(), st.integers(0, 9))
def test_gae_over_two_workers(batch, cut):
    """Scope "global moments": each worker has some rows (perhaps none) and the sums are reduced."""
    whole, parts = over_two_workers(batch, cut)
    close(torch.cat([parts[0].advantages, parts[1].advantages]), whole.advantages, 1e-5)
    close(torch.cat([parts[0].returns, parts[1].returns]), whole.returns, 1e-6)


@settings(max_examples=examples(40), deadline=None)
@given(batches(), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.1, 0.7, 0.0, -1e20]))
def test_rewards_that_are_equal_on_one_worker_only_are_whitened_and_equal_everywhere_on_none(batch, cut, odd, value):
    batch.rewards = torch.full_like(batch.rewards, value)
    whole, parts = over_two_workers(batch, cut)
    if int(whole.mask.sum()) > 1:
        assert not whole.advantages.any() and not parts[0].advantages.any() and not parts[1].advantages.any()
    batch.rewards[odd % len(batch.rewards)] += 1e20
    whole, parts = over_two_workers(batch, cut)
    close(torch.cat([parts[0].advantages, parts[1].advantages]), whole.advantages, 1e-5)


def over_two_workers(batch, cut):
    """(of one process, of each of two that have the rows before and after the cut)."""
    values, rows = batch.column(1), torch.arange(len(batch.lengths))
    whole = run("gae", batch, values=values)
    workers, parts = TwoWorkers(), {}

    def work(rank, mine):
        part = batch.pick(mine)
        parts[rank] = run("gae", part, values=values[batch.token_index(mine)], reduce=workers.reducer(rank))

    threads = [threading.Thread(target=work, args=(r, rows[:cut] if r == 0 else rows[cut:])) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return whole, parts


def test_without_the_reduction_whitening_differs():
    lengths, mask, groups = torch.tensor([2, 2]), torch.ones(4), torch.tensor([0, 1])
    rewards, values = torch.tensor([1.0, 9.0]), torch.tensor([0.1, 0.2, 0.3, 0.5])
    whole = rl.estimate("gae", rewards=rewards, lengths=lengths, mask=mask, groups=groups, values=values)
    half = rl.estimate(
        "gae", rewards=rewards[:1], lengths=lengths[:1], mask=mask[:2], groups=groups[:1], values=values[:2]
    )
    assert (whole.advantages[:2] - half.advantages).abs().max() > 0.1
