"""Stacks of all ranks, grouped: equal ones of most ranks are healthy, the others lead to the ranks to look at.

The idea is ByteRobust's aggregation analysis (arXiv 2509.16293): in a job that stands still most ranks have one stack.
The ranks with another one, and the parallel group that they share, hold the cause; without a majority there is no
verdict. A slow job is looked at several times: each round accuses one group, and the one accused most often is it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilth.cluster.controller.report import threads_of, waits
from tilth.core.layout import Mesh
from tilth.guard.verdict import Verdict

ROUNDS = 5
"""Rounds of stacks of a job that is slow, by which a group is accused."""
MAJORITY = 0.5
"""Share of the ranks that must have one stack for it to be the healthy one; more than this."""

StackFrames = tuple[str, ...]
"""Frames of one thread, innermost first: "folder/file.py:function"."""

_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+ in (?P<name>.+?)\s*$')
_PY_SPY = re.compile(r"^\s{2,}(?P<name>\S.*?) \((?P<file>[^()]*?)(?::\d+)?\)\s*$")
_PY_SPY_HEAD = re.compile(r"Process \d+: ")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class RankStacks:
    """Stacks of one process of a rank. role: "trainer", "loader" ...; only processes of one role are compared."""

    rank: int
    role: str
    threads: tuple[StackFrames, ...]
    """Main thread last, where the text says so."""


def parse(text: str, rank: int, role: str = "trainer") -> RankStacks:
    """Return the stacks of a text of ``faulthandler`` or ``py-spy dump``; no threads if it has none.

    Line numbers, addresses and folders above the last are left out: ranks at one place in a loop differ in them.
    """
    threads = [tuple(frame for line in lines if (frame := _frame(line))) for lines in threads_of(text)]
    if _PY_SPY_HEAD.match(text):  # it prints the main thread first, faulthandler last
        threads = [*threads[1:], *threads[:1]]
    return RankStacks(rank, role, tuple(frames for frames in threads if frames))


def _frame(line: str) -> str:
    found = _FAULTHANDLER.match(line) or _PY_SPY.match(line)
    if not found:
        return ""
    return f"{'/'.join(found['file'].split('/')[-2:])}:{_ADDRESS.sub('#', found['name'])}"


def hosts(texts: Mapping[int, str]) -> dict[int, str]:
    """Return what each rank does, for ``localise``: "waits" in torch.distributed, or "works".

    texts: rank -> stacks by faulthandler; a rank without any is left out.
    """
    return {rank: "waits" if waits(text) else "works" for rank, text in texts.items() if threads_of(text)}


@dataclass(frozen=True)
class StackGroups:
    """Ranks by stack for one role. healthy: the stack of most ranks; () without a majority."""

    role: str
    groups: Mapping[tuple[StackFrames, ...], tuple[int, ...]]
    healthy: tuple[StackFrames, ...]

    @property
    def outliers(self) -> tuple[int, ...]:
        """Ranks with another stack; () without a majority."""
        if not self.healthy:
            return ()
        return tuple(sorted(r for stack, ranks in self.groups.items() if stack != self.healthy for r in ranks))


def grouped(stacks: Iterable[RankStacks], *, threads: bool = False) -> list[StackGroups]:
    """Return ranks with equal stacks for every role. threads: compare all threads, not only the main one.

    A process without a stack (stopped, gone) is in a group of its own: its stack is ().
    """
    roles = defaultdict[str, dict[int, list[tuple[StackFrames, ...]]]](lambda: defaultdict(list))
    for stack in stacks:
        kept = stack.threads if threads else stack.threads[-1:]
        roles[stack.role][stack.rank].append(tuple(kept))
    found = []
    for role, by_rank in sorted(roles.items()):
        groups = defaultdict[tuple[StackFrames, ...], list[int]](list)
        for rank, several in sorted(by_rank.items()):  # a rank has several loaders: the odd one speaks for it
            groups[_odd(several, by_rank)].append(rank)
        most = max(groups, key=lambda stack: len(groups[stack]))
        enough = len(groups[most]) > MAJORITY * len(by_rank) and most
        rows = {stack: tuple(ranks) for stack, ranks in groups.items()}
        found.append(StackGroups(role, rows, most if enough else ()))
    return found


def _odd(
    mine: list[tuple[StackFrames, ...]], others: Mapping[int, list[tuple[StackFrames, ...]]]
) -> tuple[StackFrames, ...]:
    """Return the rarest stack of a rank's processes of one role."""
    counts = Counter(stack for several in others.values() for stack in several)
    return min(mine, key=lambda stack: (counts[stack], stack))


