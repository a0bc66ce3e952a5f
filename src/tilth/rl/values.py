"""Value loss: distance of a critic from the returns, over one global denominator, and explained variance."""

from typing import Any, Self

import torch
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.aggregation import Aggregation, reduce_tokens
from tilth.rl.losses import LossResult
from tilth.rl.metrics import Metric, SumsMetric
from tilth.rl.packing import Packing
from tilth.rl.registry import build

FLAT = 1e-12
"""Returns with a variance below this share of their mean square count as equal."""


class Explained(SumsMetric):
    """Explained variance, 1 - Var(return - value) / Var(return): 1 is perfect, 0 as good as a constant, below 0 worse.

    sums: float64 [5]: tokens; errors and their squares; returns and their squares. Where all returns are equal it has
    no value (NaN, ``count`` 0).
    """

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        count, errors, squared_errors, returns, squared_returns = sums
        tokens = count.clamp(min=1)
        unexplained = squared_errors / tokens - (errors / tokens) ** 2
        variance = squared_returns / tokens - (returns / tokens) ** 2
        varies = variance > FLAT * squared_returns / tokens
        share = 1 - unexplained / torch.where(varies, variance, 1.0)
        counted = torch.where(varies, count, 0.0)
        return cls(share * counted, counted, "mean", sums)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, lengths: Tensor) -> Explained:
    """Return the share of the returns' variance that the values explain. lengths: [n]; others [total]."""
    packing = Packing.of(lengths, mask)
    v, r = (
        packing.masked(packing.column(k, c)).to(torch.float64) for k, c in (("values", values), ("returns", returns))
    )
    count = packing.mask.sum().to(torch.float64)
    return Explained.of(torch.stack([count, (r - v).sum(), ((r - v) ** 2).sum(), r.sum(), (r**2).sum()]))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip: float = 0.0,
    aggregation: str | Aggregation = "token-mean",
    denominator: float | None = None,
    **options: Any,
) -> LossResult:
    """Return PPO's value loss: at a token, 0.5 * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    A value that has moved further than ``clip`` towards its return since the batch began gets no more gradient; one
    that has moved away from it keeps its own. (From the code of arXiv 1707.06347; verl and TRL have the same.)

    Args:
        values, old_values, returns: [total]; of the critic now, of the critic before this batch, and from ``estimate``.
            Only ``values`` gets a gradient. What they hold at masked positions does not matter.
        mask: [total], not 0 where the token counts. lengths: integers [n].
        clip: most that a value may move; 0: no clip.
        aggregation, denominator, options: as in ``policy_loss``.

    Metrics (means over tokens that count): value/loss, before aggregation; value/clipped, share of tokens whose
    gradient the clip takes away; value/mean; value/return; value/explained (``Explained``, of ``values``).

    Raises: RecipeError (a negative clip, unknown aggregation or option), TokenCountError (a column of another size).
    """
    if not clip >= 0:
        raise RecipeError(f"value_loss: clip = {clip}: it must be above 0, or 0 for none", key="clip")
    packing = Packing.of(lengths, mask)
    entry = build("aggregations", aggregation, options, Aggregation)
    v = packing.masked(packing.column("values", values))
    old, goal = (
        packing.masked(packing.column(k, c)).detach() for k, c in (("old_values", old_values), ("returns", returns))
    )
    losses, clipped = 0.5 * (v - goal) ** 2, torch.zeros_like(packing.mask)
    if clip:
        held = 0.5 * (v.clamp(old - clip, old + clip) - goal) ** 2
        losses, clipped = torch.maximum(losses, held), held > losses
    metrics = _metrics(packing, {"loss": losses, "clipped": clipped, "mean": v, "return": goal})
    metrics["value/explained"] = explained_variance(v, goal, packing.mask, packing.lengths)
    return LossResult(reduce_tokens(entry, losses, packing, denominator), metrics)


@torch.no_grad()
def _metrics(packing: Packing, columns: dict[str, Tensor]) -> dict[str, Metric]:
    count = packing.mask.sum()
    return {
        f"value/{name}": Metric(packing.masked(column.to(torch.float64)).sum(), count, "mean")
        for name, column in columns.items()
    }
