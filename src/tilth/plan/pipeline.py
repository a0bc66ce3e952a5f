"""Pipelines: the parts of a model on each stage, and the order in which a stage runs its passes.

Parts are numbered along the model; part k of stages * chunks stands on stage k % stages, so that a stage with several
parts ("chunks") has them far apart (interleaving, Megatron-LM 2104.04473). All is computed from numbers alone, alike on
every rank: who sends what to whom, when and in which shape is known without a message.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple

from tilth.core.errors import ScheduleError
from tilth.core.layout import Mesh, Placement, Replicate
from tilth.plan.rules import VALUE_HEAD, rule_of
from tilth.plan.shape import DecoderShape, parameter_shapes

Direction = Literal["forward", "backward", "weight"]


class Pass(NamedTuple):
    """One pass of one part over one micro-batch; the loss belongs to the forward pass of the last part.

    A schedule with "weight" passes computes gradients of inputs in "backward" and those of matrices in "weight".
    """

    direction: Direction
    part: int
    micro_batch: int


Schedule = Callable[[int, int, int, int], Iterable[Pass]]
"""(stage, stages, chunks, micro-batches) -> the passes of a stage, each once; micro-batches start in order."""


# ---- schedules ----


def sequential(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Pass]:
    """Run one micro-batch after another, so that only one has activations."""
    parts = range(stage, stages * chunks, stages)
    for i in range(micro_batches):
        yield from (Pass("forward", part, i) for part in parts)
        yield from (Pass("backward", part, i) for part in reversed(parts))


def one_forward_one_backward(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """1F1B (PipeDream-flush, 2006.09503); with several chunks interleaved 1F1B (Megatron-LM, 2104.04473).

    Interleaving takes micro-batches in groups of ``stages``. The last group may be smaller: what is missing of it is
    left out of the schedule of a full one, which delays no other pass.
    """
    full = micro_batches if chunks == 1 else -(-micro_batches // stages) * stages
    forwards = list(_virtual(stage, stages, chunks, full))
    backwards = [Pass("backward", (chunks - 1) * stages + 2 * stage - part, i) for _, part, i in forwards]
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm = min(ahead, len(forwards))
    steady = [one for pair in zip(forwards[warm:], backwards) for one in pair]
    order = [*forwards[:warm], *steady, *backwards[len(forwards) - warm :]]
    return [one for one in order if one.micro_batch < micro_batches]


def _virtual(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the forward passes of a stage: chunk by chunk for each group of ``stages`` micro-batches."""
    for first in range(0, micro_batches, stages):
        group = range(first, min(first + stages, micro_batches))
        yield from (Pass("forward", chunk * stages + stage, i) for chunk in range(chunks) for i in group)


