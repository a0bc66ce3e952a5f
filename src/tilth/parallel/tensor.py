"""Tensor parallelism, with or without sequence parallelism, put around a one-device decoder.

Attention heads, the inner width of the MLP and the vocabulary are divided over the ranks along "tp" (Shoeybi et al.,
arXiv 1909.08053): one all-reduce for each of a layer's two blocks in the forward pass and one in the backward pass.
With sequence parallelism (Korthikanti et al., arXiv 2205.05198) the residual stream between blocks is divided over
tokens, and a gather and a scatter take the place of each all-reduce. What leaves the model (hidden states) is whole and
the same on every rank, and whoever uses it gives every rank the whole gradient.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.core.layout import Box, Mesh, Replicate, Shard
from tilth.models.attention import AttentionContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder, Layer, Linear
from tilth.parallel.collectives import Group, copy_in, gather_copies, gather_tokens, reduce_out, scatter_tokens
from tilth.parallel.dims import ParallelDims
from tilth.parallel.vocabulary import Vocabulary, VocabularyEmbedding, VocabularyHead
from tilth.plan.rules import along_tp, rule_of


@dataclass(frozen=True)
class TensorPlan:
    """How parameters lie along "tp", and which gradients a rank has only its part of."""

    placements: dict[str, Shard | Replicate]
    """By name, of every parameter."""
    partial: tuple[tuple[Group, tuple[str, ...]], ...]
    """Parameters that several ranks hold alike but use for different heads or tokens: after a backward pass the
    gradients are to be summed over this group."""


def check_tensor(config: DecoderConfig, tp: int) -> None:
    """ModelError unless heads, key heads and the MLP of this shape divide over ``tp`` ranks. Any vocabulary does.

    Of key heads there may be fewer than ranks if these are a multiple of them: then neighbours hold the same one.
    """
    wrong = _misfit(config, tp)
    if wrong:
        fits = [str(n) for n in range(1, config.num_heads + 1) if not _misfit(config, n)]
        raise ModelError(f"{wrong} does not divide over layout.tp={tp} ranks; this model takes tp " + ", ".join(fits))


def _misfit(config: DecoderConfig, tp: int) -> str:
    heads, kv_heads, ffn = config.num_heads, config.num_kv_heads, config.intermediate_size
    if heads % tp:
        return f"model.heads={heads}"
    if kv_heads % tp and tp % kv_heads:
        return f"model.kv_heads={kv_heads}"
    return f"model.ffn={ffn}" if ffn % tp else ""


def apply_tensor(model: Decoder, grid: ParallelDims, sp: bool) -> TensorPlan:
    """Cut a one-device model down to this rank's part along "tp", in place. Names of parameters stay.

    Parameters become local pieces (of a model on the meta device: nothing is allocated; else what they held). sp: also
    divide the residual stream over tokens. ModelError if the shape does not divide or a parameter has no rule. Every
    rank must call it.
    """
    tp, config = grid.size("tp"), model.config
    check_tensor(config, tp)
    copies = max(1, tp // config.num_kv_heads)
    placements = {name: along_tp(name, copies) for name, _ in model.named_parameters()}
    group = grid.group("tp")
    if group is None:
        return TensorPlan(placements, ())
    for name, placement in placements.items():
        _cut(model, name, placement, grid.coordinate("tp"), tp)
    vocabulary = Vocabulary(group, config.vocab_size)
    embed = model.model.embed_tokens
    model.model.embed_tokens = VocabularyEmbedding(embed.weight, vocabulary, model.dtype, sp)  # type: ignore[assignment]
    head = VocabularyHead(vocabulary)
    model.token_logprobs, model.token_squares, model.head_logits = head, head.squares, head.logits
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        _divide_layer(layer, group, sp)
    if sp:
        _divide_tokens(model, group)
    return TensorPlan(placements, _partial(placements, grid, sp, copies))


def _cut(model: Decoder, name: str, placement: Shard | Replicate, part: int, parts: int) -> None:
    """Let a parameter hold its local piece only."""
    path, _, leaf = name.rpartition(".")
    whole = model.get_parameter(name)
    (box,) = placement.piece(Box.whole(whole.shape), part, parts)
    local = whole if box.size == whole.shape else nn.Parameter(whole.data[box.slices].clone(), whole.requires_grad)
    setattr(model.get_submodule(path), leaf, local)


def _partial(
    names: Collection[str], grid: ParallelDims, sp: bool, copies: int
) -> tuple[tuple[Group, tuple[str, ...]], ...]:
    everywhere = [n for n in names if rule_of(n).tp == "heads" or (sp and rule_of(n).tp == "residual")]
    shared = [n for n in names if rule_of(n).tp == "copied" and copies > 1]
    sums = ((grid.group("tp"), everywhere), (_sharers(grid, copies), shared))
    return tuple((group, tuple(names)) for group, names in sums if group is not None and names)


def _sharers(grid: ParallelDims, copies: int) -> Group | None:
    """The neighbours along tp that hold the same key heads."""
    split = {"tp": {"piece": grid.size("tp") // copies, "copy": copies}}
    finer = {n: s for name in grid.mesh.names for n, s in split.get(name, {name: grid.size(name)}).items()}
    mesh = Mesh(tuple(finer), tuple(finer.values()), grid.mesh.ranks)
    return ParallelDims(mesh, grid.rank, grid.generation).group("copy")


class RowLinear(nn.Module):
    """A matrix of whose inputs each rank has its own: what they give is summed, then the bias is added, once."""

    def __init__(self, local: Linear, leave: Callable[[Tensor], Tensor]) -> None:
        """local: with this rank's columns; leave: the sum over ranks."""
        super().__init__()
        self.weight, self.bias, self.leave = local.weight, local.bias, leave

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, in / ranks] -> [N, out], with sequence parallelism [ceil(N / ranks), out]."""
        x = self.leave(F.linear(x, self.weight.to(x.dtype)))
        return x if self.bias is None else x + self.bias.to(x.dtype)


def _divide_layer(layer: Layer, group: Group, sp: bool) -> None:
    attention, mlp, tp = layer.self_attn, layer.mlp, group.size()
    attention.heads //= tp
    attention.kv_heads = max(1, attention.kv_heads // tp)

    def enter(x: Tensor) -> Tensor:
        return (gather_tokens if sp else copy_in)(x, group)

    def leave(x: Tensor) -> Tensor:
        return (scatter_tokens if sp else reduce_out)(x, group)

    def enter_attention(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, tables = args
        return enter(x)[: tables[0].shape[0]], tables  # without the tokens that fill up

    attention.register_forward_pre_hook(enter_attention)
    mlp.register_forward_pre_hook(lambda _, args: (enter(args[0]),))
    attention.o_proj = RowLinear(attention.o_proj, leave)  # type: ignore[assignment]
    mlp.down_proj = RowLinear(mlp.down_proj, leave)  # type: ignore[assignment]


def _divide_tokens(model: Decoder, group: Group) -> None:
    """Sequence parallelism at the ends: dropout masks of own tokens; hidden states are gathered after the last norm."""

    def narrow(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, ctx = args
        return ids, _narrowed(ctx, group)

    model.register_forward_pre_hook(narrow)
    model.model.norm.register_forward_hook(lambda _, args, x: gather_copies(x, group))
    model.register_forward_hook(lambda _, args, x: _without_fillers(x, args[0].shape[0]))


def _without_fillers(x: Tensor, rows: int) -> Tensor:
    # A copy: fully_shard hangs its hooks on what the model returns, and those on a view are easily lost.
    return x if x.shape[0] == rows else x[:rows].clone()


def _narrowed(ctx: AttentionContext, group: Group) -> AttentionContext:
    """The context with the random numbers of this rank's tokens. What it has computed for attention is shared."""
    if ctx.dropout is None:
        return ctx
    rows = -(-ctx.positions.shape[0] // group.size())
    own = ctx.dropout.tokens[group.rank() * rows : (group.rank() + 1) * rows]
    narrow: Any = copy.copy(ctx)
    narrow.dropout = replace(ctx.dropout, tokens=own)
    return narrow
