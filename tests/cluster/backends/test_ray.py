"""What the Ray backend does beyond the conformance suite: where workers go, how they fail, who may connect."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forked
from tests.cluster.workers import HERE
from tests.errors import raises
from tilth.cluster.backends.capacity import patience
from tilth.cluster.backends.ray import RayBackend
from tilth.cluster.backends.ray_actors import interface_for
from tilth.cluster.backends.ray_connect import Node, _knock, connect, import_ray, nodes_of, place_spares, spread
from tilth.cluster.backends.ray_watch import Machine, Process, is_lost
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.batch import Jagged
from tilth.core.errors import CallTimeout, RecipeError, StorageError, WorkerLost
from tilth.core.layout import Mesh

BOTH = Mesh(("dp",), (2,))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 30))
def test_every_worker_gets_a_place_and_no_node_more_than_it_has(room, workers):
    if sum(room) < workers:
        with raises(RecipeError, "cluster.workers"):
            spread(room, workers)
        return
    on = spread(room, workers)
    shares = [on.count(i) for i in range(len(room))]
    assert len(on) == workers and on == sorted(on)  # neighbours together
    assert all(share <= places for share, places in zip(shares, room))
    open_ = [share for share, places in zip(shares, room) if share < places]
    assert not open_ or max(shares) <= min(open_) + 1  # a node that could take more has no smaller share


def test_a_cluster_too_small_says_what_it_has():
    with raises(RecipeError, "cluster.workers") as raised:
        spread([1], 3, "GPUs")
    assert "1 GPUs on 1 node " in str(raised.value)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 12))
def test_spares_wait_where_most_room_is_left(left, spares):
    if sum(left) < spares:
        with raises(RecipeError, "guard.spares"):
            place_spares(left, spares, 4)
        return
    places = place_spares(left, spares, 4)
    rest = [room - places.count(i) for i, room in enumerate(left)]
    assert len(places) == spares and min(rest) >= 0
    assert not places or max(rest) <= min(rest[i] for i in places) + 1  # level, where some went


def test_nodes_are_the_living_ones_with_what_a_worker_needs():
    rows = [
        {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0, "GPU": 2.0}},
        {"NodeID": "b", "Alive": False, "NodeManagerAddress": "10.0.0.2", "Resources": {}},
        {"NodeID": "c", "Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 3.0}},
    ]
    assert nodes_of(rows, gpus=False) == [Node("a", "10.0.0.1", 4), Node("c", "10.0.0.3", 3)]
    assert [node.room for node in nodes_of(rows, gpus=True)] == [2, 0]


@pytest.mark.parametrize(
    ("why", "silent", "lost"),
    [
        (ConnectionRefusedError(), 0.5, False),  # it has just answered
        (ConnectionRefusedError(), 1.5, True),
        (TimeoutError(), 9.0, False),
        (TimeoutError(), 11.0, True),
        (None, 11.0, False),  # a busy machine
        (None, 61.0, True),
    ],
)
def test_when_a_node_is_lost(why, silent, lost):
    assert is_lost(silent, Node("a", "10.0.0.1", 4, 1), lambda node: why) == lost


def test_ray_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(RecipeError, "cluster.backend"):
        open_cluster("ray", 2)


def test_no_workers():
    with raises(RecipeError, "cluster.workers"):
        open_cluster("ray", 0)


@pytest.mark.slow  # a process that imports torch
def test_ray_is_not_imported_before_it_is_asked_for():
    program = (
        "import sys; import tilth.cli.run\n"
        "from tilth.cluster.backends import local, ray, ray_actors\n"
        "from tilth.cluster.controller.cluster import open_cluster\n"
        "open_cluster('inline', 1).close()\n"
        "print([name for name in sys.modules if name == 'ray' or name.startswith('ray.')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def refusing(error):
    def init(**_):
        raise error

    return SimpleNamespace(init=init, is_initialized=lambda: False, exceptions=SimpleNamespace(RayError=LookupError))


def test_another_version_on_the_cluster_is_one_line():
    told = "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.11.7\nThis process ..."
    with raises(RecipeError, "cluster.address") as raised:
        connect(refusing(RuntimeError(told)), 2, "auto")
    assert "Ray: 2.40.0 Python: 3.11" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "address", ["1.2.3", "10.0.0.1", "10.0.0.1:", "10.0.0.1:ray", ":6379", "10.0.0.1:0", "10.0.0.1:65536", "local"]
)
def test_an_address_that_is_none_says_what_one_is(address):
    with raises(RecipeError, "cluster.address") as raised:
        connect(refusing(ValueError(f"Invalid address format: {address}")), 2, address)
    assert "HOST:PORT" in str(raised.value) and "TOKEN" not in str(raised.value)


def test_an_address_that_ray_has_from_elsewhere_names_no_token():
    with raises(RecipeError, "cluster.address") as raised:
        connect(refusing(ValueError("Invalid address format: 1.2.3")), 2, "auto")  # RAY_ADDRESS
    assert "HOST:PORT" in str(raised.value) and "TOKEN" not in str(raised.value)


@pytest.mark.parametrize("error", [ConnectionError("no"), LookupError("Unauthenticated")])
def test_a_cluster_that_refuses_names_the_token(error):
    with raises(RecipeError, "cluster.address") as raised:
        connect(refusing(error), 2, "auto")
    assert "RAY_AUTH_TOKEN" in str(raised.value)


def test_addresses_that_cannot_be():
    with raises(RecipeError, "cluster.address"):
        connect(refusing(AssertionError()), 2, "ray://host:10001")
    with raises(RecipeError, "cluster.address"):
        _knock("127.0.0.1:9")


class Fault(Exception):
    """Of a Ray that is pretended."""


class Silence(Fault):
    """The same, for want of an answer."""


class Failed(Fault):
    """The same, of a method."""


def pretended(get=lambda reference, timeout: reference, processes=()):
    """A backend with these processes, without Ray."""
    backend = RayBackend.__new__(RayBackend)
    kinds = {"RayError": Fault, "GetTimeoutError": Silence, "RayTaskError": Failed, "RayActorError": Fault}
    backend._ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(**kinds), wait=lambda *_, **__: None)
    backend._processes, backend._starting, backend._lock = list(processes), {}, threading.RLock()
    backend._machines = list({process.machine: None for process in processes})
    return backend


class Remote:
    """Stands for an actor; its methods answer with their arguments."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: self.asked.append((name, *given)))


