"""Edge rows, missing rewards and the identities that an estimator or a KL form must have."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.rl.strategies import Drawn, batches, columns_for
from tilth import rl
from tilth.core.errors import TokenCountError

GROUPED = ["grpo", "grpo_no_std", "rloo"]
NAN = float("nan")


def rows(name, rewards, groups=None, **options):
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    return rl.estimate_rows(name, rewards=torch.tensor(rewards), groups=groups, **options)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.7, 0.1, 1e-30, 1e30, 0.0, -3.3])
@pytest.mark.parametrize("size", [2, 7, 64])
def test_equal_rewards_teach_exactly_nothing(name, value, size):
    """Seven float32 rewards of 0.7 have a standard deviation above 0 by rounding; the advantage is 0 all the same."""
    assert not rows(name, [value] * size).any()


def test_float32_statistics_would_not_be_zero():
    """What the float64 statistics and the test of greatest == least are there for."""
    rewards = torch.full((7,), 0.7)
    assert ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).abs().max() > 0.01


@pytest.mark.parametrize("name", GROUPED)
def test_missing_rewards_leave_the_group(name):
    whole = rows(name, [1.0, 0.0, 0.5])
    for missing in (NAN, math.inf, -math.inf):
        with_missing = rows(name, [1.0, missing, 0.0, 0.5])
        assert with_missing[1] == 0
        assert torch.equal(with_missing[[0, 2, 3]], whole)
    assert not rows(name, [NAN, NAN]).any()
    assert rows(name, [NAN, 0.5])[1] == pytest.approx(0.5, rel=1e-5)
    assert not rows(name, [NAN, 0.5], singleton="zero").any()


def test_missing_rewards_leave_the_loss():
    """Advantage 0 is not enough: the row's tokens leave the mask, and so the denominator."""
    lengths, mask = torch.tensor([2, 3, 1]), torch.tensor([0, 1, 1, 1, 1, 1])
    rewards, groups = torch.tensor([1.0, NAN, 0.0]), torch.tensor([4, 4, 4])
    result = rl.estimate("grpo", rewards=rewards, lengths=lengths, mask=mask, groups=groups)
    assert result.mask.tolist() == [False, True, False, False, False, True]
    assert torch.equal(rl.keep_rows(mask, lengths, torch.isfinite(rewards)), result.mask)
    assert rl.denominator("token-mean", result.mask, lengths) == 2
    assert rl.denominator("seq-mean-token-mean", result.mask, lengths) == 2
    per_token = torch.tensor([NAN, 1.0, 0.0, NAN, 0.0, 0.0])
    again = rl.estimate("grpo", rewards=per_token, lengths=lengths, mask=mask, groups=groups)
    assert torch.equal(again.mask, result.mask) and torch.equal(again.advantages, result.advantages)


@pytest.mark.parametrize("name", [n for n in rl.names()["advantages"] if n not in ("distill", "gae", "vapo")])
def test_a_row_without_tokens_enters_no_statistic(name):
    """However rewards are given: rows [1, 0, 1], of which the last is masked, are rows [1, 0]."""
    lengths, mask = torch.tensor([2, 1, 2]), torch.tensor([1, 1, 1, 0, 0])
    per_row, groups = torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64)
    per_token = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    batch = Drawn(lengths, mask > 0, per_row, groups, 3)
    columns = columns_for(name, batch)
    columns |= {"baselines": torch.full((3,), 0.25)} if name == "remax" else {}

    def run(rows, rewards):
        tokens = batch.token_index(torch.arange(rows))
        own = {k: v[:rows] if len(v) == 3 else v[tokens] for k, v in columns.items()}
        given = {"lengths": lengths[:rows], "mask": mask[tokens], "groups": groups[:rows]}
        return rl.estimate(name, rewards=rewards, **given, **own)["advantages"]

    without = run(2, per_row[:2])
    assert without.any()
    assert torch.equal(run(3, per_row)[:3], without) and torch.equal(run(3, per_token)[:3], without)


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(batches(st.integers(0, 6)), st.sampled_from(rl.names()["advantages"]))
def test_never_nan(batch, name):
    columns = {"lengths": batch.lengths, "mask": batch.mask, "groups": batch.groups}
    result = rl.estimate(name, rewards=batch.rewards, **columns, **columns_for(name, batch))
    assert result.advantages.dtype == torch.float32 and len(result.advantages) == len(batch.mask)
    assert torch.isfinite(result.advantages).all()
    assert not result.advantages[~result.mask].any()
    assert result.returns is None or torch.isfinite(result.returns).all()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9))
def test_identities_of_the_group_estimators(rewards):
    centred = rows("grpo_no_std", rewards).double()
    size = len(rewards)
    torch.testing.assert_close(rows("rloo", rewards).double(), centred * size / (size - 1), atol=1e-5, rtol=1e-6)
    assert abs(float(centred.sum())) < 1e-5
    if max(rewards) - min(rewards) > 0.01:
        assert float(rows("grpo", rewards).double().var()) == pytest.approx(1, abs=1e-3)


