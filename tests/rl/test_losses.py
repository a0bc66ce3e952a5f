"""Policy losses: the reference vectors, the first step, edge rows, weights, and what is said of wrong options."""

import math

import pytest
import torch

from tests.errors import raises
from tests.rl.fixture import GRPO, Fixture
from tests.rl.losing import ACTIVE, AGGREGATIONS, FIRST_PASS, LOSSES, columns, first_pass, run
from tests.rl.strategies import Drawn
from tests.rl.test_golden import PACKINGS, close
from tilth import rl
from tilth.config.schema import AlgorithmConfig, Recipe
from tilth.core.errors import RecipeError, TokenCountError

NAN = float("nan")


@pytest.fixture(params=PACKINGS, ids=["packed", "prompted", "padded", "both"])
def data(request) -> Fixture:
    return Fixture(*request.param)


def loss_of(data, name, *, old="old", **options):
    x = data.new.clone().requires_grad_()
    result = rl.policy_loss(
        name,
        logprobs=x,
        old_logprobs=getattr(data, old),
        advantages=torch.where(data.mask > 0, GRPO[data.row], NAN),
        mask=data.mask,
        lengths=data.lengths,
        **options,
    )
    result.loss.backward()
    return result, x.grad


def clips(low, high):
    return {"clip_low": low, "clip_high": high}


GOLDEN = [
    ("gspo", clips(0.02, 0.03), -0.107816, 0.588620, -0.013610, 0.079786),
    ("gspo", clips(0.2, 0.2), -0.108187, 0.749907, None, None),
    ("sapo", {}, -0.239352, 0.750567, -0.012540, 0.073870),
    ("gpg", {}, 0.135408, 0.707752, -0.020620, 0.040496),
    ("reinforce", {}, 0.135408, 0.707752, -0.020620, 0.040496),
    ("kl_cov", {"cov_share": 0.1}, -0.217769, 0.706260, -0.018845, 0.001296),
    ("geo_mean", clips(0.05, 0.05), -0.099419, 0.445314, -0.013519, 0.0),
    ("dro", {"beta": 0.5}, 0.136389, 0.703466, -0.022227, 0.038889),
    ("cispo", clips(0.05, 0.05), 0.137327, 0.707032, -0.019589, 0.038471),
    ("dppo_tv", {"tv_low": 0.02, "tv_high": 0.02, "cap": 20}, 0.108157, 0.414681, -0.018845, 0.0),
    ("dppo_kl", {"kl_low": 0.0005, "kl_high": 0.0005}, 0.091304, 0.379523, None, None),
    ("reinforce", {"old": "rollout", "cap": 1.05}, 0.138040, 0.701392, None, None),
    ("ppo_clip", {"old": "rollout", "dual_clip": 3.0}, -0.222004, 0.710468, None, None),
]


@pytest.mark.parametrize("name, options, loss, norm, first, other", GOLDEN)
def test_golden(data, name, options, loss, norm, first, other):
    result, grad = loss_of(data, name, **options)
    close(result.loss.detach(), loss, 2e-6)
    close(grad.abs().sum(), norm, 2e-6)
    assert torch.isfinite(grad).all() and not grad[data.mask == 0].any()
    if first is not None:
        close(grad[data.at(0, 0)], first)
        close(grad[data.at(5, 1)], other)


def test_golden_of_truncated_weights(data):
    """Token weights min(old / rollout, 2) on the clipped loss: three policies."""
    weights = (data.old - data.rollout).exp().clamp(max=2.0)
    result, grad = loss_of(data, "ppo_clip", weights=weights, dual_clip=3.0)
    close(result.loss.detach(), -0.222004, 2e-6)
    close(grad.abs().sum(), 0.710468, 2e-6)
    close(grad[data.at(0, 0)], -0.019614)
    close(grad[data.at(5, 1)], 0.037758)


@pytest.mark.parametrize(
    "name, options, share",
    [
        ("gspo", clips(0.02, 0.03), 0.142857),
        ("cispo", clips(0.05, 0.05), 0.642857),
        ("kl_cov", {"cov_share": 0.1}, 2 / 28),
        ("kl_cov", {"cov_share": 1e-4}, 1 / 28),
    ],
)
def test_golden_shares(data, name, options, share):
    metrics = loss_of(data, name, **options)[0].metrics
    close(sum(float(metrics[k]) for k in ("clip_low", "clip_high", "selected") if k in metrics), share)


