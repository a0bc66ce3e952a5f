"""Placement of a recipe's roles on ranks, and of a decoder's parameters on the ranks of a mesh."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from tilth.config.axes import DATA, MODEL, over
from tilth.config.checks import check_cluster, pool_of, pools
from tilth.config.errors import AxisError, RecipeError
from tilth.config.roles import ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import LayoutConfig, Recipe
from tilth.core.errors import ModelError
from tilth.core.layout import Layout, Mesh, Placement, Replicate, Shard
from tilth.core.layout import Shape as Sizes
from tilth.plan.lora import adapter_rows, adapter_shapes
from tilth.plan.memory import BASE, DRAFTER, Memory, Need, alternating, together
from tilth.plan.pipeline import ON_STAGES, Stages, chunks_of, in_flight, misfit_stages, stages_of, waiting
from tilth.plan.reshard import generation_ranks
from tilth.plan.rules import ENCODERS, VALUE_HEAD, Parameter, Table, along_model, rule_of
from tilth.plan.shape import DecoderShape, parameter_shapes
from tilth.plan.working import ShardFactors, StagePart


@dataclass(frozen=True)
class Placed:
    """Placement of a role. ranks: global ranks of its workers; mesh: over these, with all axes of ``config.axes``.

    Ranks of engines on the policy's workers are ordered so that each engine's rank keeps the shard it trains
    (``plan.reshard.generation_ranks``)."""

    pool: str
    """ "" if all workers are one pool."""
    ranks: tuple[int, ...]
    mesh: Mesh
    engines: bool = field(default=False, compare=False)
    """True: generation engines side by side along dp, each over the ranks along the other axes."""

    @property
    def data_ranks(self) -> int:
        """Ranks with their own rows; of engines over several ranks each counts as one."""
        return self.mesh.size("dp") if self.engines else self.mesh.count("rows")


def place(recipe: Recipe, *, generates: bool = True) -> dict[str, Placed]:
    """Return role -> placement for all roles of a run. generates: False leaves out roles that need generation.

    Pools take consecutive ranks in order. A role of one worker is on the first rank of its pool. Raises RecipeError if
    workers, pools and layouts contradict each other, with the key and values that would work.
    """
    check_cluster(recipe)
    return {role: _placed(recipe, spec) for role, spec in roles_of(recipe, generates=generates).items()}


def ranks_of(recipe: Recipe, pool: str) -> range:
    """Return the global ranks of a pool's workers."""
    first = 0
    for name, workers in pools(recipe).items():
        if name == pool:
            return range(first, first + workers)
        first += workers
    raise RecipeError(f"no pool {pool!r} in cluster.pools; there is {', '.join(pools(recipe))}", key="cluster.pools")


def _placed(recipe: Recipe, spec: RoleSpec) -> Placed:
    pool = pool_of(recipe, spec.name)
    ranks = tuple(ranks_of(recipe, pool))
    if spec.mesh == "one":
        return Placed(pool, ranks[:1], Mesh.of({}, ranks[:1]))
    sizes = spec.placed_by(recipe).layout.meshed(len(ranks))
    if spec.mesh == "engines" and spec.receives and pool == pool_of(recipe, "policy"):
        policy = Mesh.of(ROLES["policy"].placed_by(recipe).layout.meshed(len(ranks)), ranks)
        ranks = generation_ranks(policy, math.prod(sizes[name] for name in over("layers")), sizes["tp"])
    return Placed(pool, ranks, Mesh.of(sizes, ranks), spec.mesh == "engines")


# ---- what a shape allows ----


def check_shape(recipe: Recipe, shape: DecoderShape, loaded: Mapping[str, DecoderShape] | None = None) -> None:
    """Raise RecipeError unless heads, key heads and MLP divide over each role's tp, experts over its ep, and heads over
    the cp of Ulysses; it names sizes that would work.

    Fewer key heads than ranks are fine if they divide the ranks: neighbours then hold the same one. A vocabulary may
    have any size. loaded: key of a path -> shape of its model if that is not the policy's; unknown ones are not
    checked. Settings of routers need a policy that has them.
    """
    _check_routers(recipe, shape)
    for role, spec in roles_of(recipe).items():
        known = shapes_of(spec, recipe, loaded or {})
        other = spec.loads and (spec.values or spec.mesh == "engines")  # never of the policy's shape
        if spec.mesh not in ("layout", "engines") or (not known and other):
            continue
        for own_shape in known or [shape]:
            _check_divides(recipe, role, own_shape)


