"""What a judge reads, says and earns: one rule for steps, verdicts read strictly, rewards as in FAPO (2510.22543)."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilth.rl as rl
from tilth.rewards import judging
from tilth.rewards.judging import penalty, process_reward, question, steps, verdict

LAMBDAS = [Fraction(1, 2), Fraction(2, 3), Fraction(1), Fraction(4, 3)]


@pytest.mark.parametrize(
    "text, found",
    [
        ("", []),
        ("\n \n", []),
        ("3+4=7", ["3+4=7"]),
        (" 3+4=7 \n\n#7\n", ["3+4=7", "#7"]),
        ("a\r\nb", ["a", "b"]),
        ("a b\tc", ["a b\tc"]),
        ("a\x0bb\u2028c", ["a\x0bb\u2028c"]),  # splitlines would find three lines
    ],
)
def test_steps_are_the_lines(text, found):
    assert steps(text) == found


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_steps_of_steps_are_the_same_steps(lines):
    once = steps("\n".join(lines))
    assert steps("\n".join(once)) == once and all(once)


def test_a_question_says_the_problem_the_answer_and_the_index_of_each_step():
    assert question(" 3+4= ", "7\n", ["3+4=7", "#7"]) == "3+4=\n7\n0:3+4=7\n1:#7\n?"


@pytest.mark.parametrize(
    "said, count, found",
    [
        ("#2", 5, 2),
        ("7+4-#1", 5, 1),
        ("7+4+#-1", 2, -1),
        ("#-1", 1, -1),
        ("#0", 1, 0),
        ("#1", 1, None),  # there is no such step
        ("#-2", 5, None),
        ("#", 5, None),
        ("2", 5, None),
        ("", 5, None),
        ("#1 or rather #3", 5, 3),
        ("#3 or rather #9", 5, None),  # the last one counts
        ("#### 4", 5, 4),
        (r"so \boxed{3}", 5, 3),
        (r"so \boxed{ -1 }", 5, -1),
        ("#1234567890", 10**10, None),
        ("#٣", 5, None),
    ],
)
def test_verdicts(said, count, found):
    assert verdict(said, count) == found


@given(st.integers(1, 12), st.data())
def test_a_judge_earns_between_minus_one_and_one_and_less_the_farther_off_it_is(count, data):
    truth = data.draw(st.integers(-1, count - 1))
    earned = {said: process_reward(said, truth, count) for said in range(-1, count)}
    assert all(-1 <= reward <= 1 for reward in earned.values()) and earned[truth] == 1
    assert process_reward(None, truth, count) == -1
    if truth == -1:
        assert all(earned[said] == -1 for said in range(count))
        return
    assert earned[-1] == -1 and all(earned[said] > 0 for said in range(count))  # a right label beats a wrong one
    by_distance = sorted(range(count), key=lambda said: abs(said - truth))
    assert [earned[said] for said in by_distance] == sorted((earned[s] for s in range(count)), reverse=True)
    assert all(earned[said] == 1 - abs(said - truth) / count for said in range(count))


def after(coefficient, right, wrong, flawed):
    """Rewards of a group, the flawed ones last."""
    rewards = np.array([1.0] * right + [0.0] * wrong + [1.0] * flawed)
    return penalty(rewards, coefficient=coefficient, flawed=np.arange(len(rewards)) >= right + wrong)


@pytest.mark.parametrize("coefficient", LAMBDAS)
def test_the_sign_of_a_flawed_answers_advantage(coefficient):
    """Negative exactly where (fully right) / (wrong) is above 2 / lambda - 1, in all small groups."""
    for right, wrong, flawed in product(range(6), range(6), range(1, 6)):
        n = right + wrong + flawed
        if n == 1:
            continue  # a group of one has no baseline
        rewards = after(float(coefficient), right, wrong, flawed)
        found = rl.estimate(
            "grpo",
            rewards=torch.from_numpy(rewards),
            groups=torch.zeros(n, dtype=torch.long),
            lengths=torch.ones(n, dtype=torch.long),
            mask=torch.ones(n),
        )
        advantage, exact = float(found.advantages[-1]), (2 - coefficient) * wrong - coefficient * right
        assert (abs(advantage) < 1e-6) if exact == 0 else (advantage > 0) == (exact > 0)
        if wrong and exact:
            assert (advantage < 0) == (Fraction(right, wrong) > 2 / coefficient - 1)


def test_the_moments_are_those_of_the_paper():
    """Mean (1 - 2 beta) - lambda g; variance 4 beta (1 - beta) + lambda g (1 - g)(lambda - 4 / (rho + 1))."""
    for coefficient in map(float, LAMBDAS):
        for right, flawed, wrong in [(3, 2, 3), (1, 5, 2), (4, 1, 1), (2, 2, 2)]:
            n = right + flawed + wrong
            ours = after(coefficient, right, wrong, flawed) * 2 - 1
            beta, share, rho = wrong / n, flawed / n, right / wrong
            assert float(ours.mean()) == pytest.approx(1 - 2 * beta - coefficient * share)
            variance = 4 * beta * (1 - beta) + coefficient * share * (1 - share) * (coefficient - 4 / (rho + 1))
            assert float(ours.var()) == pytest.approx(variance)


def test_without_penalty_a_reward_keeps_its_bits():
    rewards = np.array([1.0, 0.1, -0.0, np.nan, 1e-30], np.float32)
    for coefficient, flawed in ((0.0, True), (1.0, False)):
        found = penalty(rewards, coefficient=coefficient, flawed=np.full(5, flawed)).astype(np.float32)
        assert found.tobytes() == rewards.tobytes()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 3", 3.0), ("score = -0.5.", -0.5), ("#2 no, #4", 4.0), ("Score: 7/10", 0.7), ("\\boxed{ 1 }", 1.0),
        ("7", None), ("", None), ("Score: 1/0", None), ("Score:", None), ("Score: nan", None), ("# 12345678901", None),
    ],
)  # fmt: skip
def test_a_grade_is_the_last_number_behind_a_mark(text, score):
    assert judging.grade(text) == score


def test_a_rubric_is_filled_in_once():
    """What an answer says about the rubric's places is text."""
    assert judging.grading("{prompt}|{completion}|{x}", "{answer}", "right", "{prompt}") == "{answer}|{prompt}|{x}"