def test_clip_cov_of_the_fixture(data):
    """Chosen by hand: of the tokens whose covariance lies between the bounds, the two with the greatest numbers."""
    uniforms = torch.where(data.mask > 0, torch.arange(len(data.mask)) % 7 / 7 + data.row / 1000, NAN)
    options = {"cov_share": 0.1, "cov_low": 0.1, "cov_high": 0.6, "uniforms": uniforms}
    result, grad = loss_of(data, "clip_cov", **options)
    before = loss_of(data, "ppo_clip")[1]
    valid = data.mask > 0
    a, p = GRPO[data.row].double(), data.new.double()
    cov = (a - a[valid].mean()) * (p - p[valid].mean())
    inside = valid & (cov > 0.1) & (cov < 0.6)
    chosen = torch.topk(torch.where(inside, uniforms, -1.0), 2).indices
    assert int(inside.sum()) > 2 and before[chosen].all()
    assert not grad[chosen].any() and float(result.metrics["selected"]) == pytest.approx(2 / 28)
    before[chosen] = 0
    close(grad, before)


BATCH = Drawn(
    lengths=torch.tensor([4, 1, 3, 5, 2]),
    mask=torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool),
    rewards=torch.zeros(5),
    groups=torch.zeros(5),
    seed=11,
)
ROW_ADVANTAGES = torch.repeat_interleave(torch.tensor([1.0, -0.5, 3.0, -2.0, 0.25], dtype=torch.float64), BATCH.lengths)


def on_policy(name, aggregation):
    """Columns of a first step: the policy that sampled is the one that learns."""
    given = columns(BATCH)
    given = {k: torch.nan_to_num(v) for k, v in given.items()}
    given |= {"old_logprobs": given["logprobs"], "advantages": ROW_ADVANTAGES}
    result, grad = run(name, BATCH, given, aggregation=aggregation)
    wanted = rl.aggregate(
        aggregation or rl.loss_entry(name).aggregation,
        (x := given["logprobs"].clone().requires_grad_()) * -ROW_ADVANTAGES * given["weights"],
        mask=BATCH.mask,
        lengths=BATCH.lengths,
    )
    wanted.backward()
    return result, grad, x.grad


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("clip_cov", "geo_mean")])
def test_the_first_step_is_reinforce(name):
    """Ratio 1, nothing held, and the gradient of -A log pi."""
    for aggregation in ["", *AGGREGATIONS]:
        result, grad, wanted = on_policy(name, aggregation)
        torch.testing.assert_close(grad, wanted)
        assert float(result.metrics["ratio"]) == 1
        held = [float(m) for k, m in result.metrics.items() if k.startswith("clip_") or k == "truncated"]
        assert not any(held)


@pytest.mark.parametrize("rounding", [3e-7, -3e-7])
def test_rounding_has_no_gradient_of_its_own(rounding):
    """Where the policy has not moved, its log-probs of another packing differ in the last bits alone."""
    given = columns(BATCH) | {"advantages": ROW_ADVANTAGES}
    given = {k: torch.nan_to_num(v) for k, v in given.items()}
    for name in (n for n in LOSSES if n != "clip_cov"):
        (_, still), (_, rounded) = (
            run(name, BATCH, given | {"old_logprobs": given["logprobs"] + moved}) for moved in (0.0, rounding)
        )
        torch.testing.assert_close(rounded, still, rtol=1e-4, atol=1e-5, msg=name)


