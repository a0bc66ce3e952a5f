"""Communication of a step between ranks, in bytes, from the layouts alone; all sequences have maximum length."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilth.config.axes import DATA
from tilth.config.checks import learners
from tilth.config.code import keyword_defaults
from tilth.config.open_sets import COMPRESSORS, LOCAL_METHODS, OPTIMIZERS, WEIGHT_CODES
from tilth.config.roles import ROLES, resolve
from tilth.config.schema import CommConfig, LayoutConfig, Recipe
from tilth.core.layout import Layout, Mesh
from tilth.plan.context import RING_SHARE
from tilth.plan.experts import dispatch_elements, dispatch_mode
from tilth.plan.layout import Placed, cut, has_values, is_coded, layouts, place, policy_layouts
from tilth.plan.lora import is_adapter
from tilth.plan.memory import micro_tokens
from tilth.plan.pipeline import chunks_of, stages_of
from tilth.plan.reshard import ReshardPlan
from tilth.plan.rules import VALUE_HEAD, rule_of
from tilth.plan.shape import DecoderShape
from tilth.plan.working import ShardFactors, spread_over

_FP32 = 4


@dataclass(frozen=True)
class GroupTraffic:
    """GroupTraffic over one axis of one role. groups: ranks that communicate, one tuple per group."""

    role: str
    axis: str
    groups: tuple[tuple[int, ...], ...]
    what: str
    bytes: int
    """Maximum bytes that one rank sends in a step (ring collectives, as in gloo and NCCL)."""
    updates: bool = False
    """True: of gradients and weights, once an update, between ranks with the same parameters."""


@dataclass(frozen=True)
class RankWork:
    """Maximum work of one rank of a role in a step."""

    rows: int
    """Rows of the step's batch, over all ranks."""
    updates: int
    """Optimizer steps."""
    tokens: int
    """Training tokens."""
    micros: int
    """Training micro-batches."""
    scored: int
    """Tokens scored without gradients."""
    scored_micros: int


