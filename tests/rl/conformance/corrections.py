"""The oracle of corrections: weights, what is left out, and diagnostics, in plain loops over Python numbers."""

import math
from collections.abc import Callable
from typing import Any

from tests.rl.conformance.batch import Row, Token
from tests.rl.oracle import mean

Options = dict[str, Any]
FORMS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}


_TOKEN, _SEQUENCE = {"level": "token", "max_weight": 2.0}, {"level": "sequence", "max_weight": 2.0}
_ICEPOP = {"level": "token", "min_weight": 0.5, "max_weight": 5.0, "beyond": "zero"}
_GEO, _K3 = {"reject": {"seq_mean_k1": (0.999, 1.001)}}, {"reject": {"seq_mean_k3": 0.01}}
_BYPASS = {"bypass": True}
PRESETS: dict[str, Options] = {
    "none": {},
    "custom": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE | {"reject": {"seq_sum_k1": (0.5, 2.0)}},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": _GEO | _SEQUENCE,
    "decoupled_geo_rs_token_tis": _GEO | _TOKEN,
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": _K3 | _SEQUENCE,
    "decoupled_k3_rs_token_tis": _K3 | _TOKEN,
    "decoupled_seq_mis": _SEQUENCE | {"beyond": "reject"},
    "decoupled_negative": {"reject_negative": 0.5},
    "decoupled_m2po": _TOKEN | {"max_weight": 0.0, "second_moment": 0.04, "denominators": "all"},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _BYPASS | _GEO,
    "bypass_ppo_clip_k3_rs": _BYPASS | _K3,
    "bypass_pg_is": _BYPASS | _SEQUENCE,
    "bypass_pg_token_icepop": _BYPASS | _ICEPOP,
    "bypass_pg_geo_rs": _BYPASS | _GEO,
    "bypass_pg_geo_rs_seq_tis": _BYPASS | _GEO | _SEQUENCE,
    "bypass_pg_geo_rs_token_tis": _BYPASS | _GEO | _TOKEN,
}
"""What each preset is, from the description of verl's, written down here anew."""
NOTHING: Options = {
    "level": "none",
    "max_weight": 2.0,
    "min_weight": 0.0,
    "beyond": "clip",
    "normalise": False,
    "reject": {},
    "reject_negative": None,
    "second_moment": None,
    "denominators": "kept",
    "bypass": False,
}
"""No correction, and the bounds of one where an option asks for weights."""


def apart(t: Token) -> float:
    """log rho = log old - log mu."""
    return min(max(t.old_logprobs - t.rollout_logprobs, -20.0), 20.0)


def _rho(row: Row, level: str) -> list[float]:
    every = [apart(t) for t in row.tokens]
    if level == "token":
        return [math.exp(d) for d in every]
    over = math.fsum(every) if level == "sequence" else mean(every)
    return [math.exp(min(max(over, -20.0), 20.0))] * len(every)


def _bounded(rho: float, o: Options) -> tuple[float, bool]:
    """Weight, and whether the ratio lies inside of the bounds."""
    high = o["max_weight"] or math.inf
    inside = o["min_weight"] <= rho <= high
    if o["beyond"] == "clip":
        return min(max(rho, o["min_weight"]), high), inside
    return (rho if inside else 0.0), inside


def _binary(t: Token) -> float:
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (t.old_logprobs, t.rollout_logprobs))
    both = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
    return max(both)


def _statistic(row: Row, name: str) -> list[float]:
    if name == "token_binary":
        return [_binary(t) for t in row.tokens]
    over, _, form = name.rpartition("_")
    values = [FORMS[form](apart(t)) for t in row.tokens]
    if over == "token":
        return values
    return [{"seq_sum": math.fsum, "seq_mean": mean, "seq_max": max}[over](values)] * len(values)


def _meets(name: str, value: float, threshold: Any) -> bool:
    """k1 by the interval of mu / old in ratio space; k2, k3 by an upper bound."""
    if not name.endswith("_k1"):
        return value <= threshold
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
    return math.log(low) <= value <= math.log(high)