def test_the_first_step_of_losses_that_are_not_reinforce_token_by_token():
    """geo_mean spreads weights over the row; clip_cov takes the gradient of what it chose."""
    given = columns(BATCH)
    given |= {"old_logprobs": given["logprobs"], "advantages": ROW_ADVANTAGES}
    unweighted = {k: v for k, v in given.items() if k != "weights"}
    for aggregation in AGGREGATIONS:
        reinforce = run("gpg", BATCH, unweighted, aggregation=aggregation)[1]
        torch.testing.assert_close(run("geo_mean", BATCH, unweighted, aggregation=aggregation)[1], reinforce)
    result, grad = run("clip_cov", BATCH, unweighted)
    lost = BATCH.mask & (grad == 0)
    assert int(lost.sum()) == round(float(result.metrics["selected"]) * int(BATCH.mask.sum())) == 2
    torch.testing.assert_close(grad[~lost], run("gpg", BATCH, unweighted)[1][~lost])


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_counts(name):
    """All masked, NaN everywhere: loss 0 with a graph; no rows at all too."""
    x = torch.full((3,), NAN, requires_grad=True)
    given = {k: x.detach() for k in ("old_logprobs", "advantages", "uniforms", "weights", "ref_logprobs")}
    for aggregation in ["", *AGGREGATIONS]:
        found = rl.policy_loss(
            name,
            **given,
            logprobs=x,
            mask=torch.zeros(3),
            lengths=torch.tensor([1, 2]),
            aggregation=aggregation,
            kl_coef=0.5,
        )
        assert found.loss.item() == 0 and found.loss.requires_grad
        found.loss.backward()
        assert not x.grad.any() and all(math.isnan(float(m)) for m in found.metrics.values())
    nothing = {k: v[:0] for k, v in given.items()}
    empty = rl.policy_loss(
        name, **nothing, logprobs=x[:0], mask=torch.zeros(0), lengths=torch.zeros(0, dtype=torch.int64)
    )
    assert empty.loss.item() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_what_lies_at_masked_positions_reaches_nothing(name):
    given = columns(BATCH)
    result, grad = run(name, BATCH, given, kl_coef=0.3)
    assert torch.isfinite(result.loss) and torch.isfinite(grad).all() and not grad[~BATCH.mask].any()
    zeros = {k: torch.nan_to_num(v, nan=7.0) for k, v in given.items()}
    again, same = run(name, BATCH, zeros, kl_coef=0.3)
    assert torch.equal(again.loss, result.loss) and torch.equal(same, grad)
    assert {k: float(m) for k, m in again.metrics.items()} == {k: float(m) for k, m in result.metrics.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_probs_stay_finite(name):
    """A policy that moved as far as it can, either way, and tokens that are certain."""
    x = torch.tensor([-1e-9, -1e4, 0.0, -200.0])
    old = torch.tensor([-1e4, -1e-9, 0.0, -0.1])
    given = {"logprobs": x, "old_logprobs": old, "uniforms": torch.rand(4), "advantages": torch.tensor([1, -1, 2, -2])}
    for sign in (1, -1):
        given["advantages"] = sign * torch.tensor([1.0, -1.0, 2.0, -2.0])
        batch = Drawn(torch.tensor([2, 2]), torch.ones(4, dtype=torch.bool), torch.zeros(2), torch.zeros(2), 0)
        result, grad = run(name, batch, given)
        assert torch.isfinite(result.loss) and torch.isfinite(grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name):
    """And float32 differs from float64 by rounding alone."""
    given = {k: torch.nan_to_num(v) for k, v in columns(BATCH).items()}
    double = run(name, BATCH, given)[0].loss
    single = run(name, BATCH, {k: v.float() for k, v in given.items()})[0].loss
    half = run(name, BATCH, {k: v.bfloat16() for k, v in given.items()})[0].loss
    assert single.dtype == half.dtype == torch.float32 and double.dtype == torch.float64
    assert float(single) == pytest.approx(float(double), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "geo_mean"])
def test_weights_multiply_the_loss_of_tokens_not_the_penalty(name):
    given = columns(BATCH)
    bare = {k: v for k, v in given.items() if k != "weights"}
    found = first_pass(name, BATCH, given)
    more = {"thresholds": found, "aggregation": "token-sum"}
    per_token = []
    for t in torch.nonzero(BATCH.mask).flatten().tolist():
        weights = torch.zeros(len(BATCH.mask), dtype=torch.float64)
        weights[t] = 1.0
        per_token.append(float(run(name, BATCH, {**bare, "weights": weights}, **more)[0].loss))
    ones = run(name, BATCH, bare, **more)[0].loss
    assert sum(per_token) == pytest.approx(float(ones), rel=1e-9)
    weighted = run(name, BATCH, given, **more)[0].loss
    expected = math.fsum(a * b for a, b in zip(per_token, given["weights"][BATCH.mask].tolist()))
    assert float(weighted) == pytest.approx(expected, rel=1e-9)
    kl = [float(run(name, BATCH, g, kl_coef=0.7, **more)[0].loss) for g in (given, bare)]
    assert kl[0] - float(weighted) == pytest.approx(kl[1] - float(ones), rel=1e-9)


