import numpy as np
import pytest

from tests.errors import raises
from tests.flows.stand_ins import Journal, sampler
from tilth.core.errors import RecipeError, RewardError
from tilth.flows.reward_shaping import has_spread
from tilth.roles.rollout import ask


def test_a_position_moves_only_with_the_step_that_drew(tmp_path):
    one = sampler(tmp_path)
    first = one.draw("examples", 4)
    assert one.state.drawn == {} and not np.array_equal(one.draw("examples", 4), first)
    one.rollback()
    assert np.array_equal(one.draw("examples", 4), first)
    one.commit()
    assert one.state.drawn == {"examples": 4} and not np.array_equal(one.draw("examples", 4), first)


def test_two_samplers_at_the_same_position_draw_the_same(tmp_path):
    one, other = sampler(tmp_path), sampler(tmp_path)
    one.sample(4)
    one.commit()
    other.state.drawn = dict(one.state.drawn)
    again = [s.sample(4).drawn for s in (one, other)]
    assert again[0]["id"].tolist() == again[1]["id"].tolist() == list(range(24, 48))
    assert np.array_equal(again[0]["prompt"], again[1]["prompt"])


def test_missing_rewards_and_flat_groups_are_drawn_but_not_kept(tmp_path):
    one = sampler(tmp_path, lambda i: None if i == 1 else float(i // 4 == 2 and i % 2))
    found = one.sample(4, has_spread)
    assert found.kept["id"].tolist() == [8, 9, 10, 11] and found.drawn["id"].tolist() == list(range(24))
    values = one.metrics.values()
    assert (values["samples"], values["samples/trained"], values["reward/missing"]) == (24, 4, 1)
    assert values["groups/flat"] == pytest.approx(19 / 23) and values["groups/gradient"] == pytest.approx(1 / 6)


def test_rounds_go_on_until_enough_groups_are_kept_and_drop_the_surplus(tmp_path):
    one = sampler(tmp_path, lambda i: float(i // 4 % 2 == 0 and i % 2))
    found = one.sample(4, has_spread, rounds=8)
    assert len(np.unique(found.kept["group"])) == 6 and found.kept["group"].tolist() == sorted(found.kept["group"])
    assert one.metrics.values()["samples/rounds"] == len(one.roles.rollout.asked) > 1
    assert one.metrics.values()["samples/trained"] == 24


def test_rewards_of_the_journal_are_used_again_and_new_ones_written(tmp_path):
    journal = Journal({3: {"value": 0.25}})
    one = sampler(tmp_path, lambda i: 1.0, journal)
    scored = one.generate_and_score(ask([0, 1], 2, 0))
    assert scored["reward"].tolist() == [1.0, 1.0, 1.0, 0.25]
    assert journal.written == [(0, [0, 1, 2, 3], [])] and one.state.graded


def test_a_reason_is_logged_once_and_a_reward_that_never_worked_is_an_error(tmp_path):
    one = sampler(tmp_path, lambda i: None if i < 2 else 1.0)
    for _ in range(2):
        one.generate_and_score(ask([0, 1], 2, 0))
    assert [line.startswith("2 of 4 rewards are missing") for line in one.said] == [True]
    with raises(RewardError, "reward.function"):
        sampler(tmp_path, lambda i: None).generate_and_score(ask([0, 1], 2, 0))


def test_what_the_reward_printed_is_mentioned_once(tmp_path):
    one = sampler(tmp_path)
    (tmp_path / "reward.log").write_text("printed")
    for _ in range(2):
        one.generate_and_score(ask([0], 2, 0))
    assert one.said == [f"the reward function's output is in {tmp_path / 'reward.log'}"]


def test_nothing_is_generated_without_an_engine(tmp_path):
    one = sampler(tmp_path)
    del one.roles["rollout"]
    with raises(RecipeError, "reward.function"):
        one.sample(4)


def test_a_run_that_is_made_again_drops_what_was_scored_ahead_before(tmp_path):
    """Roles that were kept may have scores of an attempt that has failed; those of its own generations stay."""
    calls = []
    for one in (sampler(tmp_path), sampler(tmp_path)):
        one.roles.reward.forget = lambda samples: calls.append(samples)
        one.generate_and_score(ask([0, 1], 2, 0))
        one.generate_and_score(ask([0, 1], 2, 4))
    assert calls == [None, None]
