"""What shapes rewards, chooses groups and adapts weights: pure functions of rows and metrics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.config.schema import AlgorithmConfig
from tilth.core.batch import Batch
from tilth.flows.reward_shaping import (
    adapted,
    current,
    first_groups,
    has_spread,
    is_mixed,
    mask_truncated,
    missing_prompts,
    overlong,
)
from tilth.rl.metrics import Metric
from tilth.roles.experience import is_right

MOST = 20


def rows(lengths, rewards=None, finish=None, **more):
    n = len(lengths)
    given = {
        "completion": np.array(lengths, np.int32),
        "reward": np.array(rewards if rewards is not None else np.ones(n), np.float32),
        "finish": np.array(finish if finish is not None else np.zeros(n), np.int8),
        "group": np.zeros(n, np.int64),
    }
    return Batch(given | {name: np.array(column) for name, column in more.items()})


def how(**keys):
    return AlgorithmConfig(**{"overlong_buffer": 0.2, "overlong_penalty": 1.0, **keys})


def test_the_reward_falls_in_the_last_part_only_and_by_all_of_the_penalty_at_the_end():
    found = overlong(rows([1, 16, 17, 18, 20]), how(), MOST)["reward"]
    np.testing.assert_allclose(found, [1, 1, 0.75, 0.5, 0])  # eq. 13 of DAPO: L_max 20, L_cache 4
    assert overlong(rows([20]), how(overlong_penalty=0.5), MOST)["reward"].tolist() == [0.5]


def test_without_a_buffer_nothing_changes():
    batch = rows([20])
    assert overlong(batch, how(overlong_buffer=0.0), MOST) is batch


@given(st.integers(2, 60), st.floats(0.05, 1), st.floats(0, 3))
def test_the_fall_is_monotone_and_has_no_jump(most, buffer, penalty):
    found = overlong(
        rows(range(1, most + 1), np.zeros(most)), how(overlong_buffer=buffer, overlong_penalty=penalty), most
    )
    steps = np.diff(found["reward"], prepend=0)
    assert (steps <= 1e-6).all() and -steps.min() <= penalty / max(buffer * most, 1) + 1e-5
    assert found["reward"][-1] == pytest.approx(-penalty, abs=1e-5)


def test_cut_completions_leave_the_loss_where_the_recipe_says_so():
    batch = rows([3, 20, 5], finish=[0, 1, 0])
    assert mask_truncated(batch, how(overlong_filter=True))["completion"].tolist() == [3, 5]
    assert mask_truncated(batch, how()) is batch


# ---- which groups ----


def grouped(groups, rewards, correct=None):
    given = {"group": np.array(groups, np.int64), "reward": np.array(rewards, np.float32)}
    return Batch(given | {"outcome": given["reward"] if correct is None else np.array(correct, np.float32)})


def test_groups_are_mixed_by_what_is_right_not_by_the_shaped_reward():
    batch = grouped([1, 1, 2, 2], [1.0, 0.7, 1.0, 0.2], correct=[1, 1, 1, 0])
    assert has_spread(batch).all()
    assert is_mixed(batch).tolist() == [False, False, True, True]
    assert is_mixed(grouped([1, 1, 2, 2], [1, 1, 1, 0])).tolist() == [False, False, True, True]


def test_a_shaped_reward_does_not_change_what_is_right():
    batch = grouped([1, 1, 2, 2], [1, 1, 1, 0]).with_rows(completion=np.array([18, 17, 19, 3], np.int32))
    shaped = overlong(batch, how(), MOST)
    assert has_spread(shaped).all() and (shaped["reward"][:3] < 1).all()
    assert is_mixed(shaped).tolist() == [False, False, True, True]
    assert is_right(shaped).tolist() == [True, True, True, False]


def test_surplus_groups_are_cut_whole_the_last_ones_first():
    batch = grouped([5, 5, 3, 3, 9, 9], range(6))
    assert first_groups(batch, 2)["reward"].tolist() == [0, 1, 2, 3]
    assert len(first_groups(batch, 7)) == 6 and len(first_groups(batch, 0)) == 0


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), max_size=4))
def test_a_round_asks_for_what_is_missing_by_the_share_kept_and_never_more_than_a_batch(wanted, rounds):
    sampled, kept, first = [], [], 0
    for asked, share in rounds:
        groups = np.arange(first, first + asked)
        sampled.append(grouped(groups, groups))
        kept.append(grouped(groups[: int(share * asked)], groups[: int(share * asked)]))
        first += asked
    have, asked = sum(map(len, kept)), sum(map(len, sampled))
    found = missing_prompts(wanted, sampled, kept)
    assert (found == 0) == (have >= wanted)
    assert found <= wanted
    if found:
        assert found == wanted or found * max(have / max(asked, 1), 1 / 8) >= wanted - have


# ---- weights that follow ----


def updates(kl, entropy):
    return [{"kl_ref": Metric(kl * 10, 10, "mean"), "entropy": Metric(entropy * 10, 10, "mean")}] * 2


def test_the_kl_weight_follows_its_target_as_published():
    given = how(kl_coef=0.2, kl_target=6.0, kl_horizon=10_000)
    assert adapted(given, {}, updates(10, 1), 256)["kl_coef"] == pytest.approx(0.201024)
    assert adapted(given, {}, updates(1, 1), 256)["kl_coef"] < 0.2


def test_the_entropy_weight_grows_below_its_target_and_falls_above():
    given = how(entropy_coef=0.001, entropy_target=0.5)
    assert adapted(given, {}, updates(0, 0.1), 8)["entropy_coef"] > 0.001
    assert adapted(given, {}, updates(0, 0.9), 8)["entropy_coef"] < 0.001


def test_nothing_is_adapted_unasked_or_from_nothing():
    assert adapted(how(kl_coef=0.2), {}, updates(10, 1), 8) == {}
    assert adapted(how(kl_coef=0.2, kl_target=6.0, entropy_target=1.0), {}, [], 8) == {}
    empty = [{"kl_ref": Metric(0.0, 0, "mean")}]
    assert adapted(how(kl_coef=0.2, kl_target=6.0), {}, empty, 8) == {}


def test_an_adapted_entropy_bonus_is_there_only_below_its_target():
    given = how(entropy_coef=0.001, entropy_target=0.5)
    low = adapted(given, {}, updates(0, 0.1), 8)
    assert current(given, low)["entropy_coef"] == low["entropy_coef"] > 0.001
    high = adapted(given, low, updates(0, 0.9), 8)
    assert current(given, high)["entropy_coef"] == 0 < high["entropy_coef"] < low["entropy_coef"]
    assert current(given, {}) == {}


@pytest.mark.parametrize(("name", "target"), [("kl_coef", "kl_target"), ("entropy_coef", "entropy_target")])
def test_a_weight_is_adapted_only_while_its_target_is_set(name, target):
    """As after ``--allow``: without a target the recipe's value holds again, and nothing of before comes back."""
    given = how(**{name: 0.2, target: 0.5})
    found = adapted(given, {}, updates(5, 0.9), 8)
    fixed = how(**{name: 0.2})
    assert found[name] != 0.2 and current(fixed, found) == {}
    assert current(given, adapted(fixed, found, updates(5, 0.9), 8)) == {}


@pytest.mark.parametrize(("name", "target"), [("kl_coef", "kl_target"), ("entropy_coef", "entropy_target")])
def test_a_weight_that_was_changed_in_the_recipe_begins_anew_from_it(name, target):
    low = updates(5, 0.1)
    found = adapted(how(**{name: 0.2, target: 0.5}), {}, low, 8)
    changed = how(**{name: 0.3, target: 0.5})
    assert current(changed, found).get(name, getattr(changed, name)) == 0.3
    assert adapted(changed, found, low, 8) == adapted(changed, {}, low, 8)
    again = adapted(how(**{name: 0.2, target: 0.6}), found, low, 8)  # another target is no new beginning
    assert again[name] > found[name] > 0.2


def test_what_was_found_stays_where_a_step_measures_nothing():
    given = how(kl_coef=0.2, kl_target=6.0, entropy_coef=0.001, entropy_target=0.5)
    found = adapted(given, {}, updates(10, 0.1), 8)
    assert adapted(given, found, [], 8) == found
