"""What must not change a policy loss: micro-batches, order of rows, padding, workers. New losses are covered too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.losing import ACTIVE, AGGREGATIONS, FIRST_PASS, LOSSES, columns, first_pass, pass_columns, run
from tests.rl.strategies import Drawn, batches
from tests.rl.test_split import Meeting, parts_of
from tilth import rl

few = settings(max_examples=6, deadline=None)


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def same_metrics(found, expected):
    assert set(found) == set(expected)
    for name, metric in expected.items():
        assert float(found[name]) == pytest.approx(float(metric), rel=1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("name", LOSSES)
@few
@given(batch=batches(), data=st.data(), aggregation=st.sampled_from(["", *AGGREGATIONS]))
def test_micro_batches_in_any_order_add_up(name, batch, data, aggregation):
    """Loss, gradient and metrics, with weights and a KL penalty: rows in another order, cut anywhere."""
    given, n = columns(batch), len(batch.lengths)
    result, gradient = run(name, batch, given, aggregation=aggregation, kl_coef=0.05)
    how = aggregation or rl.loss_entry(name).aggregation
    more = {
        "aggregation": aggregation,
        "kl_coef": 0.05,
        "denominator": rl.denominator(how, batch.mask, batch.lengths),
        "thresholds": first_pass(name, batch, given),
    }
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    total, summed, metrics = 0.0, torch.zeros_like(gradient), []
    for rows in torch.tensor_split(order, cuts):
        index = batch.token_index(rows)
        part, summed[index] = run(name, batch.pick(rows), {k: v[index] for k, v in given.items()}, **more)
        total, metrics = total + part.loss, [*metrics, part.metrics]
    close(total, result.loss)
    close(summed, gradient)
    same_metrics(rl.merge_metrics(metrics), result.metrics)


def padded(batch, given, left, right):
    """The batch with masked tokens, NaN, around each row; and where its own tokens are."""
    inside = [torch.nn.functional.pad(torch.ones(int(n)), (left, right)) for n in batch.lengths]
    index = torch.cat(inside).bool() if inside else torch.zeros(0, dtype=torch.bool)
    wide = {k: torch.full((len(index),), torch.nan, dtype=v.dtype).masked_scatter(index, v) for k, v in given.items()}
    mask = torch.zeros_like(index).masked_scatter(index, batch.mask)
    return Drawn(batch.lengths + left + right, mask, batch.rewards, batch.groups, batch.seed), wide, index


@pytest.mark.parametrize("name", LOSSES)
@few
@given(batch=batches(), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_changes_nothing(name, batch, left, right):
    given = columns(batch)
    result, gradient = run(name, batch, given, kl_coef=0.05)
    wide, columns_of_it, index = padded(batch, given, left, right)
    again, found = run(name, wide, columns_of_it, kl_coef=0.05)
    close(again.loss, result.loss)
    close(found[index], gradient)
    assert not found[~index].any()
    same_metrics(again.metrics, result.metrics)


@pytest.mark.parametrize("name", LOSSES)
@few
@given(batch=batches())
def test_rows_without_tokens_change_nothing(name, batch):
    given = columns(batch)
    result, gradient = run(name, batch, given)
    alive = torch.nonzero(rl.token_counts(batch.mask, batch.lengths)).flatten()
    index = batch.token_index(alive)
    again, found = run(name, batch.pick(alive), {k: v[index] for k, v in given.items()})
    close(again.loss, result.loss)
    close(found, gradient[index])


def over_workers(name, batch, given, parts, **more):
    """Thresholds that each worker finds."""
    meeting = Meeting(len(parts))

    def work(rank):
        index = batch.token_index(parts[rank])
        mine = {k: v[index] for k, v in pass_columns(given).items()}
        part, options = batch.pick(parts[rank]), {**ACTIVE.get(name, {}), **more}
        return rl.thresholds(
            name,
            **mine,
            mask=part.mask,
            lengths=part.lengths,
            reduce=meeting.reduce(rank),
            gather=meeting.gather(rank),
            **options,
        )

    return meeting.run(work)


@pytest.mark.parametrize("name", FIRST_PASS)
@few
@given(batch=batches(), data=st.data(), workers=st.integers(2, 3), share=st.sampled_from([1e-6, 0.2, 0.9, 1.0]))
def test_all_workers_find_the_same_bits_as_one(name, batch, data, workers, share):
    """Rows anywhere, in any order, on workers some of which have none."""
    given, n = columns(batch), len(batch.lengths)
    owner = data.draw(st.lists(st.integers(0, workers - 1), min_size=n, max_size=n))
    whole = first_pass(name, batch, given, cov_share=share)
    for found in over_workers(name, batch, given, parts_of(n, owner, workers), cov_share=share):
        assert found == whole


def chosen(result, batch):
    return float(result.metrics["selected"]) * int(batch.mask.sum())


@pytest.mark.parametrize("name", FIRST_PASS)
@few
@given(batch=batches(), share=st.sampled_from([1e-6, 0.2, 0.5, 1.0]), tied=st.booleans())
def test_exactly_so_many_are_chosen(name, batch, share, tied):
    """Of all tokens, at least one, at most those that may be: also where many are equally good."""
    given, tokens = columns(batch), int(batch.mask.sum())
    if tied:
        given["uniforms"] = torch.full_like(given["uniforms"], 0.5)
        given["logprobs"] = given["old_logprobs"] = torch.full_like(given["logprobs"], -0.5)
    result, gradient = run(name, batch, given, cov_share=share)
    if not tokens:
        return
    everything = chosen(run(name, batch, given, cov_share=1.0)[0], batch)
    k = min(max(int(share * tokens), 1), everything)
    assert chosen(result, batch) == pytest.approx(k)
    assert torch.isfinite(gradient).all()


def test_the_best_are_chosen():
    """The k-th best is that of all, not of each worker: all of them may lie on one."""
    n = 40
    batch = Drawn(torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), torch.zeros(n), torch.zeros(n), 5)
    given = columns(batch)
    a, p = given["advantages"], given["logprobs"]
    cov = (a - a.mean()) * (p - p.mean())
    best = torch.argsort(cov, descending=True)
    wanted = float(cov[best[7]] + cov[best[8]]) / 2
    for owner in ([0] * n, [int(i in best[:8]) for i in range(n)], [i % 2 for i in range(n)]):
        for found in over_workers("kl_cov", batch, given, parts_of(n, owner, 2), cov_share=0.2):
            assert found["at"] == pytest.approx(wanted, rel=1e-12) and found["share"] == 0
    plain, with_penalty = (run("kl_cov", batch, given, cov_share=0.2, cov_coef=c)[1] for c in (0.0, 1.0))
    assert sorted(torch.nonzero(plain - with_penalty).flatten().tolist()) == sorted(best[:8].tolist())


SPLIT = Drawn(
    lengths=torch.tensor([2, 5, 1, 3]),
    mask=torch.ones(11, dtype=torch.bool),
    rewards=torch.zeros(4),
    groups=torch.zeros(4),
    seed=10,
)


def halves(given, *rows):
    """Some rows of the batch: the batch of them, and their columns."""
    for some in rows:
        index = SPLIT.token_index(torch.tensor(some))
        yield SPLIT.pick(torch.tensor(some)), {k: v[index] for k, v in given.items()}


@pytest.mark.parametrize("name", FIRST_PASS)
def test_a_first_pass_over_a_part_is_another_loss(name):
    """The tests above can fail: thresholds of each micro-batch, as in verl."""
    given, total = columns(SPLIT), 0.0
    for part, mine in halves(given, [0, 1], [2, 3]):
        more = {"thresholds": first_pass(name, part, mine, cov_share=0.3), "denominator": 11.0, "cov_share": 0.3}
        total += float(run(name, part, mine, **more)[0].loss)
    assert total != pytest.approx(float(run(name, SPLIT, given, cov_share=0.3)[0].loss), rel=1e-3)


def test_the_mean_of_each_micro_batch_is_another_loss():
    """verl's geo_mean takes the mean over a micro-batch's rows; two parts of other sizes are not the whole then."""
    given = columns(SPLIT)
    whole = float(run("geo_mean", SPLIT, given)[0].loss)
    one, three = (float(run("geo_mean", *part)[0].loss) for part in halves(given, [0], [1, 2, 3]))
    assert (one + three) / 2 != pytest.approx(whole, rel=1e-2)
    assert one / 4 + three * 3 / 4 == pytest.approx(whole)
    assert sum(float(run("geo_mean", *part, denominator=4.0)[0].loss) for part in halves(given, [0], [1, 2, 3])) == (
        pytest.approx(whole)
    )


def test_tokens_are_chosen_by_log_probs_a_rounding_apart():
    """What the first pass computed and what the loss sees come from other packings of the same rows."""
    n = 50
    batch = Drawn(torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), torch.zeros(n), torch.zeros(n), 8)
    given = columns(batch)
    found = first_pass("kl_cov", batch, given)
    moved = {**given, "logprobs": given["logprobs"] + batch.column(9, 1e-9)}
    for now in (given, moved):
        assert chosen(run("kl_cov", batch, now, thresholds=found)[0], batch) == pytest.approx(15)
