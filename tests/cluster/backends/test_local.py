"""Failures of the local backend, each with real processes: who, where and why is told within the limit, and no process
is left."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.cluster.workers import HERE
from tests.errors import raises
from tests.patience import patience
from tilth.cluster.backends import local
from tilth.cluster.backends.fork_server import StartedWorker, fork_server
from tilth.cluster.backends.local import LocalBackend, _listen, environment
from tilth.cluster.backends.probe import NodeProbe
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.controller.cluster import open_cluster
from tilth.cluster.worker import reaper
from tilth.core.errors import CallTimeout, DataError, RecipeError, StorageError, WorkerError, WorkerLost
from tilth.core.layout import Mesh
from tilth.trace import recorder

pytestmark = pytest.mark.dist
LIMIT = 1.0
BOTH = Mesh(("dp",), (2,))


class Watched:
    """A cluster of two workers, of which nothing may be left afterwards."""

    def __init__(self, timeout):
        forked.pid(fork_server(environment(2))._process.process)  # it stays, for the next workers of this process
        before = set(forked.descendants())  # and other tests' pools
        self.cluster = open_cluster("local", 2, timeout=timeout)
        self.cluster.dispatch.timeout = 60.0  # to make a role takes a while on a busy machine
        self.group = self.cluster.group("faulty", f"{HERE}:faulty", {}, BOTH)
        self.echo = self.cluster.group("echo", f"{HERE}:echo", {}, BOTH)
        self.cluster.dispatch.timeout = timeout
        self.folder = self.cluster.backend.folder.path
        self.pids = [link.pid for link in self.cluster.backend.links]
        self.processes = [p for p in forked.descendants() if p not in before]

    def assert_gone(self):
        gone(self.processes)
        assert not self.folder.exists()


def gone(processes, seconds=10.0):
    """Ended; a zombie that nobody has waited for yet has ended too."""
    until = time.monotonic() + seconds
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


@pytest.fixture
def watched(request):
    watched = Watched(getattr(request, "param", 60.0))
    yield watched
    watched.cluster.close()
    watched.assert_gone()


short = pytest.mark.parametrize("watched", [LIMIT], indirect=True)


def told_by(error, call, key, rank):
    """Return the message of the error that ``call`` raises, with this key and about this rank."""
    with raises(error, key) as raised:
        call()
    assert f"rank {rank}, " in str(raised.value).splitlines()[0]
    return str(raised.value)


def test_a_worker_killed_in_a_call(watched):
    told = told_by(WorkerLost, watched.group.kill(1).wait, "faulty.kill", 1)
    assert re.search(r"process \d+\) was killed by SIGKILL .* while in faulty.kill \(for \d", told)
    watched.assert_gone()
    with raises(WorkerLost, "faulty.kill"):  # the cluster is over, and says why
        watched.echo.pid()


def test_a_worker_killed_between_calls(watched):
    os.kill(watched.pids[0], signal.SIGKILL)
    for call, key in ((watched.group.status, "faulty.status"), (watched.echo.pid, "echo.pid")):  # a control message too
        told = told_by(WorkerLost, call, key, 0)
        assert "was killed by SIGKILL" in told and "between calls" in told
    watched.assert_gone()


def test_a_worker_that_leaves_shows_its_last_words(watched):
    told = told_by(WorkerLost, watched.group.leave(0).wait, "faulty.leave", 0)
    assert "ended with exit code 3" in told and told.endswith("its log ends:\n    the last words of a worker")
    watched.assert_gone()


def test_a_worker_that_raises_ends_all(watched):
    told = told_by(WorkerError, watched.group.fail(1, "value").wait, "faulty.fail", 1)
    assert "Traceback" in told
    watched.assert_gone()


def test_a_failure_that_nobody_waited_for_is_raised_at_the_next_call_or_at_the_end(watched):
    watched.group.fail(0, "data")
    told_by(DataError, watched.echo.pid, "faulty.data", 0)
    other = Watched(60.0)
    other.group.fail(1, "data")
    told_by(DataError, other.cluster.close, "faulty.data", 1)
    other.assert_gone()


@short
def test_a_stopped_worker(watched):
    told = told_by(CallTimeout, watched.group.stop(1).wait, "faulty.stop", 1)
    assert re.search(
        r"rank 1 \(process \d+, stopped\): in faulty.stop \(for \d.*\); stopped by a signal; kill -CONT \d+ lets it",
        told,
    )
    assert re.search(r"rank 0 \(process \d+, \w+\): between calls\n", told)
    watched.assert_gone()


@short
def test_a_worker_stopped_between_calls(watched):
    os.kill(watched.pids[1], signal.SIGSTOP)
    told = told_by(CallTimeout, watched.echo.pid, "echo.pid", 1)
    assert re.search(r"rank 1 \(process \d+, stopped\): has not begun echo.pid; stopped by a signal; kill -CONT", told)
    watched.assert_gone()


@short
def test_a_worker_that_holds_the_gil_shows_its_stack(watched):
    told = told_by(CallTimeout, watched.group.hold(0, 600).wait, "faulty.hold", 0)
    assert re.search(r"rank 0 .*: in faulty.hold \(for \d", told) and re.search(r"workers.py\", line \d+ in hold", told)
    watched.assert_gone()


@short
def test_a_message_that_a_stuck_worker_does_not_take(watched):
    """Its receiving thread needs the GIL too, and a socket holds little."""
    watched.group.hold(0, 600)
    big = [bytes(4_000_000)] * 2
    with pytest.raises(CallTimeout) as raised:
        watched.echo.each(big)
    told = str(raised.value)
    # Where the limit of the first call passes before the second one is sent, only the first is named.
    assert re.search(r"rank 0 .*: in faulty.hold \(for \d.*\)(; has not begun echo.each)?\n", told)
    watched.assert_gone()


@short
def test_the_limit_is_that_of_each_call_not_of_the_queue(watched):
    slow = [watched.group.sleep] * 3
    for call in slow:
        call(0.5)
    found = [watched.echo.timed(str(i), 0.6) for i in range(4)]
    assert len([dict(part) for part in found]) == 4  # 2.4 s of work, no call of which takes more than a second


@pytest.mark.parametrize("how, error, key", [
    pytest.param("raise", DataError, "faulty.data", marks=pytest.mark.slow),
    ("kill", WorkerLost, "faulty.reduce"),
])  # fmt: skip
def test_one_rank_fails_while_the_other_waits_in_a_collective(how, error, key):
    watched = Watched(60.0)
    watched.group.meet().wait()
    told_by(error, watched.group.reduce(1, how).wait, key, 1)
    watched.assert_gone()


@pytest.mark.parametrize("how, fact", [
    pytest.param("stop", r"stopped\): in faulty.reduce .*; stopped by a signal; kill -CONT", marks=pytest.mark.slow),
    ("sleep", r"sleeping\): in faulty.reduce .*\n +File .*workers.py\", line \d+ in reduce"),
    pytest.param("hold", r"sleeping\): in faulty.reduce .*\n +File .*workers.py", marks=pytest.mark.slow),
])  # fmt: skip
def test_who_does_not_come_to_a_collective_is_named_and_not_who_waits_for_it(how, fact):
    """The limit of a collective and that of the call that it is in end at about the same time."""
    watched = Watched(60.0)
    watched.group.meet(3.0).wait()
    watched.cluster.dispatch.timeout = 3.0
    told = told_by(CallTimeout, watched.group.reduce(1, how).wait, "faulty.reduce", 1)
    assert "rank 0" in told.partition("\n")[0].partition("; ")[2]  # who waited
    assert re.search(rf"\n  rank 1 \(process \d+, {fact}", told)
    watched.assert_gone()


@pytest.mark.slow
def test_a_stopped_worker_is_named_where_the_collective_ends_long_before_the_call():
    """As of a call that does much before it: what comes first is the word of the one that waited."""
    watched = Watched(60.0)
    watched.group.meet(3.0).wait()
    told = told_by(CallTimeout, watched.group.reduce(1, "stop").wait, "faulty.reduce", 1)
    assert re.search(r"\n  role faulty, rank 0, reduce: \w+Error: .*[Tt]imed out", told)
    watched.assert_gone()


def test_what_a_role_has_started_goes_with_its_worker(watched):
    children = [psutil.Process(pid) for pid in watched.group.child("")]
    watched.group.kill(0)
    told_by(WorkerLost, watched.echo.pid, "faulty.kill", 0)
    gone(children[1:])  # rank 0 died by itself: its child is the pool's own matter
    children[0].kill()


def test_an_answer_that_cannot_travel_is_an_error_of_its_call(watched):
    told_by(WorkerError, watched.echo.generator, "echo.generator", 0)


def test_an_argument_that_cannot_be_read_is_an_error_of_its_call(watched):
    class Here:  # known to this process only
        pass

    Here.__qualname__, sys.modules[__name__].Here = "Here", Here
    Here.__module__ = "tests.cluster.nowhere"
    module = type(sys)("tests.cluster.nowhere")
    module.Here = Here
    sys.modules["tests.cluster.nowhere"] = module
    try:
        told_by(WorkerError, lambda: watched.echo.each([Here(), 1]), "echo.each", 0)
    finally:
        del sys.modules["tests.cluster.nowhere"], sys.modules[__name__].Here


def test_an_exception_of_the_controller_frees_everything():
    with pytest.raises(KeyboardInterrupt):
        watched = Watched(60.0)
        with watched.cluster:
            watched.echo.timed("long", 600.0)
            raise KeyboardInterrupt
    watched.assert_gone()


CONTROLLER = """
import os, sys, time
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
from tilth.trace import recorder
cluster = open_cluster("local", 2, timeout=600.0)
group = cluster.group("faulty", "tests.cluster.workers:faulty", {}, Mesh(("dp",), (2,)))
children = group.child("")
HOW
print(cluster.backend.folder.path, *(link.pid for link in cluster.backend.links), *children, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [
    pytest.param("group.stop(1)", marks=pytest.mark.slow),
    "group.hold(0, 600)",
    pytest.param("pass", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_killed_controller_leaves_nothing(how):
    """Whatever its workers do: wait, hold the GIL, or are stopped."""
    controller = subprocess.Popen(
        [*forked.python(), "-c", CONTROLLER.replace("HOW", how)], stdout=subprocess.PIPE, text=True, env=environment(2)
    )
    folder, *pids = controller.stdout.readline().split()
    processes = [psutil.Process(int(pid)) for pid in pids] + psutil.Process(forked.pid(controller)).children()
    assert Path(folder).is_dir() and len(processes) >= 6
    time.sleep(0.2)  # the stop or the long call has begun
    controller.kill()
    controller.wait()
    controller.stdout.close()
    gone(processes)
    until = time.monotonic() + 10
    while Path(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_leftovers_of_a_dead_controller_are_removed_at_the_next_start(monkeypatch):
    """In a place of its own: any start of a cluster on this machine would remove them."""
    with tempfile.TemporaryDirectory() as place:
        left = started(place)
        assert left.is_dir() and left.parent == Path(place)
        monkeypatch.setattr("tilth.cluster.backends.session_dir._root", lambda: Path(place))
        one = SessionDir.create()
        assert not left.exists()
        two = SessionDir.create()  # a living one is left alone, of this process too
        assert one.path.is_dir() and two.path.is_dir()
        one.remove()
        two.remove()


def test_what_others_put_among_the_leftovers_is_neither_waited_for_nor_touched(tmp_path):
    """A name that begins like ours is no proof: a pipe would be waited for, a link leads anywhere."""
    (prey := tmp_path / "prey").mkdir()
    (prey / "alive").touch()
    prefix = tmp_path / "root" / f"tilth-{os.getuid()}-"
    prefix.parent.mkdir()
    for name in ("pipe", "pipe-behind-a-link", "link", "door"):
        Path(f"{prefix}{name}").mkdir()
    os.mkfifo(f"{prefix}pipe/alive")
    Path(f"{prefix}pipe-behind-a-link/alive").symlink_to(f"{prefix}pipe/alive")
    Path(f"{prefix}link/alive").symlink_to(prey / "alive")
    Path(f"{prefix}folder-behind-a-link").symlink_to(prey)
    os.mkfifo(f"{prefix}pipe-itself")
    os.mknod(f"{prefix}door/alive", stat.S_IFSOCK | 0o600)
    before = sorted(tmp_path.rglob("*"))
    made = started(prefix.parent)
    assert made.is_dir() and [p for p in sorted(tmp_path.rglob("*")) if made not in (p, *p.parents)] == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_leftovers_of_another_user_are_left_alone_whatever_their_name(tmp_path):
    theirs = tmp_path / f"tilth-{os.getuid()}-theirs"
    mine = tmp_path / f"tilth-{os.getuid()}-mine"
    for folder in (theirs, mine):
        folder.mkdir()
        (folder / "alive").touch()
    os.chown(theirs, 65534, 65534)
    os.chown(mine / "alive", 65534, 65534)
    started(tmp_path)
    assert theirs.is_dir() and mine.is_dir()


def started(place):
    """A cluster's folder in this place, made by a process of its own: what should hang must not hang the test."""
    code = (
        "import os, pathlib, tilth.cluster.backends.session_dir as f; "
        f"f._root = lambda: pathlib.Path({str(place)!r}); print(f.SessionDir.create().path, flush=True); os._exit(1)"
    )
    told = subprocess.run(
        [*forked.python(), "-c", code], capture_output=True, text=True, env=environment(1), timeout=60
    )
    return Path(told.stdout.strip())


def test_the_folder_is_private():
    with open_cluster("local", 1) as cluster:
        folder = cluster.backend.folder
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert (folder.path / "key").stat().st_mode & 0o777 == 0o600 and len(folder.key) == 32
        assert folder.path.parent == Path("/dev/shm") or not Path("/dev/shm").is_dir()


def test_a_worker_that_cannot_start_is_named_with_its_log(monkeypatch, tmp_path):
    before = set(forked.descendants())
    (tmp_path / "tilth").mkdir()
    (tmp_path / "tilth" / "__init__.py").write_text("raise ImportError('half of an installation')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("OMP_DYNAMIC", "false")  # asks for a new fork server
    with raises(WorkerLost, "cluster.start") as raised:
        LocalBackend(2)
    assert "ended with exit code 1" in str(raised.value)
    assert str(raised.value).endswith("ImportError: half of an installation")
    gone([p for p in forked.descendants() if p not in before])


def test_a_long_temporary_folder_is_named(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tilth.cluster.backends.session_dir._root", lambda: deep)
    with raises(StorageError, "session_dir.socket"):
        SessionDir.create()
    assert not list(deep.iterdir())


@pytest.mark.parametrize("there, way", [(0, "use train.device=cpu"), (2, "use at most 2")])
def test_more_workers_than_gpus_are_refused_with_what_works(monkeypatch, there, way):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with raises(RecipeError, "cluster.workers") as raised:
        open_cluster("local", 3, gpus=True)
    assert str(raised.value).endswith(way)


def test_threads_and_interface_of_a_worker(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert environment(1)["OMP_NUM_THREADS"] == str(cores) and environment(1000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(1000)["OMP_NUM_THREADS"] == "7"  # what the user says holds
    assert environment(1)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0") and environment(1)["GOMP_SPINCOUNT"] == "1000"


def test_a_failure_inside_a_scope_is_what_is_raised(watched):
    """The folder is gone when the scope ends; that is no error beside the one that took it."""
    with raises(WorkerLost, "faulty.kill"), watched.cluster.store.scope():
        watched.echo.put([1, 2])
        watched.group.kill(1)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_reaper_does_not_break_the_end_and_is_told_in_a_line(monkeypatch, capfd, how):
    monkeypatch.setattr("tilth.cluster.backends.local.END", 2.0)
    watched = Watched(60.0)
    with watched.cluster:
        os.kill(watched.cluster.backend._reaper.pid, how)
        time.sleep(0.1)
        assert len(watched.echo.pid()) == 2
    watched.assert_gone()
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("tilth: the reaper of the workers (process ")
    assert ("killed by SIGKILL" if how == signal.SIGKILL else "has not ended within 2 s") in told[0]


def test_a_process_that_ends_while_it_is_looked_up_is_no_error(monkeypatch):
    """A worker that was killed ends at any moment of its replacement."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr("psutil.pid_exists", lambda pid: True)  # it was there a moment ago
    assert [one.pid for one in reaper.running([ended.pid, os.getpid()])] == [os.getpid()]


def test_imports_do_not_count_against_the_limit_of_a_call(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(4)\nfrom tests.cluster.workers import echo\n")
    monkeypatch.syspath_prepend(tmp_path)
    with open_cluster("local", 1, timeout=2.0) as cluster:
        assert len(cluster.group("echo", "slow_to_import:echo", {"scale": float}).pid()) == 1


ENDS = [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]


@pytest.mark.parametrize("number", ENDS)
def test_a_worker_leaves_an_interrupt_to_the_controller(watched, number):
    pids = watched.echo.pid()
    for pid in pids:
        os.kill(pid, number)
    time.sleep(0.1)
    assert watched.echo.pid() == pids


def test_no_room_where_process_groups_meet_ends_with_the_advice(watched):
    (watched.folder / "meeting").symlink_to("/dev/full")
    with raises(StorageError, "session_dir.init_method") as raised:
        watched.group.meet().wait()
    told = str(raised.value)
    assert told.endswith("No space left on device; free memory there or set TMPDIR to a larger place")


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
from tilth.trace import recorder
with open_cluster("local", 2, timeout=600.0) as cluster:
    group = cluster.group("faulty", "tests.cluster.workers:faulty", {"closed": sys.argv[1]}, Mesh(("dp",), (2,)))
    print(cluster.backend.folder.path, *(link.pid for link in cluster.backend.links), flush=True)
    HOW
    time.sleep(600)
"""


@pytest.mark.parametrize("how, closed", [("pass", 2), pytest.param("group.sleep(600)", 0, marks=pytest.mark.slow)])
def test_an_interrupted_controller_leaves_nothing(tmp_path, how, closed):
    """Idle workers close their roles; those that are at work are killed."""
    program = [*forked.python(), "-c", INTERRUPTED.replace("HOW", how), str(tmp_path)]
    controller = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(2)
    )
    folder, *pids = controller.stdout.readline().split()
    processes = [psutil.Process(int(pid)) for pid in pids] + psutil.Process(forked.pid(controller)).children()
    time.sleep(0.3)
    controller.send_signal(signal.SIGINT)
    _, told = controller.communicate(timeout=patience(30))
    gone(processes)
    assert told.strip().endswith("KeyboardInterrupt") and not Path(folder).exists()
    assert len(list(tmp_path.iterdir())) == closed


def test_a_worker_whose_trace_cannot_be_written_ends_in_good_order(watched, tmp_path):
    with recorder.to(tmp_path / "mine", watched.cluster.rank):
        watched.cluster.trace(tmp_path / "events", 0)
        shutil.rmtree(tmp_path / "events")
        watched.echo.pid()
        told = watched.cluster.close()
    assert [line.split(":")[0] for line in told] == ["rank 0", "rank 1"]
    assert all("events were dropped" in line and str(tmp_path / "events") in line for line in told)
    watched.assert_gone()


@pytest.mark.parametrize(
    ("how", "limit"),
    [("block", "a call that may wait"), pytest.param("loop", "(guard.hang_after)", marks=pytest.mark.slow)],
)
def test_a_patient_call_may_take_long_as_long_as_it_gets_on(how, limit):
    """One that computes does not wait: its limit is that of other calls."""
    answers = list[str]()
    with pytest.raises(CallTimeout) as caught, open_cluster("local", 1) as cluster:
        group = cluster.group("faulty", f"{HERE}:faulty", {})
        cluster.watch(5.0, keep=True)
        group.paced(1.0)
        assert cluster.dispatch.longest[0] > 0.5 and cluster.dispatch.longest[1] == "faulty.paced"
        cluster.watch(1.0, keep=True)
        answers.append(group.wait_for_others("sleep", 2.0))
        cluster.dispatch.patience = 2.0
        cluster.dispatch.waits = {"others": 600.0}
        answers.append(group.wait_for_others("read", 3.0))
        group.wait_for_others(how, 600.0)
    assert answers == ["sleep", "read"]
    assert caught.value.key == "faulty.wait_for_others" and limit in str(caught.value)


def test_a_worker_that_ends_while_it_connects_is_named_with_its_end():
    backend, folder = LocalBackend.__new__(LocalBackend), SessionDir.create()
    backend.folder, backend.timeout, backend._kills, backend.watch = folder, 5.0, None, NodeProbe(folder, 1)
    backend._processes = {0: StartedWorker(os.getpid())}
    backend._processes[0].ended.set_result(3)
    try:
        with _listen(folder.socket) as door, socket.socket(socket.AF_UNIX) as guest:
            guest.connect(folder.socket)
            guest.close()
            with raises(WorkerLost, "cluster.start") as caught:
                backend._accept(door, [0])
        assert "rank 0" in str(caught.value) and "exit code 3" in str(caught.value)
    finally:
        folder.remove()


def test_a_worker_that_is_being_started_can_be_killed(watched, monkeypatch):
    """Else who waits for it would wait for the limit of a start."""
    backend, started = watched.cluster.backend, threading.Event()

    def start(*_):
        process = subprocess.Popen(["sleep", "30"])
        started.set()
        return process

    def strike():
        assert started.wait(60)
        while backend._processes[1].pid == watched.pids[1]:
            time.sleep(0.01)
        backend.kill([1])

    monkeypatch.setattr(local, "start_worker", start)
    strikes = threading.Thread(target=strike)
    strikes.start()
    assert "SIGKILL" in told_by(WorkerLost, lambda: backend.replace([1]), "cluster.start", 1)
    strikes.join()
    watched.cluster.dispatch.failed = WorkerLost("it is over", key="over")
