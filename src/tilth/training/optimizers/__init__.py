"""Optimizers beside AdamW and Muon, each a factory as ``tilth.optimizer`` describes it."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilth.plan.rules import Table, rule_of


class EagerOptimizer(torch.optim.Optimizer):
    """Torch's optimizer without its hooks for torch.compile, whose import takes a second and half the modules of a run.
    Steps are never compiled."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class EagerAdamW(EagerOptimizer, torch.optim.AdamW):
    """Torch's AdamW, whose step does not import torch.compile either."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Squares(Protocol):
    """Squared norms of whole tensors of which ranks have parts: ``ShardedModel.squares``."""

    def __call__(self, *kinds: Mapping[str, Tensor]) -> tuple[Sequence[str], Tensor]: ...


def decay_groups(named: Mapping[str, nn.Parameter], table: Table, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of parameters: those that decay, marked ``decays``, and norms and biases, which do not.

    A bias may have any shape: those of all experts of a layer are stacked in one tensor.
    """
    plain = {name: p for name, p in named.items() if p.ndim < 2 or rule_of(table, name).kind == "bias"}
    decayed = [p for name, p in named.items() if name not in plain]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "decays": True},
        {"params": list(plain.values()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
