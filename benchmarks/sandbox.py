"""What a program costs in the sandbox: start-up and throughput, beside a plain subprocess.

    python benchmarks/sandbox.py [--quick] [--json PATH]

Start-up: a program that prints one line, one after another, and after pauses, in which the sandbox makes the next one
ready. ``/bin/true`` by subprocess is what a fork and its end cost on this machine at this time. Beside other work the
least and the first decile of the wall times say more than the median. Processor time (user and system) is that of this
process, of the process that forks, and of the program with the first process of its namespace; the fork that watches
them is not in it. Throughput: the same by four threads. ``unit_tests``
judges a program by three tests, in two processes of one sandbox; its processor time is this process's alone.
"""

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows

from tilth.rewards.functions import load_reward
from tilth.sandbox.run import Sandbox

PROGRAM = "print(6 * 7)"
THREADS = 4
PAUSE = 0.03

USED = [0.0]
"""Processor seconds that the sandbox reported."""


def spent(sandbox: int) -> float:
    """Return processor seconds of this process, its children that ended, the sandbox's process and its programs."""
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own + USED[0] + (_of(sandbox) if sandbox else 0.0)


def _of(process: int) -> float:
    """Return processor seconds of a process and of its children that it has waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / 100


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def measured(name: str, call: Callable[[], None], count: int, sandbox: int = 0, pause: float = 0.0) -> dict[str, Any]:
    """Call it one after another, then by several threads; return milliseconds and rates."""
    call()
    walls, before = [], spent(sandbox)
    for _ in range(count):
        time.sleep(pause)
        begin = time.perf_counter()
        call()
        walls.append(time.perf_counter() - begin)
    cpu = spent(sandbox) - before
    threads = [threading.Thread(target=_repeat, args=(call, count // THREADS)) for _ in range(THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = count // THREADS * THREADS / (time.perf_counter() - begin)
    walls.sort()
    places = {"least_ms": 0, "p10_ms": count // 10, "median_ms": count // 2, "p95_ms": count * 95 // 100}
    row = {"name": name, "calls": count, **{label: walls[place] * 1e3 for label, place in places.items()}}
    shown = "  ".join(f"{label.removesuffix('_ms')} {row[label]:6.1f} ms" for label in places)
    print(f"{name:14s} {shown}  processor {cpu / count * 1e3:6.1f} ms  {THREADS} threads {rate:6.1f} a second")
    row |= {"cpu_ms": cpu / count * 1e3, "per_second": rate}
    return row


def main() -> None:
    options = benchmark_parser(__doc__, "40 calls").parse_args()
    count = 40 if options.quick else 400

    def plain() -> None:
        subprocess.run([sys.executable, "-I", "-c", PROGRAM], check=True, capture_output=True)

    def nothing() -> None:
        subprocess.run(["/bin/true"], check=True)

    judge, tests = load_reward("unit_tests"), {"tests": "assert f(1) == 2\nassert f(2) == 4\nassert f(0) == 0"}

    def judged() -> None:
        assert judge("", "def f(x): return 2 * x", tests)["reward"] == 1.0

    with Sandbox() as sandbox:
        process = sandbox._process.pid

        def inside() -> None:
            found = sandbox.run(PROGRAM)
            assert found.stdout == "42\n"
            USED[0] += found.cpu

        rows = [measured("sandbox", inside, count, process)]
        rows.append(measured("after a pause", inside, count, process, PAUSE))
    rows.append(measured("subprocess", plain, count))
    rows.append(measured("/bin/true", nothing, count))
    rows.append(measured("unit_tests", judged, count))
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
