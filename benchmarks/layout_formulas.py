"""What a layout says of one training step on one rank: the bytes that it sends along each axis, and its peak memory.

The formulas know shapes, lengths and sizes of axes, not the code that sends. ``Collectives`` counts what process groups
send. Left out of the formulas: scalars, norms, the vocabulary's sums, log-probs of each token along cp.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilth.config.load import load_recipe
from tilth.core.layout import Layout, Mesh, Shard
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.plan.experts import dispatch_mode
from tilth.plan.layout import copied_along, cut, layouts, place, update_layouts
from tilth.plan.memory import policy_need
from tilth.plan.pipeline import chunks_of
from tilth.plan.rules import rule_of
from tilth.plan.working import total

Choices = dict[int, tuple[np.ndarray, np.ndarray]]
"""Layer -> tokens of the whole batch that this rank computes, int64 [n], and their experts, int64 [n, k]."""
Sent = Iterator[tuple[str, float]]
"""Axes of several ranks, joined by "+", and bytes that this rank sends along them."""


@dataclass(frozen=True)
class Step:
    """One training step as one rank sees it."""

    mesh: Mesh
    rank: int
    config: DecoderConfig
    element: int
    """Bytes of an element of parameters, activations and gradients."""
    modes: dict[str, Any]
    """zero, schedule, sp and cp_style, where they are not the default."""
    rounds: int
    """Micro-batches with blanks."""
    lengths: np.ndarray
    """Tokens of each sequence of the ranks that have the same rows as this one."""
    padded: int
    """Tokens of blanks."""
    choices: Choices
    units: tuple[tuple[int, int, int], ...] = ()
    """Of each micro-batch of several ranks: its tokens, its ranks, and the place of this one among them."""
    computed: int = -1
    """Tokens that this rank computes where units of other ranks have rows of it, and it has parts of theirs."""
    matrices: bool = False
    """The optimizer changes each matrix of a block from the whole of it, as Muon."""

    @property
    def tokens(self) -> float:
        """Tokens that this rank computes."""
        own = self.lengths.sum() / self.mesh.size("cp") if self.computed < 0 else self.computed
        return own + self.padded / self.mesh.size("cp")

    @property
    def schedule(self) -> str:
        return self.modes.get("schedule", "1f1b")

    @property
    def held(self) -> dict[str, Layout]:
        """Parameter -> layout, of those on this rank's stage."""
        every = layouts(self.config, self.mesh, schedule=self.schedule, whole=self.modes.get("zero") == 1)
        return {name: layout for name, layout in every.items() if layout.mesh.has(self.rank)}

    @property
    def layers(self) -> int:
        """Layers on this rank's stage."""
        return len({name.split(".")[2] for name in self.held if name.startswith("model.layers.")})

    @property
    def width(self) -> float:
        """Bytes of the hidden states of all tokens of this rank."""
        return self.tokens * self.config.hidden_size * self.element

    def at(self, axis: str) -> int:
        return self.mesh.coordinate(axis, self.rank)


def formula(step: Step) -> dict[str, float]:
    """Bytes that the rank sends, by axes."""
    found = defaultdict[str, float](float)
    for part in (parameters, gradients, momenta, tensor, stages, context, experts):
        for axes, sent in part(step):
            found[axes] += sent
    return {axes: sent for axes, sent in found.items() if sent}


def parameters(step: Step) -> Sent:
    """zero = 3: for each micro-batch gathered, gradients scattered, and in layers gathered again on the way back.
    zero = 2: gathered and scattered once. zero = 1: whole, see ``gradients``."""
    for name, layout in step.held.items() if step.modes.get("zero") != 1 else ():
        shards = step.mesh.expert_shards if rule_of(step.config.table, name).stacked else step.mesh.shards
        times = 2 if step.modes.get("zero") == 2 else step.rounds * (3 if name.startswith("model.layers.") else 2)
        yield (
            label(step.mesh, shards),
            (step.mesh.size(*shards) - 1) * most_of(layout) * step.element * times,
        )


