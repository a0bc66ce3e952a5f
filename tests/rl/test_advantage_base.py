"""Every estimator with every kind of option: loops in float64, order of rows, names of groups, padding, two workers."""

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.rl import oracle
from tests.rl.strategies import batches, columns_for, pick_columns
from tests.rl.test_split import Meeting, parts_of
from tilth import rl
from tilth.core.errors import RecipeError, TokenCountError
from tilth.rl import optimal
from tilth.rl.advantages import Advantage
from tilth.rl.estimators import OF_TOKENS
from tilth.rl.packing import Groups, whiten_rows
from tilth.rl.registry import build

VARIANTS = [
    ("gae", {"gamma": 0.9, "lam": 0.5}),
    ("gae", {"whiten": False}),
    ("grpo", {"std": "biased"}),
    ("grpo", {"singleton": "zero"}),
    ("grpo_process", {}),
    ("grpo_process", {"std": "biased"}),
    ("grpo_no_std", {}),
    ("rloo", {"singleton": "zero"}),
    ("reinforce_pp_baseline", {}),
    ("reinforce_pp_baseline", {"singleton": "zero"}),
    ("opo", {}),
    ("opo", {"singleton": "zero"}),
    ("gpg", {}),
    ("gpg", {"count": "spread", "norm": 2.0}),
    ("grpo_passk", {}),
    ("grpo_passk", {"std": "biased"}),
    ("grpo_passk", {"std": "none"}),
    ("gdpo", {}),
    ("gdpo", {"keys": ("correct",), "std": "biased"}),
    ("gdpo", {"keys": ("correct", "format"), "weights": (1.0, 0.25), "singleton": "zero"}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("reinforce_pp", {"gamma": 0.5, "whiten": False}),
    ("remax", {}),
    ("vapo", {"alpha": 0.4}),
    ("vapo", {"alpha": 1.5, "value_lam": 0.7, "gamma": 0.9, "whiten": False}),
    ("vapo", {"adaptive": False, "lam": 0.3}),
    ("distill", {}),
    ("distill", {"horizon": 0.7}),
    ("distill", {"align": "characters"}),
    ("optimal_token_baseline", {}),
    ("optimal_token_baseline", {"singleton": "zero"}),
    ("tir_optimal_token_baseline", {}),
    ("tir_optimal_token_baseline", {"singleton": "zero"}),
]
variants = st.sampled_from(VARIANTS)
many = settings(max_examples=2 * settings.default.max_examples, deadline=None)
some = settings(max_examples=settings.default.max_examples, deadline=None)


def entry_of(name, options):
    return build("advantages", name, options, Advantage)


def exact(name, options):
    """Whether rows of other workers, and the order of rows, may not change a bit."""
    return entry_of(name, options).scope != "global moments"


def run(name, batch, columns, rewards=None, **more):
    rewards = batch.rewards if rewards is None else rewards
    given = {"lengths": batch.lengths, "mask": batch.mask, "groups": batch.groups}
    return rl.estimate(name, rewards=rewards, **given, **columns, **more)


def packed(batch, rows):
    """Lists over the tokens that count -> float64 [total]; rows that are missing have none."""
    found, start = torch.zeros(len(batch.mask), dtype=torch.float64), 0
    for row, length in zip(rows, batch.lengths.tolist()):
        at = torch.nonzero(batch.mask[start : start + length]).flatten() + start
        if row:
            found[at] = torch.tensor(row, dtype=torch.float64)
        start += length
    return found


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_every_estimator_has_a_variant():
    assert {name for name, _ in VARIANTS} == set(rl.names()["advantages"])


@many
@given(batches(), variants, st.booleans())
def test_loops_in_float64(batch, variant, per_token):
    check_against_loops(batch, *variant, per_token)


@pytest.mark.slow
@pytest.mark.parametrize("name, options", VARIANTS)
def test_each_by_loops_in_float64(name, options):
    settings(max_examples=examples(200), deadline=None)(
        given(batches(), st.booleans())(lambda batch, per_token: check_against_loops(batch, name, options, per_token))
    )()


def check_against_loops(batch, name, options, per_token):
    columns = columns_for(name, batch, **options)
    rewards = batch.column(2) if per_token else None
    result = run(name, batch, columns, rewards, **options)
    rows = oracle.counted(batch, columns, rewards)
    advantages, returns = oracle.token_estimates(name, rows, **options)
    close(result.advantages, packed(batch, advantages))
    assert (result.returns is None) == (returns is None)
    if returns is not None:
        close(result.returns, packed(batch, returns))
    there = torch.repeat_interleave(torch.tensor([row["valid"] for row in rows]), batch.lengths)
    assert torch.equal(result.mask, batch.mask & there)


@some
@given(batches(), variants.filter(lambda v: entry_of(*v).scope == "rows"))
def test_rows_alone_give_what_tokens_give(batch, variant):
    """Estimators of rows: what the controller finds, spread over the tokens."""
    name, options = variant
    columns = columns_for(name, batch, **options)
    counts = rl.token_counts(batch.mask, batch.lengths)
    rows = rl.estimate_rows(name, rewards=batch.rewards, groups=batch.groups, **{"counts": counts} | columns | options)
    result = run(name, batch, columns, **options)
    assert torch.equal(result.advantages, torch.where(result.mask, torch.repeat_interleave(rows, batch.lengths), 0.0))


@some
@given(batches(), st.data(), variants)
def test_order_of_rows_and_names_of_groups_do_not_matter(batch, data, variant):
    name, options = variant
    order = torch.tensor(data.draw(st.permutations(range(len(batch.lengths)))))
    columns = columns_for(name, batch, **options)
    before, index = run(name, batch, columns, **options), batch.token_index(order)
    shuffled = batch.pick(order)
    shuffled.groups = -7 * shuffled.groups + 1000
    after = run(name, shuffled, pick_columns(columns, batch, order), **options)
    assert torch.equal(after.mask, before.mask[index])
    if exact(name, options):
        assert torch.equal(after.advantages, before.advantages[index])
    close(after.advantages, before.advantages[index])


@some
@given(batches(), variants, st.integers(0, 3), st.integers(0, 3))
def test_padding_does_not_matter(batch, variant, left, right):
    name, options = variant
    columns = columns_for(name, batch, **options)
    before = run(name, batch, columns, **options)
    inside = torch.cat([torch.tensor([0] * left + [1] * n + [0] * right).bool() for n in batch.lengths.tolist()])

    def widen(column, blank):
        return torch.full((len(inside),), blank, dtype=column.dtype).masked_scatter(inside, column)

    batch.mask, batch.lengths = widen(batch.mask, False), batch.lengths + left + right
    wide = {k: widen(v, math.nan) if k in OF_TOKENS else v for k, v in columns.items()}
    after = run(name, batch, wide, **options)
    close(after.advantages[inside], before.advantages, 1e-6)
    assert not after.advantages[~inside].any() and torch.equal(after.mask[inside], before.mask)


def over_workers(name, batch, columns, parts, **options):
    meeting = Meeting(len(parts))

    def work(rank):
        rows = parts[rank]
        mine = pick_columns(columns, batch, rows)
        others = {"row": rows, "reduce": meeting.reduce(rank), "gather": meeting.gather(rank)}
        return run(name, batch.pick(rows), mine, **others, **options)

    return meeting.run(work), meeting


@some
@given(batches(), st.data(), variants, st.integers(2, 3))
def test_any_split_over_workers_is_the_whole(batch, data, variant, workers):
    name, options = variant
    n = len(batch.lengths)
    owner = data.draw(st.lists(st.integers(0, workers - 1), min_size=n, max_size=n))
    columns, parts = columns_for(name, batch, **options), parts_of(n, owner, workers)
    whole = run(name, batch, columns, **options)
    found, _ = over_workers(name, batch, columns, parts, **options)
    for one, rows in zip(found, parts):
        index = batch.token_index(rows)
        assert torch.equal(one.mask, whole.mask[index])
        assert one.returns is None or torch.equal(one.returns, whole.returns[index])
        if exact(name, options):
            assert torch.equal(one.advantages, whole.advantages[index])
        close(one.advantages, whole.advantages[index])


@many
@given(batches(st.integers(0, 6)), variants)
def test_never_nan(batch, variant):
    name, options = variant
    result = run(name, batch, columns_for(name, batch, **options), **options)
    assert result.advantages.dtype == torch.float32 and torch.isfinite(result.advantages).all()
    assert not result.advantages[~result.mask].any()
    assert result.returns is None or torch.isfinite(result.returns).all()


# -- edge rows -------------------------------------------------------------------------------------------------------


def batch_of(rewards, lengths=None, groups=None, **columns):
    """Rows without masked tokens, as keyword arguments of ``estimate``."""
    lengths = torch.tensor(lengths or [2] * len(rewards))
    groups = torch.tensor(groups or [0] * len(rewards))
    given = {
        "rewards": torch.tensor(rewards),
        "lengths": lengths,
        "groups": groups,
        "mask": torch.ones(int(lengths.sum())),
    }
    return given | {k.replace("__", "/"): torch.tensor(v) for k, v in columns.items()}


RELATIVE = ["grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo"]


@pytest.mark.parametrize("name", [*RELATIVE, "reinforce_pp", "optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("value", [0.7, 0.1, 1e-30, 1e30, 0.0, -3.3])
@pytest.mark.parametrize("size", [2, 7])
def test_zero_spread_is_exactly_zero(name, value, size):
    lengths = [1 + i % 3 for i in range(size)]
    given = batch_of([value] * size, lengths)
    if "optimal" in name:
        p = torch.linspace(0.1, 0.9, sum(lengths))
        given |= {"logprobs": p.log(), "sum_pi_squared": p**2 + 0.5 * (1 - p) ** 2, "singleton": "zero"}
    assert not rl.estimate(name, **given).advantages.any()


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one(name):
    given = batch_of([1.0, 0.0, 0.5], [2, 1, 3], [0, 0, 7])
    found = rl.estimate(name, **given).advantages
    assert torch.isfinite(found).all()
    if name == "grpo_passk":
        assert not found[3:].any() and found[0] > 0
        return
    zero = rl.estimate(name, **given, singleton="zero").advantages
    if name not in ("reinforce_pp_baseline", "gdpo"):  # whitening moves them
        assert not zero[3:].any() and found[3] == pytest.approx(0.75 if name == "gpg" else 0.5, rel=1e-5)
    assert found[3] > zero[3]


def test_one_token_in_the_batch_is_not_whitened():
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        assert rl.estimate(name, **batch_of([3.0], [1])).advantages.tolist() == [3.0]
    assert rl.estimate("gdpo", **batch_of([3.0], [1])).advantages.item() == pytest.approx(3, rel=1e-5)


def test_all_masked():
    for name, options in VARIANTS:
        given = batch_of([1.0, 0.0]) | {"mask": torch.zeros(4)}
        for column in set(entry_of(name, options).needs) - set(given):
            given[column] = torch.full((4,), math.nan) if column in OF_TOKENS else torch.ones(2)
        found = rl.estimate(name, **given, **options)
        assert not found.advantages.any() and not found.mask.any()


def test_a_missing_baseline_or_part_is_a_missing_row():
    """It leaves the statistics of the others, and the loss."""
    remax = rl.estimate("remax", **batch_of([1.0, 0.0, 1.0], baselines=[0.5, math.nan, 0.0]))
    assert remax.advantages.tolist() == [0.5, 0.5, 0, 0, 1, 1]
    assert remax.mask.tolist() == [True, True, False, False, True, True]
    parts = {"part__right": [1.0, 0.0, 0.5, 9.0], "part__form": [0.0, 1.0, 1.0, math.nan]}
    whole = rl.estimate("gdpo", keys=("right", "form"), **batch_of([1.0, 0.0, 1.0, 1.0], **parts))
    without = {k: v[:3] for k, v in parts.items()}
    three = rl.estimate("gdpo", keys=("right", "form"), **batch_of([1.0, 0.0, 1.0], **without))
    assert torch.equal(whole.advantages[:6], three.advantages) and not whole.mask[6:].any()


def test_parts_are_normalised_apart():
    """A part of a hundredth of the size counts as much: what the method is for; weights say otherwise."""
    parts = {"part__big": [100.0, 0.0, 100.0, 0.0], "part__small": [0.0, 0.0, 0.01, 0.01]}
    given = batch_of([0.0] * 4, **parts)
    equal = rl.estimate("gdpo", keys=("big", "small"), **given).advantages[::2]
    assert equal.tolist() == pytest.approx([0, -equal[2].item(), equal[2].item(), 0], abs=1e-3)
    alone = rl.estimate("gdpo", keys=("big", "small"), weights=(1.0, 0.0), **given).advantages
    given.pop("part/small")
    assert torch.equal(alone, rl.estimate("gdpo", keys=("big",), **given).advantages)


def test_the_two_counts_of_gpg():
    """Rewards 0 and 1, one flat group of ones: verl's alpha counts the 4 that are not 0, the paper's 2 of the other."""
    given = batch_of([1.0, 1.0, 1.0, 1.0, 0.0], groups=[0, 0, 0, 1, 1])
    assert rl.estimate("gpg", **given).advantages[6] == pytest.approx(5 / 4 * 0.5)
    assert rl.estimate("gpg", **given, count="spread").advantages[6] == pytest.approx(5 / 2 * 0.5)


def test_the_two_deviations():
    given = batch_of([1.0, 0.0, 0.0])
    unbiased, biased = (rl.estimate("grpo", **given, std=std).advantages for std in ("unbiased", "biased"))
    torch.testing.assert_close(biased, unbiased * math.sqrt(3 / 2), atol=1e-5, rtol=1e-5)


def test_passk_rewards_the_best_alone_and_nobody_where_two_are_best():
    assert rl.estimate("grpo_passk", std="none", **batch_of([0.2, 0.9, 0.5])).advantages.tolist() == pytest.approx(
        [0, 0, 0.4, 0.4, 0, 0]
    )
    assert not rl.estimate("grpo_passk", **batch_of([0.9, 0.9, 0.5])).advantages.any()


# -- VAPO ------------------------------------------------------------------------------------------------------------


def vapo(length, **options):
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    given = {"rewards": torch.ones(1), "groups": None, "lengths": torch.tensor([length]), "mask": torch.ones(length)}
    return rl.estimate("vapo", values=values, whiten=False, **given, **options), values, given


@pytest.mark.parametrize("length", [1, 2, 5, 60])
def test_targets_of_lambda_one_do_not_know_the_values(length):
    found, values, given = vapo(length)
    assert torch.equal(found.returns, torch.ones(length))
    again = rl.estimate("vapo", values=-9 * values, whiten=False, **given)
    assert torch.equal(again.returns, found.returns) and not torch.equal(again.advantages, found.advantages)


def test_short_rows_are_one_step():
    """1 - 1 / (alpha * l) is below 0 for l < 1 / alpha, and held at 0."""
    for length, lam in [(20, 0.0), (5, 0.0), (40, 0.5), (100, 0.8)]:
        found, values, given = vapo(length)
        fixed = rl.estimate("vapo", values=values, whiten=False, adaptive=False, lam=lam, **given)
        torch.testing.assert_close(found.advantages, fixed.advantages, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(vapo(100)[0].advantages, vapo(100, alpha=1.0)[0].advantages)


@pytest.mark.parametrize("length", [2_000, 20_000])
def test_coefficients_add_up_to_alpha_times_the_length(length):
    """One-step errors of 1 everywhere: the first token's advantage is the sum of lambda^k."""
    given = {"lengths": torch.tensor([length]), "mask": torch.ones(length), "groups": None}
    found = rl.estimate("vapo", rewards=torch.ones(length), values=torch.zeros(length), whiten=False, **given)
    assert float(found.advantages[0]) == pytest.approx(0.05 * length, rel=0.01)


def test_lambda_goes_by_the_tokens_that_count():
    """A tool's answer in the middle makes a row no longer."""
    mask = torch.ones(60)
    mask[10:30] = 0
    values = torch.where(mask > 0, torch.linspace(0, 1, 60), math.nan)
    wide = {"lengths": torch.tensor([60]), "mask": mask, "groups": None, "rewards": torch.ones(1)}
    tight = wide | {"lengths": torch.tensor([40]), "mask": torch.ones(40)}
    found = rl.estimate("vapo", values=values, **wide).advantages[mask > 0]
    torch.testing.assert_close(found, rl.estimate("vapo", values=values[mask > 0], **tight).advantages)


def test_vapo_with_one_fixed_lambda_is_gae():
    _, values, given = vapo(30)
    ours = rl.estimate("vapo", values=values, adaptive=False, lam=0.9, value_lam=0.9, gamma=0.99, **given)
    theirs = rl.estimate("gae", values=values, lam=0.9, gamma=0.99, **given)
    assert torch.equal(ours.advantages, theirs.advantages) and torch.equal(ours.returns, theirs.returns)


def test_the_critic_has_a_lambda_of_its_own():
    found, values, given = vapo(30, value_lam=0.6)
    theirs = rl.estimate("gae", values=values, lam=0.6, whiten=False, **given)
    assert torch.equal(found.returns, theirs.returns) and torch.equal(found.advantages, vapo(30)[0].advantages)


# -- the optimal token baseline --------------------------------------------------------------------------------------


def test_the_baseline_has_the_least_variance():
    """By enumeration over a vocabulary of three, one token: no other constant gives a gradient of less variance."""
    logits = torch.tensor([0.3, -1.0, 1.2], dtype=torch.float64)
    p, rewards = logits.softmax(0), torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
    squares = (p**2).sum()
    lengths = 1 - 2 * p + squares
    gradients = torch.eye(3, dtype=torch.float64) - p
    torch.testing.assert_close((gradients**2).sum(1), lengths)  # what the path variance is

    def variance(baseline):
        each = (rewards - baseline)[:, None] * gradients
        return float((p * (each**2).sum(1)).sum() - ((p[:, None] * each).sum(0) ** 2).sum())

    best = float((p * lengths * rewards).sum() / (p * lengths).sum())
    assert all(variance(best) < variance(best + d) for d in (-0.1, -0.01, 0.01, 0.1))
    copies = (p * 10_000).round().long()  # a group that has each token as often as the policy chooses it
    token = torch.repeat_interleave(torch.arange(3), copies)
    ones = torch.ones(len(token), dtype=torch.int64)
    found = rl.estimate(
        "optimal_token_baseline",
        rewards=rewards[token],
        groups=0 * ones,
        lengths=ones,
        mask=ones,
        logprobs=p.log()[token],
        sum_pi_squared=squares.expand(len(token)),
    )
    assert float(rewards[token[0]] - found.advantages[0]) == pytest.approx(best, abs=1e-3)


PATHS = {
    "logprobs": [math.log(0.5)] * 8,
    "sum_pi_squared": [0.5] * 8,
}


def test_places_are_aligned_by_distance_or_by_own_tokens():
    given = batch_of([1.0, 0.0], [4, 4], **PATHS)
    given["mask"] = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1])
    by_place = rl.estimate("optimal_token_baseline", **given).advantages
    by_ordinal = rl.estimate("tir_optimal_token_baseline", **given).advantages
    assert by_place[5] == 0 and by_place[[0, 2, 3]].tolist() == pytest.approx([0.5, 0.6, 4 / 7], abs=1e-4)
    assert by_ordinal[[0, 2, 3]].tolist() == pytest.approx([0.5] * 3) and by_ordinal[7] == 0


def test_weights_count_by_their_square():
    given = batch_of([1.0, 0.0], [1, 1], logprobs=[math.log(0.5)] * 2, sum_pi_squared=[0.5, 0.5])
    plain = rl.estimate("optimal_token_baseline", **given).advantages
    heavy = rl.estimate("optimal_token_baseline", **given, weights=torch.tensor([3.0, 1.0])).advantages
    assert plain.tolist() == pytest.approx([0.5, -0.5]) and heavy.tolist() == pytest.approx([0.1, -0.9])


def test_rounding_makes_no_negative_weight():
    """A sure token: 1 - 2 pi + pi^2 is 0, or by rounding a little below it, and the baseline stays a mean."""
    given = batch_of([1.0, 0.0], [1, 1], logprobs=[0.0, -0.01], sum_pi_squared=[0.9999, 0.9802])
    found = rl.estimate("optimal_token_baseline", **given).advantages
    assert -1 <= found[1] <= 0 <= found[0] <= 1


def test_tokens_travel_only_for_groups_on_several_workers():
    lengths, p = [2, 1, 3, 2], torch.linspace(0.2, 0.9, 8)
    given = batch_of([1.0, 0.0, 0.5, 0.2], lengths, [0, 0, 1, 1], logprobs=p.log().tolist(), sum_pi_squared=[0.9] * 8)
    starts = [0, 2, 3, 6, 8]

    def part(rows):
        index = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in rows])
        own = {k: v[index] if len(v) == 8 else v[torch.tensor(rows)] for k, v in given.items()}
        return own | {"row": torch.tensor(rows)}, index

    whole = rl.estimate("optimal_token_baseline", **given).advantages
    for owner, sent in [([[0, 1], [2, 3]], []), ([[0], [1, 2, 3]], [2, 1]), ([[0, 2], [1, 3]], [5, 3])]:
        meeting, sizes = Meeting(2), [[], []]

        def work(rank):
            mine, index = part(owner[rank])
            gather = meeting.gather(rank)

            def counting(columns):
                if "path" in columns:
                    sizes[rank].append(len(columns["path"]))
                return gather(columns)

            found = rl.estimate("optimal_token_baseline", **mine, gather=counting, reduce=meeting.reduce(rank))
            assert torch.equal(found.advantages, whole[index])

        meeting.run(work)
        assert [n for each in sizes for n in each] == sent


