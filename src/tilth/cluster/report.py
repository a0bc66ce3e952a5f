"""A call over its limit in words: the facts first, then of every rank as much of its stacks as can help."""

import re
from collections.abc import Mapping, Sequence

import psutil

from tilth.cluster.fleet import Call, Probe, place_of

FRAMES = 6
"""Innermost frames of the main thread that are shown of a rank that is not late."""
_IDLE = re.compile(
    r'/cluster/local_worker\.py", line \d+ in _receive$'
    r'|/trace/spans\.py", line \d+ in _run$'
    r'|\A  File "[^"]*/concurrent/futures/thread\.py", line \d+ in _worker$',
    re.MULTILINE,
)
"""Frames that only helpers which wait for work have: the receive loop, the trace's writer, a thread pool's idle worker
(one that works has frames inside ``_worker``)."""


_IMPORT = '  File "<frozen importlib.'
"""Beginning of the frames of Python's own import machinery: five for each module that imports another."""


def timeout_report(late: Mapping[int, Call], probes: Sequence[Probe], limit: float) -> str:
    """Which calls have exceeded ``limit`` seconds, then a paragraph a rank: stopped ones, late ones, the others.

    late: by rank, the call that is overdue. limit: ``cluster.timeout``; calls may have more (``Call.least``).
    """
    least = max((call.least for call in late.values()), default=0.0)
    within = f"{limit:g} s (cluster.timeout)" if limit >= least else f"{least:g} s"
    places = "; ".join(place_of(call, rank) for rank, call in late.items())
    order = sorted(probes, key=lambda p: (not _stopped(p), p.rank not in late, p.rank))
    ranks = [_paragraph(probe, late.get(probe.rank)) for probe in order]
    return "\n".join([f"{places}: no answer within {within}", *ranks])


def _paragraph(probe: Probe, late: Call | None) -> str:
    facts = [f"in {probe.phase}"] if probe.phase else []
    if late is not None and not probe.phase.startswith(f"{late.name} ("):
        facts.append(f"has not begun {late.name}")
    if _IMPORT in probe.stack:
        facts.append("still importing modules")
    if _stopped(probe):
        facts.append(f"stopped by a signal; kill -CONT {probe.pid} lets it go on")
    head = f"  rank {probe.rank} (process {probe.pid}, {probe.state}): {'; '.join(facts) or 'between calls'}"
    lines = _all_at_work(probe.stack) if late is not None else _main_thread(probe.stack)
    return "\n".join([head, *(f"    {line}" for line in lines)])


def _stopped(probe: Probe) -> bool:
    return probe.state == psutil.STATUS_STOPPED


def _threads(stack: str) -> list[list[str]]:
    """Frames of each thread, the innermost first; the main thread is the last. (faulthandler's text.) Of imports only
    the files that import are kept."""
    found: list[list[str]] = []
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            found.append([])
        elif line.strip() and found and not line.startswith(_IMPORT):
            found[-1].append(line)
    return found


def _main_thread(stack: str) -> list[str]:
    threads = _threads(stack)
    if not threads:
        return stack.splitlines()  # no stack: what was found instead of one
    more = len(threads[-1]) - FRAMES
    return [*threads[-1][:FRAMES], *([f"  ... and {more} frames that called these"] if more > 0 else [])]


def _all_at_work(stack: str) -> list[str]:
    threads = _threads(stack)
    if not threads:
        return stack.splitlines()
    *others, main = threads
    busy = [frames for frames in others if not _IDLE.search("\n".join(frames))]
    return [*main, *(line for frames in busy for line in ["another thread:", *frames])]
