"""Transfer protocol: how a call on a worker group is split over its ranks, and how the answers are gathered.

A role's method declares it in a decorator, in terms of the mesh's axes (HybridFlow, arXiv 2409.19256, section 4.1;
verl's N-d mesh). ``deal`` and ``gather`` are pure functions of tables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from tilth.core.batch import Batch, Column, concat
from tilth.core.errors import ArgumentError
from tilth.core.layout import Mesh
from tilth.plan.batch import (
    BatchPlan,
    MicroBatchLimits,
    RankLoad,
    RowTable,
    plan_batch,
)

Split = Literal["rows", "plan", "all", "each"]
Gather = Literal["rows", "first", "merge", "all"]
Divide = Callable[[Batch, int], Sequence[np.ndarray]]
"""(batch, parts) -> row indices of each part; every row belongs to one part, a part may be empty."""
Method = TypeVar("Method", bound=Callable[..., Any])
ATTRIBUTE = "__tilth_transfer__"
ADDED = ("row", "start")
"""Row columns that ``deal`` adds to a part of a batch and ``gather`` drops."""


@dataclass(frozen=True)
class Transfer:
    """Declaration of ``transfer``."""

    split: Split
    gather: Gather
    over: tuple[str, ...] = ()
    control: bool = False
    """True: answered at once, beside the calls."""
    patient: bool = False
    """True: it waits for a disk or for other processes, so that nothing may progress for longer than
    ``guard.hang_after``."""
    reads: bool = False
    """True: it leaves the state of its role as it is, so that a recovery after it need not load the role again."""
    mask: str = "mask"
    """Payload column of the mask that it learns from or scores; where a batch lacks it, "mask"."""
    dropout: bool = False
    """True: it learns with the dropout of the model."""
    limits: MicroBatchLimits | None = None
    """Limits of the role's micro-batches, for a plan."""


def control(method: Method) -> Method:
    """Declare a control method: ``group.method(**arguments)`` answers at once, also while a call runs, with a list in
    rank order. It runs in another thread than the calls; arguments and answer are JSON."""
    setattr(method, ATTRIBUTE, Transfer("all", "all", control=True))
    return method


def transfer(
    split: Split,
    gather: Gather,
    over: tuple[str, ...] = (),
    *,
    patient: bool = False,
    reads: bool = False,
    mask: str = "mask",
    dropout: bool = False,
) -> Callable[[Method], Method]:
    """Declare the transfer protocol of a role's method, which a call through a group needs.

    split: "rows": every Batch argument is divided over the ranks along ``over``, ranks along other axes get copies;
    "plan": so is the one Batch, by a plan of it (``plan.batch``) under the ``limits`` of the role, and each rank gets
    its part of the plan as the argument ``plan``; "all": every rank gets all; "each": every positional argument is a
    list with one item per rank of the mesh.
    gather: "rows": the collectors' Batches in the order of the whole batch; "first": the first rank's answer; "merge":
    the collectors' mappings as one (values with ``.merge`` are merged); "all": a list in rank order. over: axes of the
    mesh, by default those that split rows. Collectors are the ranks with coordinate 0 along every other axis. patient:
    True for a method that waits for a disk or for other processes. reads: True for one that leaves the state of its
    role, what a checkpoint holds of it, as it is. mask, dropout: see ``Transfer``.
    """

    for name, given, known in (("split", split, get_args(Split)), ("gather", gather, get_args(Gather))):
        if given not in known:
            raise ArgumentError(f"{name}={given!r} is not one of {', '.join(known)}", key=name)

    def mark(method: Method) -> Method:
        setattr(method, ATTRIBUTE, Transfer(split, gather, over, False, patient, reads, mask, dropout))
        return method

    return mark


def transfer_of(method: Callable[..., Any]) -> Transfer | None:
    """Return the declared protocol; None without one."""
    found: Transfer | None = getattr(method, ATTRIBUTE, None)
    return found