def shared_group(mesh: Mesh, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the smallest parallel group with all these ranks, as its axes, "pp x tp", and its members.

    ("", ()) if only all ranks together have them. One rank alone is in the smallest of its groups.
    """
    at = {rank: mesh.at(rank) for rank in mesh.ranks}
    axes = [axis for axis in mesh.names if len({at[rank][axis] for rank in ranks}) > 1]
    if len(ranks) == 1:
        wide = [name for name, size in zip(mesh.names, mesh.sizes) if size > 1]
        axes = sorted(wide, key=mesh.size)[:1]
    kept = [name for name in mesh.names if name not in axes]
    members = tuple(r for r in mesh.ranks if all(at[r][name] == at[ranks[0]][name] for name in kept)) if ranks else ()
    return (" x ".join(axes), members) if axes and len(members) < len(mesh) else ("", ())


def aggregated(stacks: Sequence[RankStacks], mesh: Mesh) -> Verdict | None:
    """Return ranks whose stacks are not those of most ranks, with the parallel group they share; None if all are equal.

    A verdict without ranks says that no stack has a majority, so stacks alone name nobody.
    """
    found = grouped(stacks)
    odd = [group for group in found if group.outliers]
    if not odd:
        split = [group for group in found if not group.healthy]
        if not split:
            return None
        counts = ", ".join(str(len(ranks)) for ranks in split[0].groups.values())
        evidence = f"no stack of {split[0].role} processes has a majority: {counts} ranks have equal ones"
        return Verdict("hang", (), evidence, {"groups": _rows(found)})
    outliers = tuple(sorted({rank for group in odd for rank in group.outliers}))
    axis, members = shared_group(mesh, outliers)
    places = "; ".join(_place(group) for group in odd)
    shared = f"; they share the {axis} group {list(members)}" if axis and len(outliers) > 1 else ""
    details = {"groups": _rows(found), "axis": axis, "group": list(members)}
    return Verdict("hang", outliers, f"{places}{shared}", details)


def _place(group: StackGroups) -> str:
    """Name the function each outlier is, and in which the others."""
    odd = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} in {_inner(stack)}"
        for stack, ranks in group.groups.items()
        if stack != group.healthy
    ]
    healthy = len(group.groups[group.healthy])
    return f"{group.role}: {', '.join(odd)}; {healthy} other ranks in {_inner(group.healthy)}"


def _inner(stack: tuple[StackFrames, ...]) -> str:
    return stack[-1][0] if stack else "no stack (stopped or gone)"


def _rows(found: Iterable[StackGroups]) -> list[dict[str, object]]:
    return [
        {"role": group.role, "ranks": list(ranks), "healthy": stack == group.healthy, "stack": [list(t) for t in stack]}
        for group in found
        for stack, ranks in group.groups.items()
    ]


def slow(rounds: Sequence[Sequence[RankStacks]], mesh: Mesh) -> Verdict | None:
    """Return the parallel group accused in most of ROUNDS rounds of stacks; None if no round, or two groups, lead.

    A slow rank is outside the collective in which others wait in many rounds, not in all; other ranks are by chance.
    """
    flags = Counter[tuple[str, tuple[int, ...]]]()
    caught = Counter[int]()
    for stacks in rounds[-ROUNDS:]:
        outliers = sorted({rank for group in grouped(stacks) for rank in group.outliers})
        if not outliers:
            continue
        caught.update(outliers)
        axis, members = shared_group(mesh, outliers)
        flags[axis, members or tuple(outliers)] += 1
    leading = flags.most_common(2)
    if not leading or (len(leading) == 2 and leading[0][1] == leading[1][1]):
        return None
    (axis, members), count = leading[0]
    ranks = tuple(rank for rank in members if caught[rank] == max(caught[r] for r in members))
    named = f"the {axis} group {list(members)}" if axis else f"ranks {list(members)}"
    evidence = f"{named}: other stacks than most ranks in {count} of {len(rounds)} rounds"
    details = {"axis": axis, "group": list(members), "rounds": count, "ranks": {str(r): n for r, n in caught.items()}}
    return Verdict("slow", ranks, evidence, details)
