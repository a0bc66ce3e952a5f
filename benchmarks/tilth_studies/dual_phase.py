"""Dual-phase replay: find faulty machines by two rounds of group tests (ByteRobust, arXiv 2509.16293, section 5).

``guard_replay`` runs it on a step of a stored run.

z = m n machines replay a step twice, each time in n groups of m: first neighbours (x // m), then every n-th machine
(x mod n). For m <= n two machines share at most one of their groups, so one faulty machine is where its groups meet.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilth.core.errors import ArgumentError
from tilth.guard.verdict import Verdict

MAJORITY = 3
"""Groups of a phase from which on one wrong one can be told from the right ones."""


@dataclass(frozen=True)
class GroupResult:
    """Result of one group's replay. bits: of state and metrics after the step, equal for equal computation."""

    bits: str
    finite: bool = True
    about: str = ""
    """What the run said about the step: its metrics and warnings, or the error that ended it."""
    error: bool = False


@dataclass(frozen=True)
class DualPhase:
    """Groups of both phases. size: m, machines in a group; groups: n, groups of a phase."""

    size: int
    groups: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.groups:
            raise ArgumentError(
                f"groups of {self.size} machines, {self.groups} of them: a group may be at most as large as there are "
                "groups, and at least 1",
                key="size",
            )

    @classmethod
    def of(cls, machines: int, least: int = 1) -> "DualPhase":
        """Return the plan with the largest groups of a multiple of ``least`` machines (that hold a model), of which
        there are at least MAJORITY, or else as many as possible. ArgumentError if no group size divides the machines.
        """
        sizes = [m for m in range(least, machines + 1, least) if machines % m == 0 and m <= machines // m]
        if not sizes:
            message = (
                f"{machines} machines cannot be divided into equal groups of {least} or a multiple, at least as many"
            )
            raise ArgumentError(f"{message} groups as a group has machines; choose other ranks", key="ranks")
        enough = [m for m in sizes if machines // m >= MAJORITY]
        size = max(enough) if enough else min(sizes)
        return cls(size, machines // size)

    @property
    def machines(self) -> range:
        """Numbers of all machines."""
        return range(self.size * self.groups)

    def first(self) -> list[tuple[int, ...]]:
        """Return the groups of the first phase, which run at the same time."""
        return [tuple(x for x in self.machines if x // self.size == a) for a in range(self.groups)]

    def second(self) -> list[tuple[int, ...]]:
        """Return the groups of the second phase."""
        return [tuple(x for x in self.machines if x % self.groups == b) for b in range(self.groups)]

    def candidates(self, first: Collection[int], second: Collection[int]) -> tuple[int, ...]:
        """Return the machines that may be faulty, in order. first, second: groups of each phase whose replay failed.

        With one faulty machine there is one. With f of them up to f squared, the faulty ones among them; a fault that
        did not come back in one of the phases leaves machines out.
        """
        for phase, failed in (("first", first), ("second", second)):
            if strange := sorted(set(failed) - set(range(self.groups))):
                raise ArgumentError(f"{phase} phase: there is no group {strange[0]} of {self.groups}", key=phase)
        return tuple(x for x in self.machines if x // self.size in first and x % self.groups in second)


def judge(
    plan: DualPhase,
    first: Sequence[GroupResult],
    second: Sequence[GroupResult],
    ranks: Sequence[int],
    recorded: bool | None,
) -> Verdict | None:
    """Decide between device and data by the outcomes of both phases; None if nothing is wrong.

    All groups have the same work in the same layout, so what differs is a device. ranks: of the machines by number.
    recorded: True if a replay by all of them gives what the run recorded; None if that is not known.
    """
    (usual, most), *others = Counter(outcome.bits for outcome in (*first, *second)).most_common()
    if others and 2 * most <= len(first) + len(second):
        evidence = "the replays of a step differ between groups of workers, and no majority tells which are right"
        return Verdict("corruption", tuple(ranks), evidence, {"cause": "device", "majority": False})
    wrong, again = ([i for i, one in enumerate(phase) if one.bits != usual] for phase in (first, second))
    if wrong or again:
        return _devices(plan, wrong, again, ranks)
    if not first[0].finite:
        evidence = "every worker computes what is not finite, the same bits: the data or the recipe make it"
        return Verdict("not-finite", (), f"{evidence}; {first[0].about}".rstrip("; "), {"cause": "data"})
    if recorded is False:
        evidence = "all replays agree, with each other and not with the record: a fault of a device that has gone"
        return Verdict("corruption", (), evidence, {"cause": "device"})
    return None


def _devices(plan: DualPhase, first: list[int], second: list[int], ranks: Sequence[int]) -> Verdict:
    """Return the verdict on groups that computed other bits than most."""
    named = plan.candidates(first, second) if first and second else ()
    if named:
        found, again = named, "in both phases"
    else:  # it came back in no other group
        groups = [plan.first()[i] for i in first] + [plan.second()[i] for i in second]
        found, again = tuple(sorted({x for group in groups for x in group})), "in one of two replays"
    listed = tuple(ranks[x] for x in found)
    words = f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
    evidence = f"groups with {words} compute other bits than most groups {again}: a device, not the data"
    return Verdict("corruption", listed, evidence, {"cause": "device", "majority": True, "again": bool(named)})
