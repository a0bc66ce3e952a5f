"""What corrections do to the gradient, by listing every answer of a small policy: its bias and variance are exact."""

from pathlib import Path

import pytest
import torch

from tests.rl import bandit
from tests.rl.bandit import ROWS, Problem
from tilth import rl

PAGE = Path(__file__).parents[2] / "docs" / "packages" / "rl-algorithms.md"


@pytest.fixture(scope="module")
def found():
    return {noise: bandit.effects(noise) for noise in bandit.NOISE}


@pytest.fixture(scope="module", params=[0.3, 1.0])
def problem(request):
    return Problem(7, request.param)


def test_answers_are_all_there_is(problem):
    assert len(set(bandit.ANSWERS)) == len(bandit.ANSWERS) == 31
    assert float(problem.likely.sum()) == pytest.approx(1, abs=1e-12)
    assert float(bandit.of_answers(problem.ours).sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("title", ROWS)
def test_the_expected_gradient_is_that_of_the_loss(problem, title):
    """The product of weights and scores by which bias and variance are found, and ``policy_loss`` itself."""
    name, options = ROWS[title]
    correction = problem.correct(name, **options)
    torch.testing.assert_close(problem.moments(correction)[0], problem.expected(correction), atol=1e-12, rtol=1e-9)


def test_without_correction_the_gradient_is_biased_and_on_its_own_samples_it_is_not(problem):
    bias, _ = problem.effect("none")
    assert bias > 0.15
    same = Problem(7, 0.0)
    for title, (name, options) in ROWS.items():
        assert same.effect(name, **options)[0] < 1e-12, title


def test_weights_of_sequences_without_bound_are_unbiased(problem):
    for seed in range(5):
        other = Problem(seed, problem.noise)
        assert other.effect("decoupled_seq_is", max_weight=0.0)[0] < 1e-12
        torch.testing.assert_close(other.expected(other.correct("decoupled_seq_is", max_weight=0.0)), other.truth)


def test_the_ratio_upside_down_makes_it_worse(problem):
    """The test above can fail."""
    columns = {"old_logprobs": problem.theirs, "rollout_logprobs": problem.ours}
    wrong = rl.correct("decoupled_seq_is", **columns, mask=bandit.MASK, lengths=bandit.LENGTHS, max_weight=0.0)
    mean, _ = problem.moments(wrong)
    assert (mean - problem.truth).norm() > 1.2 * problem.effect("none")[0] * problem.truth.norm()


@pytest.mark.parametrize("noise", bandit.NOISE)
def test_each_correction_takes_bias_away(found, noise):
    uncorrected, _ = found[noise]["none"]
    for title in ROWS:
        if title != "none":
            assert found[noise][title][0] < 0.9 * uncorrected, title
    assert found[noise]["token, no bound"][0] > 0.1  # a token's weight knows nothing of those before it


@pytest.mark.parametrize("noise", bandit.NOISE)
def test_bounds_trade_variance_for_bias(found, noise):
    for level, bounded in (("token", "token TIS"), ("sequence", "sequence TIS"), ("sequence", "sequence MIS")):
        free, held = found[noise][f"{level}, no bound"], found[noise][bounded]
        assert held[1] < free[1] and held[0] >= free[0] - 1e-3, bounded


def test_a_higher_bound_has_less_bias_and_more_variance():
    problems = [Problem(seed, 1.0) for seed in range(6)]
    curve = [
        [sum(values) for values in zip(*(p.effect("decoupled_seq_is", max_weight=bound) for p in problems))]
        for bound in (1.0, 2.0, 5.0, 20.0, 1e6)
    ]
    biases, variances = zip(*curve)
    assert list(biases) == sorted(biases, reverse=True) and biases[-1] < 1e-10
    assert list(variances) == sorted(variances)


def test_geometric_rejection_keeps_what_both_policies_like(problem):
    """Left out is exactly what is out of bounds, and its probability is the share of the engine's answers lost."""
    bounds = (0.8, 1.25)
    correction = problem.correct("decoupled_geo_rs", reject={"seq_mean_k1": bounds})
    gap = (problem.theirs - problem.ours).detach()
    mean = torch.zeros(len(bandit.ANSWERS), dtype=torch.float64).index_add(0, bandit.ROW, gap) / bandit.LENGTHS
    inside = (mean.exp() >= bounds[0]) & (mean.exp() <= bounds[1])
    assert torch.equal(correction.mask, inside[bandit.ROW]) and inside.any() and not inside.all()


def test_the_table_of_the_page_is_what_the_code_prints(found):
    page = PAGE.read_text()
    assert "\n".join(bandit.table(found)) in page