def gradients(step: Step) -> Sent:
    """Gradients are summed over copies once: 2 (n - 1) / n of them. So are those of a table that both ends have.
    zero = 1: gradients are scattered and weights gathered, together as much; only parts are summed over both ends."""
    for layout in step.held.values():
        axes = copied_along(layout)
        n, size = step.mesh.size(*axes), most_of(layout) * step.element
        yield label(step.mesh, axes), 2 * (n - 1) / n * size
        if layout.mesh.size("pp") > 1:
            yield "pp", size / (n if step.modes.get("zero") == 1 else 1)


def momenta(step: Step) -> Sent:
    """Muon: every rank gathers what ranks of its stage divide of each matrix, but not of stacks that are divided by
    experts alone. zero = 1: those of its own matrices, from ranks with the same data."""
    table, mesh, held, axes = step.config.table, step.mesh, step.held, step.mesh.over("parameters", "experts")
    names = [name for name in held if step.matrices and rule_of(table, name).kind == "matrix"]
    if step.modes.get("zero") == 1:
        held, axes = update_layouts(held, table, names), tuple(a for a in axes if a not in mesh.shards)
    for layout in (held[name] for name in names if held[name].mesh.has(step.rank)):
        alone = len(layout.shape) > 2 and all(p.dim == 0 for p in layout.placements if isinstance(p, Shard))
        yield label(mesh, axes), (not alone) * (mesh.size(*axes) - 1) * most_of(layout) * step.element


def tensor(step: Step) -> Sent:
    """Hidden states are summed around both blocks of a layer, forward and backward, and at embedding and head."""
    n, stage, last = step.mesh.size("tp"), step.at("pp"), step.mesh.size("pp") - 1
    ends = (stage == 0) + (stage == last)
    yield label(step.mesh, ["tp"]), (4 * step.layers + ends) * 2 * (n - 1) / n * step.width


def stages(step: Step) -> Sent:
    """Each micro-batch: hidden states of all its tokens after each part but the last, gradients before each but the
    first."""
    n = step.mesh.size("pp")
    parts = n * chunks_of(step.schedule) if n > 1 else 1
    own = range(step.at("pp"), parts, n)
    times = sum(part < parts - 1 for part in own) + sum(part > 0 for part in own)
    yield "pp", times * step.width / (step.mesh.size("tp") if step.modes.get("sp") else 1)


