"""One run of ``faults.py``: a recipe, and faults after some of its steps. Called with a folder that holds spec.json.

Everything that happens is a line of events.jsonl: steps, faults, messages, with ``time.monotonic()``. Faults that are
in there do not happen again when the same run continues.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tilth_studies.drill import HOUR, inject, pid_of, session_of

from tilth.cluster.backends.session_dir import SessionDir
from tilth.config.imports import end_uncollected, uncollected

with uncollected():
    from tilth.api import run_recipe
    from tilth.config.load import from_dict
    from tilth.core.errors import DataError, TilthError
    from tilth.flows.callbacks import Callback, RunView

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
MOUNT = "mount"
"""Folder in the folder of a run: a small file system of its own, if its row needs one."""
FROZEN = 4.0
"""Seconds that a frozen process stands still before it goes on."""
_FILLING = threading.Lock()


def closeness(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """Reward with spread from the first step on. A completion that the file SLOW waits for takes its seconds."""
    slow = os.environ["TILTH_FAULTS"] + ".slow"
    if os.path.exists(slow):
        seconds = float(Path(slow).read_text())
        Path(slow).unlink(missing_ok=True)
        time.sleep(seconds)
    answer = info["answer"]
    return sum(a == b for a, b in zip(completion, answer)) / len(answer) + 0.1 * len(completion)


class Drills(Callback):
    """Let the faults happen, and write what happens. faults: with after (a step), delay (seconds), kind, rank, at."""

    def __init__(self, folder: Path, faults: list[dict[str, Any]]) -> None:
        self.path = folder / "events.jsonl"
        past = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        done = {event["number"] for event in past if event["what"] in ("fault", "missed")}
        self.left = [(number, fault) for number, fault in enumerate(faults) if number not in done]
        self.lock = threading.Lock()
        self.log("start", pid=os.getpid())

    def log(self, what: str, **facts: Any) -> None:
        with self.lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "time": time.monotonic(), **facts}) + "\n")

    def on_run_start(self, run: RunView) -> None:
        """Remember the session of the workers."""
        self.session = session_of(os.getpid())
        self.log("session", path=str(self.session.path))

    def on_message(self, text: str) -> None:
        """Write a message with its time."""
        self.log("message", text=text)

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Start the faults that are due."""
        pids = [os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))]
        self.log("step", step=step, pids=pids, not_finite=metrics.get("steps/not_finite", 0))
        for number, fault in [one for one in self.left if one[1]["after"] <= step]:
            self.left.remove((number, fault))
            threading.Thread(target=self._strike, args=(number, fault), daemon=True).start()

    def _strike(self, number: int, fault: dict[str, Any]) -> None:
        """Wait, strike, and write when; a fault at a moment is written when its worker is dead."""
        time.sleep(fault["delay"])
        kind, rank = fault["kind"], fault.get("rank", 0)
        facts = {"number": number, **{k: v for k, v in fault.items() if k != "delay"}}
        try:
            if fault.get("at"):
                pid = inject(self.session, kind, rank, fault["at"])
                if kind == "kill":
                    _wait_for_end(pid)
                self.log("fault", **facts)
                return
            self.log("fault", **facts)
            OURS.get(kind, _ordinary)(self.session, rank, fault)
        except TilthError as error:  # the worker is just being replaced: no fault has happened
            self.log("missed", number=number, why=str(error))


def _wait_for_end(pid: int) -> None:
    """Wait until a process is dead, reaped or not."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.002)


def _ordinary(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    inject(session, fault["kind"], rank)


def _all(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    for one in range(fault["workers"]):
        inject(session, "kill", one)


def _controller(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_reward(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Kill the newest process below a worker: processes of the reward are their only children."""
    below = [p for p in psutil.Process().children(recursive=True) if "multiprocessing" in " ".join(p.cmdline())]
    for process in below[-1:]:
        process.kill()


def _little_memory(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Put a worker into a cgroup that has no memory for anything new, so that the kernel kills it."""
    group = MEMORY_GROUPS / f"tilth-faults-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(1 << 20))
    (group / "cgroup.procs").write_text(str(pid_of(session, rank)))


def _freeze(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Stop the controller and all its workers, as a machine that sleeps, for some seconds."""
    pids = [os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))]
    names = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"kill -STOP {names}; sleep {FROZEN}; kill -CONT {names}"], start_new_session=True)


def _freeze_controller(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {FROZEN}; kill -CONT {pid}"], start_new_session=True)


def _slow_reward(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    Path(os.environ["TILTH_FAULTS"] + ".slow").write_text(str(FROZEN))


def _slow_pass(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Make the passes of a worker longer, for ``faults_paced``."""
    Path(os.environ["TILTH_FAULTS"] + ".slow-pass").write_text(str(pid_of(session, rank)))


def _collect(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    for _ in range(20):
        gc.collect()


def _change_clocks(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Set the wall clocks of the controller and of all workers an hour ahead, for what reads them by ``time.time``."""
    plain = time.time
    setattr(time, "time", lambda: plain() + HOUR)  # noqa: B010 - a function of a module
    for one in range(fault["workers"]):
        inject(session, "clock", one)


def _load(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Let twice as many processes as there are cores compute for some seconds."""
    loop = f"import time; e = time.monotonic() + {FROZEN}\nwhile time.monotonic() < e: pass"
    for _ in range(2 * (os.cpu_count() or 1)):
        subprocess.Popen([sys.executable, "-c", loop], start_new_session=True)


def _fill(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Fill the run's own file system for some seconds."""
    _filled(mount_of() / "big")


def _fill_shared(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Fill the run's own shared memory for some seconds."""
    _filled(Path("/dev/shm/big"))


def _filled(big: Path) -> None:
    """Fill the file system of a file that is not there for some seconds. One after another does."""
    with _FILLING:
        with open(big, "wb", buffering=0) as file:
            free = shutil.disk_usage(big.parent).free
            os.posix_fallocate(file.fileno(), 0, max(free - (1 << 16), 1))
            with suppress(OSError):
                while True:  # to the last page
                    file.write(bytes(1 << 12))
        time.sleep(FROZEN)
        big.unlink()


def _read_only(session: SessionDir, rank: int, fault: dict[str, Any]) -> None:
    """Lock the run's own file system against writing for some seconds, as far as open files allow it."""
    for way in ("ro", "rw"):
        done = subprocess.run(["mount", "-o", f"remount,{way}", mount_of()], capture_output=True, text=True)
        if done.returncode:
            raise DataError(done.stderr.strip(), key="mount")
        time.sleep(FROZEN)


def mount_of() -> Path:
    """Return the run's own file system."""
    return Path(sys.argv[1]) / MOUNT


OURS = {
    "kill-all": _all,
    "kill-controller": _controller,
    "kill-reward": _kill_reward,
    "oom-kill": _little_memory,
    "freeze": _freeze,
    "freeze-controller": _freeze_controller,
    "slow-reward": _slow_reward,
    "slow-pass": _slow_pass,
    "collect": _collect,
    "clocks": _change_clocks,
    "load": _load,
    "fill": _fill,
    "fill-shared": _fill_shared,
    "read-only": _read_only,
}
"""Faults beside those of ``tilth guard inject``."""


def main() -> None:
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    drills = Drills(folder, spec["faults"])
    try:
        result = run_recipe(
            from_dict(spec["recipe"]), name="run", callbacks=[drills], reward=closeness, fallback=spec["fallback"]
        )
        drills.log("end", directory=str(result.directory))
    except TilthError as error:
        drills.log("failed", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    end_uncollected()
    main()
