"""Dual-phase replay: find faulty machines by two rounds of group tests (ByteRobust, arXiv 2509.16293, section 5).

z = m n machines replay a step twice, each time in n groups of m: first neighbours (x // m), then every n-th machine
(x mod n). For m <= n two machines share at most one of their groups, so one faulty machine is where its groups meet.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tilth.core.errors import ArgumentError


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


def failed_groups(groups: Collection[Collection[int]], faulty: Collection[int]) -> list[int]:
    """Return the numbers of the groups with a faulty machine: what a replay would find."""
    return [number for number, group in enumerate(groups) if set(group) & set(faulty)]
