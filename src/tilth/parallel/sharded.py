"""A one-device model sharded over a mesh: every rank holds its boxes of the parameters and nothing else.

Layouts are applied from outside, first tensor parallelism, then FSDP inside of its shards (torch's ``fully_shard``).
Optimizer, averages, checkpoints and weight sync use plain local tensors that share storage with the model, without
DTensor dispatch. Gradients are sums over all data ranks, never averages: the loss of each rank is already divided by
denominators of the whole batch.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilth.config.axes import DATA, MODEL
from tilth.core.errors import ModelError, ScheduleError
from tilth.core.layout import Box, Layout, Replicate, Shape
from tilth.models.attention import AttentionContext, PackedContext
from tilth.models.converters import HEAD, OUTPUT, Converter, ValueModel, converted
from tilth.models.decoder import Decoder, drops
from tilth.models.hf import check_tensors
from tilth.models.inputs import ModelInput
from tilth.models.moe import Experts
from tilth.models.unread import block, shapes
from tilth.parallel.checksums import GivenSums, GradientDigests, exact_sum
from tilth.parallel.comm import Group, is_dtensor, is_fsdp
from tilth.parallel.context import ContextParallel, Style
from tilth.parallel.deferred import DeferredGradients
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division, divided
from tilth.parallel.pipeline import (
    Handover,
    Pipe,
    PipelinePlan,
    Shared,
    check_learned,
    share,
    share_object,
)
from tilth.parallel.reducer import EXACT, End, GradientReducer, ReadySums
from tilth.parallel.zero import GradientShards, Kind, UpdateShards
from tilth.plan.layout import copied_along, layouts, nested, update_layouts
from tilth.plan.lora import has_adapters, is_adapter
from tilth.plan.packing import portions
from tilth.plan.pipeline import SPLIT, Stages, passes, scoring, stages_of
from tilth.plan.rules import rule_of

ROUNDINGS = 64
"""Roundings of the norm of all gradients that a sum of them may be off by."""
Partial = Sequence[tuple[Group, Sequence[str]]]


class GradientSums:
    """Sums of the gradients of this rank's parameters over ranks, with their checks.

    Every sum goes through one ``GradientReducer``: FSDP's reduce-scatters, the sums over copies and over ranks with a
    part of a gradient, and those of gradients that a pipeline defers. They are checked as far as it promises.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        grid: ParallelDims,
        own: Mapping[str, nn.Parameter],
        local: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        partial: Partial,
        reducer: GradientReducer,
        deferred: DeferredGradients | None,
    ) -> None:
        """own: parameters of the parts; local: this rank's part of each; layouts: of all; partial: parameters whose
        gradients are summed over a further group."""
        self.reducer, self._grid, self._own, self._local, self._partial = reducer, grid, own, local, partial
        self._layouts = layouts
        self._shards: GradientShards | None = None
        self._summed = dict(local)
        """What gets the sums of gradients: of a divided update the part of this rank."""
        self._config, self._deferred = parts[-1].config, deferred
        modules = [module for part in parts for module in part.modules()]
        self._fsdp = [module for module in modules if is_fsdp(module)]
        self._stacked = {p for module in modules if isinstance(module, Experts) for p in module.parameters()}
        self.looks: list[tuple[bool, int]] = [(False, 1), (True, self._experts_every())]
        """(experts only, N): the gradients are checked every N steps."""
        self.given = [given for look in self.looks if (given := self._watched(*look)) is not None]
        self._single = [GradientDigests(self._held_alone(experts), every) for experts, every in self.looks]
        self._changed = ""
        """Names of gradients that changed before they were multiplied."""
        self._ready: ReadySums | None = None
        """Sums over copies that are started beside the last backward pass."""
        self._may_start = False
        self._early = dict[str, Tensor]()
        """Sums of shards of gradients that change afterwards: a further group adds to them, or copies take them."""

    def divide(self, shards: GradientShards) -> None:
        """Sum gradients by parts from now on, those of updates or of all copies, with the checks of other shards."""
        self._shards, self._ready, mesh = shards, shards.ready, self._grid.mesh
        if isinstance(shards, UpdateShards):
            self._summed |= shards.parts
        for kind, group in {bucket.kind: bucket.group for bucket in shards.buckets}.items():
            names = [piece.name for bucket in shards.buckets if bucket.kind == kind for piece in bucket.own]
            (experts, axes), rank = kind, self._grid.rank
            apart, every = [axis for axis in mesh.over(*DATA) if axis not in axes], self.looks[experts][1]
            where = mesh.index(rank, *apart), mesh.size(*apart), every
            shards.given[kind] = GivenSums(group, names, *where, self.reducer.tolerance)
        self.given = [*shards.given.values()]

    def _of_copies(self) -> ReadySums | None:
        """Return the sums of gradients over copies, in buckets, those of the last layers first, which passes leave
        first; None without copies."""
        group = self._grid.group(*self._grid.mesh.copies)
        if group is None or self.reducer.apart or self._shards is not None:
            return None
        by_fsdp = {name for name, p in self._own.items() if is_dtensor(p)} - self._late
        own = {n: p for n, p in self._local.items() if n not in by_fsdp and p.requires_grad and p.numel()}
        names = [*reversed(own)]
        places = [*self.reducer.buckets([own[name] for name in names])]
        some = [[names[i] for i in one] for one in places]

        def start(number: int) -> End:
            bucket = [grad for name in some[number] if (grad := own[name].grad) is not None]
            return self.reducer.start_sum(bucket, group, f"copies.{number}")

        return ReadySums(some, own, start)

    def begin(self, step: int, *, early: bool = False) -> None:
        """Begin a step: forget what was given in the one before. early: sums may start beside the last pass."""
        self.reducer.begin(step)
        self._may_start, self._ready = early, self._ready or self._of_copies()
        if self._ready is not None:
            self._ready.begin()
        self._changed = ""
        for given in self.given:
            given.begin(step)
        for single in self._single:
            single.begin(step)

    def last_pass(self) -> None:
        """Let the backward pass that follows, the last of this step, start sums, if they may start."""
        if self._may_start and self._ready is not None:
            self._ready.open()

    def _experts_every(self) -> int:
        """Return N, where gradients of experts are checked every N steps: a token reaches few of a rank's experts, and
        checking all of them in every step would be too slow."""
        config = self._config
        chosen = self._grid.mesh.count("experts") * config.experts_per_token
        return max(1, round(config.num_experts / chosen)) if chosen else 1

    def _watched(self, experts: bool, every: int) -> GivenSums | None:
        """Record the communications of FSDP, with the sums of gradients that it adds up before they are sent: those of
        experts, which are sent to fewer ranks, or all others."""
        mesh = self._grid.mesh
        shards = mesh.expert_shards if experts else mesh.shards
        peers, apart = self._grid.group(*shards), [axis for axis in mesh.shards if axis not in shards]
        own = {n: p for n, p in self._own.items() if is_dtensor(p) and p.requires_grad}
        names, sums = [n for n, p in own.items() if (p in self._stacked) == experts], None
        if names and peers is not None:
            sums = GivenSums(
                peers, names, mesh.index(self._grid.rank, *apart), mesh.size(*apart), every, self.reducer.tolerance
            )
        if modules := [m for m in self._fsdp if isinstance(m, Experts) == experts]:
            from tilth.parallel.fsdp import watch

            watch(modules, self._grid.group(*mesh.copies), sums, self.reducer, {p: n for n, p in own.items()})
        return sums

    def _held_alone(self, experts: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, of experts or all others, with gradients that no other rank holds, nor FSDP sends,
        where there are several ranks."""
        partial, apart = {name for _, names in self._partial for name in names}, self.reducer.apart
        if len(self._grid.mesh) > 1 and (apart or self._grid.group(*self._grid.mesh.copies) is None):
            for name, p in self._own.items():
                mine = (p in self._stacked) == experts and name not in partial
                alone = apart or not copied_along(self._layouts[name])
                if mine and alone and p.requires_grad and not is_dtensor(p):
                    yield name, p

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum gradients over all data ranks after the backward passes of a step, into those of its local part.

        ModelError if a backward pass has left a gradient with a weight whose gradients are deferred.
        """
        for name, p in self._own.items():
            local = self._local[name]
            if is_dtensor(p) and name in self._late and p.grad is not None:
                raise ModelError(
                    f"{name} has a gradient from a backward pass beside the one that was deferred; a loss may use it "
                    "through its layer alone, or take pp_schedule 1f1b",
                    key=name,
                )
            if is_dtensor(p) and name not in self._late:
                local.grad = p.grad.to_local() if is_dtensor(p.grad) else None
                p.grad = None
            if local.grad is None and local.requires_grad and len(self._grid.mesh) > 1:
                local.grad = torch.zeros_like(local)
        for module in self._fsdp:
            module.reshard()
        self._early = {}
        if isinstance(self._shards, UpdateShards):
            self._shards.scatter()
        elif self._shards is not None:
            self._early = self._shards.sum_up()
        elif self.reducer.apart:
            self._changed = self._changed_alone()  # before the program changes them
            own = [p.grad for p in self._local.values() if p.grad is not None]
            torch._foreach_mul_(own, self._grid.size(*self._grid.mesh.copies))
        elif (ready := self._ready or self._of_copies()) is not None:
            self._ready = ready
            ready.finish()
        partial = {name for _, names in self._partial for name in names}
        further = [n for given in self.given for n in given.names if n in partial and n not in self._early]
        self._early |= {n: self._shard_sum([n]) for n in further}
        for number, (group, names) in enumerate(self._partial):
            grads = [self._summed[name].grad for name in names]
            self.reducer.sum_in_place([grad for grad in grads if grad is not None], group, f"partial.{number}")

    @torch.no_grad()
    def misreduced(self) -> str:
        """Return how this rank's shard of the gradients differs from what all ranks gave for it, or which gradient that
        it alone holds has changed since its backward pass; "" if none does.

        A collective call of the data ranks after ``reduce``. It sees sums: a difference below the rounding of the
        whole gradient stays unseen, and one that is not finite is the business of the gradient's norm.
        """
        changed = self._changed or self._changed_alone()
        wrong = f"that of {changed} has other bits than the backward pass has left" if changed else ""
        if self._late or not any(given.looks for given in self.given):
            return wrong
        placed = [given.placed() for given in self.given]
        found = self._grid.sum(torch.cat(placed), *DATA).split([len(one) for one in placed])
        for given, sums in zip(self.given, found):
            if wrong or given.sums is None:  # this step has no look at them
                continue
            late = [n for n in given.names if n not in self._early]
            parts = [self._early[n] for n in given.names if n in self._early]
            parts += [self._shard_sum(late)] if late else []
            shard, (gave, scale) = float(torch.stack(parts).sum()) if parts else 0.0, given.own(sums)
            count = sum(self._summed[name].numel() for name in given.names)
            limit = (ROUNDINGS + math.sqrt(count) / 8) * scale
            if abs(shard - gave) > limit and math.isfinite(shard - gave):
                explained = f"rounding explains {limit:.2g}"
                wrong = f"the shard's sum is {shard:.9g}, all ranks gave {gave:.9g} for it; {explained}"
        return wrong

    def _changed_alone(self) -> str:
        """Return the names of gradients that this rank alone holds and that are not as backward passes left them."""
        return " and ".join(filter(None, [single.changed() for single in self._single]))

    def _shard_sum(self, names: Sequence[str]) -> Tensor:
        grads = [grad for name in names if (grad := self._summed[name].grad) is not None]
        assert len(grads) == len(names)  # since ``reduce``
        return exact_sum(grads)

    @property
    def _late(self) -> Set[str]:
        """Parameters whose gradients backward passes leave to be computed."""
        return frozenset() if self._deferred is None else self._deferred.names


# ---- the model ----


Zero = Literal[1, 2, 3]
WHOLE = 64 * 2**20
"""Bytes of whole tensors that are assembled at a time."""


def _allocate(model: nn.Module, device: str) -> None:
    """Give the parameters of a model on the meta device memory.

    ``Module.to_empty`` does so by ``empty_like``, which imports sympy for them: 500 modules.
    """
    tensors = model.state_dict()
    if any(map(is_dtensor, tensors.values())):
        model.to_empty(device=device)
        return
    empty = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in tensors.items()}
    model.load_state_dict(empty, assign=True)


