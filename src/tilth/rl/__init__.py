"""What is good: advantages, policy losses, KL, aggregation (pure functions of packed columns) and reward functions.

Names are loaded on first use, so that ``tilth.rewards.functions`` and the processes that score never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilth.rl.advantages import Estimate, estimate, estimate_rows
    from tilth.rl.aggregation import aggregate, denominator, row_denominator
    from tilth.rl.algorithm import check, names, options
    from tilth.rl.kl import adapt, adapt_entropy, entropy_bonus, kl_penalty, penalise
    from tilth.rl.losses import LossResult, PolicyLoss, loss_entry, policy_loss, thresholds
    from tilth.rl.metrics import Metric, merge_metrics, mismatch
    from tilth.rl.packing import keep_rows, token_counts
    from tilth.rl.preference import PreferenceResult, pair_weights, preference_loss
    from tilth.rl.registry import register
    from tilth.rl.rollout_correction import Correction, bypasses, correct
    from tilth.rl.values import Explained, explained_variance, value_loss

_HOME = {
    name: module
    for module, names_of in {
        "rollout_correction": "Correction bypasses correct",
        "advantages": "Estimate estimate estimate_rows",
        "values": "Explained explained_variance value_loss",
        "losses": "LossResult PolicyLoss loss_entry policy_loss thresholds",
        "metrics": "Metric merge_metrics mismatch",
        "preference": "PreferenceResult pair_weights preference_loss",
        "kl": "adapt adapt_entropy entropy_bonus kl_penalty penalise",
        "aggregation": "aggregate denominator row_denominator",
        "algorithm": "check names options",
        "packing": "keep_rows token_counts",
        "registry": "register",
    }.items()
    for name in names_of.split()
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