def offered(role: object) -> dict[str, Transfer]:
    """Return the protocols of a role's methods by name."""
    found = {name: transfer_of(getattr(type(role), name, None)) for name in dir(type(role))}  # type: ignore[arg-type]
    return {name: _limited(protocol, role) for name, protocol in found.items() if protocol is not None}


def _limited(protocol: Transfer, role: object) -> Transfer:
    if protocol.split != "plan":
        return protocol
    limits = getattr(role, "limits", None)
    if limits is None:
        message = f"{type(role).__name__} has a method split by 'plan' and no attribute limits, a MicroBatchLimits"
        raise ArgumentError(f"{message}; set it, or split by 'rows'", key="limits")
    return replace(protocol, limits=limits)


class Arguments(NamedTuple):
    """Arguments of one rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Deal(NamedTuple):
    """One call, split over the ranks of a mesh."""

    arguments: list[Arguments]
    """By index in the mesh."""
    answers: list[bool]
    """True for ranks whose answers ``gather`` reads; the others need not send theirs."""
    rows: list[np.ndarray] | None
    """Row indices of each part in the whole batch, int64; None if no batch was split."""
    loads: list[RankLoad] | None = None
    """Planned work of each rank of the mesh in passes that learn; None without such passes."""


def evenly(batch: Batch, count: int) -> list[np.ndarray]:
    """Split into neighbouring rows; part sizes differ by at most one."""
    return np.array_split(np.arange(len(batch)), count)


def deal(
    how: Transfer,
    mesh: Mesh,
    divide: Divide,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan_rows: Callable[..., BatchPlan] = plan_batch,
) -> Deal:
    """Split the arguments of a call over the ranks of a mesh. plan_rows: ``plan_batch`` by some costs and balance.

    Raises ArgumentError for arguments that cannot be split as declared, AxisError for an unknown axis in ``over``.
    """
    over = how.over or mesh.over("rows")
    alike = [name for name in mesh.names if name not in over] if how.gather != "first" else mesh.names
    answers = [how.gather == "all" or not mesh.index(rank, *alike) for rank in mesh.ranks]
    if how.split == "each":
        return Deal(_each(len(mesh), args, kwargs), answers, None)
    count = mesh.size(*over)
    batches = [a for a in (*args, *kwargs.values()) if isinstance(a, Batch)]
    own: list[dict[str, Any]] = [{}] * count
    loads = None
    if how.split == "plan":
        plan, table = _planned(how, batches, mesh, count, plan_rows)
        divide, own = lambda *_: plan.rows, [{"plan": part} for part in plan.ranks]
        if not how.reads:
            each = [RankLoad.of(part.learn, table.take(mine)) for part, mine in zip(plan.ranks, plan.rows)]
            loads = [each[mesh.index(rank, *over)] for rank in mesh.ranks]
    if how.split == "all" or count == 1:
        return Deal([Arguments(tuple(args), {**kwargs, **own[0]})] * len(mesh), answers, None, loads)
    dealt, rows = [], _divided(batches, divide, count)
    for mine, more in zip(rows, own):
        named = {name: _part(a, mine) for name, a in kwargs.items()}
        dealt.append(Arguments(tuple(_part(a, mine) for a in args), named | more))
    return Deal([dealt[mesh.index(rank, *over)] for rank in mesh.ranks], answers, rows, loads)


def _each(ranks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Arguments]:
    for argument in args:
        if len(argument) != ranks:
            message = f"an argument split by 'each' has {len(argument)} items; the mesh has {ranks} ranks"
            raise ArgumentError(message, key="args")
    return [Arguments(tuple(a[i] for a in args), dict(kwargs)) for i in range(ranks)]


def _planned(
    how: Transfer, batches: Sequence[Batch], mesh: Mesh, count: int, plan_rows: Callable[..., BatchPlan]
) -> tuple[BatchPlan, RowTable]:
    if how.limits is None or len(batches) != 1:
        message = f"a call split by 'plan' takes one batch and the role's limits, not {len(batches)} and {how.limits}"
        raise ArgumentError(message, key="plan")
    (batch,), limits = batches, how.limits
    table = RowTable.of_batch(batch, how.mask if how.mask in batch.payload else "mask", digests=limits.share)
    groups, ranks = batch.rows.get("group"), {"units": mesh.units, "stages": mesh.count("layers")}
    return plan_rows(table, groups, count, limits, dropout=how.dropout, **ranks), table


def _divided(batches: Sequence[Batch], divide: Divide, count: int) -> list[np.ndarray]:
    """Divide all batches of a call alike, so that their rows stay together."""
    lengths = {len(batch) for batch in batches}
    if len(lengths) != 1:
        message = f"a call split by rows has batches of {sorted(lengths)} rows; it needs one number of rows"
        raise ArgumentError(message, key="batch")
    if taken := [name for name in ADDED if any(name in batch.rows for batch in batches)]:
        message = f"the row column {taken[0]!r} is kept for the split of a batch; give it another name"
        raise ArgumentError(message, key=taken[0])
    rows = [np.asarray(r, np.int64) for r in divide(batches[0], count)]
    if len(rows) != count or not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(batches[0]))):
        message = f"a division of {len(batches[0])} rows into {count} parts must hold every row once"
        raise ArgumentError(message, key="divide")
    return rows


def _part(argument: Any, rows: np.ndarray) -> Any:
    if not isinstance(argument, Batch):
        return argument
    added = {"row": rows}
    if "length" in argument.rows:
        lengths = argument["length"].astype(np.int64)
        added["start"] = (np.cumsum(lengths) - lengths)[rows]
    part = argument.select(rows).with_rows(**added)
    return part.with_payload(**{name: _pruned(column) for name, column in part.payload.items()})


def _pruned(column: Column) -> Column:
    """Drop the handles that no row needs. Without rows one handle stays, for the dtype of the values."""
    if not len(column.part):
        return Column(column.handles[:1], column.part, column.row)
    used, part = np.unique(column.part, return_inverse=True)
    return Column(tuple(column.handles[i] for i in used), part.astype(column.part.dtype), column.row)


def gather(how: Transfer, dealt: Deal, values: Sequence[Any]) -> Any:
    """Combine the ranks' answers (by index in the mesh; those that ``dealt.answers`` leaves out are not read)."""
    answers = [value for value, wanted in zip(values, dealt.answers) if wanted]
    match how.gather:
        case "all":
            return answers
        case "rows":
            return answers[0] if len(answers) == 1 else _in_order(answers, dealt.rows)
        case "merge":
            return answers[0] if len(answers) == 1 else _merged(answers)
        case _:
            return answers[0]