def shard(
    build: Callable[[], Decoder],
    grid: ParallelDims,
    *,
    converters: Sequence[str | Converter] = (),
    sp: bool = False,
    zero: Zero = 3,
    cp_style: Style = "ring",
    schedule: str = "1f1b",
    engine: bool = False,
    device: str = "cpu",
    base: "ShardedModel | None" = None,
    reducer: GradientReducer = EXACT,
) -> "ShardedModel":
    """Shard the model that ``build`` makes over the grid; uninitialised until ``init_`` or ``load_``.

    ``build`` and then ``converters`` run on the meta device: no full tensor is ever allocated. sp: sequence parallelism
    along tp. zero: 3 gathers parameters for each micro-batch, 2 once a step (and holds whole gradients within the
    step), 1 keeps them whole, and ranks divide their updates alone. schedule: of the passes of pipeline stages.
    cp_style: attention along cp. engine: of a generation engine, whose ranks along ep have the same rows and whole
    parameters but their experts. base: model of an equal layout whose parameters this one uses (a part that FSDP pads
    is copied). reducer: sums gradients over ranks. ModelError if the grid does not fit the model; AxisError if nothing
    divides it, or its tokens, along an axis.
    """
    divided(grid)
    if zero == 1 and grid.size(*grid.mesh.expert_shards) > 1:
        names = ", ".join(name for name in grid.mesh.expert_shards if grid.size(name) > 1)
        raise ModelError(f"zero = 1 keeps whole parameters on all ranks, and {names} would shard them", key="zero")

    def made() -> Decoder:
        with torch.device("meta"):
            return converted(build(), converters)

    model = made()
    stages, value = _stages(model, grid, schedule), isinstance(model, ValueModel)
    check_learned(stages, {name for name, p in model.named_parameters() if p.requires_grad})
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    own: dict[str, Any] = {"table": model.table, "sizes": sizes, "value": value}  # with what converters added
    table = layouts(model.config, grid.mesh, schedule=schedule, whole=engine or zero == 1, **own)
    given = layouts(model.config, grid.mesh, schedule=schedule, whole=True, **own) if reducer.by_parts else table
    how: dict[str, Any] = {"sp": sp, "zero": zero, "cp_style": cp_style, "engine": engine, "device": device}
    parts = [Division(made(), grid, stages, part, **how) for part in stages.parts(grid.coordinate("pp"))]
    for part in parts:
        part.divide()
        _allocate(part.model, device)
    for part, theirs in zip(parts, base.parts if base else ()):
        own = {name: p.detach() for name, p in theirs.named_parameters()}
        part.model.load_state_dict(own, strict=False, assign=True)
    partial = [one for part in parts for one in part.partial] + [*_tied(stages, grid, table)]
    plan = None
    if grid.size("pp") > 1:
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        plan = PipelinePlan(stages, schedule, dtypes, drops=drops(model))
    found, spread = [part.model for part in parts], grid.size("tp") if sp else 1
    return ShardedModel(found, grid, table, partial, zero, parts[0].context, plan, reducer, spread, given)


