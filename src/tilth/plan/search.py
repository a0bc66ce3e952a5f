"""Mapping search for a recipe: options of each role from its layouts, memory and predicted seconds; and the recipe
with the pools and layouts found.

Layouts are all products of the axes of ``config.axes`` that the checks of a recipe and of the model's shape accept, so
that whatever is found can run. Axes that divide neither rows nor layers stay within a node.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

from tilth.config.axes import AXES, DATA, MODEL, Split, over
from tilth.config.checks import check_cluster
from tilth.config.errors import RecipeError
from tilth.config.roles import ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import LayoutConfig, Recipe, RolloutConfig
from tilth.core.errors import PlanError, ScheduleError
from tilth.core.layout import Mesh
from tilth.plan.batch import MicroBatchLimits, PlannedMicroBatch, RankLoad, RowCosts, RowTable, plan_batch, token_costs
from tilth.plan.costs import Costs
from tilth.plan.devices import DeviceType
from tilth.plan.layout import Placed, check_shape, cut, replica_counts, shapes_of
from tilth.plan.mapping import MappingProblem, Option, Options, RoleMapping, search
from tilth.plan.memory import BASE, CUDA, DRAFTER, TOKEN, Need, alternating
from tilth.plan.pipeline import chunks_of, layer_costs, stages_of
from tilth.plan.schedule import Balance, ranks_held
from tilth.plan.shape import DecoderShape, kv_bytes, parameters, token_flops
from tilth.plan.traffic import GroupTraffic, inside, work
from tilth.plan.working import ShardFactors, element_of, total

# ---- work of ranks in steps whose sequences have unequal lengths ----

STEPS = 4
"""Steps that are planned to see how uneven ranks are."""


class StepCosts(NamedTuple):
    """Predicted cost of sequences, and by what rows are balanced."""

    rows: RowCosts
    balance: Balance
    micro_tokens: int
    ring: float = 0.0
    """Cost of a token's way around ranks that divide its sequence (``Costs.ring``)."""

    def loads(self, lengths: np.ndarray, mesh: Mesh) -> list[RankLoad]:
        """Plan a step; the work of each rank that divides rows, in predicted costs. PlanError: a row that is too long.

        lengths: int64 [n]."""
        table, by_cost = RowTable(lengths, *np.zeros((2, len(lengths)), np.int64)), self.balance == "cost"
        how: dict[str, Any] = {"balance": self.balance, "units": mesh.units, "stages": mesh.count("layers")}
        how |= {"costs": self.rows, "ring": self.ring} if by_cost else {"costs": token_costs}
        plan = plan_batch(table, None, mesh.count("rows"), MicroBatchLimits(self.micro_tokens), **how)
        found = []
        for rows, part in zip(plan.rows, plan.ranks):
            load = RankLoad.of(part.learn, table.take(rows))
            found.append(load._replace(cost=np.array([self._cost(micro, lengths[rows]) for micro in part.learn])))
        return found

    def _cost(self, micro: PlannedMicroBatch, lengths: np.ndarray) -> float:
        """Return the predicted cost of one rank in a micro-batch of its rows, which have these lengths."""
        own = micro.lengths if micro.several else lengths[micro.rows]
        computed = float(self.rows(own.astype(np.float64)).sum()) / max(1, len(micro.ranks))
        return max(computed, self.ring * float(own.sum())) if micro.several else computed


