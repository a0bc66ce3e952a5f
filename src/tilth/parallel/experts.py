"""Expert parallelism: tokens go to the ranks that hold their experts, and results come back.

Ranks along "ep" have rows of their own and divide the experts of each layer. There is no capacity: a rank takes as many
rows as the routers of all ranks send it, possibly none. Two modes give the same sums (MegaScale-MoE, arXiv 2505.11432,
section 3.2): "exchange" sends each pair of token and expert by uneven all-to-all, and adds in the order of one device;
"gather" brings all tokens to every rank and scatters sums, in another order. A layer that is recomputed in the backward
pass repeats its exchange, and all ranks of the group run as many passes; see ``ShardedModel.sync_micro_batch_count``.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.core.layout import Shard
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext, Routing, RunExperts, combine_pairs, gather_pairs, sort_by_expert
from tilth.models.rows import pad_rows
from tilth.parallel.collectives import add_up_, exchange_rows, gather_tokens, scatter_tokens
from tilth.parallel.comm import Group, all_gather, all_to_all
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.parallel.tensor import cut_parameter
from tilth.plan.experts import DispatchMode, dispatch_mode
from tilth.plan.layout import experts_misfit
from tilth.plan.rules import rule_of


class ExpertExchange:
    """Dispatch (``models.moe.ExpertDispatch``) over the ranks of a group: expert e is on rank e // (experts / ranks).

    All ranks call it in the same order, each with any number of tokens.
    """

    def __init__(self, group: Group, mode: DispatchMode | None = None) -> None:
        """mode: by default the one with the smaller volume for the number of experts of a token."""
        self.group, self.ranks, self.mode = group, group.size(), mode

    def __call__(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        mode = self.mode or dispatch_mode(routing.experts.shape[1], self.ranks)
        return (self._by_exchange if mode == "exchange" else self._by_gather)(x, routing, run, experts)

    def _by_exchange(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        order, place, counts = sort_by_expert(routing, experts)
        local, theirs = experts // self.ranks, torch.empty_like(counts)
        each = [local] * self.ranks
        counted = all_to_all(theirs, counts, each, each, self.group)
        pairs = gather_pairs(x, routing, order, place)
        counted.wait()
        table = theirs.view(self.ranks, local)
        sent, received = counts.view(self.ranks, local).sum(1).tolist(), table.sum(1).tolist()
        rows = exchange_rows(pairs, received, sent, self.group)
        expert = torch.arange(local, device=x.device).repeat(self.ranks).repeat_interleave(theirs)
        by_expert = Routing(expert[:, None], routing.weights)  # rows came by rank, then expert
        forth, back, own = sort_by_expert(by_expert, local)
        found = pad_rows(run(pad_rows(rows, forth, back), own), back, forth)
        return combine_pairs(exchange_rows(found, sent, received, self.group), routing, order, place)

    def _by_gather(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        n, k = routing.experts.shape
        local, counts = experts // self.ranks, torch.empty(self.ranks, dtype=torch.int64, device=x.device)
        all_gather(counts, torch.tensor([n], device=x.device), self.group)
        spare = int(counts.max()) - n
        every = gather_tokens(F.pad(x, (0, 0, 0, spare)), self.group)
        scale = gather_tokens(F.pad(routing.weights, (0, 0, 0, spare)), self.group)
        own = F.pad(routing.experts, (0, 0, 0, spare), value=experts)
        chosen = own.new_empty(len(every), k)
        if len(every):
            all_gather(chosen, own.contiguous(), self.group)
        here = chosen.flatten() - self.group.rank() * local
        pairs = torch.nonzero((here >= 0) & (here < local), as_tuple=True)[0]
        pairs = pairs[here[pairs].argsort(stable=True)]
        found = run(every[pairs // k], torch.bincount(here[pairs], minlength=local))
        sums = torch.zeros_like(every).index_add(0, pairs // k, found * scale.flatten()[pairs, None])
        return scatter_tokens(sums, self.group)[:n]


class ExpertSum:
    """Dispatch over ranks that have the same tokens, as of one engine: each computes with its experts, the results are
    summed. Without gradient."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        local, k = experts // self.group.size(), routing.experts.shape[1]
        here = routing.experts.flatten() - self.group.rank() * local
        pairs = torch.nonzero((here >= 0) & (here < local), as_tuple=True)[0]
        pairs = pairs[here[pairs].argsort(stable=True)]
        found = run(x[pairs // k], torch.bincount(here[pairs], minlength=local))
        sums = torch.zeros_like(x).index_add_(0, pairs // k, found * routing.weights.flatten()[pairs, None])
        return add_up_(sums, self.group)


def check_experts(config: DecoderConfig, ep: int) -> None:
    """Raise ModelError unless the experts divide over ``ep`` ranks; it names the sizes that would work."""
    wrong = experts_misfit(config, ep)
    if wrong:
        fits = [str(n) for n in range(1, max(1, config.num_experts) + 1) if not experts_misfit(config, n)]
        raise ModelError(
            f"layout.ep={ep} does not divide {wrong}; this model takes ep " + ", ".join(fits), key="layout.ep"
        )


def apply_experts(model: Decoder, grid: ParallelDims, *, engine: bool = False) -> None:
    """Cut the experts of a model to this rank's along "ep", in place, and send tokens to those of other ranks.

    engine: all ranks have the same tokens. In parity mode they are exchanged, whatever the volume: sums then have the
    bits of one device. ModelError if experts do not divide. Every rank must call it.
    """
    ep = grid.size("ep")
    check_experts(model.config, ep)
    group = grid.group("ep")
    if group is None:
        return
    for name, _ in model.named_parameters():
        if rule_of(model.table, name).stacked:
            cut_parameter(model, name, Shard(0), grid.coordinate("ep"), ep)
    dispatch = ExpertSum(group) if engine else ExpertExchange(group)
    in_order = ExpertExchange(group, "exchange")  # adds as one device does

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, ctx = args
        sending = copy.copy(ctx)
        own = ctx.experts or ExpertContext()
        sending.experts = replace(own, dispatch=in_order if own.parity else dispatch)
        return ids, sending

    model.register_forward_pre_hook(enter)


def divide_experts(division: Division) -> None:
    """Divide a model by ``apply_experts``, and shard what is not of experts over the same ranks."""
    from tilth.parallel.fsdp import shard_parameters

    apply_experts(division.model, division.grid, engine=division.engine)
    shard_parameters(division)