def shapes_of(spec: RoleSpec, recipe: Recipe, loaded: Mapping[str, DecoderShape]) -> list[DecoderShape]:
    """Return the shapes of the models that a role loads; empty: none, or not known. loaded: as of ``check_shape``."""
    return [loaded[key] for key in spec.paths(recipe) if key in loaded]


def _check_divides(recipe: Recipe, role: str, shape: DecoderShape) -> None:
    """Raise RecipeError unless a model of this shape divides over the layout of a role."""
    key, layout = ROLES[role].key, ROLES[role].placed_by(recipe).layout
    workers = len(ranks_of(recipe, pool_of(recipe, role)))
    if deep := misfit_stages(shape.num_layers, layout.pp, layout.pp_schedule):
        raise RecipeError(f"{key}.{deep}", key=f"{key}.layout.pp")
    for axis, found in (("tp", misfit), ("ep", experts_misfit)):
        wrong, size = found(shape, getattr(layout, axis)), getattr(layout, axis)
        if wrong:
            right = [str(n) for n in range(1, workers + 1) if workers % n == 0 and not found(shape, n)]
            values = f"on {workers} workers {axis} may be {', '.join(right)}"
            raise RecipeError(
                f"{key}.layout.{axis} = {size} does not divide {wrong}; {values}", key=f"{key}.layout.{axis}"
            )
    wrong = ulysses_misfit(shape, layout.cp, layout.tp) if layout.cp_style == "ulysses" else ""
    if wrong:
        divisors = [n for n in range(1, layout.cp + 1) if layout.cp % n == 0]
        right = [str(n) for n in divisors if not ulysses_misfit(shape, n, layout.tp)]
        values = f'cp_style = "ring" takes any heads, or cp may be {", ".join(right)}'
        raise RecipeError(f"{key}.layout.cp = {layout.cp} does not divide {wrong}; {values}", key=f"{key}.layout.cp")


def _check_routers(recipe: Recipe, shape: DecoderShape) -> None:
    """Raise RecipeError if a key is about routers, and the policy has none such."""
    train, default = recipe.train, type(recipe.train)()
    wanted = ["router_balance", "router_z", "router_correction"]
    wanted += ["routing"] if train.routing == "replay" else []
    biased = any(name.endswith(".gate.correction") for name in parameter_shapes(shape))
    for name in wanted:
        value, right = getattr(train, name), getattr(default, name)
        if value != right and not (shape.num_experts and (biased or name != "router_correction")):
            lacks = "its routers have no correction" if shape.num_experts else "it has no experts"
            message = f"train.{name} = {value} has no use in this model: {lacks}; set it to {right}"
            raise RecipeError(message, key=f"train.{name}.unused")


def misfit(shape: DecoderShape, tp: int) -> str:
    """Describe what cannot be divided over ``tp`` ranks; "" if all can."""
    heads, kv_heads, inner = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    if heads % tp:
        return f"model.heads = {heads}"
    if kv_heads % tp and tp % kv_heads:
        return f"model.kv_heads = {kv_heads}, nor is it a multiple"
    if inner % tp and len(shape.expert_layers) < shape.num_layers:
        return f"model.ffn = {inner}"
    return f"model.expert_ffn = {shape.expert_size}" if shape.expert_size % tp else ""


