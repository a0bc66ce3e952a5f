"""The reference vectors: numbers made by running verl's own functions, reproduced to their six digits."""

import pytest
import torch

from tests.rl.fixture import GROUPS, GRPO, LENGTHS, REWARDS, Fixture
from tilth import rl

PACKINGS = [(0, None), (3, None), (0, 6), (2, 9)]


@pytest.fixture(params=PACKINGS, ids=["packed", "prompted", "padded", "both"])
def data(request) -> Fixture:
    return Fixture(*request.param)


def close(actual, expected, tolerance=1.1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


def estimate(data, name, rewards=REWARDS, **options):
    return rl.estimate(name, rewards=rewards, lengths=data.lengths, mask=data.mask, groups=GROUPS, **options)


@pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("grpo", {}, GRPO),
        ("grpo_no_std", {}, [0.333333, -0.666667, 0.333333, 0.6, 0.3, -0.9, 0.7]),
        ("rloo", {}, [0.5, -1, 0.5, 0.9, 0.45, -1.35, 0.7]),
        ("rloo", {"singleton": "zero"}, [0.5, -1, 0.5, 0.9, 0.45, -1.35, 0]),
        ("opo", {}, [0.266667, -0.733333, 0.266667, 0.466667, 0.166667, -1.033333, 0.7]),
        ("gpg", {}, [0.388889, -0.777778, 0.388889, 0.7, 0.35, -1.05, 0.816667]),
        ("grpo_passk", {}, [0, 0, 0, 0.377964, 0, 0, 0]),
        ("reinforce_pp_baseline", {}, [0.301223, -1.645141, 0.301223, 0.820254, 0.236344, -2.099293, 1.01489]),
        ("gdpo", {}, [0.493076, -1.869418, 0.493076, 0.736655, 0.221117, -1.841038, 0.660369]),
        ("gdpo", {"keys": ("own",)}, [0.493076, -1.869418, 0.493076, 0.736655, 0.221117, -1.841038, 0.660369]),
    ],
)
def test_row_constant_advantages(data, name, options, expected, per_token):
    if "keys" in options:
        options = options | {"part/own": REWARDS}
    result = estimate(data, name, data.token_rewards if per_token else REWARDS, **options)
    expected = torch.as_tensor(expected, dtype=torch.float32)
    close(result.advantages, torch.where(data.mask > 0, expected[data.row], 0.0))
    assert result.returns is None and result["advantages"] is result.advantages
    counts = rl.token_counts(data.mask, data.lengths)
    close(rl.estimate_rows(name, rewards=REWARDS, groups=GROUPS, counts=counts, **options), expected)


GAE = {
    (1.0, 1.0): {
        0: [0.947235, 1.018341, 1.089447, 1.160553, 1.231659, 1.302765],
        4: [-0.759312, -0.688205, 0, 0, -0.474887, -0.403781],
        5: [-2.60807, -2.536964],
        "returns": [0.2, 0.2, 0, 0, 0.2, 0.2],
    },
    (0.99, 0.95): {
        0: [0.657169, 0.806865, 0.965212, 1.132758, 1.310085, 1.497812],
        4: [-0.736291, -0.6682, 0, 0, -0.434481, -0.350572],
        5: [-2.612109, -2.661053],
        "returns": [0.199586, 0.193791, 0, 0, 0.195525, 0.2],
    },
}


@pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
@pytest.mark.parametrize("gamma, lam", GAE)
def test_gae(data, gamma, lam, per_token):
    rewards = data.token_rewards if per_token else REWARDS
    result = estimate(data, "gae", rewards, values=data.values, gamma=gamma, lam=lam)
    expected = dict(GAE[gamma, lam])
    close(data.tokens(result.returns, 4), expected.pop("returns"))
    for row, values in expected.items():
        close(data.tokens(result.advantages, row), values)
    assert not result.advantages[data.mask == 0].any() and not result.returns[data.mask == 0].any()


REINFORCE_PP = {
    0: [0.374854, 0.507209, 0.654271, 0.817673, 0.999231, 1.200961],
    4: [-0.522223, -0.489542, 0, 0, -0.453231, -0.412884],
}


@pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
def test_reinforce_pp(data, per_token):
    result = estimate(data, "reinforce_pp", data.token_rewards if per_token else REWARDS, gamma=0.9)
    for row, values in REINFORCE_PP.items():
        close(data.tokens(result.advantages, row), values)
    close(data.tokens(result.returns, 4), [0.1458, 0.162, 0, 0, 0.18, 0.2])


def test_remax(data):
    """verl leaves 0.2, the reward to come, in the masked tokens of row 4; here they are 0."""
    result = estimate(data, "remax", baselines=torch.tensor([0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.2]))
    close(data.tokens(result.advantages, 0), [0.5] * 6)
    close(data.tokens(result.advantages, 4), [0.1, 0.1, 0, 0, 0.1, 0.1])


OPTIMAL = {
    0: [0.456103, 0.365695, 0.351843, 0.346233, 0, 1],
    1: [-0.543897, -0.634305, -0.648157, -0.653767],
}


