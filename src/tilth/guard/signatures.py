"""The end of a worker's log, or the text of an exception, as a class of failure: one table of signatures.

A signature says what was seen, not who is at fault: a CUDA error may come from the device, the driver or a kernel of
the user. What the user's code raised is of the layer "user", whatever else the log says of those who waited for it.
"""

import re
from dataclasses import dataclass

from tilth.guard.verdict import Kind, Verdict


@dataclass(frozen=True)
class LogSignature:
    """One row: a pattern, and the failure it is a sign of."""

    pattern: re.Pattern[str]
    kind: Kind
    layer: str
    """device, network, memory, storage, host, environment or user."""
    sentence: str


def _row(pattern: str, kind: Kind, layer: str, sentence: str) -> LogSignature:
    return LogSignature(re.compile(pattern), kind, layer, sentence)


SIGNATURES = (
    _row(r"uncorrectable (?:NVLink|ECC) error|ECC error|Xid.{0,40}: (?:48|63|64|74|79|94|95)\b", "crash", "device",
         "the device reports an uncorrectable error of its memory or links"),
    _row(r"device-side assert triggered", "error", "user", "an assertion of a kernel failed: an index out of range"),
    _row(r"an illegal memory access|illegal instruction was encountered|misaligned address", "crash", "device",
         "a kernel accessed memory it must not: a bug of a kernel or a faulty device"),
    _row(r"unspecified launch failure|CUDA error: (?:unknown error|launch)", "crash", "device",
         "a kernel failed to run"),
    _row(r"no CUDA-capable device|CUDA-capable device\(s\) is/are busy|GPU is lost|driver shutting down|"
         r"CUDA driver version is insufficient", "crash", "device", "the device or its driver is not available"),
    _row(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError", "out-of-memory",
         "device", "the device's memory ran out"),
    _row(r"NCCL (?:WARN|error).{0,200}(?:unhandled (?:system|cuda) error|remote process exited|Connection (?:refused|"
         r"reset|closed))|ncclRemoteError|ncclSystemError|Transport retry count exceeded|IBV_WC_", "crash", "network",
         "a connection between ranks failed; the rank at its other end may be the cause"),
    _row(r"Watchdog caught collective operation timeout|WorkNCCL\(.{0,400}ran for \d+ milliseconds before timing out|"
         r"Timed out waiting \d+ms for (?:recv|send) operation", "hang", "network",
         "a collective ran out of time: another rank did not come"),
    _row(r"Connection closed by peer|Connection reset by peer|Broken pipe", "crash", "network",
         "the other end of a connection is gone; it failed first"),
    _row(r"std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)|^MemoryError|Cannot allocate memory|"
         r"[Oo]ut of memory: Killed process|oom-kill", "out-of-memory", "memory", "the host's memory ran out"),
    _row(r"Bus error|SIGBUS|insufficient shared memory|/dev/shm.{0,80}No space left", "out-of-memory", "memory",
         "shared memory ran out (/dev/shm)"),
    _row(r"No space left on device|Disk quota exceeded", "storage", "storage", "the disk or its quota is full"),
    _row(r"Read-only file system|Stale file handle|Input/output error|Transport endpoint is not connected|"
         r"Structure needs cleaning", "storage", "storage", "a file system failed or is gone"),
    _row(r"Too many open files", "files", "host", "the limit of open files is reached (ulimit -n)"),
    _row(r"Resource temporarily unavailable|can't start new thread", "error", "host",
         "the limit of threads is reached"),
    _row(r"GLIBC(?:XX)?_[\d.]+.{0,3} not found|cannot open shared object file|undefined symbol", "error", "environment",
         "a library is missing or of another version"),
    _row(r"^(?:ModuleNotFoundError|ImportError)\b", "error", "environment", "a module cannot be imported"),
    _row(r"Segmentation fault|SIGSEGV|Fatal Python error: (?:Segmentation|Aborted)|SIGABRT|double free", "crash",
         "host", "a library crashed the process"),
    _row(r"NonFiniteError|(?:loss|grad(?:ient)? norm) (?:is|=) ?(?:nan|inf)", "not-finite", "user",
         "a value is not finite"),
    _row(r"Address already in use", "error", "host", "a port is taken"),
    _row(r"^(?:[\w.]+\.)?(?:[A-Z]\w*(?:Error|Exception)|KeyboardInterrupt|StopIteration)\b", "error", "user",
         "the code raised an exception"),
)  # fmt: skip
"""In order: of the patterns that a line matches, the first counts."""

_USER = re.compile(
    r"^(?:TypeError|IndexError|KeyError|ValueError|AttributeError|NameError|ZeroDivisionError|AssertionError|"
    r"UnboundLocalError|NotImplementedError|RecursionError|UnicodeDecodeError|SyntaxError|FileNotFoundError)\b"
)
"""Exceptions that nothing but code raises: the last one of a log counts before all that follows from it."""


CAUSED = ("crash", "error", "out-of-memory", "storage")
"""Kinds of verdicts whose cause a log or an exception may tell."""


GUESSES = "Some common causes include"
"""In Ray's lines about a worker that died, which name every cause that there is."""


def with_cause(verdict: Verdict) -> Verdict:
    """Return a verdict with the cause that its evidence, a log's end or an exception, shows: layer, sentence and line.

    An exception that a device raised is a crash of the worker, whose context of the device is lost, and a worker that
    can open no more files is of the kind "files": neither gets better in its process. All other kinds stay, so that an
    error of the user's code never replaces a worker, and one that others' deaths caused blames nobody.
    """
    first, line, rest = verdict.evidence.partition("\n")
    told = "\n".join(text for text in rest.splitlines() if GUESSES not in text)
    found = (classify(told) or classify(first)) if verdict.kind in CAUSED else None
    if found is None:
        return verdict
    kind, layer = verdict.kind, str(found.details["layer"])
    if kind == "error" and (found.kind, layer) == ("crash", "device"):
        kind = "crash"
    if kind in ("error", "storage") and found.kind == "files":
        kind = "files"
    if kind == "storage":  # its own sentence says why
        return verdict
    evidence = f"{first}; cause: {found.details['sentence']} ({layer}){line}{rest}"
    return Verdict(kind, verdict.ranks, evidence, {**verdict.details, "cause": dict(found.details)})


def classify(text: str) -> Verdict | None:
    """Return the failure that a log's end or an exception's text shows; None if no signature is in it.

    The last exception of the user's code counts first, then the first line that a signature matches: what follows is
    mostly its consequence.
    """
    lines = [line.strip().removeprefix("E ").strip() for line in text.splitlines() if line.strip()]
    users = [line for line in lines if _USER.match(line)]
    rows = [users[-1]] if users else lines
    for line in rows:
        for signature in SIGNATURES[:-1] if not users else SIGNATURES[-1:]:
            if signature.pattern.search(line):
                return _found(signature, line)
    raised = next((line for line in reversed(lines) if SIGNATURES[-1].pattern.search(line)), "")
    return _found(SIGNATURES[-1], raised) if raised else None


def _found(signature: LogSignature, line: str) -> Verdict:
    details = {"layer": signature.layer, "line": line[:500], "sentence": signature.sentence}
    return Verdict(signature.kind, (), f"{signature.sentence}: {line[:200]}", details)
