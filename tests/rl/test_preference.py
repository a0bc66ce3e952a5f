"""Preference losses: against TRL's numbers, plain loops in float64, differences of the loss, and their edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth import rl
from tilth.core.errors import RecipeError

OF_LOGPROBS = ("sigmoid", "robust", "hinge", "ipo", "simpo")
EVERY = (*OF_LOGPROBS, "bradley_terry")

# Three pairs under a random Qwen3 and another one as its reference: sums of log-probs and tokens of the answers, and
# what DPOTrainer of TRL 1.16 makes of them (loss_type, beta, label_smoothing -> loss).
POLICY = (
    [-7.751360893249512, -10.402290344238281, -10.02931022644043],
    [
        -15.248162269592285,
        -9.221647262573242,
        -5.240355491638184,
    ],
)
REFERENCE = (
    [-6.977492332458496, -7.980485916137695, -13.30298137664795],
    [
        -15.287240982055664,
        -8.827561378479004,
        -5.100152969360352,
    ],
)
COUNTS = [3, 3, 4], [5, 3, 2]
TRL = [
    ("sigmoid", {"beta": 0.1}, 0.6904119849205017),
    ("sigmoid", {"beta": 0.3}, 0.7240638732910156),  # with label_smoothing 0.2, which TRL's sigmoid does not look at
    ("robust", {"beta": 0.1, "smoothing": 0.1}, 0.6880235075950623),
    ("hinge", {"beta": 0.1}, 0.9808931350708008),
    ("ipo", {"beta": 0.1}, 25.616182327270508),
    ("sigmoid", {"beta": 0.5, "average": True}, 0.7112056612968445),
]


def f64(*columns):
    return tuple(torch.tensor(c, dtype=torch.float64) for c in columns)


def given_pairs(name, chosen, rejected, **options):
    """With counts and a reference where the loss takes them."""
    more = {} if name in ("bradley_terry", "simpo") else {"reference": f64(*REFERENCE)}
    return rl.preference_loss(name, chosen=chosen, rejected=rejected, counts=f64(*COUNTS), **more, **options)


# ---- values ----


@pytest.mark.parametrize("name, options, expected", TRL)
def test_values_are_those_of_trl(name, options, expected):
    assert float(given_pairs(name, *f64(*POLICY), **options).loss) == pytest.approx(expected, rel=1e-6)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def plain(name, i, margin=0.0, *, beta=0.1, smoothing=0.0, average=False, centring=0.0, sft=0.0):
    """The loss of pair i by the formulas, one number after another."""
    (w, lo), (rw, rl_), (nw, nl) = ((a[i], b[i]) for a, b in (POLICY, REFERENCE, COUNTS))
    if name == "bradley_terry":
        return -math.log(sigmoid(w - lo - margin)) + centring * (w + lo) ** 2
    if name == "simpo":
        x = beta * (w / nw - lo / nl) - margin
    elif name == "ipo":
        return ((w - rw) / nw - (lo - rl_) / nl - 1 / (2 * beta)) ** 2 - sft * w / nw
    else:
        by_w, by_l = (nw, nl) if average else (1, 1)
        x = beta * ((w - rw) / by_w - (lo - rl_) / by_l) - margin
    right, wrong = -math.log(sigmoid(x)), -math.log(sigmoid(-x))
    if name == "hinge":
        found = max(0.0, 1 - x)
    elif name == "robust":
        found = ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    else:
        found = (1 - smoothing) * right + smoothing * wrong
    return found - sft * w / nw


CASES = [
    ("sigmoid", {"beta": 0.7, "smoothing": 0.3, "margin": 0.2}),
    ("sigmoid", {"beta": 0.7, "average": True, "sft": 0.5}),
    ("robust", {"beta": 0.4, "smoothing": 0.2, "margin": 0.1}),
    ("hinge", {"beta": 0.2, "margin": 0.4, "sft": 1.0}),
    ("ipo", {"beta": 0.3, "sft": 0.2}),
    ("simpo", {"beta": 2.5, "margin": 0.8, "smoothing": 0.1}),
    ("bradley_terry", {"margin": 0.3, "centring": 0.01}),
]


@pytest.mark.parametrize("name, options", CASES)
@pytest.mark.parametrize("of_data", [None, [0.5, 0.0, -0.25]])
def test_values_are_those_of_the_formulas(name, options, of_data):
    if name == "ipo" and of_data:
        with raises(RecipeError, "margin"):
            given_pairs(name, *f64(*POLICY), margins=torch.tensor(of_data), **options)
        return
    margins = None if of_data is None else torch.tensor(of_data)
    found = given_pairs(name, *f64(*POLICY), margins=margins, **options)
    extra = of_data or [0.0] * 3
    rest = {k: v for k, v in options.items() if k != "margin"}
    expected = [plain(name, i, options.get("margin", 0.0) + extra[i], **rest) for i in range(3)]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(found.loss) == pytest.approx(sum(expected) / 3, rel=1e-12)


def test_rewards_accuracy_and_logprobs_are_measured():
    found = given_pairs("sigmoid", *f64(*POLICY), beta=0.5)
    ahead, behind = ([0.5 * (p - r) for p, r in zip(POLICY[k], REFERENCE[k])] for k in (0, 1))
    numbers = {name: float(metric) for name, metric in found.metrics.items()}
    assert numbers["rewards/chosen"] == pytest.approx(sum(ahead) / 3)
    assert numbers["rewards/rejected"] == pytest.approx(sum(behind) / 3)
    assert numbers["rewards/margin"] == pytest.approx((sum(ahead) - sum(behind)) / 3)
    assert numbers["rewards/accuracy"] == pytest.approx(sum(a > b for a, b in zip(ahead, behind)) / 3)
    assert numbers["logprobs/chosen"] == pytest.approx(sum(POLICY[0]) / 3)
    scores = rl.preference_loss("bradley_terry", chosen=torch.ones(2), rejected=torch.tensor([1.0, 0.0])).metrics
    assert float(scores["rewards/accuracy"]) == 0.75 and "logprobs/chosen" not in scores  # a tie is half


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "bradley_terry"])
def test_where_policy_and_reference_agree_the_loss_is_known_exactly(name):
    same = f64(*POLICY)
    more = {} if name == "bradley_terry" else {"reference": same}
    chosen, rejected = (same[0], same[0]) if name == "bradley_terry" else same
    found = rl.preference_loss(name, chosen=chosen, rejected=rejected, counts=f64(*COUNTS), **more)
    expected = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 25.0, "bradley_terry": math.log(2)}[name]
    assert found.losses.tolist() == [expected] * 3
    assert float(found.metrics["rewards/accuracy"]) == 0.5


# ---- derivatives ----


@pytest.mark.parametrize("name, options", CASES)
def test_derivatives_are_differences_of_the_loss(name, options):
    chosen, rejected = f64(*POLICY)
    weights = torch.tensor([0.5, 0.25, 0.25])
    found = given_pairs(name, chosen, rejected, weights=weights, **options)
    step = 1e-6
    for side, by in ((0, found.chosen), (1, found.rejected)):
        for i in range(3):
            moved = [[c.clone(), c.clone()] for c in (chosen, rejected)]
            moved[side][0][i] += step
            moved[side][1][i] -= step
            up, down = (
                float(given_pairs(name, moved[0][k], moved[1][k], weights=weights, **options).loss) for k in (0, 1)
            )
            assert float(by[i]) == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_one_gradient_step_of_dpo_is_the_papers():
    """eq. 8 of arXiv 2305.18290: -beta * sigmoid(r_l - r_w), and its opposite."""
    found = given_pairs("sigmoid", *f64(*POLICY), beta=0.3)
    for i in range(3):
        apart = 0.3 * ((POLICY[0][i] - REFERENCE[0][i]) - (POLICY[1][i] - REFERENCE[1][i]))
        assert float(found.chosen[i]) == pytest.approx(-0.3 * sigmoid(-apart) / 3)
        assert float(found.rejected[i]) == -float(found.chosen[i])


def test_nothing_that_is_passed_gets_a_gradient_or_is_needed_in_float64():
    chosen = torch.tensor([1.0, 2.0], requires_grad=True)
    with torch.no_grad():
        found = rl.preference_loss("bradley_terry", chosen=chosen, rejected=torch.zeros(2))
    assert not found.loss.requires_grad and chosen.grad is None and found.chosen.dtype == torch.float64


@pytest.mark.parametrize("name", EVERY)
def test_scores_far_apart_stay_finite(name):
    far = torch.tensor([1e4, -1e4])
    more = {"reference": (torch.zeros(2), torch.zeros(2))} if name in OF_LOGPROBS and name != "simpo" else {}
    found = rl.preference_loss(name, chosen=far, rejected=-far, **more)
    assert torch.isfinite(found.losses).all() and torch.isfinite(found.chosen).all()


def test_robust_is_unbiased_under_flipped_labels():
    """Its mean over right and flipped labels, at their rates, is the loss of the right ones."""
    chosen, rejected = f64(*POLICY)
    clean = given_pairs("sigmoid", chosen, rejected, beta=0.4).losses
    right = given_pairs("robust", chosen, rejected, beta=0.4, smoothing=0.3).losses
    flipped = rl.preference_loss(
        "robust", chosen=rejected, rejected=chosen, reference=f64(*REFERENCE)[::-1], beta=0.4, smoothing=0.3
    ).losses
    assert torch.allclose(0.7 * right + 0.3 * flipped, clean, atol=1e-12)


# ---- weights and order ----


def test_a_prompt_weighs_as_much_as_any_other_however_many_pairs_it_has():
    found = rl.pair_weights(torch.tensor([7, 7, 9, 7]))
    assert found.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 6]) and float(found.sum()) == pytest.approx(1)
    assert rl.pair_weights(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_k_answers_of_a_prompt_are_the_mean_over_all_its_pairs():
    """InstructGPT, eq. 1: 1 / (K choose 2) for each prompt."""
    scores = [[0.3, -0.2, 1.0], [0.5, 0.1]]
    pairs = [(p, a, b) for p, s in enumerate(scores) for i, a in enumerate(s) for b in s[i + 1 :]]
    found = rl.preference_loss(
        "bradley_terry",
        chosen=torch.tensor([a for _, a, _ in pairs], dtype=torch.float64),
        rejected=torch.tensor([b for _, _, b in pairs], dtype=torch.float64),
        weights=rl.pair_weights(torch.tensor([p for p, _, _ in pairs])),
    )
    each = [[-math.log(sigmoid(a - b)) for q, a, b in pairs if q == p] for p in (0, 1)]
    assert float(found.loss) == pytest.approx(sum(sum(e) / len(e) for e in each) / 2)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(EVERY), st.permutations(range(3)))
def test_the_order_of_pairs_changes_nothing(name, order):
    pick = torch.tensor(order)
    chosen, rejected = f64(*POLICY)
    more = {"reference": f64(*REFERENCE)} if name in OF_LOGPROBS and name != "simpo" else {}
    whole = rl.preference_loss(name, chosen=chosen, rejected=rejected, counts=f64(*COUNTS), **more)
    turned = rl.preference_loss(
        name,
        chosen=chosen[pick],
        rejected=rejected[pick],
        counts=tuple(c[pick] for c in f64(*COUNTS)),
        **{key: tuple(c[pick] for c in columns) for key, columns in more.items()},
    )
    assert torch.equal(whole.losses[pick], turned.losses) and torch.equal(whole.chosen[pick], turned.chosen)
    assert float(whole.loss) == pytest.approx(float(turned.loss), rel=1e-12)


def test_no_pair_is_no_loss():
    found = rl.preference_loss("bradley_terry", chosen=torch.zeros(0), rejected=torch.zeros(0))
    assert float(found.loss) == 0 and found.chosen.shape == (0,)


# ---- what is wrong ----


@pytest.mark.parametrize(
    "name, options, key",
    [
        ("sigmiod", {}, "preferences"),
        ("sigmoid", {}, "reference"),
        ("bradley_terry", {"sft": 0.1}, "sft"),
        ("bradley_terry", {"beta": 0.1}, "bradley_terry.beta"),
        ("ipo", {"smoothing": 0.1}, "ipo.smoothing"),
        ("simpo", {"smoothing": 0.5}, "simpo.smoothing"),
        ("simpo", {"beta": 0.0}, "simpo.beta"),
    ],
)
def test_what_cannot_be_is_named(name, options, key):
    with raises(RecipeError, key):
        rl.preference_loss(name, chosen=torch.zeros(2), rejected=torch.zeros(2), **options)


def test_every_loss_says_what_it_compares_and_needs():
    for name in EVERY:
        entry = rl.check(name, {"ref_logprobs"}, kind="preferences")
        assert entry.scope == "rows"
        assert entry.compares == ("rewards" if name == "bradley_terry" else "logprobs")
        if name in ("simpo", "bradley_terry"):
            assert entry.needs == ()
        else:
            with raises(RecipeError, "ref_logprobs"):
                rl.check(name, set(), kind="preferences")
