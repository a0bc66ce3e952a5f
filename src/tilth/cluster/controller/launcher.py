"""Processes started by torchrun or Slurm: one becomes the controller, the others its workers (backend local).

Every process runs the same command. Rank 0 is the controller and starts worker 0 itself; the others connect to its
session directory, whose name derives from the job.
"""

import hashlib
import os
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tilth.cluster.backends.local import LocalBackend, environment
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.worker import local_worker
from tilth.core.errors import RecipeError, StorageError
from tilth.process.program import outlive_signals

WAIT = 600.0
"""Seconds for a worker to find its controller, which reads the data first."""
LOOK = 0.1
"""Seconds between checks for the session directory."""


@dataclass(frozen=True)
class Launch:
    """One process of a job. launcher: name in error messages."""

    launcher: str
    job: str
    rank: int
    size: int
    nodes: int

    @property
    def name(self) -> str:
        """Name of the session directory, equal in all processes of the job and in no other job of this user."""
        return "job-" + hashlib.blake2s(f"{self.launcher} {self.job}".encode(), digest_size=10).hexdigest()


_waiting: list[Launch] = []
"""The job whose workers wait for this controller; empty without a launcher."""


def launch_of(env: Mapping[str, str]) -> Launch | None:
    """Read the job from the environment; None for a single process."""
    if "TORCHELASTIC_RUN_ID" in env:
        job = " ".join(env.get(k, "") for k in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        size = int(env["WORLD_SIZE"])
        nodes = -(-size // int(env.get("LOCAL_WORLD_SIZE", size)))
        found = Launch("torchrun", job, int(env["RANK"]), size, nodes)
    elif "SLURM_STEP_ID" in env:
        size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
        job = f"{env.get('SLURM_JOB_ID', '')} {env['SLURM_STEP_ID']} {env.get('SLURM_RESTART_COUNT', '0')}"
        nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
        found = Launch("srun", job, int(env.get("SLURM_PROCID", "0")), size, nodes)
    else:
        return None
    return found if found.size > 1 else None


def job_size(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes of this job, which is the default number of workers of a recipe."""
    launch = launch_of(env)
    return launch.size if launch else 1


def enter_job(backend: str, workers: int, timeout: float, env: Mapping[str, str] = os.environ) -> None:
    """Enter a job: return in the controller (or without a job), serve and exit in a worker.

    Every process calls it first, with the recipe's number of workers. A worker exits with 0 when the controller is
    done, with ``local_worker.GONE`` if it died. Raises RecipeError if the recipe does not fit the job.
    """
    launch = launch_of(env)
    if launch is None:
        return
    _check(launch, backend, workers)
    if launch.rank == 0:
        _waiting.append(launch)
        return
    _serve(launch, timeout)
    sys.exit(0)


def _check(launch: Launch, backend: str, workers: int) -> None:
    started = f"{launch.launcher} started {launch.size} processes"
    if launch.nodes > 1 or backend == "ray":
        where = f" on {launch.nodes} nodes" if launch.nodes > 1 else ""
        raise RecipeError(
            f"cluster.backend = {backend!r}: {started}{where}; on several machines use cluster.backend=ray and "
            "start tilth once, on one of them",
            key="cluster.backend",
        )
    if backend != "local":
        message = f"cluster.backend = {backend!r}: {started}; use cluster.backend=local, or start one"
        raise RecipeError(message, key="cluster.backend")
    if workers != launch.size:
        raise RecipeError(
            f"cluster.workers = {workers}: {started}; use cluster.workers={launch.size}, or start {workers} processes",
            key="cluster.workers",
        )


def local_backend(
    workers: int, *, timeout: float = 600.0, address: str = "", gpus: bool = False, lasting: str = ""
) -> LocalBackend:
    """Return the local backend over the workers that a launcher has started, or over new ones if there are none."""
    if not _waiting:
        return LocalBackend(workers, timeout, gpus, lasting=lasting)
    return LocalBackend(workers, timeout, gpus, folder=SessionDir.create(_waiting.pop().name), start=[0])


def _serve(launch: Launch, timeout: float) -> None:
    """Serve as a worker. It ignores signals only once it has found its controller; before, it ends with the job."""
    os.environ.update(environment(launch.size))
    folder, controller = _controller(launch)
    outlive_signals()
    with controller:
        local_worker.serve(controller, folder, launch.rank, launch.size, timeout)


def _controller(launch: Launch) -> tuple[SessionDir, Connection]:
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        folder = SessionDir.find(launch.name)
        if folder is not None:
            _check_private(folder.path)
            with suppress(FileNotFoundError, ConnectionRefusedError):  # being created, or of a dead controller
                return folder, local_worker.connect(folder)
        time.sleep(LOOK)
    message = f"{launch.launcher}, rank {launch.rank}: no controller (rank 0) within {WAIT:g} s"
    raise StorageError(message, key="session_dir.controller")


def _check_private(path: Path) -> None:
    """Raise StorageError unless the directory, whose name can be guessed, belongs to this user alone."""
    found = path.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        message = f"{path} is not a folder of this user alone (mode 0700); remove it"
        raise StorageError(message, key="session_dir.mode")