def process(rank):
    return Process(Remote(), Machine(Node("a", "10.0.0.1", 4), 0, Remote()), None, rank, 100 + rank)


@pytest.mark.parametrize("found, kind, ranks", [(Fault("died"), WorkerLost, (1,)), (Silence(), CallTimeout, ())])
def test_a_node_that_does_not_answer_a_control_message_is_named_with_the_rank(found, kind, ranks):
    """With it the loss is that of a replica alone; silence is not a loss."""

    def get(reference, timeout):
        raise found

    backend = pretended(get, [process(rank) for rank in range(2)])
    with raises(kind, "rollout.engine_counts") as caught:
        backend.control(1, "rollout", "engine_counts", {})
    assert tuple(caught.value.ranks) == ranks and "rank 1" in str(caught.value)


def test_a_worker_that_is_about_to_take_the_place_of_another_is_killed_with_it(monkeypatch):
    """Who waits for it in another thread has given it up."""
    old, new, begun, killed = [process(rank) for rank in range(2)], process(1), threading.Event(), threading.Event()
    new.pid, gone = 0, []
    backend = pretended(processes=old)
    backend._ray.kill = lambda actor: gone.append(actor) or (actor is new.actor and killed.set())
    for name in ("_vacate", "_refill"):
        monkeypatch.setattr(backend, name, lambda *_: None)
    monkeypatch.setattr(backend, "_substitute", lambda *_: new)
    monkeypatch.setattr(backend, "_begin", lambda _: begun.set() or killed.wait(5))
    thread = threading.Thread(target=backend.replace, args=([1],))
    thread.start()
    assert begun.wait(60)
    backend.kill(rank for rank in [1])
    assert gone == [old[1].actor, old[1].actor, new.actor]  # first by who replaces it
    thread.join()
    assert backend._processes == [old[0], new] and not backend._starting
    assert old[1].machine.agent.asked == [("kill", [101])] * 2


def test_collectives_of_one_machine_stay_on_it():
    name = interface_for("file:///dev/shm/x/meeting")
    assert any(a.address == "127.0.0.1" for a in psutil.net_if_addrs()[name])