def _in_order(answers: Sequence[Batch], rows: Sequence[np.ndarray] | None) -> Batch:
    filled = [i for i, answer in enumerate(answers) if len(answer)] or [0]
    whole = concat([answers[i] for i in filled])
    if rows is None:
        return whole
    order = np.concatenate([_places(answers[i], rows[i]) for i in filled])
    plain = Batch({name: v for name, v in whole.rows.items() if name not in ADDED}, whole.payload)
    return plain.select(np.argsort(order, kind="stable"))


def _places(answer: Batch, sent: np.ndarray) -> np.ndarray:
    """Return the row indices of an answer in the whole batch: its ``row`` column, else the order of sending."""
    if "row" in answer.rows:
        return answer["row"]
    if len(answer) != len(sent):
        message = f"{len(sent)} rows were sent and {len(answer)} came back without their column 'row': keep it"
        raise ArgumentError(message, key="row")
    return sent


def _merged(answers: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    whole: dict[Any, Any] = {}
    for answer in answers:
        for key, value in answer.items():
            whole[key] = _both(key, whole[key], value) if key in whole else value
    return whole


def _both(key: Any, mine: Any, other: Any) -> Any:
    if hasattr(mine, "merge"):
        return mine.merge(other)
    if mine is not other and not np.all(mine == other):
        message = f"two ranks answer {key!r} with different values, {mine!r} and {other!r}, that have no merge"
        raise ArgumentError(message, key=str(key))
    return mine
