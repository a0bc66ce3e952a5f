"""Stacks of all ranks, grouped: equal ones of most ranks are healthy, the others lead to the ranks to look at.

The idea is ByteRobust's aggregation analysis (arXiv 2509.16293): in a job that stands still most ranks have one stack.
The ranks with another one, and the parallel group that they share, hold the cause; without a majority there is no
verdict.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tilth.cluster.controller.report import threads_of, waits
from tilth.core.layout import Mesh
from tilth.guard.verdict import Verdict

MAJORITY = 0.5
"""Share of the ranks that must have one stack for it to be the healthy one; more than this."""

StackFrames = tuple[str, ...]
"""Frames of a thread, innermost first: "folder/file.py:function"."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+ in (?P<name>.+?)\s*$')
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def main_thread(text: str) -> StackFrames:
    """Return the stack of the main thread, which a text of ``faulthandler`` has last; () if it has none.

    Line numbers, addresses and folders above the last are left out: ranks at one place in a loop differ in them.
    """
    threads = threads_of(text)
    found = filter(None, map(_FRAME.match, threads[-1] if threads else ()))
    return tuple(f"{'/'.join(one['file'].split('/')[-2:])}:{_ADDRESS.sub('#', one['name'])}" for one in found)


def hosts(texts: Mapping[int, str]) -> dict[int, str]:
    """Return what each rank does, for ``localise``: "waits" in torch.distributed, or "works".

    texts: rank -> stacks by faulthandler; a rank without any is left out.
    """
    return {rank: "waits" if waits(text) else "works" for rank, text in texts.items() if threads_of(text)}


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


def aggregated(stacks: Mapping[int, StackFrames], mesh: Mesh) -> Verdict | None:
    """Return ranks whose stacks are not those of most ranks, with the parallel group they share; None if all are equal.

    stacks: rank -> ``main_thread``; () of a process that is stopped or gone, which is a group of its own. A verdict
    without ranks says that no stack has a majority, so stacks alone name nobody.
    """
    groups = defaultdict[StackFrames, list[int]](list)
    for rank, stack in sorted(stacks.items()):
        groups[stack].append(rank)
    healthy = max(groups, key=lambda stack: len(groups[stack]))
    enough = bool(healthy) and len(groups[healthy]) > MAJORITY * len(stacks)
    rows = [
        {"ranks": ranks, "healthy": enough and stack == healthy, "stack": list(stack)}
        for stack, ranks in groups.items()
    ]
    if not enough:
        counts = ", ".join(str(len(ranks)) for ranks in groups.values())
        return Verdict("hang", (), f"no stack has a majority: {counts} ranks have equal ones", {"groups": rows})
    odd = {stack: ranks for stack, ranks in groups.items() if stack != healthy}
    if not odd:
        return None
    outliers = tuple(sorted(rank for ranks in odd.values() for rank in ranks))
    axis, members = shared_group(mesh, outliers)
    places = [f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))} in {_inner(stack)}" for stack, r in odd.items()]
    shared = f"; they share the {axis} group {list(members)}" if axis and len(outliers) > 1 else ""
    evidence = f"{', '.join(places)}; {len(groups[healthy])} other ranks in {_inner(healthy)}{shared}"
    return Verdict("hang", outliers, evidence, {"groups": rows, "axis": axis, "group": list(members)})


def _inner(stack: StackFrames) -> str:
    return stack[0] if stack else "no stack (stopped or gone)"