class StepShare(NamedTuple):
    """Mean step of unequal sequences over one in which all are as long as the longest."""

    busiest: float = 1.0
    """Work of the busiest rank."""
    tokens: float = 1.0
    divided: float = 1.0
    """Tokens of sequences on several ranks along "hdp"."""

    @classmethod
    def of(cls, lengths: np.ndarray, rows: int, longest: int, mesh: Mesh, costs: StepCosts) -> "StepShare":
        """Plan some steps of ``rows`` sequences, as long as those of a sample: int64 [n]. PlanError: one is too
        long."""
        steps, whole = steps_of(lengths, rows), rows * longest
        even = -(-rows // mesh.count("rows")) * float(costs.rows(np.array([float(longest)]))[0])
        busiest = [max(load.cost.sum() for load in costs.loads(step, mesh)) / even for step in steps]
        divided = [step[step > costs.micro_tokens].sum() / whole for step in steps]
        return cls(*(float(np.mean(each)) for each in (busiest, [step.sum() / whole for step in steps], divided)))


def steps_of(lengths: np.ndarray, rows: int) -> Sequence[np.ndarray]:
    """Return ``STEPS`` steps of ``rows`` lengths each, of a sample in the order of its data, again from its beginning
    where it ends."""
    return list(np.resize(lengths, (STEPS, rows)))


# ---- seconds of passes over a model from rates of a device ----
#
# An estimate in the manner of HybridFlow's simulators (arXiv 2409.19256, section 6): a share of the peak that layers
# reach, a least time of each kernel, bytes over links, bubbles of a pipeline. All sequences are as long as they can be.

KERNELS = 16
"""Kernels of one layer in the forward pass; the backward pass has twice as many."""


class AxisTime(NamedTuple):
    """Communication of one rank over one axis in a stage."""

    axis: str
    seconds: float
    hidden: bool
    """True if it proceeds beside compute."""


class StageTime(NamedTuple):
    """Seconds of one rank in a stage of a step."""

    compute: float
    bubble: float
    """Idle in the pipeline while it fills and drains."""
    exposed: tuple[tuple[str, float], ...]
    """(axis, seconds of communication beside which nothing is computed)."""

    @property
    def total(self) -> float:
        """Seconds of the stage."""
        return self.compute + self.bubble + sum(seconds for _, seconds in self.exposed)


def stage(compute: float, bubble: float, exchanges: Iterable[AxisTime]) -> StageTime:
    """Add communication to compute; what proceeds beside it counts only as far as it takes longer."""
    exposed, beside = dict[str, float](), 0.0
    for axis, seconds, hidden in exchanges:
        if hidden:
            hid = min(seconds, compute - beside)
            beside, seconds = beside + hid, seconds - hid
        exposed[axis] = exposed.get(axis, 0.0) + seconds
    return StageTime(compute, bubble, tuple(exposed.items()))


def bubble_share(
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    schedule: str = "1f1b",
    *,
    again: bool = False,
    learns: bool = True,
) -> float:
    """Return the idle time of a pipeline over the time of its passes; ``tilth_studies.pipeline_idle`` finds equal ones.

    A backward pass counts as two forward passes, and three if it computes the forward pass again. 1F1B: (stages - 1) /
    micro-batches, divided by the chunks of interleaving (arXiv 2104.04473), which waits for every micro-batch that its
    last group lacks. Zero-bubble ZB-H1 (arXiv 2401.10241): passes for weights fill the bubble if there are
    enough micro-batches. learns: False for forward passes alone.
    """
    m, backward = max(1, micro_batches), 2 + again
    each, lacking = m * (1.0 + backward), -m % stages
    if schedule == "zero-bubble" and learns:
        return ((stages - 1) * (backward - 1) + max(0, stages - m)) / each
    waits = 1.0 if not learns or m < stages else backward / (1 + backward)
    return ((stages - 1) + lacking * (chunks - 1) * waits) / (m * chunks)


def uneven(shape: DecoderShape, stages: int, schedule: str, values: bool) -> float:
    """Return the time of the slowest stage over that of all stages' mean: the last one has the output head too."""
    if stages == 1:
        return 1.0
    placed, costs = stages_of(shape, stages, schedule, value=values), layer_costs(shape, value=values)
    each = [sum(costs[layer] for part in placed.parts(k) for layer in placed.layers[part]) for k in range(stages)]
    return stages * max(each) / sum(each)


UPDATED = 30
"""Bytes that an optimizer step reads and writes for each element: gradient, two moments and weight in fp32."""


def optimizer_seconds(device: DeviceType, elements: int) -> float:
    """Return seconds of one optimizer step over the elements of a rank, which memory bounds."""
    return UPDATED * elements / (device.links * device.memory_bandwidth)


def pass_seconds(device: DeviceType, rate: float, flops: float, layer_passes: float) -> float:
    """Return seconds of ``flops`` in this many forward passes of a layer, whose kernels have a least time."""
    return max(flops / rate, layer_passes * KERNELS * device.launch)


class Decoding(NamedTuple):
    """Load of one engine in a step."""

    rows: int
    """Sequences."""
    prompts: int
    """Different prompts."""
    together: int
    """Most sequences that decode at once."""
    prompt: int
    new: int
    """Tokens of a prompt and of a completion."""


def decode_seconds(
    device: DeviceType, rate: float, shape: DecoderShape, load: Decoding, element: int, ranks: int, link: float
) -> tuple[float, float]:
    """Return seconds of generation on an engine whose model ``ranks`` ranks divide, and those of them on links.

    A decode step reads all weights and the keys and values of its sequences, or computes, whichever takes longer.
    link: bytes/s between the ranks.
    """
    if not load.rows:
        return 0.0, 0.0
    size = parameters(shape)
    batch = min(load.rows, load.together)
    waves, seen = -(-load.rows // batch), load.prompt + load.new / 2
    read = (size * element + batch * seen * kv_bytes(shape, element)) / ranks
    compute = 2.0 * size * batch / ranks / rate
    least = shape.num_layers * KERNELS * device.launch
    one = max(read / (device.links * device.memory_bandwidth), compute, least)
    prefill = pass_seconds(device, rate, 2.0 * size * load.prompts * load.prompt / ranks, shape.num_layers)
    sums, moved = 2 * shape.num_layers, 2 * (ranks - 1) / ranks * shape.hidden_size * element
    steps, tokens = waves * load.new, load.rows * load.new + load.prompts * load.prompt
    talk = (steps * sums * device.hop * (ranks - 1) + tokens * sums * moved / link) if ranks > 1 else 0.0
    return steps * one + prefill + talk, talk


# ---- the search ----

STAGES = ("generate", "prepare", "train", "sync")
"""Stages of a step: decoding; scoring; updates; weight sync."""


@dataclass(frozen=True)
class SearchInput:
    """A recipe whose roles look for devices of one type.

    longest: tokens of the longest sequence. loaded: key of a path -> shape of its model if that is not the policy's.
    generates: True if the run has engines. whole: no device may be left over. tried: False for a layout to leave out.
    costs: measured of the policy on one device, in place of the type's rate. lengths: tokens of some of the sequences
    that roles learn from, int64 [n], in the order of their data: times are those of steps of such sequences, and
    layouts with hdp are tried too, which must hold the longest of them; None: all sequences are at their longest.
    """

    recipe: Recipe
    shape: DecoderShape
    longest: int
    device: DeviceType
    devices: int
    generates: bool = True
    loaded: Mapping[str, DecoderShape] = field(default_factory=dict)
    whole: bool = False
    tried: Callable[[LayoutConfig], bool] = lambda layout: True
    costs: Costs | None = None
    lengths: np.ndarray | None = None
    shares: dict[Any, StepShare] = field(default_factory=dict, compare=False, repr=False)
    parts: dict[Any, ShardFactors] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def roles(self) -> dict[str, RoleSpec]:
        """Roles that have a mesh; the others, one process each, take the first rank of the first pool."""
        found = roles_of(self.recipe, generates=self.generates)
        return {name: spec for name, spec in found.items() if spec.mesh != "one"}

    @cached_property
    def problem(self) -> MappingProblem:
        """The roles, their options and the memory of a device."""
        base = CUDA if self.device.gpu else BASE + TOKEN * self.shape.vocab_size
        sizes = self.device.pool_sizes(self.devices)
        if self.whole and self.devices not in sizes:
            sizes.append(self.devices)
        known: dict[Any, list[Option]] = {}

        def options(role: str, devices: int, beside: frozenset[str]) -> list[Option]:
            key = role, devices, "policy" in beside and self.roles[role].receives == "step"
            if key not in known:
                known[key] = list(_options(self, role, devices, beside))
            return known[key]

        return MappingProblem(
            tuple(self.roles), options, tuple(sizes), self.devices, self.device.memory, base, self.whole
        )


@dataclass(frozen=True)
class SearchResult:
    """Fastest mapping of the fastest placement, and that of the second."""

    given: SearchInput
    best: RoleMapping
    second: RoleMapping | None

    @property
    def recipe(self) -> Recipe:
        """The recipe with pools and layouts."""
        return applied(self.given.recipe, self.best, self.given.device.per_node)

    @property
    def why(self) -> str:
        """Reason for which the second placement lost."""
        if self.second is None:
            return "no other placement fits"
        lost = [b - a for a, b in zip(self.best.seconds, self.second.seconds)]
        worst = max(range(len(lost)), key=lost.__getitem__)
        if lost[worst] <= 0:
            return "it is as fast and has more pools"
        slowest = max(self.second.pools, key=lambda pool: pool.seconds[worst])
        which = f"{' + '.join(slowest.roles)} on {slowest.devices} take{'s' * (len(slowest.roles) == 1)}"
        won = min(lost)
        back = f", and wins {-won:.3g} s in {STAGES[lost.index(won)]}" if won < 0 else ""
        return f"it loses {lost[worst]:.3g} s in {STAGES[worst]}, where {which} longest{back}"


def find_mapping(given: SearchInput) -> SearchResult:
    """Search placement, pools and layouts; one that only shards what learns wins unless another is faster by ``NEAR``.

    RecipeError if nothing fits, and for pools, which the search chooses.
    """
    check_cluster(given.recipe.replaced("cluster", search=True))
    problem = given.problem
    found = search(problem)
    if not found:
        raise RecipeError(_nothing(given), key="cluster.search")
    best = found[0]
    simple = search(replace(problem, options=_simple(given, problem.options), found={}), 1)
    if simple and simple[0].total <= NEAR * best.total:
        best = simple[0]
    second = next((mapping for mapping in found if mapping.placement != best.placement), None)
    return SearchResult(given, best, second)


NEAR = 1.03
"""Seconds of a step over those of the fastest mapping at which the simplest is taken: predictions err by more."""


def _simple(given: SearchInput, options: Options) -> Options:
    """Return the options without those in which a role that learns or scores divides more than rows and shards."""

    def simple(role: str, devices: int, beside: frozenset[str]) -> Sequence[Option]:
        found = options(role, devices, beside)
        return found if given.roles[role].mesh != "layout" else [o for o in found if _shards_only(o.layout)]

    return simple


def _shards_only(layout: LayoutConfig) -> bool:
    splits = {name: {*axis.splits} for name, axis in AXES.items()}
    return all(getattr(layout, name) == 1 or ("rows" in of and "tokens" not in of) for name, of in splits.items())


def _nothing(given: SearchInput) -> str:
    """Describe why no mapping fits: the role that fits nowhere, or the sum of the minimum allocations."""
    device, where = given.device, f"{given.devices} devices of type {given.device.name}"
    for role, spec in given.roles.items():
        if given.problem.least((role,)) is not None:
            continue
        sizes = given.problem.sizes
        options = [o for n in sizes if n <= given.devices for o in given.problem.options(role, n, frozenset([role]))]
        if not options:
            return f"{role} has no layout that can run on {where}; leave {spec.key}.layout out, or change its sizes"
        least = min(o.held + max(o.training, o.generation) for o in options) + given.problem.base
        return (
            f"{role} does not fit on {where}: it needs {least / 1e9:.3g} GB of each, which has "
            f"{device.memory / 1e9:.3g} GB; more devices, or less by {spec.less}"
        )
    each = ", ".join(f"{role} {given.problem.least((role,))}" for role in given.roles)
    return f"no placement of the roles fits on {where}; alone they need at least {each}; use more devices"


def applied(recipe: Recipe, mapping: RoleMapping, per_node: int) -> Recipe:
    """Return the recipe with these pools and layouts. A pool has the name of its first role; the policy's is first.

    per_node: devices of a machine.
    """
    pools = sorted(mapping.pools, key=lambda pool: ("policy" not in pool.roles, -pool.devices))
    several = len(pools) > 1
    named = {pool.roles[0]: pool.devices for pool in pools} if several else {}
    backend = _backend(recipe, mapping.devices, per_node)
    recipe = recipe.replaced("cluster", backend=backend, pools=named, workers=mapping.devices, search=False)
    for pool in pools:
        for role, option in zip(pool.roles, pool.options):
            name = pool.roles[0] if several else ""
            recipe = recipe.replaced(ROLES[role].key, layout=option.layout, pool=name)
            if option.rows:
                recipe = recipe.replaced("rollout", max_rows=option.rows)
    check_cluster(recipe)
    return recipe


# ---- options of a role ----


def policy_options(given: SearchInput) -> list[Option]:
    """Return what each layout of the policy costs on all devices, without those that ``given.tried`` leaves out."""
    return list(_options(given, "policy", given.devices, frozenset({"policy"})))


def _options(given: SearchInput, role: str, devices: int, beside: frozenset[str]) -> Iterator[Option]:
    """Yield what each layout of a role on a pool costs, simplest layouts first; of several models the time of the
    largest one."""
    spec = given.roles[role]
    shapes = sorted(shapes_of(spec, given.recipe, given.loaded) or [given.shape], key=parameters)
    shape, bare = shapes[-1], _alone(given, devices)
    for layout in filter(given.tried, _layouts(given, spec, devices)):
        recipe = bare.replaced(spec.key, layout=layout)
        placed = Placed("", tuple(range(devices)), Mesh.of(layout.meshed(devices), tuple(range(devices))))
        try:
            check_cluster(recipe)
            check_shape(recipe, given.shape, given.loaded)
            drafter = given.loaded.get(DRAFTER)
            parts = [_part(given, recipe, role, placed, own)._replace(drafter=drafter) for own in shapes]
            part = parts[-1]
            share_of(given, recipe, role, placed, shape)
        except (RecipeError, ScheduleError, PlanError):  # this layout cannot run
            continue
        talks = inside(recipe, role, placed, shape, given.longest, part) if spec.mesh == "layout" else []
        if spec.mesh == "layout" and not _known(placed.mesh, talks):
            continue
        for rows in _batches(given, spec, placed):
            if rows:
                recipe = recipe.replaced("rollout", max_rows=rows)
            needs = [resolve(spec.memory)(recipe, one, given.longest) if spec.memory else Need(()) for one in parts]
            need = alternating(needs)
            costs = _seconds(given, recipe, role, placed, shape, part, talks, beside)
            seconds = tuple(costs.get(name, 0.0) for name in STAGES)
            held = sum(item.bytes for item in need.held if not (item.host and given.device.gpu))
            yield Option(layout, seconds, held, total(need.training), total(need.generation), rows)


def _batches(given: SearchInput, spec: RoleSpec, placed: Placed) -> Iterator[int]:
    """Yield sequences that an engine decodes together: its samples of a step in 1, 2, 4, ... rounds. 0: as the recipe
    has it, if it sets ``rollout.max_rows``, or if another role has the key too."""
    recipe, own = given.recipe, RolloutConfig.model_fields["max_rows"].default
    if (
        spec.receives != "step"
        or not recipe.flow_spec.samples
        or recipe.rollout.max_rows != own
        or "judge" in given.roles
    ):
        yield 0
        return
    rows = -(-recipe.rollout.prompts * recipe.rollout.group // placed.data_ranks)
    yield from sorted({-(-rows // 2**i) for i in range(rows.bit_length())}, reverse=True)


def _known(mesh: Mesh, talks: Sequence[GroupTraffic]) -> bool:
    """True if the plan knows the traffic of all axes that divide more than rows: none of them is free."""
    dividing = {name for name in mesh.over("tokens", *MODEL) if mesh.size(name) > 1}
    return dividing <= {name for talk in talks for name in talk.axis.split(", ")}


def _part(given: SearchInput, recipe: Recipe, role: str, placed: Placed, shape: DecoderShape) -> ShardFactors:
    """Return the first rank's part of a model, which holds most; equal for layouts that divide the model equally."""
    mesh, spec = placed.mesh, ROLES[role]
    layout = spec.placed_by(recipe).layout
    modes = tuple(getattr(layout, name) for name in LayoutConfig.model_fields if name not in AXES)
    key = (id(shape), spec.values, tuple(mesh.size(name) for name in mesh.over(*MODEL)), modes)
    if key not in given.parts:
        given.parts[key] = cut(recipe, role, placed, shape, 0)
    return given.parts[key]._replace(**replica_counts(placed, layout))


def _alone(given: SearchInput, devices: int) -> Recipe:
    """Return the recipe with all roles in one pool of this size, undivided, on the device type."""
    recipe, gpu = given.recipe, given.device.gpu
    backend = _backend(recipe, devices, given.device.per_node)
    recipe = recipe.replaced("cluster", backend=backend, workers=devices, pools={}, search=False)
    recipe = recipe.replaced("train", device="cuda" if gpu else "cpu")
    for spec in given.roles.values():
        recipe = recipe.replaced(spec.key, pool="", layout=LayoutConfig())
    return recipe


def _backend(recipe: Recipe, devices: int, per_node: int) -> str:
    """Return the backend of the recipe, or one that has these devices: local on one machine, ray on several."""
    backend = recipe.cluster.backend
    if devices > per_node and backend in ("inline", "local"):
        return "ray"
    return "local" if backend == "inline" and devices > 1 else backend


def _layouts(given: SearchInput, spec: RoleSpec, devices: int) -> Iterator[LayoutConfig]:
    """Yield the layouts of a role: the recipe's own if it sets one, else all products of the axes with their modes."""
    own: LayoutConfig = spec.placed_by(given.recipe).layout
    if own != LayoutConfig():
        sizes = own.sizes(devices)
        if math.prod(sizes.values()) == devices and all(sizes.values()):
            yield own.model_copy(update=sizes)
        return
    tried = tuple(name for name in AXES if name not in _UNITS or _in_units(given, spec))
    for sizes in _products(tried, devices, given.device.per_node):
        if _pruned(given, sizes):
            continue
        if spec.mesh != "layout":
            yield LayoutConfig(**sizes)
            continue
        modes = {name: values for name in _modes() if (values := _tried(name, sizes, spec.trains))}
        for chosen in product(*modes.values()):
            yield LayoutConfig(**sizes, **dict(zip(modes, chosen)))


def _in_units(given: SearchInput, spec: RoleSpec) -> bool:
    """True if a sequence is longer than a rank holds, and the recipe has the role divide sequences by their lengths."""
    recipe = given.recipe
    longer = given.lengths is not None and int(given.lengths.max()) > recipe.train.micro_tokens
    stages = recipe.train.offload == "auto" and spec.name != "policy"  # must be as many as the policy's
    return longer and recipe.data.packing != "none" and not stages


_UNITS = [name for name, axis in AXES.items() if {"rows", "tokens"} <= {*axis.splits}]
"""Axes along which the lengths of sequences decide who has a row."""
LEAST_TOKENS = 1024
"""Tokens of a sequence on each rank below which no axis divides them."""


def _pruned(given: SearchInput, sizes: dict[str, int]) -> bool:
    """True for layouts that are not tried: short pieces of sequences; stages of unequal numbers of layers; shards
    beside replicas that fill no whole node; units of ranks beside replicas, or ranks that divide all sequences.

    Ranks along tp divide the tokens of norms too (``sp``), which costs no time and less memory.
    """
    outer = (("layers",), ("rows",))
    inner = math.prod(n for name, n in sizes.items() if AXES[name].splits not in outer)
    ragged = inner > given.device.per_node and inner % given.device.per_node > 0
    unequal = given.shape.num_layers % _along(sizes, "layers") > 0
    pieces, units = sizes["cp"], math.prod(sizes.get(name, 1) for name in _UNITS)
    short = pieces > 1 and given.longest < LEAST_TOKENS * pieces
    if units > 1 and max(sizes["dp"], pieces) > 1:
        return True
    if _along(sizes, "experts") > 1 and not given.shape.expert_layers:
        return True
    return short or unequal or (min(sizes["dp"], sizes["fsdp"]) > 1 and ragged)


_MODE_OF = {"zero": "fsdp", "sp": "tp", "pp_schedule": "pp", "cp_style": "cp"}
"""Entry of a layout that is no axis -> the axis whose mode it is."""


def _tried(mode: str, sizes: Mapping[str, int], trains: bool) -> tuple[Any, ...]:
    """Return the values of a mode that are tried with these sizes of axes, none if it has no use.

    Copies of what is trained divide updates, which costs no time and less memory; beside experts, shards of all else
    may cost less.
    """
    values, used = _modes()[mode], sizes[_MODE_OF[mode]] > 1
    if mode != "zero":
        return values if used else ()
    if used:
        return tuple(value for value in values if value != 1)
    if not trains or _along(sizes, *DATA) == 1:
        return ()
    return (values[0], 1) if _along(sizes, "experts") > 1 else (1,)


def _along(sizes: Mapping[str, int], *splits: Split) -> int:
    """Return the ranks along the axes, of those that are tried, that split any of these."""
    return math.prod(sizes.get(name, 1) for name in over(*splits))


@cache
def _modes() -> dict[str, tuple[Any, ...]]:
    """Return the values of each mode of a layout, its default first."""
    found = {}
    for name, key in LayoutConfig.model_fields.items():
        if name not in AXES:
            values = (True,) if name == "sp" else get_args(key.annotation)
            found[name] = tuple(sorted(values, key=lambda value: value != key.default))
    return found


def _products(names: tuple[str, ...], devices: int, per_node: int) -> Iterator[dict[str, int]]:
    """Yield sizes of the axes with this product."""
    if not names:
        if devices == 1:
            yield {}
        return
    axis = AXES[names[0]]
    inner = not {"rows", "layers"} & set(axis.splits)
    for size in range(1, (min(devices, per_node) if inner else devices) + 1):
        if devices % size == 0:
            yield from ({axis.name: size, **rest} for rest in _products(names[1:], devices // size, per_node))


# ---- seconds of a role ----


def _seconds(
    given: SearchInput,
    recipe: Recipe,
    role: str,
    placed: Placed,
    shape: DecoderShape,
    part: ShardFactors,
    talks: Sequence[GroupTraffic],
    beside: frozenset[str],
) -> dict[str, float]:
    """Return stage -> seconds of a role on its pool."""
    if ROLES[role].mesh == "layout":
        found = passes(given, recipe, role, placed, shape, part, talks)
        return {name: time.total for name, time in found.items()}
    seconds = _generation(given, recipe, role, placed, shape)
    if ROLES[role].receives == "step":
        return {"generate": seconds, "sync": _sync(given, placed, beside)}
    return {"prepare": seconds}


def passes(
    given: SearchInput,
    recipe: Recipe,
    role: str,
    placed: Placed,
    shape: DecoderShape,
    part: ShardFactors,
    talks: Sequence[GroupTraffic],
) -> dict[str, StageTime]:
    """Return the times of updates and of scoring of a role whose model a layout divides. talks: traffic of a step."""
    did, mesh, spec = work(recipe, role, placed.data_ranks, given.longest), placed.mesh, ROLES[role]
    layout, again = spec.placed_by(recipe).layout, recipe.train.checkpointing is True  # "selective" keeps products
    share = share_of(given, recipe, role, placed, shape)
    values = spec.values or recipe.flow_spec.value
    one = token_flops(shape, (given.longest + 1) / 2, not values)
    parts = mesh.size(*(name for name in mesh.over("parameters", "layers") if name not in mesh.shards))
    parts *= mesh.pieces
    slowest = uneven(shape, mesh.count("layers"), layout.pp_schedule, values) / parts
    flops = {
        "train": did.tokens * (one.both + again * one.forward) * slowest * share.busiest,
        "prepare": did.scored * one.forward * slowest * share.busiest,
    }
    micros = [math.ceil(count * share.tokens) for count in (did.micros, did.scored_micros)]
    loads = {"train": (micros[0], 3 + again, did.updates), "prepare": (micros[1], 1, 0)}
    rate, whole = given.device.rate(recipe.train.precision, recipe.train.matmul), sum(flops.values())
    if given.costs is not None:
        rate = (
            (one.both + again * one.forward)
            * given.longest
            / float(given.costs.rows("policy")(np.array([given.longest]))[0])
        )
    hidden = mesh.shards if given.device.overlaps and layout.zero == 3 else ()
    found = {}
    for name, (count, times, updates) in loads.items():
        if not flops[name]:
            continue
        own = count * shape.num_layers / mesh.count("layers")
        compute = pass_seconds(given.device, rate, flops[name], own * (3 if updates else 1))
        load = StageLoad(flops[name] / whole, count, own, times, updates)
        moved = [_exchange(given.device, mesh, layout, talk, load, hidden, share) for talk in talks]
        schedule, each = layout.pp_schedule, max(1, count // max(1, updates))
        pipe = chunks_of(schedule), schedule
        idle = compute * bubble_share(mesh.count("layers"), each, *pipe, again=again, learns=bool(updates))
        written = updates * optimizer_seconds(given.device, part.elements * part.updated // max(1, part.learned))
        found[name] = stage(compute + written, idle, moved)
    return found


def share_of(given: SearchInput, recipe: Recipe, role: str, placed: Placed, shape: DecoderShape) -> StepShare:
    """Return a step of the sample's lengths over one at the longest. PlanError: a sequence is longer than the ranks
    hold."""
    mesh = placed.mesh
    if given.lengths is None or ROLES[role].mesh != "layout":
        return StepShare()
    rows, balance = work(recipe, role, placed.data_ranks, given.longest).rows, recipe.balance
    if mesh.units > 1:  # a run checks the longest that there can be, of given answers the longest that there is
        given_answers = recipe.flow_spec.learns in ("answers", "pairs")
        longest = int(given.lengths.max()) if given_answers else given.longest
        ranks_held(np.array([longest]), recipe.train.micro_tokens, mesh.units)
    key = id(shape), rows, mesh.count("rows"), mesh.units, mesh.count("layers"), balance
    if key not in given.shares:
        of_rows: RowCosts = partial(_flops, shape)
        ring = 0.0
        if given.costs is not None:
            of_rows, ring = given.costs.rows("policy"), given.costs.ring
        costs = StepCosts(of_rows, balance, recipe.train.micro_tokens, ring)
        given.shares[key] = StepShare.of(given.lengths, rows, given.longest, mesh, costs)
    return given.shares[key]


def _flops(shape: DecoderShape, lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of both passes over each sequence, float64 [n]."""
    first, second = (token_flops(shape, seen).both for seen in (1.0, 2.0))
    return lengths * (first + (second - first) * (lengths - 1) / 2)


class StageLoad(NamedTuple):
    """Work of one rank in a stage of a step."""

    share: float
    """Of the FLOPs of the role's step."""
    micros: int
    layer_passes: float
    """Layers of the rank times micro-batches."""
    times: int
    """Passes of each: forward, recomputation, and two backward."""
    updates: int


def _exchange(
    device: DeviceType,
    mesh: Mesh,
    layout: LayoutConfig,
    talk: GroupTraffic,
    load: StageLoad,
    hidden: tuple[str, ...],
    of_longest: StepShare,
) -> AxisTime:
    """Return the exchange of one stage: gradients that copies add up are those of updates, all else goes by FLOPs.

    hidden: axes whose communication proceeds beside compute. of_longest: tokens that are there, and on several ranks.
    """
    names, group = talk.axis.split(", "), talk.groups[0]
    around = device.latency(group)
    share = float(bool(load.updates)) if talk.updates else load.share
    units = set(names) <= set(_UNITS)
    if not talk.updates and not set(names) <= set(mesh.shards):
        share *= of_longest.divided if units else of_longest.tokens
    if talk.updates:
        messages = 2.0 * load.updates
    elif "pp" in names:  # neighbours, in both directions where there are gradients
        messages, around = load.micros * chunks_of(layout.pp_schedule) * (1 + bool(load.updates)), device.far
    elif set(names) <= set(mesh.shards) and "ep" not in names:
        messages = load.layer_passes * min(load.times, 3)
    else:  # gathered and scattered around two blocks of a layer, and back
        messages = 4 * load.layer_passes * max(1, load.times - 1)
        messages *= of_longest.divided / of_longest.tokens if units else 1.0  # of those on one rank there are none
    seconds = share * talk.bytes / device.bandwidth(group) + messages * around
    return AxisTime(talk.axis, seconds, set(names) <= set(hidden))


def _sync(given: SearchInput, placed: Placed, beside: frozenset[str]) -> float:
    """Return seconds in which the engines of a pool receive the policy's weights.

    Beside the policy each rank lacks what its shard does not hold of its engine's part: (n - g) / (n g) of the model
    with n ranks and g of an engine (HybridFlow, table 2), if the policy is divided over all of them. Elsewhere it lacks
    all of its part.
    """
    ranks, size = len(placed.ranks), parameters(given.shape) * element_of(given.recipe)
    parts = placed.mesh.count(*MODEL)
    if "policy" in beside:
        lacking, group = size * (ranks - parts) / (ranks * parts), tuple(range(ranks))
    else:
        lacking, group = size / parts, (0, given.device.per_node) if given.device.gpu else (0, 1)
    return lacking / given.device.bandwidth(group) + given.device.latency(range(ranks))


def _generation(given: SearchInput, recipe: Recipe, role: str, placed: Placed, shape: DecoderShape) -> float:
    """Return seconds in which the engines of a pool decode a step's samples, or judge them."""
    r, mesh = recipe.rollout, placed.mesh
    judges, parts = bool(ROLES[role].loads), mesh.size(*mesh.over("parameters", "layers", "experts"))
    samples = r.prompts * r.group if recipe.flow_spec.samples else 0
    rows = -(-samples // placed.data_ranks)
    new = recipe.judge.max_tokens if judges else min(r.max_tokens, given.longest)
    prompt = 2 * given.longest if judges else max(1, given.longest - new)
    together = min(r.max_rows, r.step_tokens)
    load = Decoding(rows, rows if judges else -(-rows // r.group), together, prompt, new)
    rate, link = given.device.rate(recipe.train.precision, recipe.train.matmul), given.device.bandwidth(range(parts))
    return decode_seconds(given.device, rate, shape, load, element_of(recipe), parts, link)[0]
