"""Oracles of losses, KL forms and aggregations: value and slope of each token, by hand, in Python floats.

A slope is d(sum of the row's losses) / d(log-prob of the token) with everything the paper holds constant held constant;
it is written down, not differentiated, so that autograd is checked too. Weights are constants on the tokens' losses.
"""

import math
from collections.abc import Callable
from typing import Any

from tests.rl.conformance.batch import Row, Token
from tests.rl.oracle import mean

Options = dict[str, Any]
Slopes = list[list[tuple[float, float]]]
Oracle = Callable[[list[Row], Options], Slopes]
ORACLES: dict[str, Oracle] = {}
KL: dict[str, Callable[[float], tuple[float, float]]] = {}


def oracle(name: str) -> Callable[[Oracle], Oracle]:
    """Make a reference known for a registered name."""

    def add(function: Oracle) -> Oracle:
        ORACLES[name] = function
        return function

    return add


def local(name: str) -> Callable[[Callable[[Token, Options], tuple[float, float]]], Any]:
    """The same for a loss in which no token depends on another."""

    def add(function: Callable[[Token, Options], tuple[float, float]]) -> Any:
        def rows(all_of_them: list[Row], o: Options) -> Slopes:
            return [[weighed(function(t, o), t) for t in row.tokens] for row in all_of_them]

        ORACLES[name] = rows
        return function

    return add


def weighed(found: tuple[float, float], token: Token) -> tuple[float, float]:
    w = token.columns.get("weight", 1.0)
    return found[0] * w, found[1] * w


def ratio(t: Token) -> float:
    return math.exp(min(max(t.logprobs - t.old_logprobs, -20.0), 20.0))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(a: float, r: float, o: Options) -> tuple[float, float]:
    """max(-A r, -A clip(r)); d/d log r is -A r where the first is as large."""
    held = clip(r, 1 - o["clip_low"], 1 + o["clip_high"])
    return max(-a * r, -a * held), -a * r if -a * r >= -a * held else 0.0


@local("ppo_clip")
def ppo_clip(t: Token, o: Options) -> tuple[float, float]:
    value, slope = surrogate(t.advantages, ratio(t), o)
    if t.advantages < 0 and o["dual_clip"] and value > -t.advantages * o["dual_clip"]:
        return -t.advantages * o["dual_clip"], 0.0
    return value, slope


@local("reinforce")
def reinforce(t: Token, o: Options) -> tuple[float, float]:
    weight = min(ratio(t), o["cap"]) if o["cap"] else 1.0
    return -weight * t.advantages * t.logprobs, -weight * t.advantages


@local("gpg")
def gpg(t: Token, o: Options) -> tuple[float, float]:
    return -t.advantages * t.logprobs, -t.advantages


@local("cispo")
def cispo(t: Token, o: Options) -> tuple[float, float]:
    low, high = (0.0, o["cap"]) if o["cap"] else (1 - o["clip_low"], 1 + o["clip_high"])
    weight = clip(ratio(t), low, high)
    return -weight * t.advantages * t.logprobs, -weight * t.advantages


@local("sapo")
def sapo(t: Token, o: Options) -> tuple[float, float]:
    tau = o["tau_pos"] if t.advantages > 0 else o["tau_neg"]
    gate = 1 / (1 + math.exp(-tau * (ratio(t) - 1)))
    return -t.advantages * gate * 4 / tau, -t.advantages * 4 * gate * (1 - gate) * ratio(t)


@local("dro")
def dro(t: Token, o: Options) -> tuple[float, float]:
    apart = clip(t.logprobs - t.old_logprobs, -20.0, 20.0)
    return -(t.advantages * t.logprobs - o["beta"] / 2 * apart**2), -(t.advantages - o["beta"] * apart)


def _dppo(t: Token, o: Options, distance: float, low: float, high: float) -> tuple[float, float]:
    """Kept unless the probability has moved in the direction of the advantage by more than is allowed."""
    moved = t.logprobs - t.old_logprobs
    if (moved > 0 and t.advantages > 0 and distance > high) or (moved < 0 and t.advantages <= 0 and distance > low):
        return 0.0, 0.0
    weight = min(ratio(t), o["cap"]) if o["cap"] else ratio(t)
    return -weight * t.advantages * t.logprobs, -weight * t.advantages


@local("dppo_tv")
def dppo_tv(t: Token, o: Options) -> tuple[float, float]:
    return _dppo(t, o, abs(math.exp(t.logprobs) - math.exp(t.old_logprobs)), o["tv_low"], o["tv_high"])


@local("dppo_kl")
def dppo_kl(t: Token, o: Options) -> tuple[float, float]:
    p, q = math.exp(t.old_logprobs), math.exp(t.logprobs)
    kl = p * (t.old_logprobs - t.logprobs) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return _dppo(t, o, kl, o["kl_low"], o["kl_high"])


# ---- of a sequence ----


@oracle("gspo")
def gspo(rows: list[Row], o: Options) -> Slopes:
    """Every token carries the row's ratio, and the whole gradient of it times its own share."""
    found = []
    for row in rows:
        if row.tokens:
            s = math.exp(min(mean([t.logprobs - t.old_logprobs for t in row.tokens]), 10.0))
        found.append([weighed(surrogate(t.advantages, s, o), t) for t in row.tokens])
    return found


