"""Errors of calls over their limit: the facts first, then the relevant part of every rank's stacks."""

import re
from collections.abc import Iterable, Mapping, Sequence

import psutil

from tilth.cluster.backends.base import Call, Probe, place_of
from tilth.core.errors import CallTimeout

FRAMES = 6
"""Innermost frames of the main thread shown for a rank that is not late."""
_IDLE = re.compile(
    r'/cluster/worker/local_worker\.py", line \d+ in (?:_receive|run)$'
    r'|/socketserver\.py", line \d+ in serve_forever$'
    r'|/trace/spans\.py", line \d+ in _run$'
    r'|\A  File "[^"]*/concurrent/futures/thread\.py", line \d+ in _worker$',
    re.MULTILINE,
)
"""Frames of helper threads without work: receive and control loop, writer of the trace, signs of life, idle thread of a
pool."""
_IMPORT = '  File "<frozen importlib.'
"""Beginning of the frames of Python's import machinery, five for each nested import."""
_FILE = re.compile(r'  File "([^"]*)"')


def overdue(late: Mapping[int, Call], probes: Sequence[Probe], limit: float, stood: str = "") -> CallTimeout:
    """Return the error of calls that exceeded their limit, with a paragraph per rank: stopped, late, others.

    late: rank -> overdue call; the error names those that the others wait for, if any. limit: ``cluster.timeout``; a
    call may have more (``Call.least``). stood: time without progress, if that is the limit; "": it is not.
    """
    least = max((call.least for call in late.values()), default=0.0)
    within = f"no answer within {limit:g} s (cluster.timeout)" if limit >= least else f"no answer within {least:g} s"
    within = f"no progress for {stood}" if stood else within
    named = absent(late, probes) or list(late)
    waiting = [rank for rank in late if rank not in named]
    more = f"; {_waited_for(waiting, named)} in a collective" if waiting else ""
    lines = [f"{_places(late, named)}: {within}{more}", *_paragraphs(late, probes, named)]
    error = CallTimeout("\n".join(lines), key=late[named[0]].operation if named else "cluster.timeout")
    error.ranks, error.probes = tuple(named), probes
    return error


def absence(late: Mapping[int, Call], probes: Sequence[Probe], waited: Mapping[int, str]) -> CallTimeout:
    """Return the error of ranks that did not join a collective which timed out for others, a paragraph per rank.

    late: rank -> unfinished call; some of them are ``absent``. waited: rank -> error of a rank that joined, whose first
    line is quoted.
    """
    named = absent(late, probes)
    quoted = [f"  {error.splitlines()[0]}" for error in waited.values()]
    head = (
        f"{_places(late, named)}: did not come to a collective; {_waited_for(waited, named)} until it ran out of time"
    )
    lines = [head, *_paragraphs(late, probes, named), *quoted]
    error = CallTimeout("\n".join(lines), key=late[named[0]].operation)
    error.ranks, error.probes = tuple(named), probes
    return error


def absent(late: Mapping[int, Call], probes: Iterable[Probe]) -> list[int]:
    """Return the late ranks that do not wait in a collective: stopped, or busy with something else."""
    return [p.rank for p in probes if p.rank in late and (_stopped(p) or not waits(p.stack))]


def in_collective(files: Sequence[str]) -> bool:
    """Return True if a thread waits for other ranks. files: of its frames, innermost first."""
    inner = next((file for file in files if not file.endswith("/torch/_ops.py")), "")
    return "/torch/distributed/" in inner


def waits(stack: str) -> bool:
    """Return True if a thread of faulthandler's text is in a collective, not just importing torch.distributed."""
    stacks = [] if _IMPORT in stack else threads_of(stack)
    return any(in_collective(_FILE.findall("\n".join(frames))) for frames in stacks)


def _places(late: Mapping[int, Call], ranks: Iterable[int]) -> str:
    return "; ".join(place_of(late[rank], rank) for rank in ranks)


def _waited_for(ranks: Iterable[int], missed: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)} waited for {'it' if len(missed) == 1 else 'them'}"


def _paragraphs(late: Mapping[int, Call], probes: Sequence[Probe], named: Sequence[int]) -> list[str]:
    order = sorted(probes, key=lambda p: (not _stopped(p), p.rank not in named, p.rank not in late, p.rank))
    return [_paragraph(probe, late.get(probe.rank)) for probe in order]


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


def threads_of(stack: str) -> list[list[str]]:
    """Parse a text of stacks into lines of frames per thread, innermost first; skip import machinery.

    faulthandler has the main thread last.
    """
    found: list[list[str]] = []
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            found.append([])
        elif line.strip() and found and not line.startswith(_IMPORT):
            found[-1].append(line)
    return found


def _main_thread(stack: str) -> list[str]:
    threads = threads_of(stack)
    if not threads:
        return stack.splitlines()  # no stack: the reason
    more = len(threads[-1]) - FRAMES
    return [*threads[-1][:FRAMES], *([f"  ... and {more} frames that called these"] if more > 0 else [])]


def _all_at_work(stack: str) -> list[str]:
    threads = threads_of(stack)
    if not threads:
        return stack.splitlines()
    *others, main = threads
    busy = [frames for frames in others if not _IDLE.search("\n".join(frames))]
    return [*main, *(line for frames in busy for line in ["another thread:", *frames])]