def context(step: Step) -> Sent:
    """ring: rank r of R has two chunks of L / 2R tokens of a sequence of L. Forward and backward, it sends keys and
    values of the early one to the R - 1 - r ranks after it and of both to the r before it, and backward it returns as
    many gradients as it got keys and values. ulysses: (R - 1) / R of queries, keys, values and results, and of their
    gradients; each rank has at least one key head. A unit of ``hdp`` is such a ring.
    """
    n, r, config = step.mesh.size("cp"), step.at("cp"), step.config
    heads, kv_heads = (max(1, count // step.mesh.size("tp")) for count in (config.num_heads, config.num_kv_heads))
    if step.modes.get("cp_style") == "ulysses":
        once = (n - 1) / n * step.tokens * 2 * (heads + max(kv_heads, n))
        rows = 2 * once
    else:
        rows = ring(int(step.lengths.sum()), n, r, kv_heads)
    each = step.layers * config.head_dim * step.element
    yield label(step.mesh, ["cp"]), (n > 1) * rows * each
    yield label(step.mesh, ["hdp"]), sum(ring(*unit, kv_heads) for unit in step.units) * each


def ring(tokens: int, n: int, r: int, kv_heads: int) -> float:
    """Rows of one head that the rank at place r of n sends."""
    chunk = tokens / (2 * n)
    sent, got = chunk * (n - 1 - r) + 2 * chunk * r, chunk * r + 2 * chunk * (n - 1 - r)
    return 2 * kv_heads * (2 * sent + got)


def experts(step: Step) -> Sent:
    """A row for each pair of a token and an expert of another rank goes there and back, forward and backward."""
    n, k = step.mesh.size("ep"), step.config.experts_per_token
    if n > 1 and dispatch_mode(k, n) == "gather":
        raise NotImplementedError("count tokens, not pairs")
    local = max(1, step.config.num_experts // n)
    away = sum(int((chosen // local != step.at("ep")).sum()) for _, chosen in step.choices.values())
    yield label(step.mesh, ["ep"]), (n > 1) * 4 * away * step.config.hidden_size * step.element


@lru_cache(256)
def most_of(layout: Layout) -> int:
    """Elements of the largest share of a parameter, up to which FSDP fills the others."""
    return max(sum(box.numel for box in layout.boxes(rank)) for rank in layout.mesh.ranks)


def label(mesh: Mesh, names: Sequence[str]) -> str:
    """The axes of several ranks among these, as a key."""
    return "+".join(name for name in mesh.names if name in names and mesh.size(name) > 1)


# ---- as counted ----


class Collectives(TorchDispatchMode):
    """Inside of it, ``sent`` adds up the bytes that the collectives of this process send by the ring algorithms, by the
    axes of the mesh along which the ranks of a group differ."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.sent = mesh, defaultdict[str, float](float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.partition(".")[0] != "barrier":
            name = func.__name__.partition(".")[0]
            group = next(g for g in map(group_of, args) if g is not None)
            places = [self.mesh.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            axes = "+".join(n for n, at in zip(self.mesh.names, zip(*places)) if len(set(at)) > 1)
            self.sent[axes] += sent_by(name, args, group)
        return func(*args, **(kwargs or {}))


def sent_by(name: str, args: Any, group: dist.ProcessGroup) -> float:
    """Bytes that this rank sends in one call of torch's operator."""
    if name in ("send", "recv_"):  # to one peer
        return sum(t.nbytes for t in tree_leaves(args[0])) * (name == "send")
    if name == "alltoall_base_":
        return args[1].nbytes - args[4][group.rank()] * (args[1].nbytes // max(len(args[1]), 1))
    whole, times = COLLECTIVES[name]
    return times * (group.size() - 1) / group.size() * sum(t.nbytes for t in tree_leaves(args[whole]))


COLLECTIVES: dict[str, tuple[int, int]] = {
    "allreduce_": (0, 2),
    "broadcast_": (0, 1),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "reduce_scatter_": (1, 1),
    "_reduce_scatter_base_": (1, 1),
}
"""Torch's operator -> which argument is the whole tensor, and how often a ring sends (n - 1) / n of it."""


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator was given, if this argument is one."""
    return dist.ProcessGroup.unbox(argument) if isinstance(argument, torch.ScriptObject) else None


class Rounds:
    """Counts forward passes of decoders, blanks included."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Rounds":
        def see(module: Any, *_: Any) -> None:
            self.count += isinstance(module, Decoder)

        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(see)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


# ---- memory ----


def predicted(step: Step, layout: dict[str, Any], batch: tuple[int, int, int]) -> int:
    """Bytes that ``tilth layout`` would predict for a rank at the peak of a step with AdamW, libraries not included.

    layout: as in a recipe; batch: sequences, tokens of the longest, tokens of a micro-batch.
    """
    rows, longest, micro = batch
    keys = [f"policy.layout.{KEYS.get(key, key)}={str(value).lower()}" for key, value in layout.items()]
    keys += [f"cluster.workers={len(step.mesh)}", "cluster.backend=local", "optimizer.name=adamw"]
    keys += ["train.precision=fp32", f"train.micro_tokens={micro}", f"supervised.batch={rows}"]
    recipe = load_recipe("sft", keys)
    need = policy_need(recipe, cut(recipe, "policy", place(recipe)["policy"], step.config, step.rank), longest)
    return total((*need.held, *need.training)) - sum(item.bytes for item in need.held if item.host)


KEYS = {"schedule": "pp_schedule"}
"""Mode -> its key in a recipe, where that is another."""
