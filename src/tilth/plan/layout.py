"""Who stands where: the roles of a recipe on ranks, and the parts of a decoder on the ranks of a mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tilth.config.checks import check_cluster, learners, pool_of, pools
from tilth.config.errors import RecipeError
from tilth.config.schema import Layout as Wanted
from tilth.config.schema import Recipe
from tilth.core.layout import Layout, Mesh, Placement, Replicate, Shard
from tilth.core.layout import Shape as Sizes
from tilth.plan.memory import (
    BASE,
    Memory,
    Need,
    critic_need,
    judge_need,
    policy_need,
    reference_need,
    reward_model_need,
    rollout_need,
    together,
)
from tilth.plan.rules import VALUE_HEAD, along_tp, rule_of
from tilth.plan.shape import DecoderShape, parameter_shapes, parameters
from tilth.plan.working import Cut

NAMES = ("dp", "fsdp", "tp")
"""Dimensions of a role's mesh. Rows are divided over dp and fsdp, elements of parameters over fsdp and tp."""


@dataclass(frozen=True)
class Placed:
    """Where a role is. ranks: global numbers of its workers; mesh: those, with the dimensions ``NAMES``."""

    pool: str
    """ "" where all workers are one pool."""
    ranks: tuple[int, ...]
    mesh: Mesh

    @property
    def data_ranks(self) -> int:
        """Ranks that take rows of their own."""
        return self.mesh.sizes[0] * self.mesh.sizes[1]


def place(recipe: Recipe) -> dict[str, Placed]:
    """Role -> where it is, for all roles that a run of this flow can have: policy, reference, critic, judge, rollout,
    reward, recorder.

    Pools take neighbouring ranks in their order. reward and recorder are one worker, the first of their pool; the
    recorder, which reads what was generated, is where the reward is. RecipeError where workers, pools and layouts
    contradict each other, with the key and the values that would work.
    """
    check_cluster(recipe)
    placed = {role: _placed(recipe, role, layout) for role, layout in learners(recipe).items()}
    if recipe.facts.learns == "documents":
        return placed | {"recorder": _alone(recipe, "policy")}
    if recipe.facts.judge:
        placed["judge"] = _placed(recipe, "judge", recipe.judge.layout)
    return placed | {
        "rollout": _placed(recipe, "rollout", recipe.rollout.layout),
        "reward": _alone(recipe, "reward"),
        "recorder": _alone(recipe, "reward"),
    }


def ranks_of(recipe: Recipe, pool: str) -> range:
    """Global numbers of a pool's workers."""
    first = 0
    for name, workers in pools(recipe).items():
        if name == pool:
            return range(first, first + workers)
        first += workers
    raise RecipeError(f"no pool {pool!r} in cluster.pools; there is {', '.join(pools(recipe))}")


def _placed(recipe: Recipe, role: str, layout: Wanted) -> Placed:
    pool = pool_of(recipe, role)
    ranks = tuple(ranks_of(recipe, pool))
    dp = layout.dp or len(ranks) // (layout.fsdp * layout.tp)
    return Placed(pool, ranks, Mesh(NAMES, (dp, layout.fsdp, layout.tp), ranks))


def _alone(recipe: Recipe, role: str) -> Placed:
    pool = pool_of(recipe, role)
    ranks = (ranks_of(recipe, pool)[0],)
    return Placed(pool, ranks, Mesh(NAMES, (1, 1, 1), ranks))


# ---- what a shape allows ----


def check_shape(recipe: Recipe, shape: DecoderShape) -> None:
    """RecipeError unless heads, key heads and the MLP divide over each role's tp; it names the tp that would work.

    Key heads may also be fewer than the ranks, if they divide them: neighbours then hold the same one. Vocabularies of
    any size are divided.
    """
    for role, layout in learners(recipe).items():
        if role == "reward_model":  # has a shape of its own
            continue
        wrong = misfit(shape, layout.tp)
        if wrong:
            workers = len(ranks_of(recipe, pool_of(recipe, role)))
            right = [str(n) for n in range(1, workers + 1) if workers % n == 0 and not misfit(shape, n)]
            values = f"on {workers} workers tp may be {', '.join(right)}"
            raise RecipeError(f"{role}.layout.tp = {layout.tp} does not divide {wrong}; {values}")


def misfit(shape: DecoderShape, tp: int) -> str:
    """What of this shape cannot be divided over ``tp`` ranks; empty: nothing."""
    heads, kv_heads, inner = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    if heads % tp:
        return f"model.heads = {heads}"
    if kv_heads % tp and tp % kv_heads:
        return f"model.kv_heads = {kv_heads}, nor is it a multiple"
    return f"model.ffn = {inner}" if inner % tp else ""


# ---- parameters ----


