"""Algorithms of reinforcement learning as pure functions of packed columns: advantages, losses, KL, aggregation."""

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

__all__ = [
    "Correction",
    "Estimate",
    "Explained",
    "LossResult",
    "Metric",
    "PolicyLoss",
    "PreferenceResult",
    "adapt",
    "adapt_entropy",
    "aggregate",
    "bypasses",
    "check",
    "correct",
    "denominator",
    "entropy_bonus",
    "estimate",
    "estimate_rows",
    "explained_variance",
    "keep_rows",
    "kl_penalty",
    "loss_entry",
    "merge_metrics",
    "mismatch",
    "names",
    "options",
    "pair_weights",
    "penalise",
    "policy_loss",
    "preference_loss",
    "register",
    "row_denominator",
    "thresholds",
    "token_counts",
    "value_loss",
]