def test_weights_are_constants():
    x = torch.tensor([-1.0, -0.5], requires_grad=True)
    found = rl.policy_loss(
        "gpg",
        logprobs=x,
        old_logprobs=x,
        advantages=torch.ones(2),
        weights=x.exp() + x * x,
        mask=torch.ones(2),
        lengths=torch.tensor([2]),
    )
    found.loss.backward()
    torch.testing.assert_close(x.grad, -(x.exp() + x * x).detach() / 2)


def test_own_aggregations():
    means = {"gspo", "sapo", "geo_mean"}
    for name in LOSSES:
        entry = rl.loss_entry(name)
        assert entry.aggregation == ("seq-mean-token-mean" if name in means else "token-mean")
        given = columns(BATCH)
        own = run(name, BATCH, given)[0].loss
        assert torch.equal(own, run(name, BATCH, given, aggregation=entry.aggregation)[0].loss)
        other = "token-mean" if name in means else "seq-mean-token-mean"
        assert not torch.isclose(own, run(name, BATCH, given, aggregation=other)[0].loss)


def test_gspo_is_the_gradient_of_the_ratio_of_sequences():
    """GSPO-token, eq. 14 of the paper, against the objective over sequences itself, eq. 5."""
    given = columns(BATCH) | {"advantages": ROW_ADVANTAGES}
    given.pop("weights")
    result, grad = run("gspo", BATCH, given)
    x = given["logprobs"].clone().requires_grad_()
    rows = []
    for start, length, a in zip([0, 4, 5, 8, 13], BATCH.lengths.tolist(), [1.0, -0.5, 3.0, -2.0, 0.25]):
        counts = BATCH.mask[start : start + length]
        if counts.any():
            s = (x - given["old_logprobs"])[start : start + length][counts].mean().exp()
            rows.append(torch.minimum(s * a, s.clamp(0.95, 1.1) * a))
    loss = -torch.stack(rows).mean()
    loss.backward()
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(grad, torch.nan_to_num(x.grad))


def test_cispo_keeps_every_gradient_and_has_two_forms():
    given = columns(BATCH)
    relative = run("cispo", BATCH, given, clip_low=5.0, clip_high=0.3)
    absolute = run("cispo", BATCH, given, cap=1.3, clip_low=0.0, clip_high=0.0)
    assert torch.equal(relative[0].loss, absolute[0].loss) and torch.equal(relative[1], absolute[1])
    assert relative[1][BATCH.mask].all()
    assert float(relative[0].metrics["clip_high"]) > 0 == float(relative[0].metrics["clip_low"])