def layouts(shape: DecoderShape, mesh: Mesh, *, value: bool = False) -> dict[str, Layout]:
    """How each parameter lies over a role's mesh: tp splits first, fsdp the rows of what tp left, dp copies.

    value: of a value model on this shape. Agrees with what ``parallel`` does.
    """
    tp = mesh.sizes[mesh.names.index("tp")]
    copies, table = max(1, tp // shape.num_kv_heads), shape.table + VALUE_HEAD
    shapes = parameter_shapes(shape, value=value)
    return {name: nested(mesh, sizes, along_tp(table, name, copies)) for name, sizes in shapes.items()}


def nested(mesh: Mesh, shape: Sizes, along_tp: Placement) -> Layout:
    """dp copies; tp splits first, as it is told; fsdp splits the rows of what tp left."""
    kinds: dict[str, Placement] = {"fsdp": Shard(0), "tp": along_tp}
    split = (kinds.get(n, Replicate()) if size > 1 else Replicate() for n, size in zip(mesh.names, mesh.sizes))
    order = sorted(range(len(mesh.names)), key=lambda i: (mesh.names[i] != "tp", mesh.names[i] != "fsdp", i))
    return Layout(mesh, tuple(split), shape, tuple(order))


def elements(parts: dict[str, Layout], rank: int) -> int:
    """Elements of all parameters that a rank holds."""
    return sum(box.numel for layout in parts.values() for box in layout.boxes(rank))


# ---- memory ----


@dataclass(frozen=True)
class Seat:
    """One role on one rank."""

    role: str
    coordinates: tuple[int, ...]
    elements: int
    """Parameters that it holds here."""
    need: Need


@dataclass(frozen=True)
class Worker:
    """All roles of one rank, and the memory that they need together; Tilth's roles of one worker take turns."""

    rank: int
    seats: tuple[Seat, ...]
    memory: Memory


def per_rank(
    recipe: Recipe,
    shape: DecoderShape,
    longest: int,
    base: int = BASE,
    *,
    generates: bool = True,
    loaded: Mapping[str, DecoderShape] | None = None,
) -> list[Worker]:
    """Predicted memory of each worker, where a sequence has at most ``longest`` tokens. Of one worker: ``predict``.

    generates: whether the run has a rollout engine. loaded: role -> shape of its model where that is another one than
    the policy's. RecipeError as of ``place`` and ``check_shape``.
    """
    placed = place(recipe)
    check_shape(recipe, shape)
    if not generates:
        placed = {role: p for role, p in placed.items() if role not in ("rollout", "reward")}
    shapes = loaded or {}
    seats = {role: _seats(recipe, role, p, shapes.get(role, shape), longest) for role, p in placed.items()}
    workers = []
    for rank in range(sum(pools(recipe).values())):
        mine = tuple(seats[role][rank] for role, p in placed.items() if rank in seats[role])
        workers.append(Worker(rank, mine, together(recipe, [seat.need for seat in mine], shape.vocab_size, base)))
    return workers


def _seats(recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, longest: int) -> dict[int, Seat]:
    @cache
    def need(fsdp: int, tp: int) -> tuple[int, Need]:
        if role == "rollout":
            return parameters(shape), rollout_need(recipe, shape, longest, placed.data_ranks)
        if role == "judge":
            positions = getattr(shape, "max_positions", recipe.model.context)
            return parameters(shape), judge_need(recipe, shape, longest, positions, placed.data_ranks)
        if role not in _NEEDS:
            return 0, Need(())
        part = cut(recipe, role, placed, shape, fsdp, tp)
        return part.elements, _NEEDS[role](recipe, part, longest)

    found = {}
    for rank in placed.ranks:
        at = placed.mesh.coordinates(rank)
        found[rank] = Seat(role, at, *need(*at[1:]))
    return found


_NEEDS = {
    "policy": policy_need,
    "reference": reference_need,
    "critic": critic_need,
    "reward_model": reward_model_need,
}
"""What each role that has a part of a model needs."""


def cut(recipe: Recipe, role: str, placed: Placed, shape: DecoderShape, fsdp: int, tp: int) -> Cut:
    """What of the model of a learner is on its rank with these coordinates."""
    wanted: Wanted = getattr(recipe, role).layout
    values = role in ("critic", "reward_model") or (role == "policy" and recipe.facts.value)
    sizes, table = placed.mesh.sizes, shape.table + VALUE_HEAD
    own = layouts(shape, Mesh(NAMES, (1, *sizes[1:])), value=values)
    part = layouts(shape, Mesh(NAMES, (1, 1, sizes[2])), value=values)  # what is computed with
    at = fsdp * sizes[2] + tp
    here = elements(own, at)
    blocks = elements({name: own[name] for name in own if rule_of(table, name).kind == "matrix"}, at)
    gathered = 0
    if wanted.fsdp > 1:
        needed = part if wanted.zero == 2 else {name: part[name] for name in part if _at_once(name)}
        gathered = elements(needed, tp)
    spread = wanted.tp if wanted.sp else 1
    return Cut(here, gathered, _part(shape, sizes[2]), blocks, spread, placed.data_ranks, sizes[0])


def _at_once(name: str) -> bool:
    """Parameters gathered at the same time under zero = 3: those outside of layers, and two layers."""
    return not name.startswith("model.layers.") or name.split(".")[2] in ("0", "1")


def _part(shape: DecoderShape, tp: int) -> DecoderShape:
    """The shape that each rank along tp computes with (vocabulary: the largest part)."""
    part: Any = shape
    return replace(
        part,
        vocab_size=-(-shape.vocab_size // tp),
        intermediate_size=shape.intermediate_size // tp,
        num_heads=shape.num_heads // tp,
        num_kv_heads=max(1, shape.num_kv_heads // tp),
    )