def test_whitening_of_few_tokens():
    """One token has no variance and is left as it is; none gives zeros; equal ones give 0."""

    def gae(mask, rewards):
        lengths, groups = torch.tensor([2, 2]), torch.tensor([0, 1])
        values = torch.zeros(4)
        result = rl.estimate("gae", rewards=rewards, lengths=lengths, mask=mask, groups=groups, values=values)
        return result.advantages.tolist()

    assert gae(torch.tensor([0, 1, 0, 0]), torch.tensor([3.0, 1.0])) == [0, 3, 0, 0]
    assert gae(torch.zeros(4), torch.tensor([3.0, 1.0])) == [0, 0, 0, 0]
    assert gae(torch.ones(4), torch.tensor([NAN, NAN])) == [0, 0, 0, 0]
    assert gae(torch.ones(4), torch.tensor([2.0, 2.0])) == [0, 0, 0, 0]


def critic_alone(rewards, *, seed=0, **options):
    """gae of rows of three tokens whose values are noise."""
    n = len(rewards)
    values = 1e-3 * torch.randn(3 * n, generator=torch.Generator().manual_seed(seed))
    lengths, rewards = torch.full((n,), 3), torch.tensor(rewards)
    return rl.estimate(
        "gae", rewards=rewards, lengths=lengths, mask=torch.ones(3 * n), groups=None, values=values, **options
    )


@pytest.mark.parametrize("value", [0.7, 0.1, 1e-30, 1e30, 0.0, -3.3])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_equal_rewards_are_no_reason_to_whiten_the_noise_of_the_critic(value, size, lam):
    """Whitened it would have variance 1, as large as what a real reward teaches; the critic learns all the same."""
    found = critic_alone([value] * size, lam=lam)
    assert not found.advantages.any() and found.mask.all()
    assert float(found.returns[2]) == pytest.approx(value, rel=1e-6, abs=1e-9)
    noise = critic_alone([value] * size, lam=lam, whiten=False).advantages
    assert value == 1e30 or noise.any()


def test_what_tells_tokens_apart_is_whitened_however_little_it_is():
    def scale(rewards, **options):
        return float(critic_alone(rewards, **options).advantages.std())

    above = float(torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)))
    assert scale([0.7] * 63 + [above]) == pytest.approx(1, abs=0.01)
    assert scale([1.0] * 63 + [NAN]) == 0 and scale([1.0] * 62 + [0.0, NAN]) == pytest.approx(1, abs=0.01)
    assert scale([1.0] * 64, gamma=0.9) == pytest.approx(1, abs=0.01)  # sooner is better: a reason of its own
    assert scale([0.0] * 64, gamma=0.9) == 0


def test_rewards_of_tokens_with_equal_sums_are_not_flat():
    columns = dict(lengths=torch.tensor([2, 2]), mask=torch.ones(4), groups=None, values=torch.zeros(4))
    early = rl.estimate("gae", rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]), **columns)
    assert early.advantages.tolist() == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-3)
    assert not rl.estimate("gae", rewards=torch.tensor([0.0, 1.0, 0.0, 1.0]), **columns).advantages.any()


def test_gae_lambda_one_is_reward_to_go_minus_value():
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    values = torch.tensor([0.5, 0.25, 9.0, 0.125])
    result = rl.estimate(
        "gae",
        rewards=rewards,
        lengths=torch.tensor([4]),
        mask=torch.tensor([1, 1, 0, 1]),
        groups=None,
        values=values,
        whiten=False,
    )
    assert result.advantages.tolist() == [7 - 0.5, 6 - 0.25, 0, 4 - 0.125]
    assert result.returns.tolist() == [7, 6, 0, 4]


def test_all_masked_loss_is_zero_with_a_graph():
    x = torch.full((3,), NAN, requires_grad=True)
    for aggregation in rl.names()["aggregations"]:
        result = rl.policy_loss(
            "ppo_clip",
            logprobs=x,
            old_logprobs=x,
            advantages=x,
            mask=torch.zeros(3),
            lengths=torch.tensor([3]),
            aggregation=aggregation,
        )
        assert result["loss"].item() == 0
        result.loss.backward()
    assert not x.grad.any() and math.isnan(float(result["metrics"]["ratio"]))


def test_extreme_log_ratios_stay_finite():
    x = torch.tensor([0.0, -math.inf, -1e4, 0.0], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, 0.0, 0.0])
    result = rl.policy_loss(
        "ppo_clip",
        logprobs=x,
        old_logprobs=old,
        advantages=torch.tensor([-1.0, 1.0, -1.0, 1.0]),
        mask=torch.ones(4),
        lengths=torch.tensor([4]),
    )
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(x.grad).all()
    assert result.loss.item() == pytest.approx((math.exp(20) - math.exp(-20) + 0.8 - 1) / 4)