def test_optimal_token_baseline(data):
    columns = {"logprobs": data.old, "sum_pi_squared": torch.full_like(data.old, 0.5)}
    result = estimate(data, "optimal_token_baseline", **columns)
    for row, values in OPTIMAL.items():
        close(data.tokens(result.advantages, row), values, 1.5e-6)
    turns = estimate(data, "tir_optimal_token_baseline", **columns)
    close(data.tokens(turns.advantages, 4), [0.436497, 0.424765, 0, 0, -0.124497, 0.2])


AGGREGATED = [
    ("token-mean", {}, 0.278929),
    ("token-sum", {}, 7.81),
    ("seq-mean-token-sum", {}, 1.115714),
    ("seq-mean-token-mean", {}, 0.316429),
    ("seq-mean-token-sum-norm", {"norm_length": 6}, 0.185952),
    ("seq-mean-token-sum-norm", {"norm_length": 8}, 0.139464),
    ("seq-mean-token-sum-norm", {}, 0.185952),
]


@pytest.mark.parametrize("name, options, expected", AGGREGATED)
def test_aggregation(data, name, options, expected):
    value = rl.aggregate(name, data.loss, mask=data.mask, lengths=data.lengths, **options)
    close(value, expected)
    whole = rl.denominator(name, data.mask, data.lengths, **options)
    close(rl.aggregate(name, data.loss, mask=data.mask, lengths=data.lengths, denominator=whole), expected)


def test_aggregation_over_two_workers(data):
    """verl: token-mean * dp with the global count 60 and dp 2, here the plain share of a global mean."""
    value = rl.aggregate("token-mean", data.loss, mask=data.mask, lengths=data.lengths, denominator=60)
    close(2 * value, 0.260333)


CLIP = {"clip_low": 0.05, "clip_high": 0.08, "dual_clip": 3.0}
LOSSES = [
    ("token-mean", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, -0.223126, 0.706260, -0.018845, 0.037011),
    ("token-mean", CLIP, -0.218708, 0.505474, -0.018845, 0.0),
    ("seq-mean-token-mean", CLIP, -0.102499, 0.525614, -0.012563, 0.0),
    ("token-mean", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.02}, -0.226545, 0.619470, None, None),
]


def ppo(data, aggregation="token-mean", **options):
    new = data.new.clone().requires_grad_()
    grpo = torch.where(data.mask > 0, GRPO[data.row], float("nan"))
    result = rl.policy_loss(
        "ppo_clip",
        logprobs=new,
        old_logprobs=data.old,
        advantages=grpo,
        mask=data.mask,
        lengths=data.lengths,
        aggregation=aggregation,
        **options,
    )
    result.loss.backward()
    return result, new.grad


@pytest.mark.parametrize("aggregation, options, loss, norm, first, other", LOSSES)
def test_ppo_clip(data, aggregation, options, loss, norm, first, other):
    result, grad = ppo(data, aggregation, **options)
    close(result.loss.detach(), loss, 2e-6)
    close(grad.abs().sum(), norm, 2e-6)
    assert torch.isfinite(grad).all() and not grad[data.mask == 0].any()
    if first is not None:
        close(grad[data.at(0, 0)], first)
        close(grad[data.at(5, 1)], other)


def test_clip_shares(data):
    metrics = ppo(data, **CLIP)[0].metrics
    close(float(metrics["clip_low"]) + float(metrics["clip_high"]), 0.25)
    close(float(ppo(data, dual_clip=1.02)[0].metrics["clip_dual"]), 0.0714286)


def test_mismatch_diagnostics(data):
    """k3_kl of the rollout correction's diagnostics, and the greatest and mean difference of the fixture."""
    metrics = ppo(data, rollout_logprobs=data.rollout)[0].metrics
    close(float(metrics["mismatch/k3"]), 0.000429)
    close(float(metrics["mismatch/max"]), 0.04)
    valid = data.mask > 0
    close(float(metrics["mismatch/mean"]), (data.old - data.rollout)[valid].abs().mean())


@pytest.mark.parametrize(
    "form, value, first, other",
    [
        ("k1", 0.0014286, 1 / 28, 1 / 28),
        ("k2", 0.0016036, -0.0046429, 0.0021429),
        ("k3", 0.0016148, -0.0049582, 0.0020798),
    ],
)
def test_kl(data, form, value, first, other):
    new = data.new.clone().requires_grad_()
    penalty = rl.kl_penalty(form, new, data.ref)
    mean = rl.aggregate("token-mean", penalty, mask=data.mask, lengths=data.lengths)
    mean.backward()
    close(mean.detach(), value, 1e-7)
    # The vector lists per-token gradients: those of the mean over the 28 tokens.
    close(new.grad[data.at(0, 0)], first, 1e-6)
    close(new.grad[data.at(3, 1)], other, 1e-6)


def test_kl_in_the_loss_is_the_same_number(data):
    plain, _ = ppo(data)
    with_kl, _ = ppo(data, ref_logprobs=data.ref, kl="k2", kl_coef=0.5)
    close((with_kl.loss - plain.loss).detach(), 0.5 * 0.0016036, 1e-6)
    close(float(with_kl.metrics["kl_ref"]), 0.0016036)


def test_lengths_of_the_fixture():
    assert LENGTHS == Fixture().lengths.tolist() and int(Fixture().mask.sum()) == 28
