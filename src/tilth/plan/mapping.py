"""Mapping search: which roles share devices, how many devices each pool has, which layout each role takes.

Algorithm 1 of HybridFlow (arXiv 2409.19256): over all set partitions of the roles, over all splits of the devices that
give each pool at least its minimum allocation. A stage of a step lasts as long as its slowest pool, whose roles take
turns; a step is the sum of its stages. Where the paper keeps one layout per role and size, all layouts stay that no
other one beats in every stage and in memory, so that the result equals brute force.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Option(NamedTuple):
    """One layout of a role on a number of devices, and what it costs."""

    layout: Any
    seconds: tuple[float, ...]
    """Of each stage."""
    held: int
    """Bytes of each device, permanent."""
    training: int = 0
    generation: int = 0
    """Bytes during a micro-batch and during an engine step, of which only the larger exists beside other roles'."""
    rows: int = 0
    """Sequences that an engine decodes together; 0: as the recipe has it."""


Options = Callable[[str, int, frozenset[str]], Sequence[Option]]
"""(role, devices, roles of its pool) -> its layouts."""


class PoolChoice(NamedTuple):
    """Roles that share devices, with the layout of each."""

    roles: tuple[str, ...]
    devices: int
    options: tuple[Option, ...]
    seconds: tuple[float, ...]
    """Of each stage, in which the roles take turns."""
    held: int
    training: int
    generation: int

    @property
    def memory(self) -> int:
        """Bytes of each device at the peak, without the base."""
        return self.held + max(self.training, self.generation)

    def joined(self, role: str, option: Option) -> "PoolChoice":
        """Return the pool with one more role."""
        seconds = tuple(a + b for a, b in zip(self.seconds, option.seconds)) if self.roles else option.seconds
        working = max(self.training, option.training), max(self.generation, option.generation)
        return PoolChoice(
            (*self.roles, role), self.devices, (*self.options, option), seconds, self.held + option.held, *working
        )


