"""Books of asynchronous experience: which groups of samples are begun, have ended, are taken or dropped.

Staleness is bounded where groups are begun (AReaL, arXiv 2505.24298, section 5.1): with B groups a step, v steps done
and a bound of N versions, at most (v + N + 1) B groups have been begun and not dropped. A step leaves no more groups
than later steps can take before these reach the bound, so a late group is waited for, and none is dropped for being
long.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilth.core.errors import DataError
from tilth.plan.repack import due_groups
from tilth.runs.state import Intervals, RunState


@dataclass(eq=False)
class SampleGroup:
    """Samples of one prompt: ``size`` ids that count up from ``first``. version: of the policy when it was begun;
    place: in the order in which groups have ended, -1: in flight."""

    first: int
    size: int
    prompt: int
    version: int
    place: int = -1

    @property
    def stop(self) -> int:
        """Id behind its last one."""
        return self.first + self.size


class Ledger:
    """Every group from its begin until it is consumed or dropped; each ends in one of the two, once."""

    def __init__(
        self, bound: int | None, buffer: int, batch: int, *, fresh: bool, version: int, state: RunState
    ) -> None:
        """bound: versions that a group may be behind, None: any number; buffer: steps of groups in the books without a
        bound; batch: groups of a step; fresh: take those that were begun last first; version: of the policy now;
        state: what is committed."""
        self.bound, self.batch, self.fresh = bound, batch, fresh
        self.most = (buffer if bound is None else bound + 1) * batch
        self.open: dict[int, SampleGroup] = {}
        """Groups that are in flight or wait, by their first id."""
        self.taken: list[SampleGroup] = []
        """Those of the step under way."""
        self.wanted = self.later = 0
        """Groups that this step still takes, and later ones of the phase."""
        self.steps = self.begun = self.lost = 0
        """Steps done, and groups begun and dropped, since these books were opened."""
        self._versions, self._ended = [*(one for one in state.versions if one < version), version], 0
        self.admitted, self.ended = Intervals(state.admitted), Intervals(state.ended)
        self.consumed, self.dropped = Intervals(state.consumed), Intervals(state.dropped)

    # ---- versions ----

    def at(self, version: int, held: int | None = None) -> None:
        """Note the version of the policy from now on. held: of the engines, default: the same."""
        if version > self._versions[-1]:
            self._versions.append(version)
        oldest = min((group.version for group in self.open.values()), default=version)
        oldest = oldest if held is None else min(oldest, held)
        del self._versions[: max(0, bisect_right(self._versions, oldest) - 1)]

    @property
    def version(self) -> int:
        """Version of the policy now."""
        return self._versions[-1]

    def age(self, version: int) -> int:
        """Return how many versions this one is behind."""
        return len(self._versions) - bisect_right(self._versions, version)

    def too_old(self, version: int) -> bool:
        """Return True for a version beyond the bound."""
        return self.bound is not None and self.age(version) > self.bound

    def stale(self) -> list[int]:
        """Return the first ids of open groups that no step may take any more, as in a loop that syncs several times."""
        return [first for first, group in self.open.items() if self.too_old(group.version)]

    # ---- groups ----

    def want(self, count: int, later: int) -> None:
        """Begin to take groups for a step. later: steps of the phase after it."""
        self.wanted, self.later = count, later * self.batch

    def room(self, version: int | None = None) -> int:
        """Return the number of groups that may be begun now: that the books hold, the phase needs, and steps can take
        in time. version: of the engines, default: of the policy."""
        free = self.most - len(self.open) - len(self.taken)
        free = min(free, self.wanted + self.later - len(self.open))
        if self.bound is not None:
            slack = self.bound - self.age(self.version if version is None else version)
            now = self.wanted if self.wanted or self.taken else self.batch
            before = sum(self.bound - self.age(group.version) <= slack for group in self.open.values())
            free = min(free, now + slack * self.batch - before)
            free = min(free, (self.steps + self.bound + 1) * self.batch - (self.begun - self.lost))
        return max(0, free)

    def begin(
        self, prompts: Sequence[int], first: int, size: int, version: int | None = None, *, again: bool = False
    ) -> list[SampleGroup]:
        """Begin a group of each prompt, ids from ``first`` on. version: of the engines, default: of the policy; again:
        of those that a resume asks for once more.

        DataError [experience.capacity] beyond the bound: nothing may begin that a step could not take in time.
        """
        version = self.version if version is None else version
        made = [SampleGroup(first + i * size, size, prompt, version) for i, prompt in enumerate(prompts)]
        self.begun += len(made)
        if self.bound is not None and self.begun - self.lost > (self.steps + self.bound + 1) * self.batch:
            raise DataError(
                f"{self.begun - self.lost} groups are begun and not dropped after {self.steps} steps of {self.batch}, "
                f"more than rollout.staleness = {self.bound} allows",
                key="experience.capacity",
            )
        for group in made:
            if not again and group.first in self.admitted:
                raise DataError(f"sample {group.first} is begun a second time", key="experience.admitted")
            self.admitted.add(group.first, group.stop)
            self.open[group.first] = group
        return made

    def end(self, first: int) -> SampleGroup:
        """Note that all samples of a group have ended."""
        group = self.open[first]
        group.place, self._ended = self._ended, self._ended + 1
        self.ended.add(group.first, group.stop)
        return group

    def take(self) -> list[SampleGroup]:
        """Return groups for the step, in the order of their ids; none while it has to wait for some."""
        groups = [*self.open.values()]
        ready = [i for i, group in enumerate(groups) if group.place >= 0]
        ready.sort(key=lambda i: (-groups[i].version, -groups[i].first) if self.fresh else (groups[i].place, 0))
        left = [None if self.bound is None else self.bound - self.age(group.version) for group in groups]
        chosen = [groups[i] for i in due_groups(left, ready, min(self.wanted, len(groups)), self.batch)]
        if not chosen:
            return []
        for group in chosen:
            del self.open[group.first]
        chosen.sort(key=lambda g: g.first)
        self.taken += chosen
        self.wanted = 0
        return chosen

    def drop(self, firsts: Iterable[int]) -> list[SampleGroup]:
        """Drop groups that are open or taken; they count no more."""
        wanted, found = set(firsts), list[SampleGroup]()
        found += [group for first, group in self.open.items() if first in wanted]
        found += [group for group in self.taken if group.first in wanted]
        self.taken = [group for group in self.taken if group.first not in wanted]
        for group in found:
            self.open.pop(group.first, None)
            self._once(group)
            self.dropped.add(group.first, group.stop)
        self.lost += len(found)
        return found

    def done(self) -> list[SampleGroup]:
        """Note that the step has learned from what it has taken; return that."""
        taken, self.taken = self.taken, []
        for group in taken:
            self._once(group)
            self.consumed.add(group.first, group.stop)
        self.steps += bool(taken)
        return taken

    def _once(self, group: SampleGroup) -> None:
        """Raise DataError [experience.once] for a group that was consumed or dropped before."""
        if group.first in self.consumed or group.first in self.dropped:
            raise DataError(
                f"sample {group.first} was consumed or dropped before; each is so once", key="experience.once"
            )

    def store(self, state: RunState) -> None:
        """Write the books to the state that is committed; no step is under way."""
        state.versions = [*self._versions]
        state.flying = [(group.first, group.size, group.prompt, group.version) for group in self.open.values()]
        for name in ("admitted", "ended", "consumed", "dropped"):
            setattr(state, name, Intervals(getattr(self, name)))