def test_without_the_others_tokens_the_baseline_is_another():
    p = torch.linspace(0.2, 0.9, 4)
    given = batch_of([1.0, 0.0], logprobs=p.log().tolist(), sum_pi_squared=(p**2 + 0.01).tolist())
    whole = rl.estimate("tir_optimal_token_baseline", **given).advantages
    alone = {k: v[: len(v) // 2] for k, v in given.items()}
    assert not torch.allclose(rl.estimate("tir_optimal_token_baseline", **alone).advantages, whole[:2], atol=0.01)
    assert optimal._ROUNDING < 0.01


# -- the last bit: float32 results hide most of what an order of summation does ----------------------------------------


def shuffles(n):
    generator = torch.Generator().manual_seed(n)
    return [torch.randperm(n, generator=generator) for _ in range(10)]


def drawn(n, *values):
    """n of these numbers in float64, so that many are equal."""
    return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (n,), generator=torch.manual_seed(n))]


def test_whitening_of_rows_has_the_same_bits_in_any_order():
    values, weights = drawn(60, 0.1, 0.7, -0.3, 1 / 3), drawn(61, 0, 1, 3, 7)[:60]
    whole, moved = whiten_rows(values, weights), 0
    for order in shuffles(60):
        assert torch.equal(whiten_rows(values[order], weights[order]), whole[order])
        moved += float((values * weights)[order].cumsum(0)[-1]) != float((values * weights).cumsum(0)[-1])
    assert moved, "the numbers would not show an order"


