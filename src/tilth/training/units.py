"""Micro-batches of several ranks: the first has the rows, and sends the others what their part of the model needs.

Loss and columns of the loss stay on the first rank; see ``parallel.context.UnitShare``.
"""

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from tilth.core.errors import PlanError
from tilth.core.trajectory import OPENS
from tilth.parallel.comm import Exchange, Members, all_reduce
from tilth.parallel.context import ContextParallel
from tilth.plan.batch import MicroBatches

ROUTING = "routing"
"""Column of the generation engine's choices of experts, int64 [N, layers with experts, k]; below 0: not known."""
TARGETS = "targets"
"""Column of tokens whose log-probs are asked for at the places of others, int64 [N]."""
PLACES = "dropout/places"
"""Column of the index of each token in the whole batch, which numbers dropout masks, int64 [N]."""
SENT = (OPENS, TARGETS, PLACES, ROUTING)
"""Columns of integers that a model or what scores its states needs on each rank of a unit."""


def send_rows(
    unit: Members, count: int, ids: Tensor, mask: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return ids, mask and columns of all ``count`` tokens of a unit: on its first rank those given, which it sends; on
    the others, whose own are empty, ids, mask and the columns of ``SENT``."""
    names = [name for name in SENT if name in columns]
    widths = [1, 1, *(math.prod(columns[name].shape[1:]) for name in names)]
    table = torch.empty(count, sum(widths), dtype=torch.int64, device=ids.device)
    first = unit.place == 0
    if first:
        torch.cat([x.reshape(count, -1).long() for x in (ids, mask, *map(columns.__getitem__, names))], 1, out=table)
    others = [(place, table) for place in range(1, len(unit.ranks))]
    Exchange(unit, others if first else [], [] if first else [(0, table)]).wait()
    if first:
        return ids, mask, columns
    found, marks, *rest = table.split(widths, 1)
    given = {name: x.reshape(count, *columns[name].shape[1:]).contiguous() for name, x in zip(names, rest)}
    return found[:, 0].to(ids.dtype), marks[:, 0].to(mask.dtype), given


def check_units(plan: MicroBatches, context: ContextParallel, device: torch.device) -> None:
    """Raise PlanError on all ranks of the axis unless any two have the same units together, in the same order.

    One sum: of two ranks one adds the digest of their units, the other one subtracts it. On a device it is the first
    message of the group too, in which all of its ranks take part.
    """
    own, digests, wrong = context.group.rank(), dict[int, int](), ""
    for number, micro in enumerate(plan):
        ranks = micro.ranks
        if micro.several and (own not in ranks or list(ranks) != sorted({*ranks} & {*range(context.group.size())})):
            wrong = wrong or f"micro-batch {number} has the ranks {ranks} on rank {own} of {context.group.size()}; "
        for peer in ranks if micro.several else ():
            data = np.array([micro.check, *ranks, *micro.lengths], np.int64).tobytes()
            digests[peer] = zlib.crc32(data, digests.get(peer, 0))
    signed = sum(digest if own < peer else -digest for peer, digest in digests.items() if peer != own)
    found = torch.tensor([signed, int(bool(wrong))], device=device)
    all_reduce(found, context.group).wait()
    if found.any():
        message = f"{wrong}the ranks along the axis have other units, or the same ones in another order"
        raise PlanError(f"{message}: give each of them its part of one plan (plan.batch.plan_batch)", key="plan.units")