def running(pid):
    """A zombie that nobody has waited for yet has ended too."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.ray
class TestWithRay:
    """Real processes, on the Ray of the session."""

    @pytest.fixture(autouse=True)
    def _ray(self, ray_here):
        self.ray = ray_here

    def open(self):
        cluster = open_cluster("ray", 2, timeout=60.0)
        self.backend, self.folder = (
            cluster.backend,
            Path(self.ray.get(cluster.backend._machines[0].agent.place.remote())),
        )
        assert isinstance(self.backend, RayBackend) and self.folder.stat().st_mode & 0o777 == 0o700
        return cluster

    def assert_gone(self, *others):
        until = time.monotonic() + 10
        while left := [pid for pid in (*[process.pid for process in self.backend._processes], *others) if running(pid)]:
            assert time.monotonic() < until, f"still there: {left}"
            time.sleep(0.02)
        assert not self.folder.exists()

    def test_it_listens_on_this_machine_only_and_wants_a_token(self):
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) >= 32
        processes = [psutil.Process(), *forked.descendants()]
        open_doors = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
        assert open_doors and {ip.removeprefix("::ffff:") for ip in open_doors} == {"127.0.0.1"}

    def test_workers_meet_and_a_killed_one_is_named(self):
        with raises(WorkerLost, "faulty.reduce") as raised, self.open() as cluster:
            faulty = cluster.group("faulty", f"{HERE}:faulty", {}, BOTH)
            dict(faulty.meet())
            child = faulty.child("")[0]
            dict(faulty.reduce(1, "kill"))
        told = str(raised.value)
        assert re.search(
            r"^role faulty, rank 1, reduce: the worker \(process \d+\) has died while in faulty.reduce", told
        )
        self.assert_gone(child)

    @pytest.mark.slow  # test_conformance.py has a worker that dies
    def test_last_words(self):
        with raises(WorkerLost, "faulty.leave") as raised, self.open() as cluster:
            dict(cluster.group("faulty", f"{HERE}:faulty", {}, BOTH).leave(0))
        assert "\n    the last words of a worker" in str(raised.value)
        self.assert_gone()

    @pytest.mark.slow  # test_conformance.py has one that is stopped
    @pytest.mark.parametrize("how, state, extra", [("stop", "stopped", ()), ("hold", "sleeping", (60,))])
    def test_a_worker_that_is_stuck_is_seen_from_outside(self, how, state, extra):
        with pytest.raises(CallTimeout) as raised, self.open() as cluster:
            faulty = cluster.group("faulty", f"{HERE}:faulty", {}, BOTH)
            cluster.dispatch.timeout = 2.0  # not before: on a busy machine it takes a while to make a role
            dict(getattr(faulty, how)(1, *extra))
        told = str(raised.value)
        assert told.startswith(f"role faulty, rank 1, {how}: no answer within 2 s (cluster.timeout)")
        assert re.search(rf"rank 1 \(process \d+, {state}\): in faulty.{how} \(for \d", told)
        assert re.search(r"rank 0 \(process \d+, \w+\): between calls\n", told)
        assert (f"in {how}\n" in told) == (how == "hold")  # a stopped process cannot show its stack
        self.assert_gone()

    @pytest.mark.parametrize(
        "how, state", [("stop", "stopped"), pytest.param("sleep", "sleeping", marks=pytest.mark.slow)]
    )
    @pytest.mark.slow
    def test_who_does_not_come_to_a_collective_is_named_and_not_who_waits_for_it(self, how, state):
        with pytest.raises(CallTimeout) as raised, self.open() as cluster:
            faulty = cluster.group("faulty", f"{HERE}:faulty", {}, BOTH)
            dict(faulty.meet(3.0))
            dict(faulty.reduce(1, how))
        told = str(raised.value)
        assert re.match(r"role faulty, rank 1, reduce: did not come to a collective; rank 0 waited for it", told)
        assert re.search(rf"\n  rank 1 \(process \d+, {state}\): in faulty.reduce", told)
        self.assert_gone()

    def test_a_clean_end_leaves_nothing_and_payload_may_be_written_to(self):
        with self.open() as cluster:
            echo = cluster.group("echo", f"{HERE}:echo", {}, BOTH)
            assert echo.environment("GOMP_SPINCOUNT") == ["1000", "1000"]
            assert {psutil.Process(pid).nice() for pid in echo.pid()} == {psutil.Process().nice()}
            big = Jagged.of([np.arange(200_000)])
            handle = cluster.store.put("big", big)
            column = cluster.store.get(handle)
            assert np.array_equal(column.values, big.values) and column.values.flags.writeable
            assert cluster.store.nbytes == handle.nbytes == big.values.nbytes + 16
            probe = self.backend.probe(1)
            assert (
                probe.pid == echo.pid()[1]
                and probe.state in ("running", "sleeping")
                and "Current thread" in probe.stack
            )
            os.kill(
                self.ray.get(self.backend._machines[0].agent.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL
            )
            with raises(StorageError, "big"):
                cluster.store.get(handle)
            self.backend.close(kill=True)
            cluster.dispatch.failed = WorkerLost("the machine")
        assert self.backend.probe(0).state == "gone"

    def test_too_many_workers(self):
        have = int(self.ray.cluster_resources()["CPU"])
        with raises(RecipeError, "cluster.workers"):
            open_cluster("ray", have + 1)

    def test_a_ray_that_was_there_before_stays(self):
        assert not connect(self.ray, 2, "")
        assert import_ray() is self.ray


DRIVER = """
import sys
from tests.cluster.workers import HERE
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
workers, address, lie = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if lie:
    import ray
    ray.__version__ = lie[0]