@oracle("geo_mean")
def geo_mean(rows: list[Row], o: Options) -> Slopes:
    """-mean(A) exp(mean of log-ratios held on the side that A bounds); each token's loss depends on all of the row."""
    found: Slopes = []
    for row in rows:
        held, free, n = [], [], len(row.tokens)
        for t in row.tokens:
            d, a = t.logprobs - t.old_logprobs, t.advantages
            bound = (a > 0 and d > o["clip_high"]) or (a < 0 and d < -o["clip_low"])
            held.append(0.0 if a == 0 else (o["clip_high"] if a > 0 else -o["clip_low"]) if bound else d)
            free.append(0.0 if bound or a == 0 else 1.0)
        if not n:
            found.append([])
            continue
        value = -mean([t.advantages for t in row.tokens]) * math.exp(mean(held))
        weight = [t.columns.get("weight", 1.0) for t in row.tokens]
        found.append([(value * w, value * math.fsum(weight) * f / n) for w, f in zip(weight, free)])
    return found


# ---- of tokens that the whole batch decides on ----


def _covariances(rows: list[Row]) -> dict[int, float]:
    """(A - mean A)(log pi - mean log pi) of each token, by its place in the batch."""
    every = [t for row in rows for t in row.tokens]
    if not every:
        return {}
    a, b = mean([t.advantages for t in every]), mean([t.logprobs for t in every])
    return {t.at: (t.advantages - a) * (t.logprobs - b) for t in every}


def _best(values: dict[int, float], k: int) -> set[int]:
    return set(sorted(values, key=lambda at: -values[at])[:k])


@oracle("clip_cov")
def clip_cov(rows: list[Row], o: Options) -> Slopes:
    """PPO's clip; a share of all tokens, of those with a covariance inside the bounds, counts nothing."""
    every, cov = {t.at: t for row in rows for t in row.tokens}, _covariances(rows)
    eligible = {}
    for at, t in every.items():
        r, a = ratio(t), t.advantages
        clipped = (a < 0 and r < 1 - o["clip_low"]) or (a > 0 and r > 1 + o["clip_high"])
        if o["cov_low"] < cov[at] < o["cov_high"] and not clipped:
            eligible[at] = t.uniforms
    gone = _best(eligible, max(int(o["cov_share"] * len(every)), 1))
    return [
        [(0.0, 0.0) if t.at in gone else weighed(surrogate(t.advantages, ratio(t), o), t) for t in row.tokens]
        for row in rows
    ]


@oracle("kl_cov")
def kl_cov(rows: list[Row], o: Options) -> Slopes:
    """-A r, and |log r| at the share of tokens with the greatest covariance."""
    cov = _covariances(rows)
    best = _best(cov, max(int(o["cov_share"] * len(cov)), 1))
    found = []
    for row in rows:
        slopes = []
        for t in row.tokens:
            d, value = t.logprobs - t.old_logprobs, -t.advantages * ratio(t)
            coef = o["cov_coef"] if t.at in best else 0.0
            slopes.append(weighed((value + coef * abs(d), value + (math.copysign(coef, d) if d else 0.0)), t))
        found.append(slopes)
    return found


# ---- KL: d = log policy - log reference -> value, slope ----


def _k3(d: float) -> tuple[float, float]:
    held = clip(d, -20.0, 20.0)
    value = math.exp(-held) - 1 + held
    return min(value, 10.0), 1 - math.exp(-held) if value < 10 and abs(d) < 20 else 0.0


KL["k1"] = lambda d: (d, 1.0)
KL["k2"] = lambda d: (d * d / 2, d)
KL["k3"] = _k3
KL["abs"] = lambda d: (abs(d), math.copysign(1.0, d) if d else 0.0)
KL["k1+"] = lambda d: (d, d)
KL["k2+"] = lambda d: (d * d / 2, d)
KL["k3+"] = lambda d: (_k3(d)[0], d)
KL["abs+"] = lambda d: (abs(d), d)


# ---- aggregations: counts of each row -> the weight of each token in the one number ----


def _rows(counts: list[int]) -> int:
    return max(sum(c > 0 for c in counts), 1)


AGGREGATIONS: dict[str, Callable[[list[int], Options], list[float]]] = {
    "token-mean": lambda counts, o: [1 / max(sum(counts), 1) for _ in counts],
    "token-sum": lambda counts, o: [1.0 for _ in counts],
    "seq-mean-token-sum": lambda counts, o: [1 / _rows(counts) for _ in counts],
    "seq-mean-token-mean": lambda counts, o: [1 / _rows(counts) / max(c, 1) for c in counts],
    "seq-mean-token-sum-norm": lambda counts, o: [
        1 / _rows(counts) / (o.get("norm_length") or max([*counts, 1])) for _ in counts
    ],
}


# ---- the value loss ----


def value_loss(t: Token, bound: float) -> tuple[float, float]:
    """0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2); no slope where the clipped one is larger."""
    free = (t.values - t.returns) ** 2 / 2
    held = (clip(t.values, t.old_values - bound, t.old_values + bound) - t.returns) ** 2 / 2 if bound else free
    return max(free, held), t.values - t.returns if free >= held else 0.0


__all__ = ["AGGREGATIONS", "KL", "ORACLES", "mean", "value_loss"]
