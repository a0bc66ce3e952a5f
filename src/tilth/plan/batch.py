"""Plan of a batch: rows to ranks, and the rows of each rank to micro-batches, with the predicted cost of each.

Samples with the same prompt may be computed as a tree, their prompt once. Where ranks divide rows and tokens together,
a micro-batch is a unit of one or more of them (``plan.schedule``). A plan needs the length of each row, and the
length and digest of its prompt, never the tokens themselves, so the controller makes it for all ranks.
"""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tilth.core.batch import Batch, Jagged
from tilth.core.errors import ArgumentError, PlanError
from tilth.plan.offload import OffloadLimits, ratios
from tilth.plan.packing import divide, micro_batches
from tilth.plan.schedule import Balance, Rounds, schedule

WORTH = 0.9
"""Largest share of the tokens that may remain for prompt sharing to be worth a separate micro-batch."""
COPIES = 4
"""Samples per prompt token of memory: the keys and values of a prompt are copied to each of its samples."""
PLANNED = {"mask": ("prefix", "prefix_digest"), "kept": ("kept_prefix", "kept_prefix_digest")}
"""Payload column with a mask -> row columns of the prompts before its first tokens: ``prefixes`` and ``digests`` of
``RowTable``."""
RowCosts = Callable[[np.ndarray], np.ndarray]
"""Lengths [n] -> cost of each sequence, float64 [n]."""


def token_costs(lengths: np.ndarray) -> np.ndarray:
    """Return the tokens of each sequence as its cost."""
    return lengths.astype(np.float64)


def prompt_lengths(mask: Jagged) -> np.ndarray:
    """Return the tokens before the first one that the policy chose: int64 [n]; the length if it chose none."""
    chosen = np.append(np.flatnonzero(mask.values), len(mask.values))
    first = chosen[np.searchsorted(chosen, mask.offsets[:-1])]
    return np.minimum(first, mask.offsets[1:]) - mask.offsets[:-1]


class RowTable(NamedTuple):
    """Columns that a plan is made from, int64 [n] each."""

    lengths: np.ndarray
    prefixes: np.ndarray
    """Tokens of the prompt, which other rows may share; 0 for a row of several conversations, which shares nothing."""
    digests: np.ndarray
    """64-bit digest of these tokens."""

    @classmethod
    def of(
        cls, tokens: Jagged, mask: np.ndarray, opens: np.ndarray | None = None, *, digests: bool = True
    ) -> "RowTable":
        """Make the table of packed rows. opens: [N], 1 where a further conversation of a row begins. digests: False
        leaves them 0, for a plan that shares nothing."""
        prefixes = prompt_lengths(Jagged(mask, tokens.offsets))
        if opens is not None:
            prefixes[np.searchsorted(tokens.offsets, np.flatnonzero(opens), side="right") - 1] = 0
        found = np.zeros(len(prefixes), np.int64)
        if digests:
            found[:] = [_digest(tokens.values[a : a + n]) for a, n in zip(tokens.offsets, prefixes)]
        return cls(tokens.lengths, prefixes, found)

    @classmethod
    def of_batch(cls, batch: Batch, mask: str, *, digests: bool) -> "RowTable":
        """Read the table from the row columns of a batch. mask: name of the mask's payload column.

        Raises ArgumentError for a column that is missing.
        """
        needed = ("length", *PLANNED[mask]) if digests else ("length",)
        if missing := [name for name in needed if name not in batch.rows]:
            message = f"a call is planned from the row columns {', '.join(needed)}, and the batch has no {missing[0]!r}"
            how = "it is the number of tokens" if missing[0] == "length" else f"RowTable.columns({mask!r}) makes it"
            raise ArgumentError(f"{message}; {how}", key=missing[0])
        found = [batch[name].astype(np.int64) for name in needed]
        return cls(*found, *[np.zeros(len(batch), np.int64)] * (3 - len(found)))

    def columns(self, mask: str = "mask") -> dict[str, np.ndarray]:
        """Return the row columns that the controller plans from, beside ``length``; mask: name of the mask's column."""
        prefix, digest = PLANNED[mask]
        return {prefix: self.prefixes.astype(np.int32), digest: self.digests}

    def take(self, rows: np.ndarray) -> "RowTable":
        """Select rows."""
        return RowTable(*(column[rows] for column in self))

    def check(self, rows: np.ndarray, *, shared: bool) -> int:
        """Return a checksum of what a micro-batch of these rows depends on."""
        columns = self.take(rows) if shared else (self.lengths[rows],)
        return zlib.crc32(np.concatenate(columns).astype(np.int64).tobytes())


