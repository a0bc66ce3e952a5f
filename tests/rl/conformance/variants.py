"""The ways in which each entry is called: every option at least once away from its default, and every aggregation."""

from collections.abc import Iterable

from tests.rl.conformance.family import Variant
from tilth import rl

AGGREGATIONS = rl.names()["aggregations"]

_ADVANTAGES: dict[str, list[dict]] = {
    "gae": [{"gamma": 0.9, "lam": 0.8, "whiten": False}, {"gamma": 0.99}],
    "vapo": [{"alpha": 0.4, "gamma": 0.9, "value_lam": 0.5}, {"adaptive": False, "lam": 0.7, "whiten": False}],
    "grpo": [{"eps": 0.1, "singleton": "zero"}, {"std": "biased"}],
    "grpo_process": [{"std": "biased", "eps": 0.1}],
    "grpo_no_std": [{"singleton": "zero"}],
    "rloo": [{"singleton": "zero"}],
    "reinforce_pp": [{"gamma": 0.9}, {"whiten": False, "gamma": 0.5}],
    "reinforce_pp_baseline": [{"singleton": "zero"}],
    "remax": [],
    "opo": [{"singleton": "zero"}],
    "gpg": [{"count": "spread", "norm": 2.0}, {"singleton": "zero"}],
    "grpo_passk": [{"std": "none"}, {"std": "biased", "eps": 0.1}],
    "gdpo": [
        {"keys": ("correct", "format"), "weights": (1.0, 0.3)},
        {"keys": ("format",), "singleton": "zero"},
        {"std": "biased", "eps": 0.1},
    ],
    "optimal_token_baseline": [{"eps": 0.1}, {"singleton": "zero"}],
    "tir_optimal_token_baseline": [{"eps": 0.1}, {"singleton": "zero"}],
    "distill": [{"horizon": 1.0}, {"horizon": 0.7}, {"align": "characters"}],
}
_LOSSES: dict[str, list[dict]] = {
    "ppo_clip": [{"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.1}],
    "reinforce": [{"cap": 1.2}],
    "cispo": [{"clip_low": 0.2, "clip_high": 0.1}, {"cap": 1.1}],
    "sapo": [{"tau_pos": 0.5, "tau_neg": 2.0}],
    "dro": [{"beta": 0.5}],
    "dppo_tv": [{"tv_low": 0.02, "tv_high": 0.03, "cap": 1.1}],
    "dppo_kl": [{"kl_low": 0.001, "kl_high": 0.002, "cap": 1.1}],
    "clip_cov": [{"clip_low": 0.1, "clip_high": 0.3, "cov_share": 0.3, "cov_low": -0.5, "cov_high": 0.5}],
    "kl_cov": [{"cov_share": 0.3, "cov_coef": 0.5}],
    "gspo": [{"clip_low": 0.05, "clip_high": 0.08}],
    "geo_mean": [{"clip_low": 0.05, "clip_high": 0.1}],
}
_CORRECTIONS: list[dict] = [
    {"level": "token", "max_weight": 1.1, "min_weight": 0.9},
    {"level": "token", "max_weight": 1.1, "min_weight": 0.9, "beyond": "zero", "normalise": True},
    {"level": "sequence", "max_weight": 1.3, "beyond": "reject"},
    {"level": "token", "max_weight": 1.1, "min_weight": 0.9, "beyond": "reject", "normalise": True},
    {"level": "geometric", "max_weight": 0.0, "normalise": True, "bypass": True, "made_for": "reinforce"},
    {"reject": {"token_k1": (0.9, 1.1), "seq_sum_k1": 1.5}},
    {"reject": {"token_k2": 0.02, "seq_sum_k2": 0.1, "seq_max_k2": 0.05}, "denominators": "all"},
    {"reject": {"token_k3": 0.02, "seq_mean_k3": 0.02, "seq_max_k3": 0.04}, "level": "sequence"},
    {"reject": {"seq_mean_k1": 1.05, "seq_mean_k2": 0.03}, "reject_negative": 0.02},
    {"reject": {"seq_sum_k3": 0.1, "token_binary": 0.01}},
    {"level": "token", "second_moment": 0.01},
]
_OTHERS: dict[str, dict[str, list[dict]]] = {
    "aggregations": {"seq-mean-token-sum-norm": [{"norm_length": 5}]},
    "kl": {},
    "corrections": {"custom": _CORRECTIONS},
    "preferences": {
        "sigmoid": [{"beta": 0.5, "smoothing": 0.1, "margin": 0.3}, {"average": True}],
        "robust": [{"beta": 0.5, "smoothing": 0.2, "margin": 0.3}, {"average": True}],
        "hinge": [{"beta": 0.5, "margin": 0.3}, {"average": True}],
        "ipo": [{"beta": 0.5}],
        "simpo": [{"beta": 1.0, "smoothing": 0.1, "margin": 0.3}],
        "bradley_terry": [{"margin": 0.3, "centring": 0.01}],
    },
}
WEIGHTED = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that take importance weights."""
COMMON = {"losses": ("kl", "kl_coef")}
"""Options of a whole kind, which the rows of their own kind check."""


def variants(kind: str, name: str) -> list[Variant]:
    """Defaults first. Losses: with every aggregation, and with importance weights."""
    if kind == "value":
        return [Variant({"clip": 0.2 if name == "clip" else 0.0}, a) for a in AGGREGATIONS]
    own = _ADVANTAGES.get(name, []) if kind == "advantages" else _of(kind).get(name, [])
    found = [Variant(), *(Variant(o) for o in own)]
    if kind == "advantages" and name in WEIGHTED:
        found.append(Variant(weighted=True))
    if kind == "losses":
        found += [Variant(own[-1] if own else {}, a, weighted=True) for a in AGGREGATIONS]
    if kind == "preferences" and name != "ipo":
        found.append(Variant(weighted=True))  # by margins of the data
    if kind == "kl":
        found.append(Variant({}, "seq-mean-token-mean"))
    return found


def _of(kind: str) -> dict[str, list[dict]]:
    return _LOSSES if kind == "losses" else _OTHERS.get(kind, {})


def unchecked(kind: str, name: str, known: Iterable[str]) -> list[str]:
    """Options that no variant sets: nobody would see if they did nothing. Presets share those of ``custom``."""
    row = "custom" if kind == "corrections" else name
    given = {option for v in variants(kind, row) for option in v.options}
    return [option for option in known if option not in given and option not in COMMON.get(kind, ())]