class RoleMapping(NamedTuple):
    """Pools of a step, and how long it takes."""

    pools: tuple[PoolChoice, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each stage: of its slowest pool."""
        return tuple(map(max, zip(*(pool.seconds for pool in self.pools))))

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds)

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(pool.devices for pool in self.pools)

    @property
    def placement(self) -> frozenset[tuple[str, ...]]:
        """Roles of each pool."""
        return frozenset(pool.roles for pool in self.pools)


@dataclass(frozen=True)
class MappingProblem:
    """Roles to map onto at most ``devices`` devices of ``memory`` bytes each, of which ``base`` are taken.

    sizes: those that a pool may have, ascending. whole: no device may be left over.
    """

    roles: tuple[str, ...]
    options: Options
    sizes: tuple[int, ...]
    devices: int
    memory: int
    base: int = 0
    whole: bool = False
    limit: float = math.inf
    """Seconds that a pool's stages may take together."""
    found: dict[tuple[str, ...], tuple[PoolChoice, ...]] = field(default_factory=dict, compare=False, repr=False)

    def choices(self, roles: tuple[str, ...]) -> tuple[PoolChoice, ...]:
        """Return the pools of these roles that fit and that no other beats in every stage with no more devices."""
        if roles not in self.found:
            fits = [choice for n in self.sizes if n <= self.devices for choice in self._fitting(roles, n)]
            self.found[roles] = tuple(
                best(fits, lambda c: (*c.seconds, *((c.devices,) if not self.whole else (c.devices, -c.devices))))
            )
        return self.found[roles]

    def least(self, roles: tuple[str, ...]) -> int | None:
        """Return the minimum allocation of roles that share devices; None if they fit on no allowed number."""
        return min((choice.devices for choice in self.choices(roles)), default=None)

    def _fitting(self, roles: tuple[str, ...], devices: int) -> list[PoolChoice]:
        found, room = [PoolChoice((), devices, (), (), 0, 0, 0)], self.memory - self.base
        for role in roles:
            options = best(
                self.options(role, devices, frozenset(roles)), lambda o: (*o.seconds, o.held, o.training, o.generation)
            )
            more = (choice.joined(role, option) for choice in found for option in options)
            fits = [c for c in more if c.memory <= room and sum(c.seconds) <= self.limit]
            found = best(fits, lambda c: (*c.seconds, c.held, c.training, c.generation))
        return best(found, lambda c: c.seconds)


def best(items: Sequence[T], numbers: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items that no other one equals or beats in all numbers; of equal ones the first."""
    if len(items) < 2:
        return list(items)
    table = np.array([numbers(item) for item in items], float)
    front, kept = np.empty_like(table), list[int]()
    for i in np.lexsort(table.T[::-1]):  # whatever beats an item comes before it
        row = table[i]
        if not (front[: len(kept)] <= row).all(1).any():
            front[len(kept)] = row
            kept.append(int(i))
    return [items[i] for i in sorted(kept)]


def placements(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield all set partitions of the roles, each set in the order of the roles."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for smaller in placements(rest):
        yield ((first,), *smaller)
        for i, group in enumerate(smaller):
            yield (*smaller[:i], (first, *group), *smaller[i + 1 :])


def search(problem: MappingProblem, count: int = 2) -> list[RoleMapping]:
    """Return the fastest mapping of each of the ``count`` fastest placements, fastest first; [] if nothing fits.

    Of equally fast placements the one with fewer pools is first. A first search, in which each role has its fastest and
    its smallest layout only, gives a bound on the seconds of the pools of the second one, in which it has all.
    """
    some: Options = lambda role, devices, beside: _extremes(problem.options(role, devices, beside))  # noqa: E731
    rough = _search(replace(problem, options=some, found={}), count)
    limit = rough[-1].total * (1 + 1e-9) if len(rough) == count else math.inf
    return _search(replace(problem, limit=limit, found={}), count)


def _extremes(options: Sequence[Option]) -> list[Option]:
    fastest = sorted(options, key=lambda option: sum(option.seconds))[:1]
    return fastest + sorted(options, key=lambda option: option.held + max(option.training, option.generation))[:1]


def _search(problem: MappingProblem, count: int) -> list[RoleMapping]:
    found: list[RoleMapping] = []
    for groups in sorted(placements(problem.roles), key=len):
        limit = found[-1].total if len(found) == count else math.inf
        fastest = _split(problem, groups, limit)
        if fastest is not None:
            found = sorted([*found, fastest], key=lambda mapping: mapping.total)[:count]
    return found


def _split(problem: MappingProblem, groups: Sequence[tuple[str, ...]], limit: float) -> RoleMapping | None:
    """Return the fastest mapping of a placement if it is faster than ``limit``, by branch and bound."""
    sets = [problem.choices(group) for group in groups]
    if not all(sets) or sum(min(c.devices for c in choices) for choices in sets) > problem.devices:
        return None
    sets.sort(key=lambda choices: -min(sum(c.seconds) for c in choices))
    needed = [min(c.devices for c in choices) for choices in sets]
    floors = [np.min([c.seconds for c in choices], axis=0) for choices in sets]
    later = [np.max(floors[i:], axis=0) if i < len(sets) else np.zeros_like(floors[0]) for i in range(len(sets) + 1)]
    spare = [sum(needed[i:]) for i in range(len(sets) + 1)]
    ordered = [sorted(choices, key=lambda c: sum(c.seconds)) for choices in sets]
    fastest: list[tuple[PoolChoice, ...]] = []

    def extend(chosen: tuple[PoolChoice, ...], seconds: np.ndarray, left: int) -> None:
        nonlocal limit
        at = len(chosen)
        if at == len(sets):
            if not problem.whole or left == 0:
                limit, fastest[:] = float(seconds.sum()), [chosen]
            return
        for choice in ordered[at]:
            longer = np.maximum(seconds, choice.seconds)
            if choice.devices > left - spare[at + 1] or np.maximum(longer, later[at + 1]).sum() >= limit:
                continue
            extend((*chosen, choice), longer, left - choice.devices)

    extend((), np.zeros_like(floors[0]), problem.devices)
    return RoleMapping(fastest[0]) if fastest else None
