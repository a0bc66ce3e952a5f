"""Estimators and losses that are plain functions: the same numbers as the entries that they copy, or a named error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilth
import tilth.rl as rl
from tests.config.test_plugins import _nothing_left_behind  # noqa: F401  (a fixture)
from tests.errors import raises
from tilth.core.errors import PluginError, RecipeError
from tilth.rl.estimators import RowAdvantage
from tilth.rl.policy_losses import PolicyLoss


def leave_one_out(rewards, groups, *, scale: float = 1.0):
    found = torch.empty_like(rewards)
    for group in groups.unique():
        own = groups == group
        n = int(own.sum())
        mean = (rewards[own].sum() - rewards[own]) / max(n - 1, 1)
        found[own] = scale * (rewards[own] - mean if n > 1 else rewards[own])
    return found


def clipped(logprobs, old_logprobs, advantages, *, clip: float = 0.2):
    ratio = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    return loss, {"beyond": ((ratio - 1).abs() > clip).float()}


def batch(seed, n=7):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (n,), generator=random)
    total = int(lengths.sum())
    found = {name: -torch.rand(total, generator=random) for name in ("logprobs", "old_logprobs", "values")}
    found |= {"lengths": lengths, "mask": (torch.rand(total, generator=random) > 0.2).float()}
    found |= {"rewards": torch.rand(n, generator=random, dtype=torch.float64)}
    found["rewards"][0] = torch.nan
    return found | {"groups": torch.randint(0, 3, (n,), generator=random)}


@given(st.integers(0, 10_000), st.floats(-3, 3))
def test_a_function_over_rows_equals_the_entry_that_it_copies(seed, scale):
    tilth.advantage("mine_rows")(leave_one_out)
    b = batch(seed)
    given_columns = {name: b[name] for name in ("rewards", "groups", "lengths", "mask")}
    mine = rl.estimate("mine_rows", **given_columns, scale=scale)
    theirs = rl.estimate("rloo", **given_columns)
    torch.testing.assert_close(mine.advantages, (scale * theirs.advantages.double()).float())
    assert torch.equal(mine.mask, theirs.mask)


@given(st.integers(0, 10_000))
def test_a_function_over_tokens_equals_the_entry_that_it_copies(seed):
    @tilth.advantage("mine_tokens")
    def reward_to_go_minus_value(rewards, values, lengths):
        parts = zip(rewards.split(lengths.tolist()), values.split(lengths.tolist()))
        advantages = torch.cat([own.flip(0).cumsum(0).flip(0) - value for own, value in parts])
        return advantages, advantages + values

    b = batch(seed)
    columns = {name: b[name] for name in ("rewards", "groups", "lengths", "mask", "values")}
    mine, theirs = rl.estimate("mine_tokens", **columns), rl.estimate("gae", **columns, whiten=False)
    torch.testing.assert_close(mine.advantages, theirs.advantages)
    torch.testing.assert_close(mine.returns, theirs.returns)


@given(st.integers(0, 10_000), st.floats(0.01, 0.9))
def test_a_loss_equals_the_entry_that_it_copies_with_its_gradient_and_kl(seed, clip):
    tilth.policy_loss("mine_loss")(clipped)
    b, found = batch(seed), {}
    advantages = torch.randn(len(b["mask"]), generator=torch.Generator().manual_seed(seed))
    for name, options in (("mine_loss", {"clip": clip}), ("ppo_clip", {"clip_low": clip, "clip_high": clip})):
        logprobs = b["logprobs"].clone().requires_grad_()
        columns = {name: b[name] for name in ("old_logprobs", "mask", "lengths")}
        result = rl.policy_loss(
            name, logprobs=logprobs, advantages=advantages, ref_logprobs=b["values"], kl_coef=0.1, **columns, **options
        )
        result.loss.backward()
        found[name] = result.loss.detach(), logprobs.grad, result.metrics
    for mine, theirs in zip(found["mine_loss"][:2], found["ppo_clip"][:2]):
        torch.testing.assert_close(mine, theirs)
    assert 0 <= float(found["mine_loss"][2]["plugin/beyond"]) <= 1


def test_classes_and_parts_of_a_reward_work_too():
    @tilth.advantage("mine_class")
    class Mine(RowAdvantage):
        factor: float = 2.0

        @property
        def needs(self):
            return ("rewards",)

        def rows(self, rows):
            return self.factor * rows.scores

    @tilth.advantage("mine_part")
    def by_style(rewards, part_style):
        return rewards + part_style

    common = {"rewards": torch.tensor([1.0, 3.0]), "groups": None}
    common |= {"lengths": torch.tensor([1, 2]), "mask": torch.ones(3)}
    assert rl.estimate("mine_class", **common, factor=3.0).advantages.tolist() == [3, 9, 9]
    styled = rl.estimate("mine_part", **common, **{"part/style": torch.tensor([10.0, 20.0])})
    assert styled.advantages.tolist() == [11, 23, 23]


def test_missing_rewards_never_reach_the_function():
    seen = []

    @tilth.advantage("mine_seen")
    def remember(rewards, groups):
        seen.append(rewards)
        return rewards

    rewards = torch.tensor([1.0, torch.nan, 2.0])
    found = rl.estimate(
        "mine_seen", rewards=rewards, groups=torch.zeros(3), lengths=torch.tensor([1, 1, 1]), mask=torch.ones(3)
    )
    assert seen[0].tolist() == [1, 2] and found.advantages.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("function", "key"),
    [
        (lambda rewards, reward: rewards, "reward"),
        (lambda rewards, **options: rewards, "options"),
        (lambda *columns: columns, "columns"),
        (lambda rewards, scale=1.0: rewards * scale, "scale"),
    ],
)
def test_arguments_that_are_no_columns_are_refused_with_those_there_are(function, key):
    tilth.advantage("mine_wrong")(function)
    with raises(PluginError, f"mine_wrong.{key}"):
        rl.check("mine_wrong", {"rewards"}, kind="advantages")


def test_a_name_that_comes_with_tilth_is_refused():
    tilth.advantage("rloo")(leave_one_out)
    with raises(PluginError, "rloo.name"):
        rl.check("rloo", {"rewards", "groups"}, kind="advantages")


def test_options_are_checked_by_their_type():
    tilth.advantage("mine_rows")(leave_one_out)
    with raises(RecipeError, "mine_rows.scale"):
        rl.check("mine_rows", {"rewards", "groups"}, {"scale": "much"}, kind="advantages")
    with raises(RecipeError, "mine_rows.scales"):
        rl.check("mine_rows", {"rewards", "groups"}, {"scales": 1.0}, kind="advantages")


BROKEN = [
    (None, ""),
    (1.0, ".loss.shape"),
    (torch.zeros(99), ".loss.shape"),
    (torch.zeros(1, dtype=torch.int64), ".loss.dtype"),
    ((torch.zeros(1),) * 3, ".results"),
    ((torch.zeros(1), torch.zeros(1)), ".metrics"),
    ((torch.zeros(1), {"beyond": 3}), ".beyond.shape"),
]


@pytest.mark.parametrize("result, key", BROKEN)
def test_a_wrong_result_and_an_exception_name_the_function_and_its_line(result, key):
    @tilth.policy_loss("mine_broken")
    def broken(logprobs):
        if result is None:
            raise KeyError("what")
        return result

    one = torch.zeros(1)
    with raises(PluginError, f"mine_broken{key}") as caught:
        rl.policy_loss(
            "mine_broken", logprobs=one, old_logprobs=one, advantages=one, mask=torch.ones(1), lengths=torch.tensor([1])
        )
    assert "test_functions.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "key"), [((1, 2, 3), ".results"), ((None, torch.zeros(2)), ".advantages.shape"), ((), ".results")]
)
def test_a_wrong_result_of_an_estimator_over_tokens_is_named(result, key):
    tilth.advantage("mine_pairs")(lambda rewards, lengths: result)
    with raises(PluginError, f"mine_pairs{key}"):
        rl.estimate("mine_pairs", rewards=torch.ones(1), groups=None, lengths=torch.tensor([2]), mask=torch.ones(2))


def test_a_class_of_another_kind_is_refused():
    tilth.advantage("mine_other")(PolicyLoss)
    with raises(PluginError, "mine_other.class"):
        rl.check("mine_other", set(), kind="advantages")


def test_a_row_whose_part_is_missing_is_missing():
    @tilth.advantage("mine_part")
    def by_style(rewards, part_style):
        return rewards + part_style

    found = rl.estimate(
        "mine_part",
        rewards=torch.tensor([1.0, 2.0]),
        groups=None,
        lengths=torch.tensor([1, 1]),
        mask=torch.ones(2),
        **{"part/style": torch.tensor([torch.nan, 1.0])},
    )
    assert found.advantages.tolist() == [0, 3] and found.mask.tolist() == [False, True]


def test_a_result_that_is_not_finite_and_a_loss_without_a_gradient_are_named():
    tilth.policy_loss("mine_constant")(lambda logprobs: logprobs.detach())
    tilth.policy_loss("mine_nan")(lambda logprobs: logprobs * torch.nan)
    one, lengths = torch.zeros(1, requires_grad=True), torch.tensor([1])
    given = {"old_logprobs": one.detach(), "advantages": one.detach(), "mask": torch.ones(1), "lengths": lengths}
    for name, key in (("mine_constant", "loss.gradient"), ("mine_nan", "loss")):
        with raises(PluginError, f"{name}.{key}"):
            rl.policy_loss(name, logprobs=one, **given)


def untyped(rewards, *, table: torch.nn.Linear = None):
    return rewards


def undefined(rewards, *, table: "NoSuchName" = None):  # noqa: F821
    return rewards


@pytest.mark.parametrize(
    ("kind", "function", "key"),
    [
        ("advantage", lambda rewards, values, groups: values, "groups"),
        ("advantage", lambda rewards, *, kl="k1": rewards, "kl"),
        ("advantage", lambda rewards, *, epochs=3: rewards, "epochs"),
        ("policy_loss", lambda logprobs, weights: logprobs, "weights"),
        ("policy_loss", lambda logprobs, *, _scale=1.0: logprobs, "_scale.reserved"),
        ("policy_loss", lambda logprobs, *, needs=1.0: logprobs, "needs.reserved"),
        ("advantage", untyped, "options"),
        ("advantage", undefined, "options"),
    ],
)
def test_what_a_function_cannot_have_is_refused_before_a_run(kind, function, key):
    getattr(tilth, kind)("mine_refused")(function)
    with raises(PluginError, f"mine_refused.{key}"):
        rl.check("mine_refused", {"rewards"}, kind={"advantage": "advantages", "policy_loss": "losses"}[kind])


def test_an_option_of_ones_own_that_is_called_cap_has_no_bound():
    @tilth.policy_loss("capped")
    def capped(logprobs, advantages, *, cap: float = 0.5):
        return -advantages * logprobs

    assert rl.loss_entry("capped", cap=0.25).model_dump()["cap"] == 0.25
