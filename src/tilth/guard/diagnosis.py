"""Diagnosis of a job that stands still: who holds it up, in which operation, since when, and where the others wait.

The workers that live are asked for their flight recorders, all at the same time and for ``ASK`` seconds at most; their
stacks, processes and open spans are read from outside. A worker that does not answer is mute only if its process does
not run Python either (stopped, gone, or something holds the GIL): a slow answer accuses nobody.
"""

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import psutil

from tilth.cluster.backends.base import Backend, Probe, RepairableBackend
from tilth.cluster.backends.probe import FATAL, GONE, SILENT
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.report import threads_of, waits
from tilth.cluster.worker.executor import Executor
from tilth.config.errors import listed
from tilth.core.errors import CallTimeout, DataError, TilthError, WorkerError, WorkerLost
from tilth.core.layout import Mesh
from tilth.guard.flight_recorder import FlightDump, dump, outside, parse
from tilth.guard.localise import FEW, aborted, localise
from tilth.guard.verdict import Verdict
from tilth.trace.ops import kind as kind_of

T = TypeVar("T")
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (.+)')
ASK = 1.0
"""Seconds in which all workers together answer; what comes later is not waited for."""
FRAMES = 12
"""Innermost frames of a culprit that a verdict keeps."""
ABORTED = ("SIGABRT", f"{FATAL}Aborted")
"""In the end of a process that gloo aborts because a message is larger than it expects."""


@dataclass(frozen=True)
class HangReport:
    """Facts about the workers of a job that stands still."""

    probes: Mapping[int, Probe]
    dumps: Mapping[int, FlightDump]
    left: frozenset[int] = frozenset()
    """Ranks whose newest call left a collective with an error."""
    mute: frozenset[int] = frozenset()
    """Ranks that cannot answer: stopped, gone, or something holds the GIL."""
    late: frozenset[int] = frozenset()
    """Ranks that could answer and did not within the time, or whose answer cannot be read."""
    since: Mapping[int, float] = field(default_factory=dict)
    """When each busy rank last got on with its work, in seconds since 1970."""


# ---- in a worker ----


def recorded(executor: Executor) -> dict[str, Any]:
    """Return this worker's flight recorder ("" without process groups), and ``Executor.left``."""
    distributed = sys.modules.get("torch.distributed")
    grouped = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return {"dump": dump().decode() if grouped else "", "left": executor.left}


# ---- in the controller ----


def at_once(ask: Callable[[int], T], ranks: Collection[int], seconds: float) -> dict[int, T]:
    """Ask about all ranks at the same time; return the answers that came within these seconds and were no error."""
    answers: SimpleQueue[tuple[int, list[T]]] = SimpleQueue()

    def run(rank: int) -> None:
        try:
            answers.put((rank, [ask(rank)]))
        except TilthError:  # it does not answer, which is an answer
            answers.put((rank, []))

    for rank in ranks:
        Thread(target=run, args=(rank,), name="ask", daemon=True).start()
    found, until = dict[int, T](), time.monotonic() + seconds
    for _ in ranks:
        try:
            rank, value = answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        if value:
            found[rank] = value[0]
    return found


def hang_report(backend: Backend, probes: Iterable[Probe] = (), seconds: float = ASK) -> HangReport:
    """Read and ask all workers, in at most these seconds. probes: what is known of them already."""
    until = time.monotonic() + seconds
    known = {probe.rank: probe for probe in probes}
    known = known or at_once(backend.probe, range(backend.workers), seconds)
    living = [rank for rank, probe in known.items() if probe.state not in SILENT]
    before = {rank: _beats(backend, rank) for rank in living}
    left = max(0.05, until - time.monotonic())
    answers = at_once(lambda rank: backend.control(rank, "", "recorder", {}), living, left)
    dumps = _parsed({rank: one["dump"] for rank, one in answers.items() if one["dump"]})
    quiet = [rank for rank in living if rank not in answers and _beats(backend, rank) == before[rank]]
    mute = frozenset([*quiet, *(rank for rank in known if rank not in living)])
    ranks = frozenset(rank for rank, one in answers.items() if one["left"])
    unread = {rank for rank, one in answers.items() if one["dump"] and rank not in dumps}
    return HangReport(known, dumps, ranks, mute, frozenset(living) - frozenset(answers) - mute | unread)


def _parsed(texts: Mapping[int, str]) -> dict[int, FlightDump]:
    """Return the dumps that can be read; another version of torch may write others."""
    found = dict[int, FlightDump]()
    for rank, text in texts.items():
        with suppress(DataError):
            found[rank] = parse(text.encode(), rank, f"rank {rank}")
    return found


def _beats(backend: Backend, rank: int) -> int:
    return backend.life(rank)[1] if isinstance(backend, RepairableBackend) else -1


