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
