"""AdaAlter (arXiv 1911.09030): AdaGrad that updates before it accumulates, so that ranks which synchronise rarely have
the same denominators in between."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.plan.rules import Table
from tilth.training.optimizers import EagerOptimizer, decay_groups
from tilth.training.optimizers.blockwise import slices

INITIAL = EPS = 1e-3
"""b0, and eps of the paper, where they are 1 and losses sums over the tokens of a batch; here losses are means."""


class AdaAlter(EagerOptimizer):
    """AdaAlter: x -= lr (G / sqrt(b0^2 + B + k eps^2) + decay x), then A += G^2, of elements.

    A, ``accumulated``, is this rank's sum. B is A at the begin of a period of ``every`` steps, of which this is the
    k-th: in a period k eps^2 stands for the squares that other ranks do not know yet. A method that synchronises ranks
    once in ``every`` steps averages weights and what ``averaged`` names, after each k = ``every``. With 1, the default,
    B is A, of squares of the whole gradient.
    """

    averaged = ("accumulated",)
    """State that a method of local steps averages, beside the weights."""
    common = ("denominator",)
    """State that ranks have alike then."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        section: OptimizerSection,
        *,
        named: Mapping[str, nn.Parameter],
        table: Table,
        every: int = 1,
    ) -> None:
        """every: steps of a period."""
        defaults = {"lr": section.lr, "initial": INITIAL, "eps": EPS}
        super().__init__(decay_groups(named, table, section.weight_decay), defaults)
        self.every = every

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one update."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            if not params:
                continue
            torch._foreach_add_([state["step"] for state in states], 1)
            k = (int(states[0]["step"]) - 1) % self.every + 1
            least, kept = group["initial"] ** 2 + k * group["eps"] ** 2, 1 - group["lr"] * group["weight_decay"]
            if self.every > 1 and k == 1:
                torch._foreach_copy_([s["denominator"] for s in states], [s["accumulated"] for s in states])
            held = "denominator" if self.every > 1 else "accumulated"
            rows = [(p.detach(), p.grad, state[held], state["accumulated"]) for p, state in zip(params, states)]
            for _, (p, grad, b, a) in slices(rows):
                under = torch._foreach_add(b, least)
                torch._foreach_sqrt_(under)
                torch._foreach_mul_(p, kept)
                torch._foreach_addcdiv_(p, grad, under, -group["lr"])
                torch._foreach_addcmul_(a, grad, grad)