def diagnosed(verdict: Verdict, error: TilthError, cluster: Cluster) -> Verdict:
    """Return the verdict on a failure with culprits and evidence, if it is one of ranks that wait for each other.

    cluster: as the failure left it.
    """
    broke = isinstance(error, WorkerError) and bool(error.collective)
    ended = isinstance(error, WorkerLost) and any(sign in verdict.evidence for sign in ABORTED)
    if not (isinstance(error, CallTimeout) or broke or ended):
        return verdict
    probes, since = (error.probes, error.since) if isinstance(error, CallTimeout) else ((), {})
    ago = time.time() - time.monotonic()
    found = hang_report(cluster.backend, probes)
    found = replace(found, since={rank: at + ago for rank, at in since.items()})
    more = explained(found, verdict.ranks, {one.role: one.mesh for one in cluster.groups})
    calls = more.details.get("calls", {}) if more is not None else {}
    if more is None or not (isinstance(error, CallTimeout) or calls.get("calls") or "silent" in calls):
        return verdict
    evidence, dead = f"{more.evidence}\n{verdict.evidence}", {"dead": list(error.ranks)} if ended else {}
    return Verdict(more.kind, more.ranks, evidence, {**verdict.details, **more.details, **dead})


def explained(found: HangReport, named: Sequence[int], meshes: Mapping[str, Mesh]) -> Verdict | None:
    """Return who holds up the job, and the evidence in a sentence; None if nothing is known of who does.

    named: ranks that the failure names, which count where recorders name nobody.
    """
    dumps = {rank: _titled(one, meshes) for rank, one in found.dumps.items()}
    living = {rank: probe.stack for rank, probe in found.probes.items() if probe.state not in SILENT}
    states = hosts(living) | dict.fromkeys(found.left, "failed")
    blamed = localise(dumps, sorted(found.mute), hosts=states)
    if blamed is None or blamed.kind != "collective":
        blamed = aborted(dumps, _ends(found)) or blamed
    if blamed is not None and blamed.kind == "collective" and found.late:  # others' calls are needed for that
        blamed = None
    ranks = blamed.ranks if blamed is not None and blamed.ranks else tuple(named)
    if not ranks:
        return None
    rows = {str(rank): _row(found, rank, states) for rank in ranks if rank in found.probes}
    sentences = [row["sentence"] for row in rows.values()]
    waiting = _waiting(found, dumps, ranks, states, blamed)
    details: dict[str, Any] = {"culprits": rows, "wait": sorted({rank for _, some in waiting for rank in some})}
    if blamed is not None and blamed.kind == "collective":
        sentences, details["calls"] = [blamed.evidence], dict(blamed.details)
    elif blamed is not None:
        details["recorders"] = blamed.evidence
    sentences += [
        f"rank{'s' * (len(some) > 1)} {listed(some, FEW)} wait{'s' * (len(some) == 1)} in {at}" for at, some in waiting
    ]
    if shared := _shared(found, meshes):
        details["stacks"] = shared
    return Verdict(blamed.kind if blamed is not None else "hang", ranks, "; ".join(sentences), details)


def _ends(found: HangReport) -> dict[int, str]:
    """Return rank -> innermost frame outside torch of the main threads of processes that ended by an abort."""
    threads = {rank: threads_of(one.stack) for rank, one in found.probes.items() if one.stack.startswith(ABORTED[1])}
    frames = {rank: _FRAME.findall("\n".join(some[-1])) for rank, some in threads.items() if some}
    sites = {rank: outside([f"{file}:{line} in {name}" for file, line, name in some]) for rank, some in frames.items()}
    return {rank: site for rank, site in sites.items() if site}


def _titled(one: FlightDump, meshes: Mapping[str, Mesh]) -> FlightDump:
    """Return the dump with its groups described by the axes along which they lie."""
    groups = {
        name: group._replace(description=axes) if (axes := _axes(group.ranks, meshes)) else group
        for name, group in one.groups.items()
    }
    return replace(one, groups=groups)


def _axes(ranks: Sequence[int], meshes: Mapping[str, Mesh]) -> str:
    """Return the axes of a mesh that these ranks are along: "dp", "dp x fsdp"; "" if of none."""
    for mesh in meshes.values():
        if len(ranks) > 1 and set(ranks) <= set(mesh.ranks):
            places = [mesh.at(rank) for rank in ranks]
            axes = [name for name in mesh.names if len({place[name] for place in places}) > 1]
            if sorted(mesh.along(ranks[0], *axes)) == sorted(ranks):
                return " x ".join(axes)
    return ""