def test_group_sums_have_the_same_bits_in_any_order():
    """Sums of products with counts too, where scores are equal and counts are not (OPO)."""
    scores, counts, ids = drawn(60, 0.1, 0.7, -0.3), drawn(61, 1, 3, 7, 9)[:60], drawn(62, 4, 5)[:60].long()

    def sums(order):
        of = Groups.of(ids[order], scores[order], torch.ones(60, dtype=torch.bool), counts[order])
        return of.sum((scores * counts)[order])

    whole = sums(torch.arange(60))
    assert all(torch.equal(sums(order), whole[order]) for order in shuffles(60))
    plain = [(scores * counts)[order][ids[order] == 4].cumsum(0)[-1].item() for order in shuffles(60)]
    assert len(set(plain)) > 1, "the numbers would not show an order"


def test_baselines_of_places_have_the_same_bits_in_any_order():
    columns = (
        drawn(60, 2, 3).long(),
        drawn(61, 0, 1)[:60].long(),
        drawn(62, 0.1, 0.7, 1.3)[:60],
        drawn(63, 0.2, 0.9, 0.3)[:60],
    )

    def found(order):
        return optimal._Cells(*(c[order] for c in columns)).advantages(1e-8, "reward")

    whole = found(torch.arange(60))
    assert all(torch.equal(found(order), whole[order]) for order in shuffles(60))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, columns, options, key",
    [
        ("remax", ["rewards"], {}, "baselines"),
        ("gdpo", ["rewards", "groups", "part/correct"], {"keys": ["corect"]}, "part/corect"),
        ("gdpo", ["rewards", "groups", "part/fun", "part/length"], {"keys": ["style"]}, "part/style"),
        ("gdpo", ["rewards", "groups"], {"keys": ["style"]}, "part/style"),
        ("gdpo", [], {"keys": ["a", "b"], "weights": [1]}, "gdpo.weights"),
        ("gdpo", [], {"keys": ["a", "a"]}, "gdpo.keys"),
        ("gdpo", [], {"keys": "correct"}, "gdpo.keys"),
        ("vapo", ["rewards"], {}, "values"),
        ("vapo", ["rewards", "values"], {"alpha": 0}, "vapo.alpha"),
        ("vapo", ["rewards", "values"], {"lamda": 1}, "vapo.lamda"),
        ("gpg", ["rewards", "groups"], {"count": "all"}, "gpg.count"),
        ("grpo", ["rewards", "groups"], {"std": "none"}, "grpo.std"),
        ("optimal_token_baseline", ["rewards", "groups", "logprobs"], {}, "sum_pi_squared"),
        ("reinforce_pp", ["rewards"], {"lam": 1.0}, "reinforce_pp.lam"),
    ],
)
def test_what_is_wrong_is_named_before_a_run(name, columns, options, key):
    with raises(RecipeError, key) as error:
        rl.check(name, columns, options, kind="advantages")
    assert "\n" not in str(error.value)


