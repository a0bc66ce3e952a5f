"""Tensor parallelism, with or without sequence parallelism, applied to a one-device decoder.

Attention heads, the inner width of the MLP and the vocabulary are divided over the ranks along "tp" (Shoeybi et al.,
arXiv 1909.08053): one all-reduce for each of a layer's two blocks in the forward pass and one in the backward pass.
With sequence parallelism (Korthikanti et al., arXiv 2205.05198) the residual stream between blocks is divided over
tokens, and a gather and a scatter replace each all-reduce. Hidden states that leave the model are whole and equal on
every rank, and their consumer gives every rank the whole gradient.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.core.layout import Box, Mesh, Replicate, Shard
from tilth.models.attention import AttentionContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder, Linear, RMSNorm, WideRMSNorm, project
from tilth.models.logprobs import wide
from tilth.models.lora import Adapter
from tilth.models.moe import MoE
from tilth.parallel.collectives import Group, copy_in, gather_copies, gather_tokens, reduce_out, scatter_tokens
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.parallel.vocabulary import Vocabulary, VocabularyEmbedding, VocabularyHead
from tilth.plan.layout import misfit
from tilth.plan.rules import along_tp, rule_of


@dataclass(frozen=True)
class TensorPlan:
    """Layout of parameters along "tp", and the gradients that a rank has only a part of."""

    placements: dict[str, Shard | Replicate]
    """Placement by name, of every parameter."""
    partial: tuple[tuple[Group, tuple[str, ...]], ...]
    """Parameters that several ranks hold alike but use for different heads or tokens: their gradients are summed over
    this group after a backward pass."""


def check_tensor(config: DecoderConfig, tp: int) -> None:
    """Raise ModelError unless heads, key heads and the MLP divide over ``tp`` ranks. Any vocabulary does.

    There may be fewer key heads than ranks if the ranks are a multiple of them: then neighbours hold the same one.
    """
    wrong = misfit(config, tp)
    if wrong:
        fits = [str(n) for n in range(1, config.num_heads + 1) if not misfit(config, n)]
        raise ModelError(
            f"layout.tp={tp} does not divide {wrong}; this model takes tp " + ", ".join(fits), key="layout.tp"
        )


def apply_tensor(model: Decoder, grid: ParallelDims, sp: bool) -> TensorPlan:
    """Cut a one-device model to this rank's part along "tp", in place. Names of parameters stay.

    Parameters become local pieces (on the meta device nothing is allocated). sp: also divide the residual stream over
    tokens. ModelError if the shape does not divide or a parameter has no rule. Every rank must call it.
    """
    tp, config = grid.size("tp"), model.config
    check_tensor(config, tp)
    copies = max(1, tp // config.num_kv_heads)
    rules = {name: rule_of(model.table, name).tp for name, _ in model.named_parameters()}
    placements = {name: along_tp(model.table, name, copies) for name in rules}
    group = grid.group("tp")
    if group is None:
        return TensorPlan(placements, ())
    for adapter in (module for module in model.modules() if isinstance(module, Adapter)):
        adapter.part = grid.coordinate("tp")
        if sp and adapter.dropout:
            message = (
                f"dropout of adapters, {adapter.dropout}, does not work with sp, which divides tokens: set it to 0"
            )
            raise ModelError(message, key="lora.dropout.sp")
    for name, placement in placements.items():
        cut_parameter(model, name, placement, grid.coordinate("tp"), tp)
    vocabulary = Vocabulary(group, config.vocab_size)
    if model.first or hasattr(model.model, "embed_tokens"):  # the last part of a model has it if it is the head
        embed = model.model.embed_tokens
        model.model.embed_tokens = VocabularyEmbedding(embed.weight, vocabulary, model.dtype, sp)  # type: ignore[assignment]
    head = VocabularyHead(vocabulary)
    model.token_logprobs, model.token_squares, model.head_logits = head, head.squares, head.logits
    _divide_norms(model, group)
    _divide_blocks(model, group, sp)
    if sp:
        _divide_tokens(model, group)
    return TensorPlan(placements, _partial(rules, grid, sp, copies))


def divide_products(division: Division) -> None:
    """Divide a model by ``apply_tensor``."""
    division.partial += apply_tensor(division.model, division.grid, division.sp).partial


def cut_parameter(model: Decoder, name: str, placement: Shard | Replicate, part: int, parts: int) -> None:
    """Replace a parameter with one part of it, in place."""
    path, _, leaf = name.rpartition(".")
    whole = model.get_parameter(name)
    (box,) = placement.piece(Box.whole(whole.shape), part, parts)
    local = whole if box.size == whole.shape else nn.Parameter(whole.data[box.slices].clone(), whole.requires_grad)
    setattr(model.get_submodule(path), leaf, local)


def _partial(
    rules: Mapping[str, str], grid: ParallelDims, sp: bool, copies: int
) -> tuple[tuple[Group, tuple[str, ...]], ...]:
    """Return the gradients to sum after a backward pass. rules: name -> how it is divided."""
    everywhere = [name for name, rule in rules.items() if rule == "heads" or (sp and rule == "residual")]
    shared = [name for name, rule in rules.items() if rule == "copied" and copies > 1]
    sums = ((grid.group("tp"), everywhere), (_sharers(grid, copies), shared))
    return tuple((group, tuple(names)) for group, names in sums if group is not None and names)


def _sharers(grid: ParallelDims, copies: int) -> Group | None:
    """Return the group of neighbours along tp that hold the same key heads."""
    split = {"tp": {"piece": grid.size("tp") // copies, "copy": copies}}
    finer = {n: s for name in grid.mesh.names for n, s in split.get(name, {name: grid.size(name)}).items()}
    mesh = Mesh(tuple(finer), tuple(finer.values()), grid.mesh.ranks)
    return ParallelDims(mesh, grid.rank, grid.generation).group("copy")


class RowLinear(nn.Module):
    """Linear layer divided by columns: partial outputs are summed, then the bias is added once."""

    def __init__(self, local: Linear, leave: Callable[[Tensor], Tensor]) -> None:
        """local: with this rank's columns; leave: the sum over ranks."""
        super().__init__()
        self.weight, self.bias, self.leave = local.weight, local.bias, leave
        self.product, self.lora = local.product, local.lora

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, in / ranks] -> [N, out], with sequence parallelism [ceil(N / ranks), out]."""
        x = self.leave(project(self, x, None))
        return x if self.bias is None else x + self.bias.to(x.dtype)


class DividedNorm(WideRMSNorm):
    """Norm over all heads together, of which each rank has its own: the squares are summed over the ranks."""

    def __init__(self, local: RMSNorm, group: Group) -> None:
        """local: with this rank's weights. Heads that several ranks hold count as often."""
        super().__init__(local.eps)
        self.weight, self.group, self.offset = local.weight, group, getattr(local, "offset", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, width / ranks] -> the same shape."""
        kind = wide(x.dtype)
        own, weight = x.to(kind), self.weight.to(x.dtype).to(kind) + self.offset
        squares = copy_in(reduce_out(own.square().sum(-1, keepdim=True), self.group), self.group)
        return (own * torch.rsqrt(squares / (x.shape[-1] * self.group.size()) + self.eps) * weight).to(x.dtype)


def _divide_norms(model: Decoder, group: Group) -> None:
    """Replace norms whose weights are divided."""
    for name, _ in list(model.named_parameters()):
        row, path = rule_of(model.table, name), name.rpartition(".")[0]
        if row.kind == "norm" and row.tp in ("rows", "copied"):
            parent, _, leaf = path.rpartition(".")
            local = model.get_submodule(path)
            assert isinstance(local, RMSNorm)
            setattr(model.get_submodule(parent), leaf, DividedNorm(local, group))


def _divide_blocks(model: Decoder, group: Group, sp: bool) -> None:
    """Gather the input of each block, which ends in a layer divided by columns, and sum its output."""

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *tables = args
        x = (gather_tokens if sp else copy_in)(x, group)
        return (x[: tables[0][0].shape[0]], *tables) if tables else (x,)  # attention: without tokens that fill up

    def leave(x: Tensor) -> Tensor:
        if sp:
            return scatter_tokens(x, group)
        # The sum is in place, and selective recomputation keeps the product.
        return reduce_out(x.clone() if model.checkpointing == "selective" else x, group)

    _divide_experts(model, leave, group, sp)
    apart = tuple(f"{path}." for path, block in model.named_modules() if isinstance(block, MoE))
    linears = [
        name
        for name, p in model.named_parameters()
        if name.endswith(".weight") and rule_of(model.table, name).tp == "columns" and not name.startswith(apart)
    ]
    blocks = dict.fromkeys(name.rsplit(".", 2)[0] for name in linears)
    for name in linears:
        path, leaf, _ = name.rsplit(".", 2)
        block = model.get_submodule(path)
        setattr(block, leaf, RowLinear(getattr(block, leaf), leave))
    for path in blocks:
        model.get_submodule(path).register_forward_pre_hook(enter)


def _divide_experts(model: Decoder, add_up: Callable[[Tensor], Tensor], group: Group, sp: bool) -> None:
    """Gather the input of each block of experts, whose inner widths are divided, and sum its output once.

    All ranks route alike, as they see the same tokens. A rank's gradient of the router is its part of the sum.
    """

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (gather_tokens if sp else copy_in)(args[0], group), *args[1:]

    def leave(_: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        return add_up(x)

    for block in model.modules():
        if isinstance(block, MoE):
            block.experts.down_proj.share = 1 / group.size()
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)


def _divide_tokens(model: Decoder, group: Group) -> None:
    """Divide dropout masks over tokens, and gather hidden states after the last norm."""

    def narrow(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, ctx = args
        return ids, _narrowed(ctx, group)

    model.register_forward_pre_hook(narrow)
    if model.last:
        model.model.norm.register_forward_hook(lambda _, args, x: gather_copies(x, group))
        model.register_forward_hook(lambda _, args, x: _without_fillers(x, args[1].positions.shape[0]))


def _without_fillers(x: Tensor, rows: int) -> Tensor:
    # A copy: fully_shard hangs its hooks on what the model returns, and those on a view are easily lost.
    return x if x.shape[0] == rows else x[:rows].clone()


def _narrowed(ctx: AttentionContext, group: Group) -> AttentionContext:
    """Return the context with the random numbers of this rank's tokens. Its cached attention values are shared."""
    if ctx.dropout is None:
        return ctx
    rows = -(-ctx.positions.shape[0] // group.size())
    own = ctx.dropout.tokens[group.rank() * rows : (group.rank() + 1) * rows]
    narrow: Any = copy.copy(ctx)
    narrow.dropout = replace(ctx.dropout, tokens=own)
    return narrow