def work(recipe: Recipe, role: str, ranks: int, longest: int) -> RankWork:
    """Return the work of one rank of a role, if ``ranks`` ranks divide the rows."""
    a, samples = recipe.algorithm, recipe.flow_spec.samples and recipe.algorithm.steps > 0
    rows = recipe.rollout.prompts * recipe.rollout.group if samples else recipe.supervised.batch * recipe.flow_spec.rows
    own = -(-rows // ranks) * longest
    updates = a.epochs * a.minibatches if samples else 1
    scores = role != "policy" or (samples and updates > 1) or recipe.flow_spec.learns == "pairs"
    learns = ROLES[role].trains
    budget = micro_tokens(recipe, longest, ranks)
    one = -(-own // (a.minibatches if samples else 1))
    return RankWork(
        rows=rows,
        updates=updates * learns,
        tokens=own * (a.epochs if samples else 1) * learns,
        micros=-(-one // budget) * updates * learns,
        scored=own * scores,
        scored_micros=-(-own // budget) * scores,
    )


def traffic(recipe: Recipe, shape: DecoderShape, longest: int, *, generates: bool = True) -> list[GroupTraffic]:
    """Return the traffic over all axes of more than one rank, role by role, then of weight syncs.

    longest: tokens of the longest sequence; generates: True if the run has engines.
    """
    placed, found = place(recipe, generates=generates), list[GroupTraffic]()
    for role in learners(recipe):
        found += inside(recipe, role, placed[role], shape, longest)
    for role in placed:
        if ROLES[role].mesh == "engines":
            found += _engine(recipe, role, placed[role], shape, longest)
        if ROLES[role].receives == "step":
            found += _publish(recipe, placed["policy"], role, placed[role], shape)
    return found


def inside(
    recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, longest: int, part: ShardFactors | None = None
) -> list[GroupTraffic]:
    """Return the traffic between the ranks of one role whose model is divided by a layout.

    part: what a rank holds, if it is known.
    """
    config = learners(recipe)[role]
    part = part or cut(recipe, role, placed, shape, placed.ranks[0])
    layers = _layers(recipe, role, config, placed, shape)
    found = _data(recipe, role, config, placed, shape, part, longest)
    found += _matrices(recipe, role, config, placed, part, longest)
    found += _context(recipe, role, config, placed, shape, longest, layers.all)
    found += _experts(recipe, role, placed, shape, longest, layers.experts)
    found += _tensor(recipe, role, placed, shape, longest, config.sp, layers.all)
    return found + _stages(recipe, role, config, placed, shape, longest)


class _Layers(NamedTuple):
    """Most layers, and most layers with experts, of one rank."""

    all: int
    experts: int


def _layers(recipe: Recipe, role: str, config: LayoutConfig, placed: Placed, shape: DecoderShape) -> _Layers:
    count = placed.mesh.size("pp")
    if count == 1:
        return _Layers(shape.num_layers, len(shape.expert_layers))
    stages = stages_of(shape, count, config.pp_schedule, value=has_values(recipe, role))
    own = [[layer for part in stages.parts(k) for layer in stages.layers[part]] for k in range(count)]
    return _Layers(max(map(len, own)), max(len({*layers} & {*shape.expert_layers}) for layers in own))


def _talk(role: str, mesh: Mesh, axes: Sequence[str], what: str, sent: float, *, updates: bool = False) -> GroupTraffic:
    used = [name for name in axes if mesh.size(name) > 1]
    return GroupTraffic(role, ", ".join(used), mesh.groups(*used), what, int(sent), updates)


def _data(
    recipe: Recipe,
    role: str,
    config: LayoutConfig,
    placed: Placed,
    shape: DecoderShape,
    part: ShardFactors,
    longest: int,
) -> list[GroupTraffic]:
    mesh, did = placed.mesh, work(recipe, role, placed.data_ranks, longest)
    coded = _Coded.of(recipe, role, config, placed, shape)
    if config.zero == 1:
        return list(_updates(role, mesh, part, did.updates, coded))
    copies = mesh.size(*mesh.copies)
    found = []
    if copies > 1 and did.updates:
        what, sent = "gradients are added up, once an update", 2 * _share(copies) * part.elements * _FP32
        if coded is not None and mesh.size(*mesh.shards) == 1:  # copies of shards are exact
            what, sent = coded.copied(part.elements, copies)
        found.append(_talk(role, mesh, mesh.copies, what, sent * did.updates, updates=True))
    if config.zero == 2:
        what = "gathered, gradients scattered, once an update"
        times = 2 * did.updates + did.scored_micros
    else:
        what = "gathered, gradients scattered, each micro-batch"
        times = 3 * did.micros + did.scored_micros  # gathered again on the way back
    kinds = (("parameters", mesh.shards, part.elements - part.experts), ("experts", mesh.expert_shards, part.experts))
    for kind, axes, elements in kinds:
        ranks = mesh.size(*axes)
        if ranks > 1 and elements:
            whole = elements * ranks  # of its tp part
            sent = _share(ranks) * whole * _FP32 * times
            if coded is not None:  # zero = 2
                sent += (coded.scattered(whole, ranks) - _share(ranks) * whole * _FP32) * did.updates
            found.append(_talk(role, mesh, axes, f"{kind} {what}", sent))
    return found


def _updates(role: str, mesh: Mesh, part: ShardFactors, updates: int, coded: "_Coded | None") -> Iterator[GroupTraffic]:
    """Yield the sums of gradients and the gathers of weights under ``zero = 1``."""
    data = mesh.over(*DATA)
    apart = [name for name in data if name not in mesh.over("experts")]
    for kind, axes, elements in (("parameters", data, part.elements - part.experts), ("experts", apart, part.experts)):
        ranks = mesh.size(*axes)
        if ranks > 1 and elements * updates:
            what = f"gradients of {kind} scattered, weights gathered, once an update"
            sent = 2 * _share(ranks) * elements * _FP32
            if coded is not None:
                what = f"gradients of {kind} {coded.how}, weights gathered, once an update"
                sent = coded.scattered(elements, ranks) + coded.gathered(elements, ranks, weights=True)
            yield _talk(role, mesh, axes, what, sent * updates, updates=True)


def _matrices(
    recipe: Recipe, role: str, config: LayoutConfig, placed: Placed, part: ShardFactors, longest: int
) -> list[GroupTraffic]:
    """Return what an optimizer that needs whole matrices gathers to compute their changes; state stays divided."""
    mesh, updates = placed.mesh, work(recipe, role, placed.data_ranks, longest).updates
    axes = [name for name in mesh.over("parameters", "experts") if config.zero != 1 or name not in mesh.shards]
    own = (part.adapters or part.divided) / part.updates[0]
    if OPTIMIZERS[recipe.optimizer.name].needs != "matrices" or mesh.size(*axes) == 1 or not own * updates:
        return []
    sent = (mesh.size(*axes) - 1) * own * _FP32 * updates
    what = f"matrices of {recipe.optimizer.name} gathered, once an update"
    return [_talk(role, mesh, axes, what, sent, updates=True)]


class _Coded(NamedTuple):
    """Messages of ``policy.comm``: what a rank sends of tensors that it compresses, or averages in parts."""

    comm: CommConfig
    elements: float
    """Share of the elements that a rank holds which are in large matrices."""
    size: float
    """Mean elements of such a matrix, as a rank holds it."""

    @classmethod
    def of(
        cls, recipe: Recipe, role: str, config: LayoutConfig, placed: Placed, shape: DecoderShape
    ) -> "_Coded | None":
        """Return None if a role sends whole gradients."""
        comm = recipe.policy.comm
        if role != "policy" or comm.exact:
            return None
        table, mesh, rank = shape.table + VALUE_HEAD, placed.mesh, placed.ranks[0]
        held = layouts(
            shape, mesh, value=has_values(recipe, role), schedule=config.pp_schedule, whole=comm.local == "none"
        )
        own = {name: sum(box.numel for box in layout.boxes(rank)) for name, layout in held.items()}
        large = [own[n] for n, one in held.items() if own[n] and is_coded(one, rule_of(table, n), comm.smallest)]
        return cls(comm, sum(large) / max(1, sum(own.values())), sum(large) / max(1, len(large)))

    def copied(self, elements: int, ranks: int) -> tuple[str, float]:
        """Return what a rank sends to others with the same elements in place of their gradients, and its bytes."""
        sums, both = _share(ranks) * elements * _FP32, self.comm.two_way
        if self.comm.local != "none":
            what = f"models that learn apart ({self.comm.local}), the mean of {self.comm.every} steps"
            return what, 2 * sums * self._apart()
        back = self.gathered(elements, ranks) if both else sums
        return f"gradients {self.how}, sums gathered, once an update", self.scattered(elements, ranks) + back

    def _apart(self) -> float:
        """Return the bytes of a local method over those of summed gradients."""
        name, every = self.comm.local, self.comm.every
        if name != "cser":
            return (2 if name == "adaalter" else 1) / every
        parts = keyword_defaults(resolve(LOCAL_METHODS[name])) | self.comm.options
        changes, models, large, rest = parts["changes"], parts["models"], self.elements, 1 - self.elements
        if changes == 0:
            return (large / models + rest) / every
        return 1.0 if changes == 1 else large / changes + rest + large / (every * models)

    @property
    def how(self) -> str:
        """Description of the messages of gradients."""
        return "scattered" if self.comm.gradients == "exact" else f"scattered in codes of {self.comm.gradients}"

    def scattered(self, elements: float, ranks: int) -> float:
        """Return the bytes in which a rank sends gradients of elements to the ranks that sum parts of them."""
        if self.comm.gradients == "exact":
            return _share(ranks) * elements * _FP32
        made = resolve(COMPRESSORS[self.comm.gradients].made)(**self.comm.options)
        if self.comm.gradients != "sdp4bit":
            return (ranks - 1) * self._part(elements, ranks, made)
        size = math.gcd(self.comm.node_size, ranks)
        within, across = (self._part(elements, ranks, one) for one in (made.within, made.across))
        if size == ranks:
            return (ranks - 1) * within
        return (size - 1) * (ranks // size) * within + (ranks // size - 1) * across

    def gathered(self, elements: float, ranks: int, *, weights: bool = False) -> float:
        """Return the bytes in which a rank sends its sums, or its new weights, to all others."""
        name, options = (self.comm.weights, {}) if weights else (self.comm.gradients, self.comm.options)
        if name == "exact":
            return _share(ranks) * elements * _FP32
        own = WEIGHT_CODES[name] if weights else COMPRESSORS[name].made
        return (ranks - 1) * self._part(elements, ranks, resolve(own)(**options))

    def _part(self, elements: float, ranks: int, compressor: Any) -> float:
        """Return the bytes of the codes of one rank's part of elements."""
        own, matrix = elements / ranks, max(1.0, self.size / ranks)
        return own * (self.elements * _code_bytes(compressor, matrix) / matrix + (1 - self.elements) * _FP32)


def _code_bytes(compressor: Any, count: float) -> float:
    """Return the bytes of the code of some values. They grow linearly but for whole bytes and groups, so that two
    lengths tell those of others."""
    import torch  # where a recipe compresses

    from tilth.core.random import stream  # loads torch too

    few, many = 1 << 14, 1 << 16
    one, other = (compressor.encode(torch.zeros(n), stream(0, "form")).nbytes for n in (few, many))
    return float(one + (other - one) * (count - few) / (many - few))


def _experts(
    recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, longest: int, layers: int
) -> list[GroupTraffic]:
    """Return the traffic of tokens to their experts and back; a layer that is recomputed sends them again."""
    ep = placed.mesh.size("ep")
    if ep == 1:
        return []
    did, mode = work(recipe, role, placed.data_ranks, longest), dispatch_mode(shape.experts_per_token, ep)
    tokens = did.tokens * (2 + bool(recipe.train.checkpointing)) + did.scored
    one = dispatch_elements(mode, tokens, shape.experts_per_token, shape.hidden_size, ep) / placed.mesh.pieces
    element = 2 if recipe.train.precision == "bf16" else _FP32
    what = {"exchange": "tokens sent to their experts and back", "gather": "tokens gathered for experts, and scattered"}
    return [_talk(role, placed.mesh, ["ep"], what[mode], one * element * layers)]


def _context(
    recipe: Recipe, role: str, config: LayoutConfig, placed: Placed, shape: DecoderShape, longest: int, layers: int
) -> list[GroupTraffic]:
    """Keys and values that go around once forward, and back with their gradients; or tokens exchanged for heads."""
    mesh, tp = placed.mesh, placed.mesh.size("tp")
    unit = spread_over(recipe, longest, mesh.units)
    cp = mesh.pieces * unit
    if cp == 1:
        return []
    did, element = work(recipe, role, placed.data_ranks, longest), 2 if recipe.train.precision == "bf16" else _FP32
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    again = bool(recipe.train.checkpointing)
    if config.cp_style == "ring":
        what, each = "keys and values sent around", RING_SHARE * 2 * kv_heads * shape.head_dim
        sent = (did.scored + did.tokens * (2 + again)) * element + did.tokens * _FP32  # gradients travel in fp32
    else:
        what, each = "tokens exchanged for heads", 2 * (heads + max(kv_heads, cp)) * shape.head_dim / cp
        sent = (did.scored + did.tokens * (2 + again)) * element
    total = layers * each * sent * unit * _share(cp)  # rows of a unit are not on its other ranks too
    return [_talk(role, mesh, mesh.over("tokens"), f"{what} in attention of each layer", total)]


def _tensor(
    recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, longest: int, sp: bool, layers: int
) -> list[GroupTraffic]:
    tp, tokens = placed.mesh.size("tp"), placed.mesh.pieces
    if tp == 1:
        return []
    did = work(recipe, role, placed.data_ranks, longest)
    element = 2 if recipe.train.precision == "bf16" else _FP32
    forward = 2 + 2 * bool(recipe.train.checkpointing)  # two blocks a layer, and again where they are recomputed
    each = layers * shape.hidden_size * element * 2 * _share(tp)
    sent = each * (did.tokens * (forward + 2) + did.scored * 2) / tokens
    what = "tokens gathered and scattered" if sp else "outputs added up"
    return [_talk(role, placed.mesh, ["tp"], f"{what} around both blocks of each layer", sent)]


def _stages(
    recipe: Recipe, role: str, config: LayoutConfig, placed: Placed, shape: DecoderShape, longest: int
) -> list[GroupTraffic]:
    """Return the hidden states and gradients that go from one stage of a pipeline to the next."""
    stages = placed.mesh.size("pp")
    if stages == 1:
        return []
    did = work(recipe, role, placed.data_ranks, longest)
    element = 2 if recipe.train.precision == "bf16" else _FP32
    parts = stages * chunks_of(config.pp_schedule)
    sent = []
    for stage in range(stages):
        own = range(stage, parts, stages)
        forth, back = sum(part < parts - 1 for part in own), sum(part > 0 for part in own)
        sent.append(forth * (did.tokens + did.scored) + back * did.tokens)
    divided = placed.mesh.pieces * (placed.mesh.size("tp") if config.sp else 1)
    most = max(sent) * shape.hidden_size * element / divided
    return [_talk(role, placed.mesh, ["pp"], "hidden states and their gradients, between neighbouring stages", most)]


def _engine(recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, longest: int) -> list[GroupTraffic]:
    """Return the traffic of engines over several ranks; at most each token of a step's batch goes through them."""
    tp, ep, found = placed.mesh.size("tp"), placed.mesh.size("ep"), list[GroupTraffic]()
    rows = -(-work(recipe, "policy", 1, longest).rows // placed.data_ranks)
    new = recipe.judge.max_tokens if role == "judge" else recipe.rollout.max_tokens
    element = 2 if recipe.train.precision == "bf16" else _FP32
    summed = 2 * shape.hidden_size * element * rows * longest  # of one block, but for the share that a ring sends
    if ep > 1:
        sent = len(shape.expert_layers) * summed * _share(ep)
        found.append(_talk(role, placed.mesh, ["ep"], "results of experts added up", sent))
    if tp > 1:
        sent = 2 * shape.num_layers * summed * _share(tp) + _share(tp) * shape.vocab_size * _FP32 * rows * new
        what = "outputs added up around both blocks of each layer, logits gathered"
        found.append(_talk(role, placed.mesh, ["tp"], what, sent))
    return found


def _publish(recipe: Recipe, source: Placed, role: str, target: Placed, shape: DecoderShape) -> list[GroupTraffic]:
    """Return the exchange of boxes among the ranks of each group; layers are alike, so each kind is planned once."""
    theirs = ROLES[role].placed_by(recipe).layout.pp_schedule
    held = policy_layouts(recipe, shape, source.mesh, schedule=recipe.policy.layout.pp_schedule)
    whole = target.engines or ROLES[role].placed_by(recipe).layout.zero == 1
    wanted = layouts(shape, target.mesh, schedule=theirs, whole=whole)
    if role == "rollout" and recipe.rollout.adapters == "adapter":  # the base goes once
        wanted = policy_layouts(recipe, shape, target.mesh, schedule=theirs, engine=True)
        wanted = {name: layout for name, layout in wanted.items() if is_adapter(name)}
    kinds: dict[tuple[Layout, Layout], list[str]] = {}
    for name, layout in wanted.items():
        kinds.setdefault((held[name], layout), []).append(name)
    times = {names[0]: len(names) for names in kinds.values()}
    one, other = ({name: found[name] for name in times} for found in (held, wanted))
    plans, left = list[ReshardPlan](), dict.fromkeys((*source.ranks, *target.ranks))
    while left:
        plans.append(ReshardPlan.of(next(iter(left)), source.mesh, one, target.mesh, other))
        for rank in plans[-1].ranks:
            del left[rank]
    plans = [plan for plan in plans if len(plan.ranks) > 1]
    if not plans:
        return []
    sent = max(sum(m.box.numel * times[m.name] for m in plan.sent(rank)) for plan in plans for rank in plan.ranks)
    element = 2 if recipe.train.precision == "bf16" else _FP32
    what = f"boxes of the policy's weights that {role} lacks"
    return [GroupTraffic("publish", f"to {role}", tuple(plan.ranks for plan in plans), what, sent * element)]


def _share(ranks: int) -> float:
    """Return the share of a vector that a ring moves over each link in one gather or scatter."""
    return (ranks - 1) / ranks


def tokens_of_rank(recipe: Recipe, placed: Placed, longest: int) -> int:
    """Return the maximum tokens of one step's batch on one rank."""
    rows = math.ceil(work(recipe, "policy", 1, longest).rows / placed.data_ranks)
    return rows * -(-longest // placed.mesh.pieces)