def test_columns_of_another_size_are_named():
    with raises(TokenCountError, "baselines.shape"):
        rl.estimate("remax", **batch_of([1.0, 0.0], baselines=[0.0] * 3))
    with raises(TokenCountError, "part/a.shape"):
        rl.estimate("gdpo", keys=("a",), **batch_of([1.0, 0.0], part__a=[0.0]))
    with raises(TokenCountError, "sum_pi_squared.shape"):
        rl.estimate("optimal_token_baseline", **batch_of([1.0, 0.0], logprobs=[0.0] * 4, sum_pi_squared=[0.0] * 2))


def test_the_controller_is_told_of_missing_counts():
    given = {"rewards": torch.ones(2), "groups": torch.zeros(2)}
    for name in ("opo", "gdpo", "reinforce_pp_baseline"):
        with raises(RecipeError, "counts"):
            rl.estimate_rows(name, **given)


def test_an_estimator_with_moments_of_the_batch_whitens_unless_it_says_otherwise():
    class Declared(Advantage):
        scope: ClassVar[str] = "global moments"

    assert Declared().whitens and not entry_of("reinforce_pp", {"whiten": False}).whitens


def test_scopes():
    scopes = {name: entry_of(name, {}).scope for name in rl.names()["advantages"]}
    assert {name for name, scope in scopes.items() if scope == "rows"} == set(RELATIVE)
    assert scopes["remax"] == "token-local" and scopes["reinforce_pp"] == scopes["vapo"] == "global moments"
    assert (
        entry_of("reinforce_pp", {"whiten": False}).scope == entry_of("vapo", {"whiten": False}).scope == "token-local"
    )
    assert scopes["optimal_token_baseline"] == scopes["tir_optimal_token_baseline"] == "group tokens"
