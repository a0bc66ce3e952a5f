"""Consolidation of long tails: which replicas hand their last trajectories to others of the same version. Of what ends,
``due_groups`` are those that an update takes.

Algorithm 1 of Laminar, arXiv 2510.12633, as its notes describe it. Memory of keys and values grows while a replica
admits, stays while rows wait, and falls once nothing waits: the fall is the tail, and needs no threshold. Replicas in
their tail are emptied into each other by best fit, so that the emptied ones pull the newest weights and begin again.

Where it differs: use of memory is compared with its peak since the last admission, not with the sample before, because
the rows that are left still grow; and rows that can end soon stay, as a move computes their prefix again.
"""

from collections.abc import Sequence
from typing import NamedTuple


class ReplicaLimits(NamedTuple):
    """Capacity of one replica."""

    tokens: int
    """Tokens of keys and values."""
    rows: int
    """Rows up to which a decode step takes no longer than that of one: the roofline's bound."""

    def hold(self, tokens: int, rows: int) -> bool:
        """Return True if a replica can hold so many."""
        return tokens <= self.tokens and rows <= self.rows


class LiveRow(NamedTuple):
    """Trajectory that decodes."""

    trajectory: int
    tokens: int
    """Tokens of keys and values, those of the prompt among them."""
    left: int
    """Most tokens that it may still generate."""


class ReplicaLoad(NamedTuple):
    """State of one replica."""

    version: int
    """Weights that it generates with."""
    rows: tuple[LiveRow, ...]
    waiting: int
    """Rows that it has been given and that wait for room."""
    peak: int
    """Most tokens of keys and values that it has held since it was last given rows."""

    @property
    def tokens(self) -> int:
        """Tokens of keys and values that it holds."""
        return sum(row.tokens for row in self.rows)

    def idle(self, limits: ReplicaLimits) -> bool:
        """Return True in its tail: nothing waits, memory has fallen, and a decode step has room for more rows."""
        falls = self.tokens < min(limits.tokens, self.peak)
        return not self.waiting and falls and 0 < len(self.rows) < limits.rows


class TailMove(NamedTuple):
    """Trajectories that one replica stops and another one resumes."""

    source: int
    target: int
    """Indices of replicas. No source is a target."""
    trajectories: tuple[int, ...]


def repack(replicas: Sequence[ReplicaLoad], limits: ReplicaLimits, *, stay: int = 0) -> list[TailMove]:
    """Plan moves that empty as many replicas as best fit does; the least loaded goes first, into the fullest that fits.

    stay: a row that may generate at most so many tokens more stays where it is. A target holds what ``limits`` allows,
    with all that is planned onto it. Replicas of one version exchange rows, of different versions never.
    """
    idle = [index for index, replica in enumerate(replicas) if replica.idle(limits)]
    tokens = {index: replicas[index].tokens for index in idle}
    rows = {index: len(replicas[index].rows) for index in idle}
    moves, targets = list[TailMove](), set[int]()
    for source in sorted(idle, key=lambda index: (tokens[index], index)):
        moved = [row for row in replicas[source].rows if row.left > stay]
        if source in targets or not moved:
            continue
        size = sum(row.tokens for row in moved)
        fitting = [
            index
            for index in tokens
            if index != source
            and replicas[index].version == replicas[source].version
            and limits.hold(tokens[index] + size, rows[index] + len(moved))
        ]
        if not fitting:
            continue
        target = max(fitting, key=lambda index: (tokens[index], -index))
        tokens[target] += size
        rows[target] += len(moved)
        targets.add(target)
        del tokens[source]  # an emptied replica takes no rows
        moves.append(TailMove(source, target, tuple(row.trajectory for row in moved)))
    return moves


def due_groups(left: Sequence[int | None], ready: Sequence[int], count: int, batch: int) -> list[int]:
    """Return the indices of groups that an update takes; none while it has to wait for some.

    left: updates that each group may still wait, None: any number; ready: those that have ended, in the order in which
    they are taken; count: that it takes, and batch: that each later one takes. It leaves no more groups than later ones
    can take before these reach their bound.
    """
    chosen, bounds = list[int](), {one for one in left if one is not None}
    for slack in sorted(bounds):
        urgent = {i for i, own in enumerate(left) if own is not None and own <= slack}
        need = len(urgent) - max(slack, 0) * batch - sum(i in urgent for i in chosen)
        more = [i for i in ready if i in urgent and i not in chosen][: max(need, 0)]
        if len(more) < need:
            return []
        chosen += more
    chosen += [i for i in ready if i not in chosen][: max(0, count - len(chosen))]
    return chosen if len(chosen) >= count else []
