"""What is good: advantages, policy losses, KL, aggregation (pure functions of packed columns) and reward functions.

Names are loaded on first use, so that ``tilth.rl.rewards`` and the processes that score never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilth.rl.advantages import Estimate, estimate, estimate_rows
    from tilth.rl.aggregation import aggregate, denominator, row_denominator
    from tilth.rl.catalog import check, names, options
    from tilth.rl.correction import Correction, bypasses, correct
    from tilth.rl.entropy import adapt_entropy, entropy_bonus
    from tilth.rl.gap import mismatch
    from tilth.rl.kl import adapt, kl_penalty, penalise
    from tilth.rl.losses import LossResult, PolicyLoss, loss_entry, policy_loss, thresholds
    from tilth.rl.metrics import Metric, merge_metrics
    from tilth.rl.packing import keep_rows, token_counts
    from tilth.rl.preference import PreferenceResult, pair_weights, preference_loss
    from tilth.rl.registry import register
    from tilth.rl.values import Explained, explained_variance, value_loss

_HOME = {
    "Correction": "correction",
    "Estimate": "advantages",
    "Explained": "values",
    "LossResult": "losses",
    "Metric": "metrics",
    "PolicyLoss": "losses",
    "PreferenceResult": "preference",
    "adapt": "kl",
    "adapt_entropy": "entropy",
    "aggregate": "aggregation",
    "check": "catalog",
    "bypasses": "correction",
    "correct": "correction",
    "denominator": "aggregation",
    "entropy_bonus": "entropy",
    "estimate": "advantages",
    "estimate_rows": "advantages",
    "explained_variance": "values",
    "keep_rows": "packing",
    "kl_penalty": "kl",
    "loss_entry": "losses",
    "merge_metrics": "metrics",
    "mismatch": "gap",
    "names": "catalog",
    "options": "catalog",
    "pair_weights": "preference",
    "penalise": "kl",
    "policy_loss": "losses",
    "preference_loss": "preference",
    "register": "registry",
    "row_denominator": "aggregation",
    "thresholds": "losses",
    "token_counts": "packing",
    "value_loss": "values",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
