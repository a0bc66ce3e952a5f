"""Experts over an optimizer step: losses and correction of routers from counts of the whole step, replay, metrics.

The loss of balance needs the share of the step's tokens that each expert gets, over all micro-batches and ranks. A pass
without gradient over the step's micro-batches counts first (with ``ExpertOptions.balance`` alone; it costs a third of a
step); the gradient then takes the shares as constants, so that neither micro-batches nor layout change the loss. The
pass cannot be saved: the gradient is linear in the shares, but it goes through the routers' inputs into every layer
before, so it would have to wait, with the activations of all micro-batches, until the last one has been routed.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.config.axes import DATA
from tilth.core.device import to_device
from tilth.models.config import DecoderConfig
from tilth.models.moe import ExpertContext, RouterLoss
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel
from tilth.rl.metrics import Metric
from tilth.training.packed import MicroBatch, computed_tokens, recorded_of


class ExpertOptions(NamedTuple):
    """Learning of routers beside the loss (``train.router_*`` of a recipe)."""

    balance: float = 0.0
    """Weight of the loss of balance; 0: none."""
    z: float = 0.0
    """Weight of the mean of (log sum exp of router logits)^2; 0: none."""
    correction: float = 0.0
    """Step of the routers' correction after each update, towards equal loads; 0: it stays."""
    replay: bool = False
    """Follow the recorded choices of the generation engine."""


ROUTERS_ALONE = ExpertOptions()
"""Routers learn by the loss of the step alone."""


def context_of(
    micro: MicroBatch, recorded: Tensor | None, options: ExpertOptions, loss: RouterLoss | None, parity: bool
) -> ExpertContext:
    """Return the context of experts of one micro-batch. recorded: int64 [N, layers, k], below 0 where not known."""
    weights = torch.ones(len(computed_tokens(micro)), dtype=torch.float64, device=micro.ids.device)
    if micro.trees is not None:
        counts = np.bincount(micro.trees.slot, minlength=len(weights)).astype(np.float64)
        (weights,) = to_device([counts], weights.device)
    replay = recorded if options.replay else None
    return ExpertContext(parity=parity, replay=replay, record=recorded is not None, weights=weights, loss=loss)


@dataclass
class ExpertStep:
    """Experts in one optimizer step of this rank."""

    config: DecoderConfig
    grid: ParallelDims
    options: ExpertOptions
    tokens: float
    """Tokens of the whole step, of all ranks."""
    parity: bool = False
    fractions: Tensor | None = None
    contexts: list[tuple[ExpertContext, Tensor | None]] = field(default_factory=list)

    @property
    def counts_first(self) -> bool:
        """True until the pass that counts is over, if the step needs one."""
        return bool(self.options.balance) and self.fractions is None

    def context(self, micro: MicroBatch) -> ExpertContext:
        """Return the context of a micro-batch."""
        recorded, o = recorded_of(micro), self.options
        charged = not self.counts_first and (o.balance or o.z)
        share = 1.0 / self.grid.size("tp")
        loss = RouterLoss(o.balance, o.z, self.tokens, self.fractions, share) if charged else None
        made = context_of(micro, recorded, o, loss, self.parity)
        self.contexts.append((made, recorded))
        return made

    def count(self) -> None:
        """End the pass that counts."""
        loads = self.loads()
        self.fractions = loads / loads.sum(-1, keepdim=True).clamp(min=1)
        self.contexts.clear()

    def loads(self) -> Tensor:
        """Return the pairs that each expert computed in the whole step, float64 [layers with experts, experts]."""
        found = torch.zeros(len(self.config.expert_layers), self.config.num_experts, dtype=torch.float64)
        for ctx, _ in self.contexts:
            for number, loads in ctx.loads.items():
                found[number] += loads.cpu()
        return self.grid.sum(found.flatten(), *DATA, "layers").view_as(found)

    def metrics(self, loads: Tensor) -> dict[str, Metric]:
        """Return the metrics of the step. loads: of the whole step."""
        shares = loads / loads.sum(-1, keepdim=True).clamp(min=1)
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1) / math.log(max(self.config.num_experts, 2))
        values = {
            "experts/load_max": float(shares.max()) * self.config.num_experts,
            "experts/entropy": float(entropy.mean()),
            "experts/dropped": 0.0,  # no expert has a capacity
        }
        found = {name: Metric(value, 1, "mean") for name, value in values.items()}
        return found | self._losses() | self._flips()

    def _losses(self) -> dict[str, Metric]:
        if not (self.options.balance or self.options.z):
            return {}
        own = torch.zeros(3, dtype=torch.float64)
        for ctx, _ in self.contexts:
            for term in ctx.losses.values():
                own[:2] += term.cpu()
            own[2] += 0.0 if ctx.weights is None else float(ctx.weights.sum()) / self.tokens
        balance, z, share = self.grid.sum(own, "tokens", without=("rows",)).tolist()
        balance, z = self.grid.sum(torch.tensor([balance, z], dtype=torch.float64), "layers").tolist()
        return {"experts/balance_loss": Metric(balance, share, "mean"), "experts/z_loss": Metric(z, share, "mean")}

    def _flips(self) -> dict[str, Metric]:
        """Return the share of recorded pairs of token and expert that the router here would not choose; those of a
        shared prompt count in each of its samples."""
        found = torch.zeros(2, dtype=torch.float64)
        for ctx, recorded in self.contexts:
            for number, layer in enumerate(self.config.expert_layers):
                if recorded is not None and layer in ctx.chosen:
                    theirs = recorded[:, number]
                    own = ctx.chosen[layer][: len(theirs)]
                    missed = (theirs[:, :, None] != own[:, None]).all(-1) & (theirs >= 0)
                    assert ctx.weights is not None  # see context_of
                    pairs = torch.stack([missed.sum(1), (theirs >= 0).sum(1)]).to(ctx.weights)
                    found += (pairs @ ctx.weights).cpu()
        flipped, known = self.grid.sum(found, "tokens", "layers", without=("rows",)).tolist()
        return {"experts/flips": Metric(flipped, known, "mean")} if known else {}


@torch.no_grad()
def correct_(sharded: ShardedModel, loads: Tensor, step: float) -> None:
    """Move the routers' corrections by ``step``: up for experts below the mean load, down above (arXiv 2408.15664).

    loads: of the whole step, [layers with experts, experts].
    """
    config = sharded.model.config
    for layer, own in zip(config.expert_layers, loads):
        name = f"model.layers.{layer}.mlp.gate.correction"
        for box in sharded.boxes(name) if name in sharded.parameters else ():
            p = sharded.parameters[name]
            p.add_((own.mean() - own).sign()[box.slices].to(p), alpha=step)