def ulysses_misfit(shape: DecoderShape, cp: int, tp: int) -> str:
    """Describe which heads of one of ``tp`` ranks cannot be divided over ``cp`` ranks; "" if all can."""
    kv_heads, per = max(1, shape.num_kv_heads // tp), f" over tp = {tp}" if tp > 1 else ""
    if shape.num_heads // tp % cp:
        return f"model.heads = {shape.num_heads}{per}"
    return (
        f"model.kv_heads = {shape.num_kv_heads}{per}, nor is it a multiple" if kv_heads % cp and cp % kv_heads else ""
    )


def experts_misfit(shape: DecoderShape, ep: int) -> str:
    """Describe which experts cannot be divided over ``ep`` ranks; "" if they can."""
    if ep == 1 or (shape.num_experts and shape.num_experts % ep == 0):
        return ""
    return f"model.experts = {shape.num_experts}" + ("" if shape.num_experts else ", as the model has none")


# ---- parameters ----


def layouts(
    shape: DecoderShape,
    mesh: Mesh,
    *,
    value: bool = False,
    schedule: str = "1f1b",
    whole: bool = False,
    table: Table = (),
    sizes: Mapping[str, Sizes] | None = None,
) -> dict[str, Layout]:
    """Return parameter -> layout over a role's mesh, as ``parallel`` shards it. value: of a value model.

    schedule: of the stages of a mesh with pp; the mesh of a layout has the stages that hold the parameter. whole: of
    generation engines, or under ``zero = 1``. table, sizes: those of a model that converters changed; by default the
    family's. ModelError: an axis but dp divides a model with encoders of media.
    """
    copies, table = max(1, mesh.size("tp") // shape.num_kv_heads), table or shape.table + VALUE_HEAD
    divided = next((axis for axis in mesh.over("tokens", *MODEL) if mesh.size(axis) > 1), "")
    if divided and any(row.name.startswith(ENCODERS) for row in table):
        message = f"layout.{divided} = {mesh.size(divided)} would divide a model with encoders of media"
        raise ModelError(f"{message}, whose ranks may be replicas alone (dp); use 1", key=f"layout.{divided}.encoders")
    stages = stages_of(shape, mesh.size("pp"), schedule, value=value)
    made = cache(lambda own, size, along: nested(own, size, dict(along)))  # equal in all layers
    on = cache(lambda holders: mesh if stages.count == 1 else mesh.only("pp", holders))
    found = {}
    for name, size in (parameter_shapes(shape, value=value) if sizes is None else sizes).items():
        along = ON_STAGES | along_model(table, name, copies, whole=whole)
        found[name] = made(on(stages.holders(name)), size, tuple(along.items()))
    return found


def policy_layouts(
    recipe: Recipe, shape: DecoderShape, mesh: Mesh, *, schedule: str, engine: bool = False
) -> dict[str, Layout]:
    """Return what weight sync takes from the policy, or gives to engines: parameter -> layout, with those of adapters
    unless they are merged."""
    how: dict[str, Any] = {"schedule": schedule, "whole": engine or recipe.policy.layout.zero == 1}
    if recipe.rollout.adapters == "merged":
        return layouts(shape, mesh, **how)
    lora = recipe.policy.lora
    sizes = parameter_shapes(shape) | adapter_shapes(shape, lora)
    return layouts(shape, mesh, table=shape.table + adapter_rows(shape.table, lora), sizes=sizes, **how)


def nested(mesh: Mesh, shape: Sizes, along: Mapping[str, Placement]) -> Layout:
    """Lay a parameter over a mesh: axes in ``along`` split first, as it says by name; shards that are not in it split
    the rows of what those left, all together; copies copy. AxisError for another axis that divides the model.
    """
    model, shards, mesh, order = _frame(mesh, tuple(along))
    split: list[Placement] = []
    for name, count in zip(mesh.names, mesh.sizes):
        if count == 1 or name not in model:
            split.append(Replicate())
        elif name in shards or name in along:
            split.append(Shard(0) if name in shards else along[name])
        else:
            raise AxisError(f"axis {name!r} divides the model, but has no placement for this parameter", key=name)
    return Layout(mesh, tuple(split), shape, order)


@lru_cache(64)
def _frame(mesh: Mesh, along: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], Mesh, tuple[int, ...]]:
    """Return axes that divide the model, shards among them that are not in ``along``, the mesh with these as one axis,
    and the order of division."""
    model, shards = mesh.over(*MODEL), tuple(name for name in mesh.shards if name not in along)
    mesh = mesh.merged(*shards)
    order = sorted(range(len(mesh.names)), key=lambda i: (mesh.names[i] not in model, mesh.names[i] in shards, i))
    return model, shards, mesh, tuple(order)


def copied_along(layout: Layout) -> tuple[str, ...]:
    """Return the axes of several ranks along which ranks hold the same part of a parameter and see different data."""
    data, placed = layout.mesh.over(*DATA), zip(layout.mesh.names, layout.mesh.sizes, layout.placements)
    return tuple(name for name, n, own in placed if n > 1 and name in data and isinstance(own, Replicate))


def is_coded(layout: Layout, rule: Parameter, smallest: int) -> bool:
    """Return True if compression codes gradients of this layout and rule: those of a matrix of at least ``smallest``
    elements of which ranks have parts and copies, and nobody a part of its gradient. Ranks along tp have one of what
    they compute their own heads or tokens with."""
    partial = rule.tp in ("heads", "residual") and layout.mesh.size("tp") > 1
    once = all(getattr(own, "copies", 1) == 1 for own in layout.placements) and layout.mesh.count("layers") == 1
    matrix = rule.kind in ("matrix", "embedding") and math.prod(layout.shape) >= smallest
    return once and matrix and not partial and bool(copied_along(layout))


def is_by_experts(layout: Layout) -> bool:
    """Return True for a stack of matrices that is whole, or divided between matrices alone."""
    dims = {placement.dim for placement in layout.placements if isinstance(placement, Shard)}
    return len(layout.shape) > 2 and dims <= {0}


def update_layouts(held: Mapping[str, Layout], table: Table, matrices: Collection[str] = ()) -> dict[str, Layout]:
    """Return parameter -> layout of its update under ``zero = 1``: its gradient, optimizer state and average.

    Ranks that hold the same part of a parameter divide its rows, of stacks of experts the rows of each expert. Of
    ``matrices``, whose optimizer needs whole ones, each belongs to the rank with the fewest elements so far, and stacks
    are divided between experts.
    """
    made, loads = dict[Any, Layout](), dict[Any, list[int]]()
    found = dict(held)
    for name in sorted(held, key=lambda name: -math.prod(held[name].shape)):
        layout, stacked = held[name], rule_of(table, name).stacked
        axes, owned = copied_along(layout), name in matrices and not stacked
        if not axes:
            continue
        dim = int(stacked and name not in matrices)
        if owned:
            load = loads.setdefault((id(layout.mesh), axes), [0] * layout.mesh.size(*axes))
            dim = load.index(min(load))
            load[dim] += math.prod(layout.shape)
        key = id(layout), owned, dim
        if key not in made:
            made[key] = _owned(layout, axes, dim) if owned else _rows_divided(layout, axes, dim)
        found[name] = made[key]
    return found


def _owned(layout: Layout, axes: Sequence[str], owner: int) -> Layout:
    """Return the layout of one copy: that of the ranks with this row-major index along the axes."""
    mesh = layout.mesh
    for axis in reversed(axes):
        owner, place = divmod(owner, layout.mesh.size(axis))
        mesh = mesh.only(axis, [place])
    return replace(layout, mesh=mesh)


def _rows_divided(layout: Layout, axes: Sequence[str], dim: int) -> Layout:
    """Return a layout whose parts the ranks along these axes divide along a dimension."""
    last = [i for i, name in enumerate(layout.mesh.names) if name in axes]
    placements = tuple(Shard(dim) if i in last else own for i, own in enumerate(layout.placements))
    return Layout(layout.mesh, placements, layout.shape, (*(i for i in layout.order if i not in last), *last))


def elements(parts: Mapping[str, Layout], rank: int, times: Mapping[str, int] | None = None) -> int:
    """Count the elements of all parameters that a rank holds. times: parameter -> parameters like it, with itself."""
    different = {id(layout): layout for layout in parts.values()}
    each = {key: sum(box.numel for box in layout.boxes(rank)) for key, layout in different.items()}
    return sum(each[id(layout)] * (times or {}).get(name, 1) for name, layout in parts.items())


@lru_cache(256)
def alike(shape: DecoderShape, stages: Stages, value: bool) -> Mapping[str, int]:
    """Return parameter -> parameters like it, itself included: those of one row of the table, on the same stages."""
    table, first, found = shape.table + VALUE_HEAD, dict[object, str](), dict[str, int]()
    for name in _shapes(shape, value):
        kind = first.setdefault((rule_of(table, name).name, stages.holders(name)), name)
        found[kind] = found.get(kind, 0) + 1
    return found


# ---- memory ----


@dataclass(frozen=True)
class Seat:
    """One role on one rank."""

    role: str
    coordinates: dict[str, int]
    elements: int
    """Elements of parameters that it holds here."""
    need: Need


@dataclass(frozen=True)
class RankPlan:
    """All roles of one rank and their memory together, as roles of one worker alternate."""

    rank: int
    seats: tuple[Seat, ...]
    memory: Memory


def per_rank(
    recipe: Recipe,
    shape: DecoderShape,
    longest: int,
    *,
    generates: bool = True,
    loaded: Mapping[str, DecoderShape] | None = None,
) -> list[RankPlan]:
    """Return the predicted memory of each worker, for sequences of at most ``longest`` tokens.

    generates: True if the run has a rollout engine. loaded: key of a path -> shape of its model if that is not the
    policy's; that of the drafting model (``DRAFTER``) too. Raises RecipeError, see ``place`` and ``check_shape``.
    """
    placed = place(recipe, generates=generates)
    check_shape(recipe, shape, loaded)
    shapes = loaded or {}
    seats = {
        role: _seats(recipe, role, p, shapes_of(ROLES[role], recipe, shapes) or [shape], longest, shapes.get(DRAFTER))
        for role, p in placed.items()
    }
    workers = []
    for rank in range(sum(pools(recipe).values())):
        mine = tuple(seats[role][rank] for role, p in placed.items() if rank in seats[role])
        workers.append(RankPlan(rank, mine, together(recipe, [seat.need for seat in mine], shape.vocab_size, BASE)))
    return workers


def _seats(
    recipe: Recipe,
    role: str,
    placed: Placed,
    shapes: Sequence[DecoderShape],
    longest: int,
    drafter: DecoderShape | None,
) -> dict[int, Seat]:
    spec = ROLES[role]

    @cache
    def need(rank: int) -> tuple[int, Need]:
        if spec.memory is None:
            return 0, Need(())
        parts = [
            ShardFactors(0, 0, shape, 0) if spec.mesh == "one" else cut(recipe, role, placed, shape, rank)
            for shape in shapes
        ]
        needs = [resolve(spec.memory)(recipe, part._replace(drafter=drafter), longest) for part in parts]
        return sum(part.elements for part in parts), alternating(needs)

    mesh = placed.mesh  # copies need the same
    return {rank: Seat(role, mesh.at(rank), *need(mesh.along(rank, *mesh.copies)[0])) for rank in placed.ranks}


def has_values(recipe: Recipe, role: str) -> bool:
    """True if a role's model is a value model."""
    return ROLES[role].values or (role == "policy" and recipe.flow_spec.value)


def cut(recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, rank: int) -> ShardFactors:
    """Return the part of a role's model on one of its ranks."""
    config: LayoutConfig = ROLES[role].placed_by(recipe).layout
    values = has_values(recipe, role)
    mesh, table = placed.mesh, shape.table + VALUE_HEAD
    times = alike(shape, stages_of(shape, mesh.size("pp"), config.pp_schedule, value=values), values)
    sizes = _sizes(shape, values, times)
    how: dict[str, Any] = {"value": values, "schedule": config.pp_schedule, "sizes": sizes}
    how["whole"] = placed.engines or config.zero == 1
    own = layouts(shape, mesh.part(rank, *mesh.over(*MODEL)), **how)
    here = elements(own, rank, times)
    matrices = {name: layout for name, layout in own.items() if rule_of(table, name).kind == "matrix"}
    blocks = elements(matrices, rank, times)
    divided = elements({name: one for name, one in matrices.items() if not is_by_experts(one)}, rank, times)
    experts = elements({name: own[name] for name in own if rule_of(table, name).stacked}, rank, times)
    gathered = 0 if how["whole"] else _gathered(shape, mesh, rank, config, values)
    tp = mesh.size("tp")
    spread = tp if config.sp else 1
    stage = stage_part(shape, mesh, rank, config.pp_schedule, value=values)
    counts = {"experts": experts, "divided": divided, **replica_counts(placed, config)}
    found = ShardFactors(here, gathered, tp_part(shape, tp), blocks, spread, **counts)
    adapters = _adapters(recipe, role, shape, mesh, rank, stage is not None)
    return found._replace(stage=stage, ring=found.tokens > 1 and config.cp_style == "ring", adapters=adapters)


def replica_counts(placed: Placed, config: LayoutConfig) -> dict[str, Any]:
    """Return the factors of a rank's part that depend on the ranks with the same part."""
    mesh = placed.mesh
    data = mesh.over(*DATA) if config.zero == 1 else ()
    updates = mesh.size(*data), mesh.size(*(name for name in data if name not in mesh.over("experts")))
    ranks, copies = placed.data_ranks, mesh.size(*mesh.copies)
    return {"ranks": ranks, "copies": copies, "tokens": mesh.pieces, "units": mesh.units, "updates": updates}


def _adapters(recipe: Recipe, role: str, shape: DecoderShape, mesh: Mesh, rank: int, staged: bool) -> int:
    """Count the elements of adapters that a rank of a role holds, on a stage of a pipeline with equal layers."""
    lora = getattr(ROLES[role].placed_by(recipe), "lora", None)
    if role == "rollout" and recipe.rollout.adapters == "adapter":
        lora = recipe.policy.lora
    if lora is None or not lora.rank:
        return 0
    own = mesh.part(rank, *mesh.over(*MODEL))
    table, sizes = adapter_rows(shape.table, lora, f"{ROLES[role].key}.lora.targets"), adapter_shapes(shape, lora)
    copies = max(1, mesh.size("tp") // shape.num_kv_heads)
    whole = ROLES[role].placed_by(recipe).layout.zero == 1
    along = {n: ON_STAGES | along_model(table, n, copies, whole=whole) for n in sizes}
    found = {n: nested(own, size, along[n]) for n, size in sizes.items()}
    return elements(found, rank) // (mesh.size("pp") if staged else 1)


def stage_part(shape: DecoderShape, mesh: Mesh, rank: int, schedule: str, *, value: bool) -> StagePart | None:
    """Return the part of a model on a rank's stage; None without a pipeline."""
    count, stage = mesh.size("pp"), mesh.coordinate("pp", rank)
    if count == 1:
        return None
    stages = stages_of(shape, count, schedule, value=value)
    layers = sum(len(stages.layers[part]) for part in stages.parts(stage))
    flights = in_flight(schedule, count, stage, 4 * count) / chunks_of(schedule)
    late = waiting(schedule, count, stage, 4 * count) / chunks_of(schedule)
    return StagePart(layers, stage == 0, stage == count - 1, flights, late)


def _gathered(shape: DecoderShape, mesh: Mesh, rank: int, config: LayoutConfig, values: bool) -> int:
    """Count the elements of the parameters that a rank gathers and holds at the same time."""
    apart, found = [name for name in mesh.over(*MODEL) if name not in mesh.shards], 0
    stages = stages_of(shape, mesh.size("pp"), config.pp_schedule, value=values)
    times = alike(shape, stages, values)
    sizes = _sizes(shape, values, times if config.zero == 2 else _two_layers(shape, stages, values))
    for stacked, shards in ((False, mesh.shards), (True, mesh.expert_shards)):
        if mesh.size(*shards) == 1:
            continue
        kept = [name for name in mesh.shards if name not in shards]
        mine = mesh.part(rank, *apart, *kept)  # what is computed with
        part = layouts(shape, mine, value=values, schedule=config.pp_schedule, sizes=sizes)
        these = {n: part[n] for n in part if rule_of(shape.table + VALUE_HEAD, n).stacked == stacked}
        found += elements(these, rank, times) if config.zero == 2 else _at_once(these, rank)
    return found


def _at_once(parts: dict[str, Layout], rank: int) -> int:
    """Count the elements gathered at once under zero = 3: all outside of layers, and the two largest layers."""
    layers, found = dict[str, dict[str, Layout]](), dict[str, Layout]()
    for name, layout in parts.items():
        inside = layers.setdefault(name.split(".")[2], {}) if name.startswith("model.layers.") else found
        inside[name] = layout
    return elements(found, rank) + sum(sorted(elements(own, rank) for own in layers.values())[-2:])


@lru_cache(256)
def _two_layers(shape: DecoderShape, stages: Stages, value: bool) -> tuple[str, ...]:
    """Return the parameters outside of layers, and of two layers of each kind on each stage, among which the largest
    are."""
    table, layers = shape.table + VALUE_HEAD, dict[str, list[str]]()
    for name in _shapes(shape, value):
        layers.setdefault(name.split(".")[2] if name.startswith("model.layers.") else "", []).append(name)
    kinds: dict[object, list[str]] = {"": layers.pop("")}
    for names in layers.values():
        kind = stages.holders(names[0]), *(rule_of(table, name).name for name in names)
        kinds.setdefault(kind, []).extend(names if len(kinds.get(kind, ())) < 2 * len(names) else ())
    return tuple(name for names in kinds.values() for name in names)


def _sizes(shape: DecoderShape, value: bool, names: Iterable[str]) -> dict[str, Sizes]:
    """Return the sizes of these parameters."""
    every = _shapes(shape, value)
    return {name: every[name] for name in names}


@lru_cache(16)
def _shapes(shape: DecoderShape, value: bool) -> Mapping[str, Sizes]:
    return parameter_shapes(shape, value=value)


def tp_part(shape: DecoderShape, tp: int) -> DecoderShape:
    """Return the shape that each rank along tp computes with (vocabulary: the largest part)."""
    part: Any = shape
    return replace(
        part,
        vocab_size=-(-shape.vocab_size // tp),
        intermediate_size=max(1, shape.intermediate_size // tp),
        expert_size=shape.expert_size // tp,
        num_heads=shape.num_heads // tp,
        num_kv_heads=max(1, shape.num_kv_heads // tp),
    )