with open_cluster("ray", workers, timeout=100, address=address) as cluster:
    mesh = Mesh(("dp",), (workers,))
    faulty, echo = cluster.group("faulty", f"{HERE}:faulty", {}, mesh), cluster.group("echo", f"{HERE}:echo", {}, mesh)
    print("nodes", len(cluster.backend._machines), echo.about()["init_method"].split(":")[0])
    far = cluster.group("far", f"{HERE}:echo", {}, Mesh(("dp",), (1,), (workers - 1,)))
    with cluster.store.scope():
        handle = far.put([5, 6, 7])
        print("home", handle.key[0], echo.get(handle), cluster.store.get(handle).values.tolist())
    dict(faulty.meet())
    print("total", dict(faulty.reduce(-1, ""))["total"], "held", cluster.store.nbytes)
"""


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    return port if not 10000 <= port < 20000 else free_port()  # Ray's workers take those


@pytest.fixture
def two_nodes(tmp_path_factory):
    """(address, environment) of a cluster of two nodes with a token, started as the guide says."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install '.[ray]')")
    port, root = free_port(), Path(__file__).parents[3]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = clean | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
                   "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
    small = ["--object-store-memory=100000000", "--disable-usage-stats"]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of its sockets must be short
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    nodes = [subprocess.Popen([*command, *small, *head], env=env, stdout=subprocess.DEVNULL)]
    until = time.monotonic() + patience(60.0)
    while time.monotonic() < until:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
        time.sleep(0.1)
    nodes.append(
        subprocess.Popen([*command, *small, f"--address=127.0.0.1:{port}"], env=env, stdout=subprocess.DEVNULL)
    )
    yield f"127.0.0.1:{port}", env
    started = [psutil.Process(node.pid) for node in nodes]
    family = [process for node in started for process in (node, *node.children(recursive=True))]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for node in nodes:
        node.wait()
    shutil.rmtree(folder, ignore_errors=True)


def drive(env, *arguments, seconds=120.0):
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(seconds))
    return found.stdout, found.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_with_a_token(two_nodes):
    address, env = two_nodes
    until = time.monotonic() + patience(60.0)
    while "nodes 2" not in (told := drive(env, 4, address))[0] and time.monotonic() < until:
        assert "the Ray cluster has 2 CPUs on 1 node" in told[1], told  # the second is still coming
    out, err = told
    assert "nodes 2 tcp" in out, err
    assert "home 1 [5, 6, 7] [5, 6, 7]" in out, err
    assert "total 4.0 held 0" in out, err
    assert "the Ray cluster has 4 CPUs on 2 nodes" in drive(env, 5, address)[1]
    for wrong in ({"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}):
        out, err = drive(env | wrong, 1, address)
        assert not out and re.search(r"RecipeError: cluster.address = .* RAY_AUTH_TOKEN \(or", err), err
    assert re.search(
        r"RecipeError: cluster.address = .*Version mismatch: .* Ray: 9.9.9", drive(env, 1, address, "9.9.9")[1]
    )