def zero_bubble(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """ZB-H1 (Qi et al., 2401.10241): 1F1B whose gradients of matrices fill the bubble.

    They follow by as many micro-batches as the stage is far from the first, so that no stage holds more activations
    than the first one does in 1F1B.
    """
    order, late = list[Pass](), deque[Pass]()
    for one in one_forward_one_backward(stage, stages, chunks, micro_batches):
        order.append(one)
        if one.direction == "backward":
            late.append(one._replace(direction="weight"))
            if len(late) > stage:
                order.append(late.popleft())
    return [*order, *late]


SCHEDULES: dict[str, Schedule] = {
    "sequential": sequential,
    "1f1b": one_forward_one_backward,
    "interleaved": one_forward_one_backward,
    "zero-bubble": zero_bubble,
}
"""Schedules by name."""
CHUNKS = {"interleaved": 2}
"""Parts on each stage; 1 where a schedule is not named."""


def chunks_of(schedule: str) -> int:
    """Return the parts on each stage under a schedule."""
    return CHUNKS.get(schedule, 1)


SPLIT = ("zero-bubble",)
"""Schedules with "weight" passes."""
Orders = tuple[tuple[Pass, ...], ...]
"""Passes of each stage."""


@lru_cache(64)
def passes(name: str, stages: int, chunks: int, micro_batches: int) -> Orders:
    """Return the passes of each stage. ScheduleError: unknown; a pass is missing, repeated or waits for ever.

    Each pair of stages exchanges hidden states (and gradients) in one order, so messages need no label.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not declared; there are {', '.join(SCHEDULES)}", key="schedule")
    orders = tuple(tuple(SCHEDULES[name](s, stages, chunks, micro_batches)) for s in range(stages))
    _check_passes(name, orders, chunks, micro_batches)
    _check_order(name, orders, stages * chunks)
    _check_channels(name, orders, stages * chunks)
    return orders


def needed(one: Pass, parts: int) -> Pass | None:
    """Return the pass whose result this one needs; None for the first part's forward pass."""
    direction, part, i = one
    if direction == "weight":
        return Pass("backward", part, i)
    if direction == "backward":
        return Pass("backward", part + 1, i) if part + 1 < parts else Pass("forward", part, i)
    return Pass("forward", part - 1, i) if part else None


def scoring(stages: int, chunks: int, micro_batches: int) -> Orders:
    """Return the forward passes of each stage for scores without gradients."""
    return tuple(tuple(_virtual(stage, stages, chunks, micro_batches)) for stage in range(stages))


def _check_passes(name: str, orders: Sequence[Sequence[Pass]], chunks: int, micro_batches: int) -> None:
    """Raise ScheduleError unless every pass is there once, on the stage of its part."""
    kinds: set[Direction] = {one.direction for order in orders for one in order} | {"forward", "backward"}
    for stage, order in enumerate(orders):
        parts = range(stage, len(orders) * chunks, len(orders))
        wanted = {Pass(kind, part, i) for kind in kinds for part in parts for i in range(micro_batches)}
        if len(set(order)) != len(order):
            twice = next(one for i, one in enumerate(order) if one in order[:i])
            raise ScheduleError(f"schedule {name!r}: stage {stage} has {twice} twice", key=f"{name}.order")
        if wrong := wanted.symmetric_difference(order):
            message = f"schedule {name!r}: {min(wrong)} is missing, or of no micro-batch or other stage than {stage}"
            raise ScheduleError(message, key=f"{name}.passes")


def _check_order(name: str, orders: Sequence[Sequence[Pass]], parts: int) -> None:
    """Raise ScheduleError if a stage waits for ever, or the first part does not take micro-batches in order."""
    done, places, moved = set[Pass](), [0] * len(orders), True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while places[stage] < len(order) and _ready(order[places[stage]], parts, done):
                done.add(order[places[stage]])
                places[stage] += 1
                moved = True
    for stage, (place, order) in enumerate(zip(places, orders)):
        if place < len(order):
            message = f"schedule {name!r}: stage {stage} waits for ever before {order[place]}, which comes too early"
            raise ScheduleError(message, key=f"{name}.order")


def _ready(one: Pass, parts: int, done: set[Pass]) -> bool:
    before = needed(one, parts)
    own = one.direction != "backward" or Pass("forward", one.part, one.micro_batch) in done
    first = one.direction != "forward" or not one.micro_batch or one._replace(micro_batch=one.micro_batch - 1) in done
    return own and first and (before is None or before in done)


def _check_channels(name: str, orders: Sequence[Sequence[Pass]], parts: int) -> None:
    """Raise ScheduleError unless messages from one stage to another come in the order in which that one needs them."""
    made = {one: (stage, at) for stage, order in enumerate(orders) for at, one in enumerate(order)}
    for stage, order in enumerate(orders):
        newest: dict[tuple[str, int], int] = {}
        for one in order:
            before = needed(one, parts)
            if before is None or one.direction == "weight" or made[before][0] == stage:
                continue
            source, at = made[before]
            if at < newest.get((one.direction, source), 0):
                message = f"schedule {name!r}: stage {source} sends {before} later than stage {stage} needs it"
                raise ScheduleError(message, key=f"{name}.channel")
            newest[one.direction, source] = at


# ---- what a schedule costs ----


def in_flight(name: str, stages: int, stage: int, micro_batches: int) -> int:
    """Return the greatest number of (part, micro-batch) whose activations a stage holds at the same time."""
    order = passes(name, stages, chunks_of(name), micro_batches)[stage]
    change = {"forward": 1, "backward": -1, "weight": 0}
    return max(accumulate(change[one.direction] for one in order), default=0)


def waiting(name: str, stages: int, stage: int, micro_batches: int) -> int:
    """Return the greatest number of (part, micro-batch) whose "weight" passes a stage still has to run when it begins a
    forward pass."""
    order = passes(name, stages, chunks_of(name), micro_batches)[stage]
    change = {"forward": 0, "backward": int(name in SPLIT), "weight": -1}
    left = accumulate((change[one.direction] for one in order), initial=0)
    return max((count for count, one in zip(left, order) if one.direction == "forward"), default=0)


# ---- parts of a model ----

ON_STAGES: dict[str, Placement] = {"pp": Replicate()}
"""Placement of a parameter along pp, on the mesh of the stages that hold it."""
_LAST = ("model.norm.", "lm_head.", "score.")
"""Parameters on the last stage."""


@dataclass(frozen=True)
class Stages:
    """Parts of a model over the stages of a pipeline."""

    count: int
    layers: tuple[range, ...]
    """Layers of each part; the first part has the embedding too, the last one the norm and the head."""
    tied: bool
    """The embedding is the head too: the first and the last part have it."""

    @property
    def chunks(self) -> int:
        """Parts on each stage."""
        return len(self.layers) // self.count

    def parts(self, stage: int) -> range:
        """Return the parts on a stage."""
        return range(stage, len(self.layers), self.count)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter."""
        last = self.count - 1
        if name.startswith("model.layers."):
            layer, count = int(name.split(".")[2]), self.layers[-1].stop
            if layer >= count:
                raise ScheduleError(f"no stage holds {name}: the model has layers 0 to {count - 1}", key=name)
            return (next(k for k, own in enumerate(self.layers) if layer in own) % self.count,)
        if name.startswith("model.embed_tokens."):
            return (0, last) if self.tied and last else (0,)
        if last and not name.startswith(_LAST):
            message = f"no stage of a pipeline holds {name}; its last one holds {', '.join(_LAST)} alone: use pp = 1"
            raise ScheduleError(message, key=name)
        return (last,)

    def holds(self, part: int, name: str) -> bool:
        """True if a part has a parameter."""
        if name.startswith("model.layers."):
            return int(name.split(".")[2]) in self.layers[part]
        first, last = part == 0, part == len(self.layers) - 1
        return first or (last and self.tied) if name.startswith("model.embed_tokens.") else last

    def mesh(self, mesh: Mesh, name: str) -> Mesh:
        """Return the mesh of the ranks that hold a parameter."""
        return mesh if self.count == 1 else mesh.only("pp", self.holders(name))


@lru_cache(256)
def stages_of(shape: DecoderShape, count: int, schedule: str, *, value: bool = False) -> Stages:
    """Divide a model over stages so that the slowest part is as fast as can be. value: it has no output head.

    ScheduleError if there are more parts than layers.
    """
    parts = count * chunks_of(schedule) if count > 1 else 1
    if misfit_stages(shape.num_layers, count, schedule):
        raise ScheduleError(misfit_stages(shape.num_layers, count, schedule), key="layout.pp")
    tied = shape.tie_embeddings and not value
    return Stages(count, tuple(_balanced(layer_costs(shape, value=value), parts)), tied)


def misfit_stages(layers: int, count: int, schedule: str) -> str:
    """Describe why so many layers cannot be divided; "" if they can."""
    parts = count * chunks_of(schedule) if count > 1 else 1
    if parts <= layers:
        return ""
    most = max(layers // chunks_of(schedule), 1)
    under = f" with pp_schedule = {schedule}, {chunks_of(schedule)} parts a stage," if parts > count else ""
    return f"layout.pp = {count}{under} needs {parts} layers, the model has {layers}: pp may be 1 to {most}"


@lru_cache(64)
def layer_costs(shape: DecoderShape, *, value: bool = False) -> tuple[float, ...]:
    """Return the cost of each layer: elements of its matrices that a token meets, which are multiplications of it.

    It meets some of the experts. The last layer has the head in addition, which is a matrix even where it is the
    embedding; looking up an embedding costs a row.
    """
    sizes, costs = parameter_shapes(shape, value=value), [0.0] * shape.num_layers
    for name, size in sizes.items():
        row = rule_of(shape.table + VALUE_HEAD, name)
        if name.startswith("model.layers.") and row.kind in ("matrix", "router"):
            costs[int(name.split(".")[2])] += prod(size[1:]) * (shape.experts_per_token if row.stacked else size[0])
    costs[0] += shape.hidden_size
    costs[-1] += shape.hidden_size * (1 if value else shape.vocab_size)
    return tuple(costs)


def _balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Divide layers into neighbours, at least one each, so that the costliest part costs least."""
    total = [0.0, *accumulate(costs)]
    n = len(costs)
    best: list[list[tuple[float, int]]] = [[(total[end], 0) for end in range(n + 1)]]
    for k in range(1, parts):
        row = [(float("inf"), 0)] * (n + 1)
        for end in range(k + 1, n + 1):
            row[end] = min((max(best[-1][cut][0], total[end] - total[cut]), cut) for cut in range(k, end))
        best.append(row)
    ends = [n]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    return [range(a, b) for a, b in pairwise([0, *reversed(ends)])]
