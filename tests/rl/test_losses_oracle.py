"""Every policy loss against a loop in Python floats, and its gradient against differences of that loop.

An oracle is a function of log-probs x and of frozen ones x0: what the paper holds constant is written with x0. So a
difference in x with x0 fixed is the gradient that a loss must have.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings

from tests.examples import examples
from tests.rl import oracle
from tests.rl.losing import ACTIVE, LOSSES, columns, run
from tests.rl.strategies import batches
from tilth import rl

NAMES = ["old_logprobs", "advantages", "weights", "uniforms"]


class Token:
    """x: log-prob; x0: the same, frozen; old, a, w, u: old log-prob, advantage, weight, random number."""

    def __init__(self, x, x0, old, a, w, u):
        self.x, self.x0, self.old, self.a, self.w, self.u = x, x0, old, a, w, u
        self.r, self.r0 = math.exp(x - old), math.exp(x0 - old)


def clip(x, low, high):
    return min(max(x, low), high)


def surrogate(r, a, o):
    return max(-a * r, -a * clip(r, 1 - o["clip_low"], 1 + o["clip_high"]))


def each(function):
    """A loss that looks at one token."""
    return lambda rows, o: [[function(t, o) for t in row] for row in rows]


def ppo_clip(t, o):
    return min(surrogate(t.r, t.a, o), -t.a * o["dual_clip"]) if t.a < 0 else surrogate(t.r, t.a, o)


def sapo(t, o):
    tau = o["tau_pos"] if t.a > 0 else o["tau_neg"]
    return -t.a / (1 + math.exp(-tau * (t.r - 1))) * 4 / tau


def dppo(too_far):
    def loss(t, o):
        p, q = math.exp(t.x0), math.exp(t.old)
        forward = p > q if t.a > 0 else p < q
        return 0.0 if forward and too_far(p, q, t.a > 0, o) else -min(t.r0, o["cap"]) * t.a * t.x

    return each(loss)


def far_tv(p, q, up, o):
    return abs(p - q) > (o["tv_high"] if up else o["tv_low"])


def far_kl(p, q, up, o):
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return kl > (o["kl_high"] if up else o["kl_low"])


def gspo(rows, o):
    found = []
    for row in rows:
        s0 = math.exp(oracle.mean([t.x0 - t.old for t in row])) if row else 1.0
        found.append([surrogate(s0 * math.exp(t.x - t.x0), t.a, o) for t in row])
    return found


def geo_mean(rows, o):
    found = []
    for row in rows:
        held = [min(t.x - t.old, o["clip_high"]) if t.a > 0 else max(t.x - t.old, -o["clip_low"]) for t in row]
        value = -oracle.mean([t.a for t in row]) * math.exp(oracle.mean(held)) if row else 0.0
        found.append([value for _ in row])
    return found


def with_covariance(rows):
    tokens = [t for row in rows for t in row]
    centre, middle = oracle.mean([t.a for t in tokens]), oracle.mean([t.x0 for t in tokens])
    return [(t, (t.a - centre) * (t.x0 - middle)) for t in tokens]


def clip_cov(rows, o):
    if not any(rows):
        return rows
    held = {t for row in rows for t in row if surrogate(t.r0, t.a, o) > -t.a * t.r0}
    inside = [t for t, cov in with_covariance(rows) if o["cov_low"] < cov < o["cov_high"] and t not in held]
    k = max(int(o["cov_share"] * sum(map(len, rows))), 1)
    few = set(sorted(inside, key=lambda t: -t.u)[:k])
    return [[0.0 if t in few else surrogate(t.r, t.a, o) for t in row] for row in rows]


def kl_cov(rows, o):
    if not any(rows):
        return rows
    best = sorted(with_covariance(rows), key=lambda pair: -pair[1])
    few = {t for t, _ in best[: max(int(o["cov_share"] * len(best)), 1)]}
    return [[-t.a * t.r + (o["cov_coef"] * abs(t.x - t.old) if t in few else 0.0) for t in row] for row in rows]


ORACLES = {
    "ppo_clip": each(ppo_clip),
    "reinforce": each(lambda t, o: -min(t.r0, o["cap"]) * t.a * t.x),
    "gpg": each(lambda t, o: -t.a * t.x),
    "cispo": each(lambda t, o: -clip(t.r0, 1 - o["clip_low"], 1 + o["clip_high"]) * t.a * t.x),
    "sapo": each(sapo),
    "dro": each(lambda t, o: -(t.a * t.x - o["beta"] / 2 * (t.x - t.old) ** 2)),
    "dppo_tv": dppo(far_tv),
    "dppo_kl": dppo(far_kl),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gspo": gspo,
    "geo_mean": geo_mean,
}


def loop(name, batch, now, frozen, given):
    """The loss of a batch."""
    rows = []
    for masks, *cells in oracle.rows_of(batch.lengths, batch.mask, now, frozen, *(given[n] for n in NAMES)):
        rows.append([Token(*cell) for m, *cell in zip(masks, *cells) if m])
    losses = ORACLES[name](rows, {**rl.options("losses", name), **ACTIVE.get(name, {})})
    weighted = [[t.w * v for t, v in zip(row, values)] for row, values in zip(rows, losses)]
    return oracle.aggregate(rl.loss_entry(name).aggregation, weighted)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=examples(15), deadline=None)
@given(batch=batches())
def test_value_and_gradient(name, batch):
    assume(name != "kl_cov" or int(batch.mask.sum()) != 2)  # the covariances of two tokens are equal
    given = columns(batch)
    x0 = given["logprobs"]
    result, gradient = run(name, batch, given)
    assert float(result.loss) == pytest.approx(loop(name, batch, x0, x0, given), rel=1e-9, abs=1e-12)
    for t in torch.nonzero(batch.mask).flatten().tolist()[::3]:
        sides = []
        for h in (1e-6, -1e-6):
            moved = x0.clone()
            moved[t] += h
            sides.append(loop(name, batch, moved, x0, given))
        assert float(gradient[t]) == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_an_oracle_for_every_loss():
    assert set(ORACLES) == set(LOSSES)
