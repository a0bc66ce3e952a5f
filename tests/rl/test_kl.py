"""KL forms by exact enumeration, the penalty in the reward, and coefficients that follow a target."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.rl import oracle
from tests.rl.fixture import Fixture
from tests.rl.strategies import EXAMPLES, batches
from tests.rl.test_edges import expected_gradient, gradient_of, policy
from tests.rl.test_golden import close
from tilth import rl
from tilth.config.checks import check
from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError, TokenCountError

FORMS = rl.names()["kl"]
STRAIGHT = [form for form in FORMS if form.endswith("+")]
NAN = float("nan")


def test_the_forms():
    assert STRAIGHT == ["k1+", "k3+", "abs+"] and {f.rstrip("+") for f in FORMS} == {"k1", "abs", "k2", "k3"}


@pytest.mark.parametrize(
    "form, value, first, other",
    [
        ("abs", 0.0521429, -1 / 28, 1 / 28),
        ("k1+", 0.0014286, -0.0046429, 0.0021429),
        ("k3+", 0.0016148, -0.0046429, 0.0021429),
        ("abs+", 0.0521429, -0.0046429, 0.0021429),
    ],
)
def test_golden(form, value, first, other):
    """The vectors of k1, k2 and k3 are in test_golden."""
    data = Fixture(2, 9)
    new = data.new.clone().requires_grad_()
    mean = rl.aggregate("token-mean", rl.kl_penalty(form, new, data.ref), mask=data.mask, lengths=data.lengths)
    mean.backward()
    close(mean.detach(), value, 1e-7)
    close(new.grad[data.at(0, 0)], first, 1e-6)
    close(new.grad[data.at(3, 1)], other, 1e-6)


def logits(seed):
    return 0.6 * torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", STRAIGHT)
def test_straight_through_forms_have_the_gradient_of_the_kl(form, seed):
    """Exact expectation over a vocabulary of five, on samples of the policy: that of KL(policy || reference)."""
    mine, other = logits(seed)
    reference = policy(other)
    forward = gradient_of(lambda p: (p.exp() * (p - reference)).sum(), mine)
    torch.testing.assert_close(expected_gradient(form, mine, reference), forward)
    now = policy(mine)
    assert torch.equal(rl.kl_penalty(form, now, reference), rl.kl_penalty(form[:-1], now, reference))


def test_abs_has_another_gradient_and_another_value():
    """Off by no more than its name: it is the distance that an update can pull down without a KL falling as much."""
    mine, other = logits(0)
    reference, now = policy(other), policy(mine)
    forward = gradient_of(lambda p: (p.exp() * (p - reference)).sum(), mine)
    assert not torch.allclose(expected_gradient("abs", mine, reference), forward, rtol=0.05)
    value = float((now.exp() * rl.kl_penalty("abs", now, reference)).sum())
    assert value > 1.5 * float((now.exp() * (now - reference)).sum()) and value == pytest.approx(
        math.fsum(math.exp(p) * abs(p - q) for p, q in zip(now.tolist(), reference.tolist()))
    )


def test_in_the_reward_k1_is_right():
    """REINFORCE on a reward of -k1 descends KL(policy || reference); on -k2 it descends something else."""
    mine, other = logits(1)
    reference, now = policy(other), policy(mine)
    forward = gradient_of(lambda p: (p.exp() * (p - reference)).sum(), mine)

    def descent(form):
        kl = rl.kl_penalty(form, now, reference)
        return gradient_of(lambda p: (now.exp() * kl * p).sum(), mine)

    torch.testing.assert_close(descent("k1"), forward)
    for form in ("k2", "abs"):
        assert not torch.allclose(descent(form), forward, rtol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_equal_policies_have_no_penalty(form):
    x = torch.full((3,), -0.7, requires_grad=True)
    penalty = rl.kl_penalty(form, x, x.detach())
    penalty.sum().backward()
    assert not penalty.detach().any() and x.grad.tolist() == ([1, 1, 1] if form == "k1" else [0, 0, 0])
    assert rl.kl_penalty(form, x.bfloat16(), x.detach()).dtype == torch.float32


@pytest.mark.parametrize("form", STRAIGHT)
def test_clamps_hold_the_value_not_the_gradient(form):
    x = torch.tensor([30.0, -30.0], requires_grad=True)
    value = rl.kl_penalty(form, x, torch.zeros(2))
    value.sum().backward()
    assert x.grad.tolist() == [30, -30]
    wanted = {"k1+": [30, -30], "k3+": [10, 10], "abs+": [30, 30]}[form]
    assert value.tolist() == wanted


# ---- in the reward ----


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(batches(), st.sampled_from(FORMS), st.sampled_from([0.0, 0.1, 2.0]))
def test_penalise_by_loop(batch, form, coef):
    own, theirs = batch.column(1), batch.column(2)
    found = rl.penalise(batch.rewards, own, theirs, kl=form, coef=coef, mask=batch.mask, lengths=batch.lengths)
    expected = []
    for reward, (mask, p, q) in zip(batch.rewards.tolist(), oracle.rows_of(batch.lengths, batch.mask, own, theirs)):
        last = max((t for t, m in enumerate(mask) if m), default=None)
        for t, m in enumerate(mask):
            d = p[t] - q[t]
            kl = {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": math.exp(-d) - 1 + d if m else NAN}[form.rstrip("+")]
            expected.append((reward if t == last else 0.0) - coef * kl if m else 0.0)
    assert found.dtype == torch.float64 and not found.requires_grad
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(batches())
def test_missing_stays_missing(batch):
    """What the estimator leaves out is what it would leave out without a penalty."""
    own, theirs = batch.column(1).requires_grad_(), batch.column(2)
    how = {"mask": batch.mask, "lengths": batch.lengths}
    tokens = rl.penalise(batch.rewards, own, theirs, kl="k1", coef=0.1, **how)
    plain = torch.isfinite(batch.rewards)
    values = batch.column(3)
    found = rl.estimate("gae", rewards=tokens, groups=None, values=values, whiten=False, **how)
    assert torch.equal(found.mask, batch.mask & torch.repeat_interleave(plain, batch.lengths))
    assert torch.isfinite(found.advantages).all()


def test_without_a_penalty_it_is_the_reward():
    rewards, lengths, mask = torch.tensor([1.0, NAN, 0.5]), torch.tensor([3, 2, 1]), torch.tensor([0, 1, 1, 1, 0, 1])
    same = torch.full((6,), -0.5)
    found = rl.penalise(rewards, same, same, kl="k3", coef=1.0, mask=mask, lengths=lengths)
    assert found[[0, 1, 2, 4, 5]].tolist() == [0, 0, 1, 0, 0.5] and math.isnan(found[3])
    with raises(TokenCountError, "rewards.shape"):
        rl.penalise(torch.ones(6), same, same, kl="k3", coef=1.0, mask=mask, lengths=lengths)
    with raises(TokenCountError, "ref_logprobs.shape"):
        rl.penalise(rewards, same, same[:2], kl="k3", coef=1.0, mask=mask, lengths=lengths)
    with raises(RecipeError, "kl"):
        rl.penalise(rewards, same, same, kl="k3*", coef=1.0, mask=mask, lengths=lengths)


# ---- coefficients that follow ----


def test_adaptive_kl_of_the_vector():
    assert rl.adapt(0.2, 10.0, target=6.0, horizon=1e4, count=256) == pytest.approx(0.201024)


@given(coef=st.floats(1e-6, 10), kl=st.floats(-1, 100), target=st.floats(1e-3, 10), count=st.integers(1, 1000))
def test_adaptive_kl_goes_the_right_way_and_not_far(coef, kl, target, count):
    found = rl.adapt(coef, kl, target=target, horizon=1e4, count=count)
    assert (found >= coef) if kl >= target else (found <= coef)
    assert abs(found / coef - 1) <= 0.2 * count / 1e4 * (1 + 1e-9) and found > 0


def test_adaptive_kl_finds_its_target():
    """A policy whose KL is inverse to the coefficient."""
    coef = 0.01
    for _ in range(500):
        coef = rl.adapt(coef, 0.1 / coef, target=2.0, horizon=1000, count=64)
    assert 0.1 / coef == pytest.approx(2.0, rel=1e-2)


def test_adaptive_kl_of_nothing_and_of_nonsense():
    for kl in (NAN, math.inf):
        assert rl.adapt(0.3, kl, target=1.0, horizon=100, count=1) == 0.3
    for wrong in ({"target": 0.0}, {"horizon": 0.0}, {"target": NAN}):
        with raises(RecipeError, min(wrong)):
            rl.adapt(0.3, 1.0, **{"target": 1.0, "horizon": 100, "count": 1, **wrong})
    with raises(RecipeError, "horizon"):
        rl.adapt(0.3, 0.0, target=1.0, horizon=100, count=500)


def test_a_horizon_that_is_too_short_is_named_before_the_run():
    how = {"kl_coef": 0.1, "kl_target": 1.0}
    rollout = {"prompts": 16, "group": 8}
    check(Recipe(algorithm={**how, "kl_horizon": 26}, rollout=rollout, reward={"function": "addition"}))
    with pytest.raises(RecipeError) as caught:
        check(Recipe(algorithm={**how, "kl_horizon": 25}, rollout=rollout, reward={"function": "addition"}))
    assert "algorithm.kl_horizon = 25" in str(caught.value)
    assert rl.adapt(0.1, 0.0, target=1.0, horizon=26, count=128) > 0
    with pytest.raises(RecipeError):
        rl.adapt(0.1, 0.0, target=1.0, horizon=25, count=128)


def test_entropy_is_held_from_below():
    how = {"target": 0.2, "step": 0.01, "least": 0.0, "most": 0.03}
    path, coef = [], 0.0
    for entropy in (0.1, 0.1, 0.19, 0.1, 0.2, 0.5, 0.9, 0.9):
        coef = rl.adapt_entropy(coef, entropy, **how)
        path.append((round(coef, 6), round(rl.entropy_bonus(coef, entropy, target=0.2), 6)))
    rising, falling = (
        [(0.01, 0.01), (0.02, 0.02), (0.03, 0.03), (0.03, 0.03)],
        [(0.02, 0.02), (0.01, 0), (0, 0), (0, 0)],
    )
    assert path == rising + falling
    assert rl.adapt_entropy(0.02, NAN, **how) == 0.02
    assert rl.adapt_entropy(0.0, 0.1, target=0.2) == 1e-4


def test_entropy_control_finds_its_target():
    """A policy whose entropy grows with the weight of the bonus."""
    coef, seen = 0.0, []
    for _ in range(400):
        entropy = 0.05 + 20 * coef
        coef = rl.adapt_entropy(coef, entropy, target=0.2, step=1e-4, least=0.0, most=0.1)
        seen.append(entropy)
    assert max(abs(e - 0.2) for e in seen[200:]) < 0.005


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"step": 0.0}, "step"),
        ({"least": 0.2, "most": 0.1}, "least"),
        ({"least": -0.1}, "least"),
    ],
)
def test_wrong_bounds_of_the_entropy_bonus(wrong, key):
    with raises(RecipeError, key):
        rl.adapt_entropy(0.1, 0.1, **{"target": 0.2, "step": 0.1, "least": 0.0, "most": 1.0, **wrong})