def _digest(tokens: np.ndarray) -> int:
    data = np.ascontiguousarray(tokens, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits of the micro-batches of one model."""

    tokens: int
    """Most tokens of a micro-batch; a longer row is alone."""
    share: bool = False
    """True: rows with the same prompt may be computed as one tree."""
    several: bool = False
    """True: a pass that learns has two micro-batches or more, unless there is one row."""
    dropout: bool = False
    """True: the model has dropout, under which each row has a mask of its own and no prompt is shared."""
    offload: float | OffloadLimits = 0.0
    """Share of the activations' rows that moves to the host, or what decides it for more than ``tokens``."""
    in_step: bool = False
    """True: ranks that share a micro-batch run equally many before it, blanks where they have none."""

    def moved(self, tokens: int) -> float:
        """Return the share of the activations' rows of a micro-batch that moves to the host."""
        if not isinstance(self.offload, OffloadLimits):
            return self.offload
        return float(ratios(np.array([tokens]), 1, self.tokens, self.offload)[0])


NONE = np.zeros(0, np.int64)


class PlannedMicroBatch(NamedTuple):
    """Rows of one micro-batch, as indices into those of its rank; a blank has none."""

    groups: tuple[np.ndarray, ...]
    shared: bool
    """True if the rows of each group share their prompt."""
    cost: float
    """Predicted, in the unit of the costs that the plan was made with."""
    check: int
    """``RowTable.check`` of its rows."""
    offload: float = 0.0
    """Share of the activations' rows that moves to the host."""
    ranks: tuple[int, ...] = ()
    """Ranks that divide its tokens, ascending along the axis; (): this one alone. The first has the rows, in ``groups``
    of the others there are none."""
    lengths: np.ndarray = NONE
    """Tokens of each row, int64, where several ranks divide them."""

    @property
    def several(self) -> bool:
        """True if it is of several ranks."""
        return len(self.ranks) > 1

    @property
    def rows(self) -> np.ndarray:
        """Rows of all groups, in the order in which they are packed."""
        return np.concatenate(self.groups)


MicroBatches = tuple[PlannedMicroBatch, ...]


class MicroBatchPlan(NamedTuple):
    """Micro-batches of one rank's rows: of passes without a gradient, and of those that learn."""

    score: MicroBatches
    learn: MicroBatches


class RankLoad(NamedTuple):
    """Work of one rank's micro-batches: float64 [m] each."""

    cost: np.ndarray
    """As of ``PlannedMicroBatch``."""
    tokens: np.ndarray
    squares: np.ndarray
    """Sum of squared lengths; a shared prompt counts once."""

    @classmethod
    def of(cls, micros: MicroBatches, table: RowTable) -> "RankLoad":
        """Count the work of micro-batches. table: of their rank's rows."""
        amounts = np.array([_amounts(micro, table) for micro in micros]).reshape(len(micros), 2)
        return cls(np.array([micro.cost for micro in micros]), *amounts.T)


def _amounts(micro: PlannedMicroBatch, table: RowTable) -> tuple[float, float]:
    """Return the tokens and squares of a rank's part of a micro-batch; a blank has none."""
    lengths = (micro.lengths if micro.several else table.lengths[micro.rows]).astype(np.float64)
    share = 1 / max(1, len(micro.ranks))
    tokens, squares = share * float(lengths.sum()), share * float((lengths**2).sum())
    for group in micro.groups if micro.shared else ():
        prompt, again = float(table.prefixes[group[0]]), len(group) - 1
        tokens, squares = tokens - again * prompt, squares - again * prompt**2
    return tokens, squares


class BatchPlan(NamedTuple):
    """Rows of each rank, int64 indices into the batch, and what each rank does with them."""

    rows: tuple[np.ndarray, ...]
    ranks: tuple[MicroBatchPlan, ...]


def plan_batch(
    table: RowTable,
    groups: np.ndarray | None,
    ranks: int,
    limits: MicroBatchLimits,
    *,
    dropout: bool = False,
    costs: RowCosts = token_costs,
    units: int = 1,
    stages: int = 1,
    balance: Balance = "tokens",
    ring: float = 0.0,
) -> BatchPlan:
    """Plan a batch for ``ranks`` ranks that divide its rows.

    groups: [n], rows with the same number stay on one rank as far as balance allows (``packing.divide``). dropout: True
    for passes with the dropout of the model. balance: by "cost" each rank begins with its costliest micro-batch, so
    that those of one round are alike. units: neighbouring ranks that divide tokens too, ``limits.tokens`` each in a
    micro-batch. stages: of a pipeline. ring: cost of a token's way around these ranks. Of them ``schedule`` makes the
    plan, which raises PlanError for a row longer than they take together.
    """
    apart = ranks // units
    every = np.arange(len(table.lengths))
    rows = tuple(np.array_split(every, apart))
    if apart > 1 and balance != "none":
        rows = tuple(divide(costs(table.lengths), groups, apart))
    if units > 1:
        moved = limits.offload if isinstance(limits.offload, OffloadLimits) else None
        how: dict[str, Any] = {"ranks": units, "costs": costs, "balance": balance, "stages": stages, "offload": moved}
        scheduled = partial(schedule, capacity=limits.tokens, ring=ring, **how)
        parts = [part for some in rows for part in _in_units(table, some, limits, units, scheduled)]
        return BatchPlan(tuple(some for some, _ in parts), tuple(plan for _, plan in parts))
    plan = partial(plan_rows, limits=limits, dropout=dropout, costs=costs, costliest_first=balance == "cost")
    return BatchPlan(rows, tuple(plan(table.take(r)) for r in rows))


def _in_units(
    table: RowTable, rows: np.ndarray, limits: MicroBatchLimits, units: int, scheduled: Callable[[np.ndarray], Rounds]
) -> list[tuple[np.ndarray, MicroBatchPlan]]:
    """Plan rows for neighbouring ranks: the rows that each one has, and its micro-batches in the order of rounds."""
    rounds = scheduled(table.lengths[rows])
    if isinstance(limits.offload, float):
        rounds = [[unit._replace(offload=limits.offload) for unit in units] for units in rounds]
    in_step = limits.in_step and any(len(unit.ranks) > 1 for units in rounds for unit in units)
    return [_of_rank(table, rows, rounds, rank, in_step=in_step) for rank in range(units)]


def _of_rank(
    table: RowTable, rows: np.ndarray, rounds: Rounds, rank: int, *, in_step: bool
) -> tuple[np.ndarray, MicroBatchPlan]:
    """Return the rows that a rank has, and its micro-batches; in_step: with a blank in each round without one."""
    own = [unit.rows for units in rounds for unit in units if unit.ranks[0] == rank]
    had, micros = np.sort(np.concatenate([NONE, *own])), list[PlannedMicroBatch]()
    for units in rounds:
        here = [unit for unit in units if rank in unit.ranks]
        micros += [PlannedMicroBatch((NONE,), False, 0.0, table.check(NONE, shared=False))] * (in_step and not here)
        for unit in here:
            group, check = NONE, table.check(rows[unit.rows], shared=False)
            if unit.ranks[0] == rank:
                group = np.searchsorted(had, unit.rows)
            micro = PlannedMicroBatch((group,), False, float(unit.cost), check, unit.offload)
            if len(unit.ranks) > 1:
                micro = micro._replace(ranks=unit.ranks, lengths=table.lengths[rows[unit.rows]])
            micros.append(micro)
    return rows[had], MicroBatchPlan(tuple(micros), tuple(micros))


def plan_rows(
    table: RowTable,
    limits: MicroBatchLimits,
    *,
    dropout: bool = False,
    costs: RowCosts = token_costs,
    costliest_first: bool = False,
) -> MicroBatchPlan:
    """Plan the micro-batches of one rank. Nothing is shared on a rank with a row of several conversations."""
    share = limits.share and not ((table.prefixes == 0) & (table.lengths > 0)).any()
    score = learn = _split(table, limits, limits.tokens, costs, share=share)
    if share and dropout and limits.dropout:
        learn = _split(table, limits, limits.tokens, costs, share=False)
        share = False
    most, total = limits.tokens, int(table.lengths.sum())
    while limits.several and len(learn) == 1 and len(table.lengths) > 1 and most > 1:
        most = min(most, total) // 2
        learn = _split(table, limits, most, costs, share=share)
    if costliest_first:
        score, learn = (tuple(sorted(micros, key=lambda micro: -micro.cost)) for micros in (score, learn))
    return MicroBatchPlan(score, learn)


def _split(table: RowTable, limits: MicroBatchLimits, most: int, costs: RowCosts, *, share: bool) -> MicroBatches:
    """Split into micro-batches of at most ``most`` tokens; those with trees come first, if trees save enough."""
    lengths, prefixes = table.lengths, table.prefixes
    shared = [group for group in prefix_groups(table, most) if len(group) > 1] if share else []
    sizes = np.array([lengths[g].sum() - (len(g) - 1) * prefixes[g[0]] for g in shared], np.int64)
    in_trees = np.concatenate(shared) if shared else np.zeros(0, np.int64)
    if sizes.sum() > WORTH * lengths[in_trees].sum():
        shared, sizes, in_trees = [], sizes[:0], in_trees[:0]
    alone = np.setdiff1d(np.arange(len(lengths)), in_trees)
    sizes = np.maximum(sizes, np.array([lengths[g].sum() // COPIES for g in shared], np.int64))
    found = [(tuple(shared[u] for u in units), True, sizes[units]) for units in micro_batches(sizes, most)]
    found += [((alone[rows],), False, lengths[alone[rows]]) for rows in micro_batches(lengths[alone], most)]
    whole, once = costs(lengths), costs(prefixes)
    return tuple(
        PlannedMicroBatch(
            groups,
            trees,
            float(sum(whole[g].sum() - trees * (len(g) - 1) * once[g[0]] for g in groups)),
            table.check(np.concatenate(groups), shared=trees),
            limits.moved(int(tokens.sum())),
        )
        for groups, trees, tokens in found
    )


def prefix_groups(table: RowTable, most: int) -> list[np.ndarray]:
    """Group rows with the same prompt, up to trees of ``most`` tokens."""
    groups: list[list[int]] = []
    newest: dict[tuple[int, int], tuple[int, int]] = {}  # prompt -> (its open group, tokens of that tree)
    for row, (length, prefix, digest) in enumerate(zip(*(column.tolist() for column in table))):
        group, size = newest.get((prefix, digest), (-1, most))
        if prefix == length or size + length - prefix > most:
            groups.append([])
            group, size = len(groups) - 1, prefix
        groups[group].append(row)
        newest[prefix, digest] = group, size + length - prefix
    return [np.array(g, np.int64) for g in groups]


def check_plan(plan: Sequence[PlannedMicroBatch], table: RowTable) -> None:
    """Raise PlanError unless a plan has each of these rows once, and was made from their lengths and prompts."""
    rows = np.concatenate([np.zeros(0, np.int64), *(micro.rows for micro in plan)])
    if not np.array_equal(np.sort(rows), np.arange(len(table.lengths))):
        message = f"the plan has {len(rows)} rows, not each of the {len(table.lengths)} of this rank once"
        raise PlanError(f"{message}; make it from the batch of the call", key="plan.rows")
    for number, micro in enumerate(plan):
        elsewhere = micro.several and not len(micro.rows)
        if not elsewhere and micro.check != table.check(micro.rows, shared=micro.shared):
            raise PlanError(
                f"micro-batch {number} of the plan was made from other lengths or prompts than those of its "
                f"{len(micro.rows)} rows: the row columns of a batch must follow its tokens and mask",
                key=f"plan.{number}",
            )
