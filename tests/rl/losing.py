"""Policy losses under test: columns for any of them, and options with which each does what is peculiar to it."""

from dataclasses import replace

import torch

from tilth import rl

LOSSES = rl.names()["losses"]
AGGREGATIONS = rl.names()["aggregations"]
FIRST_PASS = [name for name in LOSSES if rl.loss_entry(name).first_pass]

ACTIVE = {
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.5},
    "reinforce": {"cap": 1.1},
    "cispo": {"clip_low": 0.2, "clip_high": 0.1},
    "sapo": {"tau_pos": 0.8, "tau_neg": 2.0},
    "dro": {"beta": 0.7},
    "dppo_tv": {"tv_low": 0.05, "tv_high": 0.1, "cap": 1.3},
    "dppo_kl": {"kl_low": 0.01, "kl_high": 0.02, "cap": 1.3},
    "clip_cov": {"cov_share": 0.3, "cov_low": -0.2, "cov_high": 2.0},
    "kl_cov": {"cov_share": 0.3, "cov_coef": 0.6},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "geo_mean": {"clip_low": 0.1, "clip_high": 0.2},
}
"""A loss that is not here is tested with its defaults."""


def columns(batch) -> dict[str, torch.Tensor]:
    """Everything that a loss may ask for, float64 with NaN where masked: probabilities below 1, close to each other."""
    old = -0.05 - batch.column(0).abs()
    near = {name: (old + batch.column(i, 0.3)).clamp(max=-0.01) for i, name in [(1, "logprobs"), (2, "ref_logprobs")]}
    uniforms = torch.rand(len(batch.mask), generator=torch.Generator().manual_seed(batch.seed), dtype=torch.float64)
    return {
        **near,
        "old_logprobs": old,
        "rollout_logprobs": old + batch.column(3, 0.1),
        "advantages": batch.column(4, 1.0),
        "weights": batch.column(5).exp(),
        "uniforms": torch.where(batch.mask, uniforms, torch.nan),
    }


def pass_columns(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that the first pass takes."""
    return {k: given[k] for k in ("logprobs", "old_logprobs", "advantages", "uniforms")}


def run(name, batch, given, **more):
    """Result and gradient of one call on the columns of this batch (or on some rows of it, with ``thresholds``)."""
    x = given["logprobs"].clone().requires_grad_()
    options = {**ACTIVE.get(name, {}), **more}
    result = rl.policy_loss(name, **{**given, "logprobs": x}, mask=batch.mask, lengths=batch.lengths, **options)
    result.loss.backward()
    return replace(result, loss=result.loss.detach()), x.grad


def first_pass(name, batch, given, **more):
    """Thresholds of a batch."""
    options = {**ACTIVE.get(name, {}), **more}
    return rl.thresholds(name, **pass_columns(given), mask=batch.mask, lengths=batch.lengths, **options)