def _stages(model: Decoder, grid: ParallelDims, schedule: str) -> Stages:
    """Divide a model over the stages of the grid. ModelError: more parts than layers."""
    try:
        return stages_of(model.config, grid.size("pp"), schedule, value=isinstance(model, ValueModel))
    except ScheduleError as error:
        raise ModelError(str(error), key=error.key) from None


def _tied(stages: Stages, grid: ParallelDims, names: Iterable[str]) -> Partial:
    """Return the gradients of parameters that the first and the last stage use, if this rank is on one of these."""
    ranks = grid.ranks("pp")
    shared, ends = [name for name in names if len(stages.holders(name)) > 1], (ranks[0], ranks[-1])
    group = grid.group_of(ends) if shared and grid.rank in ends else None
    return [] if group is None else [(group, shared)]


class ShardedModel:
    """Model on one rank of a grid: its ``parts``, one or, on a stage of an interleaved pipeline, several.

    ``model`` is the last of them. Without a pipeline it is the whole model, called like the one-device model it was
    built as; on the last stage it has the head. ``layouts`` has all parameters, ``parameters`` those of this stage.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        grid: ParallelDims,
        layouts: Mapping[str, Layout],
        partial: Partial = (),
        zero: Zero = 3,
        context: ContextParallel | None = None,
        pipeline: PipelinePlan | None = None,
        reducer: GradientReducer = EXACT,
        spread: int = 1,
        given: Mapping[str, Layout] | None = None,
    ) -> None:
        """partial: parameters whose gradients are summed over a further group. context: how ranks divide tokens.
        pipeline: None if all parts are here. spread: ranks that divide the tokens of hidden states. given: layouts of
        gradients before they are summed; None: those of parameters."""
        self.parts, self.model, self.grid, self.zero = list(parts), parts[-1], grid, zero
        self.context, self.spread = context, spread
        self.layouts: dict[str, Layout] = dict(layouts)
        self._given = self.layouts if given is None else given
        self.pipeline, self._connected = pipeline, False
        self._own = {name: p for part in parts for name, p in part.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = {name: _local(p) for name, p in self._own.items()}
        """This rank's part of each parameter, sharing storage with the model: plain tensors, possibly of 0 rows."""
        self.deferred: DeferredGradients | None = None
        """Gradients of matrices that the schedule computes apart from backward passes; None: it does not."""
        if pipeline is not None and pipeline.schedule in SPLIT:
            self.deferred = DeferredGradients(self.parts, self._own, self.parameters, reducer, at_once=zero == 3)
        self._fsdp = [m for part in parts for m in part.modules() if is_fsdp(m)]
        of_parts = self._own, self.parameters, self.layouts
        self.gradients = GradientSums(self.parts, grid, *of_parts, partial, reducer, self.deferred)
        self.updates: UpdateShards | None = None
        """This rank's parts of updates, if ranks with the same parameters divide them (``divide_updates``)."""
        self.update_layouts: Mapping[str, Layout] = self.layouts
        """Layouts of all parameters' updates: gradients, optimizer state, averages."""
        wrong = [n for n, p in self.parameters.items() if sum(b.numel for b in self.boxes(n)) != p.numel()]
        if wrong:
            raise ModelError(
                f"{wrong[0]}: the layout says {self.boxes(wrong[0])}, the model has another part of it",
                key=f"{wrong[0]}.layout",
            )

    @classmethod
    def alone(cls, model: Decoder) -> "ShardedModel":
        """Wrap a model on one device."""
        grid = ParallelDims.alone()
        return cls([model], grid, {n: nested(grid.mesh, tuple(p.shape), {}) for n, p in model.named_parameters()})

    @classmethod
    def of(cls, model: "Decoder | ShardedModel") -> "ShardedModel":
        """Return the sharded model itself, or wrap a model on one device."""
        return model if isinstance(model, ShardedModel) else cls.alone(model)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of all parameters, those of other stages included."""
        return {n: p.dtype for n, p in self.parameters.items()} if self.pipeline is None else self.pipeline.dtypes

    @property
    def drops(self) -> bool:
        """True if passes that learn have dropout, on this stage or another one: all of them plan alike."""
        return any(map(drops, self.parts)) if self.pipeline is None else self.pipeline.drops

    @property
    def adapted(self) -> bool:
        """True if adapters of the model are learned instead of its weights."""
        return has_adapters(self.layouts)

    @property
    def learned(self) -> list[str]:
        """Parameters that are learned, those of other stages included: all, or adapters and the value head."""
        return [n for n in self.layouts if is_adapter(n) or n.startswith(HEAD)] if self.adapted else list(self.layouts)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.parameters.values())).device

    def boxes(self, name: str) -> list[Box]:
        """Return this rank's boxes of a parameter; none if its part is empty."""
        return self.layouts[name].boxes(self.grid.rank)

    # Weights

    @torch.no_grad()
    def init_(self, seed: int, names: Collection[str] | None = None) -> None:
        """Initialise as ``Decoder.init_weights_`` does: the same bits in every layout. names: only these."""
        for name, local in self.parameters.items():
            if names is not None and name not in names:
                continue
            for box in self.boxes(name):
                self.model.init_parameter_(name, local.data, seed, box, self.layouts[name].shape)
        self.reshard()

    @torch.no_grad()
    def load_(self, tensors: Mapping[str, Tensor], source: str = "state") -> None:
        """Copy this rank's boxes of whole tensors; of ``Unread`` tensors only those are read. ModelError: missing, or
        does not fit.

        A value model also accepts the tensors of a decoder: the body is copied, the head is zero. Adapters that the
        tensors lack stay as they are.
        """
        begins = isinstance(self.model, ValueModel) and not any(name.startswith(HEAD) for name in tensors)
        left_out = (HEAD, OUTPUT) if begins else ()
        fresh = {n for n in self.layouts if is_adapter(n)} if not has_adapters(tensors) else set()
        wanted = {n: layout.shape for n, layout in self.layouts.items() if not (begins and n.startswith(HEAD))}
        wanted = {name: shape for name, shape in wanted.items() if name not in fresh}
        found = {name: shape for name, shape in shapes(tensors).items() if not name.startswith(left_out)}
        check_tensors(source, wanted, found)
        for name, local in self.parameters.items():
            if name in wanted:
                self._copy(name, tensors)
            elif name not in fresh:
                local.zero_()
        self.reshard()

    @torch.no_grad()
    def load_full(self, name: str, full: Tensor) -> None:
        """Copy this rank's boxes of one whole tensor."""
        self._copy(name, {name: full})
        self.reshard()

    @torch.no_grad()
    def load_part(self, name: str, part: Tensor) -> None:
        """Copy this rank's part of one tensor; nothing if another stage of a pipeline has it."""
        if name in self.parameters:
            self.parameters[name].copy_(part)
        self.reshard()

    def _copy(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        for box in self.boxes(name):
            self.parameters[name].copy_(block(tensors, name, box.slices))

    @torch.no_grad()
    def assemble(
        self, names: Sequence[str], parts: Mapping[str, Tensor] | None = None, *, stage: bool = False
    ) -> dict[str, Tensor]:
        """Assemble whole parameters on every rank; one collective for each dtype over the ranks that divide them.

        parts: this rank's parts, by parameter name, of other tensors with the parameters' layouts. stage: only on the
        ranks of this stage of a pipeline, which hold all of ``names``.
        """
        given = self.parameters if parts is None else parts
        own = {name: given[name].detach() for name in names if name in given}
        axes = [name for name in self.grid.mesh.over(*MODEL) if not (stage and name == "pp")]
        if self.grid.size(*axes) == 1:
            return own
        dtypes = {name: own[name].dtype if name in own else self._dtype(name, given) for name in names}
        whole: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(dtypes.values()):
            these = {name: self.layouts[name] for name in names if dtypes[name] == dtype}
            like = torch.empty(0, dtype=dtype, device=self.device)
            whole |= self.grid.gather_boxes(axes, these, own, like)
        return {name: whole[name] for name in names}

    def _dtype(self, name: str, given: Mapping[str, Tensor]) -> torch.dtype:
        """Return the dtype of a tensor like a parameter of another stage; given: such tensors of this stage."""
        declared, own = self.dtypes[name], next(iter(given))
        return given[own].dtype if self.parameters[own].dtype == declared else declared

    def own_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that is divided as a parameter of its own."""
        for box in self.boxes(name):
            return full[box.slices]
        return full.new_empty(self.parameters[name].shape)

    def reshard(self) -> None:
        """Free gathered copies of parameters: the next forward pass gathers again.

        The root stays gathered after a forward pass without a backward pass, so this must follow every change of
        parameters and every use; ``begin``, ``finish`` and every load call it.
        """
        for module in self._fsdp:
            module.reshard()

    # A step

    def divide_updates(self, matrices: Collection[str] = ()) -> Mapping[str, nn.Parameter]:
        """Return what an optimizer on this rank updates: all learned parameters, or under ``zero = 1`` its part of
        those that other ranks have too. matrices: those of which it needs whole ones."""
        learned = {name: p for name, p in self.parameters.items() if p.requires_grad}
        held = {name: self.layouts[name] for name in self.learned}
        reducer, table, kinds = self.gradients.reducer, self.model.table, dict[Kind, dict[str, Shape]]()
        if reducer.apart:
            reducer.bind(self.grid, held, held, table, learned)
        if reducer.apart or (self.zero != 1 and not reducer.by_parts):
            return learned
        parts = update_layouts(held, table, matrices if self.zero == 1 else ())
        reducer.bind(self.grid, {name: self._given[name] for name in held}, parts, table, learned)
        if (self.zero != 1 and self._fsdp) or not any(map(copied_along, held.values())):
            return learned
        for name, p in learned.items():
            if axes := copied_along(held[name]):
                kinds.setdefault((rule_of(table, name).stacked, axes), {})[name] = tuple(p.shape)
        last_first = [(kind, dict(reversed(found.items()))) for kind, found in kinds.items()]
        some = [(kind, names) for kind, found in last_first for names in buckets(found, reducer.bucket_bytes)]
        if self.zero != 1:
            self.gradients.divide(GradientShards(reducer, self.grid, learned, self.layouts, parts, some))
            return learned
        self.updates = UpdateShards(reducer, self.grid, learned, self.layouts, parts, some)
        self.update_layouts = {**self.layouts, **self.updates.layouts}
        self.gradients.divide(self.updates)
        return self.updates.parts

    @property
    def in_step(self) -> bool:
        """True if ranks that compute with the same tokens must run equally many micro-batches before: their passes are
        those of a pipeline, or gather parameters or exchange tokens with further ranks."""
        return self.pipeline is not None or bool(self._fsdp) or self.grid.mesh.count("experts") > 1

    def sync_micro_batch_count(self, micros: int) -> int:
        """Return how many micro-batches or blanks this rank must run if it has ``micros`` of its own.

        If each of them gathers parameters or exchanges tokens, all data ranks run as many as the one with the most.
        """
        if (self._fsdp and self.zero == 3) or self.grid.mesh.count("experts") > 1:
            return self.grid.most(micros)
        return max(micros, 1) if self._fsdp else micros

    def begin(self, step: int = 0, *, early: bool = False) -> None:
        """Prepare a step: no gradients, no gathered parameters. step: its number, the same on all ranks. early: the
        passes over the next batch are all of the step, so that gradients may be summed beside the last one."""
        for p in (*self.parameters.values(), *self._own.values()):
            p.grad = None
        # A pass that waits for a sum must not keep ranks waiting that are in another pass.
        self.gradients.begin(step, early=early and self.context is None and not self.in_step)
        self.reshard()
        if self.updates is not None:
            self.updates.refresh()

    def forward(self, given: ModelInput, ctx: AttentionContext) -> Tensor:
        """Run an input of N tokens through all parts -> hidden [N, hidden]."""
        for part in self.parts:
            given = given._replace(ids=part(given, ctx))
        return given.ids

    # Passes of the parts

    @property
    def schedule(self) -> str:
        """Name of the schedule of the passes."""
        return "sequential" if self.pipeline is None else self.pipeline.schedule

    def handover(self, schedule: str, micro_batches: int) -> Handover:
        """Return what orders the passes of one step and carries results between them.

        schedule: of ``plan.pipeline.SCHEDULES``, or "" of passes without gradients.
        """
        stages, chunks = self.grid.size("pp"), len(self.parts)
        orders = passes(schedule, stages, chunks, micro_batches) if schedule else scoring(stages, chunks, micro_batches)
        parts = len(self.parts) * self.grid.size("pp")
        if self.pipeline is None:
            return Handover(orders, self.stage, parts)
        pipe = Pipe(orders, self.stage, parts, grid=self.grid, model=self.model, spread=self.spread)
        if not self._connected:
            pipe.connect()
            self._connected = True
        return pipe

    @property
    def stage(self) -> int:
        """Number of this rank's stage."""
        return self.grid.coordinate("pp")

    def share(self, x: Tensor) -> None:
        """Replace x by that of the last stage, where losses and scores arise; a collective call of a pipeline."""
        if self.pipeline is not None:
            share(x, self.grid)

    def share_object(self, found: Shared) -> Shared:
        """Return what the last stage found; a collective call of a pipeline."""
        return found if self.pipeline is None else share_object(found, self.grid)

    def part(self, number: int) -> int:
        """Return the index in ``parts`` of a part by its number in the whole model."""
        return number // self.grid.size("pp")

    def start_micro_batch(self, part: int, *, last: bool, alone: bool) -> None:
        """Prepare the backward pass of a part: gradients are summed over data ranks as late as the memory allows.

        last: no other one follows in this step. alone: no other micro-batch is in flight, whose loss needs what the
        root has gathered.
        """
        root = self.parts[part]
        if last:
            self.gradients.last_pass()
        if is_fsdp(root):
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(self.zero == 3 and alone, recurse=False)
            if self.zero == 3:
                root.set_requires_all_reduce(last)
            else:
                root.set_requires_gradient_sync(last)

    def blank_input(self, parity: bool = False) -> tuple[ModelInput, AttentionContext]:
        """Return one token, the input of a blank; parity: that of the others, which decides how experts get tokens."""
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        return ModelInput(ids), PackedContext([1], self.device, parity)

    def nothing(self, hidden: Tensor) -> Tensor:
        """Return 0 that depends on hidden states, thus on all layers, and on what the loss uses beside them.

        Ranks sum the gradients that they have, so a blank has those of other micro-batches: layers have parameters
        without any.
        """
        nothing = hidden[:0].sum().float()
        for name, p in self.model.named_parameters():
            if not name.startswith("model.layers."):
                nothing = nothing + p.flatten()[:0].sum().float()
        return nothing

    def squares(self, *kinds: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
        """Return the squared L2 norms of whole tensors, from every rank's part, float64 [kinds, names], and before them
        their names: those of the first mapping, of a pipeline and under ``zero = 1`` all that are learned.

        kinds: each by the same parameter names, with layouts as in ``update_layouts``, all of this rank that are
        learned. The norm of a part may stand for it. Replicas count once. A collective call of the replica.
        """
        over = MODEL if self.updates is None else (*DATA, *MODEL)
        names, norms = squares_of(*kinds, device=self.device)
        if self.grid.mesh.count(*over) == 1:
            return names, norms
        axes = self.grid.mesh.over(*over)
        counts = torch.tensor([self._counts(name, axes) for name in names], dtype=torch.float64, device=norms.device)
        if self.pipeline is not None or self.updates is not None:
            places = {name: i for i, name in enumerate(self.learned)}
            slots = torch.tensor([places[name] for name in names], dtype=torch.int64, device=norms.device)
            every = torch.zeros(len(kinds), len(places), dtype=torch.float64, device=norms.device)
            return list(places), self.grid.sum(every.index_copy_(1, slots, norms * counts), *over)
        return names, self.grid.sum(norms * counts, *over)

    def norm(self, tensors: Mapping[str, Tensor]) -> float:
        """Return the L2 norm of all whole tensors together, from every rank's part."""
        return float(self.squares(tensors)[1].sum().sqrt())

    def _counts(self, name: str, divided: Sequence[str]) -> bool:
        """True if this rank, of those along ``divided`` that hold the same elements, counts them."""
        layout = self.update_layouts[name]
        place = layout.mesh.at(self.grid.rank)
        for dim, placement in zip(layout.mesh.names, layout.placements):
            copies = layout.mesh.size(dim) if isinstance(placement, Replicate) else getattr(placement, "copies", 1)
            if dim in divided and place[dim] % copies:
                return False
        return True


def squares_of(*kinds: Mapping[str, Tensor], device: torch.device | None = None) -> tuple[list[str], Tensor]:
    """Return ``ShardedModel.squares`` of tensors that are whole. device: of the result, if there are none."""
    names = list(kinds[0])
    if not names:
        return names, torch.zeros(len(kinds), 0, dtype=torch.float64, device=device)
    found = [torch.stack(torch._foreach_norm(list(tensors.values()))).double() for tensors in kinds]
    return names, torch.stack(found).square()


def _local(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.to_local().detach(), p.requires_grad) if is_dtensor(p) else p


def buckets(shapes: Mapping[str, Shape], most: int = WHOLE) -> Iterator[list[str]]:
    """Return names in order, in buckets of at most ``most`` bytes in fp32; a larger tensor is alone."""
    return portions(shapes, lambda name: 4 * math.prod(shapes[name]), most)
