"""Processes of torchrun and Slurm become a controller and its workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.errors import raises
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.controller import launcher
from tilth.cluster.controller.launcher import Launch, enter_job, job_size, launch_of
from tilth.cluster.worker import local_worker
from tilth.core.errors import RecipeError, StorageError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "2"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8",
         "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "2"}  # fmt: skip
PROGRAM = """
import os
from tilth.cluster.controller.launcher import enter_job, job_size
workers = job_size()
enter_job("local", workers, 60.0)
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
with open_cluster("local", workers, timeout=60.0) as cluster:
    group = cluster.group("echo", "tests.cluster.workers:echo", {"scale": float}, Mesh(("dp",), (workers,)))
    pids = group.pid()
    assert len(set(pids) | {os.getpid()}) == workers + 1
    print("workers", workers, "controls", os.getpid(), "pids", *pids, flush=True)
    if "die" in os.environ:
        os._exit(1)
    assert "fail" not in os.environ, "the controller fails"
"""


@pytest.fixture(autouse=True)
def nobody_waits():
    yield
    launcher._waiting.clear()


def test_what_torchrun_says():
    assert launch_of(TORCHRUN) == Launch("torchrun", "run 29500 0", 2, 4, 1)
    assert launch_of(TORCHRUN | {"WORLD_SIZE": "8"}).nodes == 2
    assert launch_of(TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None


def test_what_slurm_says_is_of_the_step_and_not_of_the_job():
    assert launch_of(SLURM) == Launch("srun", "77 3 0", 2, 4, 1)
    old = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP_N")}
    assert launch_of(old) == Launch("srun", "77 3 0", 2, 8, 2)
    assert launch_of(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None  # a shell of salloc
    assert launch_of({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}) is None  # a batch script itself
    assert launch_of({}) is None


def test_torchrun_inside_a_job_of_slurm_is_torchrun():
    assert launch_of(SLURM | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    "change", [{"TORCHELASTIC_RUN_ID": "x"}, {"MASTER_PORT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1"}]
)
def test_processes_of_a_job_agree_on_a_folder_and_other_jobs_have_another(change):
    name = launch_of(TORCHRUN).name
    assert launch_of(TORCHRUN | {"RANK": "3"}).name == name
    assert launch_of(TORCHRUN | change).name != name


def test_a_process_alone_is_left_alone():
    enter_job("inline", 1, 1.0, {})
    enter_job("local", 3, 1.0, {})
    assert not launcher._waiting and job_size({}) == 1


@pytest.mark.parametrize(
    "backend, workers, env, key, way",
    [
        ("local", 2, TORCHRUN, "cluster.workers", "cluster.workers=4, or start 2"),
        ("local", 1, TORCHRUN, "cluster.workers", "cluster.workers=4"),
        ("inline", 1, SLURM, "cluster.backend", "cluster.backend=local"),
        ("local", 8, TORCHRUN | {"WORLD_SIZE": "8"}, "cluster.backend", "cluster.backend=ray"),
        ("ray", 4, SLURM, "cluster.backend", "start tilth once"),
    ],
)
def test_a_recipe_that_does_not_fit_the_job_is_told_what_would(backend, workers, env, key, way):
    for rank in ("0", "1"):  # every process says so: none waits for another
        with raises(RecipeError, key) as raised:
            enter_job(backend, workers, 1.0, env | {"RANK": rank, "SLURM_PROCID": rank})
        assert way in str(raised.value)


def test_rank_0_controls_with_as_many_workers_as_there_are_processes():
    assert job_size(TORCHRUN) == job_size(SLURM) == 4
    enter_job("local", 4, 1.0, TORCHRUN | {"RANK": "0"})
    assert [launch.name for launch in launcher._waiting] == [launch_of(TORCHRUN).name]


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o770)
    with raises(StorageError, "session_dir.mode"):
        launcher._check_private(tmp_path)
    tmp_path.chmod(0o700)
    launcher._check_private(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with raises(StorageError, "session_dir.mode"):
        launcher._check_private(link)


def test_a_name_is_found_by_others_and_only_one_can_have_it():
    name = f"job-test-{os.getpid()}"
    assert SessionDir.find(name) is None
    folder = SessionDir.create(name)
    try:
        found = SessionDir.find(name)
        assert found is not None and found.path == folder.path and found.key == folder.key
        with pytest.raises(FileNotFoundError):
            local_worker.connect(found)  # nobody listens yet: a worker tries again
        with raises(StorageError, "session_dir"):
            SessionDir.create(name)
    finally:
        folder.remove()


def test_a_worker_without_a_controller_gives_up(monkeypatch):
    monkeypatch.setattr(launcher, "WAIT", 0.3)
    with raises(StorageError, "session_dir.controller"):
        launcher._controller(launch_of(TORCHRUN | {"TORCHELASTIC_RUN_ID": f"none-{os.getpid()}"}))


WAITING = """
from tilth.cluster.controller import launcher
look = launcher._controller
launcher._controller = lambda launch: (print("waits", flush=True), look(launch))[1]
launcher.enter_job("local", 2, 60.0)
"""


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_whose_controller_was_ended_before_it_came_ends_by_the_same_signal(number):
    job = {"SLURM_JOB_ID": f"none-{os.getpid()}", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    env = environment(**job, SLURM_STEP_NUM_NODES="1", SLURM_PROCID="1")
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + WAITING
    with subprocess.Popen(
        [*forked.python(), "-c", program], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        try:
            assert process.wait(20) == -number
        finally:
            process.kill()


def environment(**changes):
    root = Path(__file__).parents[3]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SLURM_"))}
    return {**clean, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1", **changes}


def finish(process, seconds=60):
    out, _ = process.communicate(timeout=seconds)
    return out, process.returncode


@pytest.mark.dist
@pytest.mark.parametrize("how", ["", pytest.param("fail", marks=pytest.mark.slow), "die"])
def test_three_processes_of_slurm(how):
    """The launched ones start first and wait; they are workers 1 and 2 and end with the controller: well if it has told
    them to, also when it fails itself."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    changes = {how: "1"} if how else {}
    processes = {}
    for rank in (2, 1, 0):
        env = environment(**step, **changes, SLURM_STEP_NUM_NODES="1", SLURM_PROCID=str(rank))
        command = [*forked.python(), "-c", PROGRAM]
        processes[rank] = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(0.1)
    out, code = finish(processes[0])
    words = out.split()
    assert words[:4] == ["workers", "3", "controls", str(forked.pid(processes[0]))]
    assert words[6:] == [str(forked.pid(processes[n])) for n in (1, 2)] and int(words[5]) != forked.pid(processes[0])
    codes = [code, *(finish(processes[rank])[1] for rank in (1, 2))]
    assert codes[0] == bool(how) and (all(codes[1:]) if how == "die" else codes[1:] == [0, 0])
    until = time.monotonic() + 10  # the keeper of a dead controller removes it
    while SessionDir.find(launch_of(step | {"SLURM_PROCID": "0"}).name) and time.monotonic() < until:
        time.sleep(0.02)
    assert SessionDir.find(launch_of(step | {"SLURM_PROCID": "0"}).name) is None


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun(tmp_path):
    program = tmp_path / "role.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, code = finish(process)
    assert code == 0 and out.count("workers 2 controls") == 1