def test_reinforce_with_a_cap_and_cispo_without_a_lower_bound_are_one():
    given = columns(BATCH)
    for cap in (1.0, 1.2, 4.0):
        capped = run("reinforce", BATCH, given, cap=cap)
        torch.testing.assert_close(capped[1], run("cispo", BATCH, given, cap=cap)[1])
    assert torch.equal(run("reinforce", BATCH, given, cap=0)[1], run("gpg", BATCH, given)[1])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_leaves_out_moves_in_the_direction_of_the_advantage(name):
    """Of equal moves, those against the advantage stay."""
    old = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    now = torch.tensor([0.9, 0.9, 0.1, 0.1]).log()
    batch = Drawn(torch.tensor([4]), torch.ones(4, dtype=torch.bool), torch.zeros(1), torch.zeros(1), 0)
    given = {"logprobs": now, "old_logprobs": old, "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    result, grad = run(name, batch, given)
    assert (grad != 0).tolist() == [False, True, True, False]
    assert float(result.metrics["clip_high"]) == float(result.metrics["clip_low"]) == 0.25
    assert float(result.metrics["truncated"]) == 0.25  # 1.8 is above 1.3, where it counts


@pytest.mark.parametrize(
    "name, options, key",
    [
        ("gspo", {"dual_clip": 3.0}, "gspo.dual_clip"),
        ("gpg", {"clip_low": 0.1}, "gpg.clip_low"),
        ("sapo", {"tau": 1.0}, "sapo.tau"),
        ("sapo", {"tau_pos": 0.0}, "sapo.tau_pos"),
        ("dppo_tv", {"kl_low": 0.1}, "dppo_tv.kl_low"),
        ("dppo_kl", {"cap": 0.5}, "dppo_kl.cap"),
        ("reinforce", {"cap": 0.5}, "reinforce.cap"),
        ("cispo", {"cap": 0.5}, "cispo.cap"),
        ("clip_cov", {"cov_share": 0.0}, "clip_cov.cov_share"),
        ("kl_cov", {"cov_share": 1.5}, "kl_cov.cov_share"),
        ("kl_cov", {"cov_low": 1.5}, "kl_cov.cov_low"),
        ("dro", {"beta": 0.0}, "dro.beta"),
        ("geo_mean", {"kl": "k4"}, "kl"),
        ("geo_mean", {"norm_length": 4}, "geo_mean.norm_length"),
    ],
)
def test_wrong_options_are_named(name, options, key):
    with raises(RecipeError, key) as error:
        rl.policy_loss(name, **columns(BATCH), mask=BATCH.mask, lengths=BATCH.lengths, **options)
    assert "\n" not in str(error.value)


def test_a_part_of_a_batch_needs_the_first_pass():
    given = columns(BATCH)
    for name in FIRST_PASS:
        with raises(RecipeError, "thresholds"):
            run(name, BATCH, given, denominator=12.0)
        assert rl.loss_entry(name).scope == "global moments"
    without = {k: v for k, v in given.items() if k != "uniforms"}
    with raises(RecipeError, "uniforms"):
        run("clip_cov", BATCH, without)
    with raises(RecipeError, "uniforms"):
        rl.thresholds("clip_cov", **{k: given[k] for k in given if k in ("logprobs", "old_logprobs", "advantages")},
                      mask=BATCH.mask, lengths=BATCH.lengths)  # fmt: skip
    with raises(RecipeError, "kl_cov.cov_low"):
        first_pass("kl_cov", BATCH, given, cov_low=1.0)
    for name in ("weights", "uniforms"):
        with raises(TokenCountError, f"{name}.shape"):
            run("clip_cov", BATCH, {**given, name: torch.ones(3)})


def test_losses_without_a_first_pass_need_nothing():
    given = columns(BATCH)
    for name in set(LOSSES) - set(FIRST_PASS):
        assert first_pass(name, BATCH, given) == {} and rl.loss_entry(name).scope == "token-local"
    assert FIRST_PASS == ["clip_cov", "kl_cov"]
    assert first_pass("kl_cov", BATCH, given, kl_coef=0.1).keys() == {"mean_advantage", "mean_logprob", "at", "share"}


def test_options_under_test_are_those_of_the_losses():
    for name, options in ACTIVE.items():
        assert set(options) <= set(rl.options("losses", name))


def test_a_recipe_has_the_clips_of_its_loss():
    """Said nowhere: those of the entry, whatever the flow has for PPO's loss; and what a recipe says stays."""
    for name in LOSSES:
        own = {k: v for k, v in rl.options("losses", name).items() if k in ("clip_low", "clip_high")}
        for flow, high in (("grpo", 0.2), ("dapo", 0.28)):
            found = Recipe(flow=flow, algorithm={"loss": name}).algorithm
            wanted = {"clip_low": 0.2, "clip_high": 0.2} | own
            if name in ("ppo_clip", "clip_cov"):
                wanted["clip_high"] = high
            assert {k: getattr(found, k) for k in wanted} == wanted, (flow, name)
        assert Recipe(flow="dapo", algorithm={"loss": name, "clip_high": 0.01}).algorithm.clip_high == 0.01
    assert Recipe(algorithm=AlgorithmConfig(loss="gspo")).algorithm.clip_low == 3e-4
    assert Recipe(flow="dapo").algorithm.clip_high == 0.28