def _row(found: HangReport, rank: int, states: Mapping[int, str]) -> dict[str, Any]:
    """Return what one culprit does: state, operation, since when, its innermost frames."""
    probe, since = found.probes[rank], found.since.get(rank)
    threads = threads_of(probe.stack)
    frames = [line.strip() for line in threads[-1][:FRAMES]] if threads else []
    how, where = _state(probe, rank in found.mute, states.get(rank, "")), place(probe)
    clock = f" since {time.strftime('%H:%M:%S', time.localtime(since))}" if since is not None else ""
    at = f", at {frames[0]}" if frames and states.get(rank) == "works" else ""
    sentence = f"rank {rank} {how} {f'in {where}' if where else 'between calls'}{clock}{at}"
    operation, micro = probe.spans[-1] if probe.spans else ("", -1)
    row = {"sentence": sentence, "state": how, "operation": operation, "micro_batch": micro, "since": since}
    return {**row, "call": probe.phase.partition(" (for")[0], "stack": frames}


def place(probe: Probe) -> str:
    """Return where a worker is: "backward of micro-batch 3", "all_reduce in optimizer", its call, "" between calls."""
    inner = [one for one in probe.spans if one[0] not in ("", "call")]
    names = [f"{op} of micro-batch {micro}" if micro >= 0 else op for op, micro in inner]
    if len(names) > 1 and kind_of(inner[-1][0]) == "communication":
        return f"{inner[-1][0]} in {names[-2]}"
    return names[-1] if names else probe.phase.partition(" (for")[0]


def _state(probe: Probe, mute: bool, host: str) -> str:
    """Describe in a verb what a process does."""
    if probe.state == GONE:
        return "is gone"
    if probe.state in SILENT:
        return "stopped"
    if mute:
        return "holds the GIL"
    if host == "waits":
        return "waits for other ranks"
    return "is busy" if probe.state == psutil.STATUS_RUNNING else "waits"


def _waiting(
    found: HangReport,
    dumps: Mapping[int, FlightDump],
    culprits: Collection[int],
    states: Mapping[int, str],
    blamed: Verdict | None,
) -> list[tuple[str, list[int]]]:
    """Return (collective, ranks) of those that wait, for the collectives most of them wait in first."""
    held = blamed.details.get("wait") if blamed is not None else None
    ranks = held if held is not None else [rank for rank, state in states.items() if state == "waits"]
    places = dict[str, list[int]]()
    for rank in sorted(set(ranks) - set(culprits)):
        places.setdefault(_collective(rank, dumps.get(rank), found.probes.get(rank)), []).append(rank)
    return sorted(places.items(), key=lambda place: (-len(place[1]), place[1]))


def _collective(rank: int, one: FlightDump | None, probe: Probe | None) -> str:
    """Name the collective in which a rank waits: its newest that is not complete, or else its open span."""
    pending = [op for op in one.ops if op.pending] if one is not None else []
    if one is not None and pending:
        group = one.groups.get(pending[-1].group)
        title = (group.description or list(group.ranks)) if group is not None else pending[-1].group
        return f"{pending[-1].op} of group {title}"
    if probe is not None and probe.spans:
        return place(probe) if kind_of(probe.spans[-1][0]) == "communication" else f"a collective of {place(probe)}"
    return "a collective"


def _shared(found: HangReport, meshes: Mapping[str, Mesh]) -> str:
    """Return the stacks that differ from those of most ranks of the largest role, in a sentence; "" if none does."""
    if not meshes:
        return ""
    mesh = max(meshes.values(), key=len)
    stacks = {rank: main_thread(found.probes[rank].stack) for rank in mesh.ranks if rank in found.probes}
    odd = aggregated(stacks, mesh) if len(stacks) == len(mesh) > 1 else None
    return odd.evidence if odd is not None else ""


# ---- stacks of all ranks, grouped ----
#
# The idea is ByteRobust's aggregation analysis (arXiv 2509.16293): in a job that stands still most ranks have one
# stack. The ranks with another one, and the parallel group that they share, hold the cause; without a majority there is
# no verdict.

MAJORITY = 0.5
"""Share of the ranks that must have one stack for it to be the healthy one; more than this."""

StackFrames = tuple[str, ...]
"""Frames of a thread, innermost first: "folder/file.py:function"."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def main_thread(text: str) -> StackFrames:
    """Return the stack of the main thread, which a text of ``faulthandler`` has last; () if it has none.

    Line numbers, addresses and folders above the last are left out: ranks at one place in a loop differ in them.
    """
    threads = threads_of(text)
    found = filter(None, map(_FRAME.search, threads[-1] if threads else ()))
    return tuple(f"{'/'.join(one[1].split('/')[-2:])}:{_ADDRESS.sub('#', one[3].rstrip())}" for one in found)


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