def _farthest(rows: list[Row], bound: float) -> float:
    """The largest squared log ratio that may stay, of tokens whose update moves them further: they are taken in order
    of size, equal ones at once, while their mean is within the bound."""
    squares = sorted(apart(t) ** 2 for row in rows for t in row.tokens if t.advantages * apart(t) > 0)
    ends = [i for i, square in enumerate(squares, 1) if i == len(squares) or squares[i] > square]
    within = [squares[i - 1] for i in ends if mean(squares[:i]) <= bound]
    return max(within, default=-1.0)


def _passes(row: Row, o: Options, farthest: float) -> list[bool]:
    """Which tokens of a row meet every condition."""
    found = [True] * len(row.tokens)
    if not found:
        return []
    for name, threshold in o["reject"].items():
        found = [f and _meets(name, v, threshold) for f, v in zip(found, _statistic(row, name))]
    if o["reject_negative"] is not None:
        far = mean([-apart(t) for t in row.tokens]) > o["reject_negative"]
        found = [f and not (far and mean([t.advantages for t in row.tokens]) < 0) for f in found]
    moves = [t.advantages * apart(t) > 0 for t in row.tokens]
    return [f and not (m and apart(t) ** 2 > farthest) for f, m, t in zip(found, moves, row.tokens)]


def correct(rows: list[Row], o: Options) -> tuple[list[list[float]], list[list[bool]]]:
    """Weight (1 where there are none) and whether it is kept, of each token that counts."""
    weights, kept, bounds = [], [], []
    farthest = math.inf if o["second_moment"] is None else _farthest(rows, o["second_moment"])
    for row in rows:
        passes = _passes(row, o, farthest)
        within = [True] * len(row.tokens)
        if o["level"] == "none":
            weights.append([1.0] * len(row.tokens))
        else:
            bounded = [_bounded(rho, o) for rho in (_rho(row, o["level"]) if row.tokens else [])]
            weights.append([w for w, _ in bounded])
            if o["beyond"] == "reject":
                within = [inside for _, inside in bounded]
        kept.append([p and inside for p, inside in zip(passes, within)])
        bounds.append(within)
    if o["normalise"] and o["level"] != "none":
        weights = _normalised(weights, bounds, o["level"])
    if o["denominators"] == "all":
        weights = [[w if k else 0.0 for w, k in zip(*row)] for row in zip(weights, kept)]
        kept = [[True] * len(row) for row in kept]
    return weights, kept


def _normalised(weights: list[list[float]], within: list[list[bool]], level: str) -> list[list[float]]:
    """Over the mean of the tokens' weights, or that of the rows, without those that are out of bounds and left out."""
    every = [list(zip(*row)) for row in zip(weights, within)]
    flat = [w for row in every for w, inside in (row if level == "token" else row[:1]) if inside]
    scale = mean(flat) if flat and mean(flat) > 1e-8 else 1.0
    return [[w / scale for w in row] for row in weights]


def diagnostics(rows: list[Row]) -> dict[str, tuple[float, int]]:
    """Sum and count of each: over tokens, or over rows that have any."""
    tokens = [t for row in rows for t in row.tokens]
    some = [row.tokens for row in rows if row.tokens]

    def of_tokens(form: Callable[[float], float]) -> tuple[float, int]:
        return math.fsum(form(apart(t)) for t in tokens), len(tokens)

    def of_rows(form: Callable[[float, float, list[Token]], float]) -> tuple[float, int]:
        own = [(mean([t.old_logprobs for t in r]), mean([t.rollout_logprobs for t in r]), r) for r in some]
        return math.fsum(form(*one) for one in own), len(some)

    return {
        "kl": of_tokens(lambda d: -d),
        "k3": of_tokens(lambda d: min(math.exp(d) - 1 - d, 10.0)),
        "chi2_token": of_tokens(lambda d: math.exp(2 * d) - 1),
        "training_ppl": of_rows(lambda ours, theirs, r: math.exp(-ours)),
        "rollout_ppl": of_rows(lambda ours, theirs, r: math.exp(-theirs)),
        "log_ppl_diff": of_rows(lambda ours, theirs, r: theirs - ours),
        "ppl_ratio": of_rows(lambda ours, theirs, r: math.exp(theirs - ours)),
        "chi2_seq": of_rows(lambda ours, theirs, r: math.exp(2 * math.fsum(map(apart, r))) - 1),
    }
