"""What others do with the faults of ``faults.py``: torchrun, torchft and NVRx with three ranks, one fault a job.

A pause is the time from the fault to the second step that ranks other than the faulty one have ended after it (the
first may have been under way), as long as it ends within LIMIT seconds. Poisoned: their weights are not finite at the
end. The coordinator is torchft's lighthouse, which is started again on its port after a second, torchrun's launcher, or
the process that has the store of NVRx. torchrun's loop has PyTorch's limit of 30 minutes for a collective, and one of
10 s where a rank hangs.
"""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 3
LIMIT = 110.0
WARM = 5
"""Steps of all ranks before the fault."""
FAULTS = ("kill", "stop", "gil", "nan", "coordinator")
LOOP = Path(__file__).with_name("faults_loop.py")
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(100000)
"""


@dataclass
class Job:
    """Processes of one job. coordinator: what all of them need."""

    folder: Path
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    coordinator: subprocess.Popen[bytes] | None = None
    again: list[str] = field(default_factory=list)
    """Command that starts the coordinator again."""

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that it can be ended with its children."""
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of all ranks, by time."""
        texts = [path.read_text().rpartition("\n")[0] for path in self.folder.glob("steps-*")]
        return sorted((json.loads(line) for text in texts for line in text.splitlines()), key=lambda one: one["time"])

    def end(self) -> None:
        """Kill what is left."""
        for process in [*self.ranks, self.coordinator]:
            if process is not None:
                for pid in {process.pid, *(one["pid"] for one in self.lines())}:
                    _kill(pid)
                process.wait()


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a group of processes, or to the process; nothing if there is none."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except ProcessLookupError:
            continue


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def begin(name: str, python: str, fault: str, folder: Path) -> Job:
    """Start a job."""
    folder.mkdir(parents=True)
    job, port = Job(folder), free_port()
    if name == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
               "--max-restarts=5", str(LOOP), "torchrun", str(folder), "0", str(RANKS),
               "10" if fault in ("stop", "gil") else "1800"]  # fmt: skip
        job.coordinator = job.start(run)
        return job
    if name == "torchft":
        house = str(Path(python).with_name("torchft_lighthouse"))
        job.again = [house, "--min_replicas", "1", "--bind", f"127.0.0.1:{port}", "--join_timeout_ms", "10000"]
        job.coordinator = job.start(job.again)
    else:
        job.coordinator = job.start([python, "-c", STORE, str(port)])
    time.sleep(3.0)
    way = "torchft" if name == "torchft" else "nvrx"
    job.ranks = [job.start([python, str(LOOP), way, str(folder), str(r), str(RANKS), str(port)]) for r in range(RANKS)]
    return job


def strike(job: Job, fault: str, victim: Mapping[str, Any]) -> float:
    """Let the fault happen; return its time."""
    now = time.monotonic()
    if fault in ("gil", "nan"):
        (job.folder / f"{fault}-{victim['rank']}").touch()
    elif fault == "coordinator":
        assert job.coordinator is not None
        os.kill(job.coordinator.pid, signal.SIGKILL)
        job.coordinator.wait()
        if job.again:
            time.sleep(1.0)
            job.coordinator = job.start(job.again)
    else:
        os.kill(victim["pid"], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return now


def one_job(name: str, python: str, fault: str, rng: random.Random, folder: Path) -> dict[str, Any]:
    """Run a job with one fault: its pause, inf if nothing followed."""
    job = begin(name, python, fault, folder)
    try:
        if not _wait(lambda: _least(job) > WARM, LIMIT):
            return {"error": "it never began: " + (folder / "log").read_text()[-300:]}
        time.sleep(rng.uniform(0.2, 0.6))
        newest = {one["rank"]: one for one in job.lines()}
        victim = newest[rng.choice(sorted(newest))]
        at = strike(job, fault, victim)
        if fault == "nan":
            time.sleep(3.0)
        found = _wait(lambda: _second(job, at, victim, fault) is not None, LIMIT)
        time.sleep(0.5)
        others = [one for one in job.lines() if one["pid"] != victim["pid"]]
        second = _second(job, at, victim, fault)
        pause = second - at if found and second is not None else float("inf")
        return {"pause": pause, "poisoned": bool(others) and not others[-1]["finite"]}
    finally:
        job.end()


def _least(job: Job) -> int:
    """Number of steps of the rank that has the fewest; 0 until all have some."""
    ranks = [one["rank"] for one in job.lines()]
    return min(map(ranks.count, set(ranks))) if len(set(ranks)) == RANKS else 0


def _second(job: Job, at: float, victim: Mapping[str, Any], fault: str) -> float | None:
    """Time of the second step that all other ranks, or all new processes, have ended after the fault."""
    after: dict[int, list[float]] = {}
    for one in job.lines():
        if one["time"] > at + (2.5 if fault == "coordinator" else 0.0) and one["pid"] != victim["pid"]:
            after.setdefault(one["pid"], []).append(one["time"])
    seconds = sorted(times[1] for times in after.values() if len(times) > 1)
    return seconds[0] if seconds else None


def _wait(done: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if done():
            return True
        time.sleep(0.02)
    return False


def why_not(name: str, python: str) -> str:
    """Return why a rival cannot be measured, "" if it can."""
    module = {"torchft": "torchft.manager", "NVRx": "nvidia_resiliency_ext.inprocess"}[name]
    if not python:
        return f"no environment was given with --{name.lower()}"
    try:
        done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"{python} cannot import {module}: {done.stderr.strip().splitlines()[-1]}"


def rivals(pythons: Mapping[str, str], seeds: int, seed: int, root: Path, only: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each rival and fault. pythons: interpreters that have torchft and NVRx; only: text in a row's
    name."""
    for name in ("torchrun", *pythons):
        why = "" if name == "torchrun" else why_not(name, pythons[name])
        if why:
            yield {"row": 0, "fault": name, "why": why}
            continue
        for fault in [fault for fault in FAULTS if only in f"{name}: {fault}"]:
            found = list[dict[str, Any]]()
            for number in range(seeds):
                rng = random.Random(f"{seed}-{name}-{fault}-{number}")
                found.append(one_job(name, pythons.get(name, ""), fault, rng, root / f"{name}-{fault}-{number}"))
            yield _row(f"{name}: {fault}", found)


def _row(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    pauses = [one["pause"] for one in found if one.get("pause", float("inf")) < float("inf")]
    seconds = (
        {"pause_median": round(statistics.median(pauses), 2), "pause_max": round(max(pauses), 2)} if pauses else {}
    )
    return {
        "row": 0, "fault": name, "workers": RANKS, "runs": len(found), "faults": len(found), "right": 0, "equal": 0,
        "recoveries": len(pauses), "false": 0, "again": 0, "left": 0, "kinds": [], **seconds,
        "poisoned": sum(one.get("poisoned", False) for one in found),
        "errors": [one["error"] for one in found if "error" in one],
    }  # fmt: skip