def test_half_precision_is_computed_in_float32():
    x = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    result = rl.policy_loss(
        "ppo_clip",
        logprobs=x,
        old_logprobs=x.detach(),
        advantages=torch.ones(2),
        mask=torch.ones(2),
        lengths=torch.tensor([2]),
    )
    assert result.loss.dtype == torch.float32 and result.loss.item() == -1
    assert rl.kl_penalty("k3", x, x.detach()).dtype == torch.float32


def test_columns_of_another_size_are_named():
    good = dict(rewards=torch.ones(2), lengths=torch.tensor([1, 2]), mask=torch.ones(3), groups=torch.tensor([0, 0]))
    rl.estimate("grpo", **good)
    for column, wrong in [
        ("mask", torch.ones(4)),
        ("rewards", torch.ones(5)),
        ("groups", torch.zeros(3)),
        ("lengths", torch.tensor([1, 1])),
    ]:
        with raises(TokenCountError, f"{'mask' if column == 'lengths' else column}.shape"):
            rl.estimate("grpo", **{**good, column: wrong})
    with raises(TokenCountError, "values.shape"):
        rl.estimate("gae", **good, values=torch.ones(2))
    with raises(TokenCountError, "denominator"):
        rl.aggregate("token-mean", torch.ones(3), mask=good["mask"], lengths=good["lengths"], denominator=0)


def policy(logits):
    return torch.log_softmax(logits, -1)


def expected_gradient(form, logits, reference):
    """Exact expectation over a vocabulary of five of the gradient of the penalty of a sampled token."""
    total = torch.zeros_like(logits)
    for token in range(5):
        x = logits.clone().requires_grad_()
        penalty = rl.kl_penalty(form, policy(x)[token], reference[token])
        penalty.backward()
        total += policy(logits)[token].exp() * x.grad
    return total


def gradient_of(divergence, logits):
    x = logits.clone().requires_grad_()
    divergence(policy(x)).backward()
    return x.grad


def test_kl_identities_by_enumeration():
    generator = torch.Generator().manual_seed(0)
    logits, other = 0.5 * torch.randn(2, 5, generator=generator, dtype=torch.float64)  # inside the clamp of k3
    reference, now = policy(other), policy(logits)
    kl = float((now.exp() * (now - reference)).sum())
    for form in ("k1", "k3"):
        assert float((now.exp() * rl.kl_penalty(form, now, reference)).sum()) == pytest.approx(kl, rel=1e-12)
    assert float((now.exp() * rl.kl_penalty("k2", now, reference)).sum()) != pytest.approx(kl, rel=0.1)
    zero = expected_gradient("k1", logits, reference)
    torch.testing.assert_close(zero, torch.zeros(5, dtype=torch.float64), atol=1e-14, rtol=0)
    forward = gradient_of(lambda p: (p.exp() * (p - reference)).sum(), logits)
    torch.testing.assert_close(expected_gradient("k2", logits, reference), forward)
    backward = gradient_of(lambda p: (reference.exp() * (reference - p)).sum(), logits)
    torch.testing.assert_close(expected_gradient("k3", logits, reference), backward)


def test_k3_is_clamped():
    x = torch.tensor([0.0, -30.0, 30.0, -3.0], dtype=torch.float64)
    values = rl.kl_penalty("k3", x, torch.zeros(4, dtype=torch.float64)).tolist()
    assert values == pytest.approx([0, 10, 10, 10])
    x = torch.tensor([8.0], dtype=torch.float64)
    assert float(rl.kl_penalty("k3", x, torch.zeros(1))) == pytest.approx(math.exp(-8) + 7)


def test_on_policy_gradient_is_reinforce():
    """First update: ratio 1 everywhere, nothing clipped, and the gradient is that of -A log p."""
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    lengths, mask = torch.tensor([4, 2]), torch.tensor([0, 1, 1, 1, 0, 1])

    def gradient(objective):
        x = logits.clone().requires_grad_()
        objective(policy(x)[:, 2]).backward()
        return x.grad

    def ppo(logprobs):
        result = rl.policy_loss(
            "ppo_clip",
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=advantages,
            mask=mask,
            lengths=lengths,
            dual_clip=3.0,
        )
        metrics = {k: float(v) for k, v in result.metrics.items()}
        assert metrics.pop("ratio") == 1 and not any(metrics.values())
        return result.loss

    def reinforce(logprobs):
        return rl.aggregate("token-mean", -advantages * logprobs, mask=mask, lengths=lengths)

    torch.testing.assert_close(gradient(ppo), gradient(reinforce))


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_a_negative_length_is_named(name):
    with raises(TokenCountError, "lengths"):
        rl.estimate(
            name,
            rewards=torch.tensor([1.0, 0.0]),
            groups=torch.tensor([0, 0]),
            lengths=torch.tensor([-1, 6]),
            mask=torch.ones(5),
        )
