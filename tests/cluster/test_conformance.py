"""What every backend must do, run on each of them with real processes.

A backend joins by a line in BACKENDS; ``open_cluster`` makes it. With one worker everything holds too.
"""

import gc
import gzip
import itertools
import json
import os
import pickle
import signal
import time
from contextlib import nullcontext
from functools import partial
from threading import Thread

import numpy as np
import psutil
import pytest

from tests.cluster.workers import HERE, LONG, Odd
from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tilth.cluster.backends.base import Call, RepairableBackend, Reply
from tilth.cluster.controller.cluster import open_cluster
from tilth.cluster.controller.lazy import LazyBatch, LazyMap
from tilth.cluster.controller.leases import PAYLOAD
from tilth.core.batch import Batch, Jagged, concat
from tilth.core.errors import (
    CallTimeout,
    DataError,
    PayloadLeak,
    PluginError,
    RecipeError,
    StaleGeneration,
    WorkerError,
    WorkerLost,
)
from tilth.core.layout import Mesh
from tilth.roles.experience import FINISHES
from tilth.trace.spans import recorder

BACKENDS = [
    ("inline", 1),
    pytest.param(("local", 1), marks=[pytest.mark.dist, pytest.mark.slow]),  # one of four, as local-4 shows
    pytest.param(("local", 4), marks=pytest.mark.dist),
    pytest.param(("ray", 2), marks=[pytest.mark.dist, pytest.mark.ray]),
    pytest.param(("ray", 4), marks=[pytest.mark.dist, pytest.mark.ray, pytest.mark.slow]),
]
FACTOR = 2.5


def mesh_of(workers):
    return Mesh(("dp", "fsdp", "tp"), (1, 2, 2) if workers == 4 else (1, 1, workers))


SELDOM = [
    pytest.param(given.values[0], marks=[*given.marks, pytest.mark.slow]) if given == BACKENDS[3] else given
    for given in BACKENDS
]
seldom_with_ray = pytest.mark.parametrize(
    "backend", SELDOM, ids=lambda p: f"{p[0]}-{p[1]}", indirect=True, scope="module"
)
"""For what code settles that other rows run too: Ray's two workers import torch anew for each fleet."""


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: f"{p[0]}-{p[1]}")
def backend(request):
    if request.param[0] == "ray":
        request.getfixturevalue("ray_here")
    return request.param


@pytest.fixture(scope="module")
def cluster(backend):
    with open_cluster(*backend, timeout=60.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(cluster):
    """On all workers; the lambda is of this module, so it travels by value."""
    return cluster.group("echo", f"{HERE}:echo", {"scale": lambda x: FACTOR * x}, mesh_of(cluster.workers))


def batch_of(count, length=3):
    ids = np.arange(count)
    return Batch({"id": ids, "x": ids / 7, "length": np.full(count, length)})


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_rows_go_and_come_back_in_order(echo, count):
    batch = batch_of(count)
    found = echo.same(batch)
    assert found.rows.keys() == batch.rows.keys() and all(np.array_equal(found[c], batch[c]) for c in batch.rows)
    assert echo.scaled(batch)["y"].tolist() == [FACTOR * x for x in batch["x"].tolist()]


def test_metrics_are_those_of_the_whole(echo):
    found = echo.total(batch_of(9))["x"]
    assert found.total == pytest.approx(batch_of(9)["x"].sum()) and found.count == 9


def test_each_rank_gets_its_own(echo):
    items = [f"item-{i}" for i in range(echo.world_size)]
    assert echo.each(items, plain=3) == [(rank, item, 3) for rank, item in enumerate(items)]


def test_a_role_is_told_where_it_is(cluster, echo):
    found = echo.about()
    assert (found["role"], found["rank"], found["workers"]) == ("echo", 0, cluster.workers)
    assert found["mesh"] == mesh_of(cluster.workers) and found["timeout"] == 60.0
    assert bool(found["init_method"]) == (cluster.workers > 1) and found["roles"] in ([], ["echo"])


def test_a_role_without_a_mesh_is_on_worker_0_and_sees_the_roles_made_before(cluster, echo):
    single = cluster.group("single", f"{HERE}:echo", {})
    assert single.world_size == 1 and len(single.pid()) == 1
    assert single.pid()[0] == echo.pid()[0]
    assert "echo" in single.about()["roles"]


@seldom_with_ray
def test_workers_are_profiled_on_the_ranks_that_were_named(cluster, echo, tmp_path):
    ranks = sorted({0, cluster.workers - 1})
    assert cluster.profile(ranks) == {}
    assert cluster.profile(ranks) == {rank: "this process is being profiled already" for rank in ranks}
    echo.total(batch_of(9))
    found = cluster.profiled(ranks, tmp_path / "steps-3-4")
    assert {rank: made.path for rank, made in found.items()} == {
        rank: str(tmp_path / f"steps-3-4-rank-{rank}.json.gz") for rank in ranks
    }
    for made in found.values():
        with gzip.open(made.path) as file:
            assert "echo.total" in {event["name"] for event in json.load(file)["traceEvents"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"steps-3-4-rank-{rank}.json.gz" for rank in ranks]
    assert {made.error for made in cluster.profiled(ranks, None).values()} == {"nothing is being profiled"}
    assert cluster.profile(ranks[:1]) == {} and cluster.profiled(ranks[:1], None)[0].error == ""
    assert len(list(tmp_path.iterdir())) == len(ranks)  # what is forgotten leaves no file


def test_methods_without_a_protocol_are_refused_with_what_is_offered(echo):
    with pytest.raises(AttributeError) as raised:
        echo.scale()
    assert "'scale'" in str(raised.value) and "about, " in str(raised.value)


def test_payload_goes_from_worker_to_worker(cluster, echo):
    with cluster.store.scope():
        batch = echo.think(batch_of(10, length=4))
        assert echo.sums(batch)["sum"].tolist() == [4 * i + 6 for i in range(10)]
        chosen = batch.select(np.array([7, 2, 2]))
        assert echo.sums(chosen)["sum"].tolist() == [34, 14, 14]


def test_fewer_rows_than_ranks_are_read_too(cluster, echo):
    with cluster.store.scope():
        batch = echo.think(batch_of(1, length=4))
        assert echo.sums(batch)["sum"].tolist() == [6]
        assert echo.sums(batch.select(np.zeros(0, np.int64)))["sum"].tolist() == []


FEW = 64
"""Bytes of a message that are no payload of the test's: numbers of a step and a call, the sums of two spans."""


@pytest.mark.parametrize(
    "payload",
    [b"x" * 70_000, {"ids": np.arange(30_000), "word": "some text"}, [1, 2.5, None]],
    ids=["bytes", "array", "plain"],
)
def test_every_call_and_answer_is_counted_as_it_is_pickled(cluster, echo, payload):
    echo.pid()
    cluster.traffic()
    echo.twice(payload)
    found = cluster.traffic()
    assert set(found) == {("echo.twice", "sent"), ("echo.twice", "received")}
    call = len(pickle.dumps(Call("echo", "twice", (payload,)), protocol=5))
    answer = len(pickle.dumps(Reply([payload, pickle.loads(pickle.dumps(payload))], {}), protocol=5))
    assert abs(found["echo.twice", "sent"] / cluster.workers - call) <= FEW
    assert 0 <= found["echo.twice", "received"] / cluster.workers - answer + FEW <= 6 * FEW
    assert cluster.traffic() == {}


def test_making_a_role_and_what_the_cluster_asks_itself_are_counted(cluster):
    cluster.traffic()
    cluster.group("heavy", f"{HERE}:echo", {"scale": partial(max, bytes(50_000))}, mesh_of(cluster.workers))
    cluster.collect_garbage(3)
    found = cluster.traffic()
    assert 0 <= found["heavy.create", "sent"] - 50_000 * cluster.workers <= 1000 * cluster.workers
    assert found["cluster.collect", "sent"] > 0 and found["cluster.collect", "received"] > 0


def test_a_read_of_the_controller_is_counted(cluster, echo):
    with cluster.store.scope():
        batch = echo.think(batch_of(10, length=4))
        assert len(echo.sums(batch)) == 10
        assert not any(operation == PAYLOAD for operation, _ in cluster.traffic())
        tokens = batch.read(cluster.store, "tokens")["tokens"]
        assert [tokens.row(i)[0] for i in range(10)] == list(range(10))
        handles = batch.payload["tokens"].handles
        assert cluster.traffic() == {(PAYLOAD, "received"): sum(h.nbytes for h in handles)}
        own = cluster.store.put("own", Jagged.of([np.arange(3)]))
        assert cluster.traffic() == {(PAYLOAD, "sent"): own.nbytes}


def test_a_scope_frees_what_anyone_put_inside_it(cluster, echo):
    lease = cluster.store.lease("kept")
    with cluster.store.under(lease):
        kept, own = echo.put([1]), cluster.store.put("own", Jagged.of([np.arange(3)]))
    before = cluster.store.nbytes
    with cluster.store.scope():
        echo.think(batch_of(10))  # nobody waits for it: the scope does
        inner = echo.put([2, 3])
        assert echo.get(inner) == [2, 3] and cluster.store.nbytes > before
    assert cluster.store.nbytes == before
    with pytest.raises(KeyError):
        cluster.store.get(inner)
    assert echo.get(kept) == [1] and echo.get(own) == [0, 1, 2]
    lease.release()
    for handle in (kept, own):
        with pytest.raises(KeyError):
            cluster.store.get(handle)
    lease.release()  # twice is fine


def test_experience_outlives_its_step_until_its_batch_is_released(cluster, echo):
    """Two batches made in one step, used and released in later ones, each by itself."""
    leases = [cluster.store.lease(name) for name in ("early", "late")]
    with cluster.store.scope():
        batches = []
        for lease in leases:
            with cluster.store.under(lease):
                batches.append(echo.think(batch_of(10, length=4)))
        gone = echo.think(batch_of(10))
    with pytest.raises(KeyError):
        gone.read(cluster.store, "tokens")
    early, late = batches
    held = cluster.store.nbytes
    with cluster.store.scope():
        part = echo.sums(echo.think(early.select(np.array([7, 2])).with_rows(x=np.ones(2))))
        assert part["sum"].tolist() == [34, 14] and cluster.store.nbytes > held
        assert leases[0] in part.leases and leases[1] not in part.leases and len(part.leases) == 2
    assert cluster.store.nbytes == held  # what the later step put is gone, the batch's own is there
    late.release()
    assert 0 < cluster.store.nbytes < held
    assert echo.sums(early)["sum"].tolist() == [4 * i + 6 for i in range(10)]
    concat([early, early]).release()
    assert cluster.store.nbytes == 0


def test_a_release_waits_for_the_calls_of_its_lease_and_for_no_others(cluster, echo, tmp_path):
    if cluster.workers == 1:
        pytest.skip("calls of one worker are over in order")
    last = cluster.workers - 1
    far = cluster.group("far", f"{HERE}:echo", {}, Mesh(("dp",), (1,), (last,)))
    near = cluster.group("near", f"{HERE}:echo", {}, Mesh(("dp",), (1,), (0,)))
    lease = cluster.store.lease("near")
    slow = far.until("slow", str(tmp_path / "go"))
    with cluster.store.under(lease):
        near.think(batch_of(4))  # nobody waits for it: the release does
    lease.release()
    assert cluster.store.nbytes == 0
    (tmp_path / "go").touch()
    assert slow == {("slow", last): True}
    with cluster.store.under(lease):
        batch = near.think(batch_of(4)).wait()
    far.timed("slow", 1.0)
    read = far.sums(batch)  # under no lease, but it needs the batch's: the release waits for it too
    batch.release()
    assert read["sum"].tolist() == [3 * i + 3 for i in range(4)] and cluster.store.nbytes == 0


@seldom_with_ray
@pytest.mark.parametrize("owner", ["a batch of step 3", ""])
def test_payload_that_is_still_held_at_the_end_is_a_named_error(backend, owner):
    with raises(PayloadLeak, owner or "payload"), open_cluster(*backend, timeout=60.0) as cluster:
        group = cluster.group("echo", f"{HERE}:echo", {}, Mesh(("dp",), (cluster.workers,)))
        with cluster.store.under(cluster.store.lease(owner)) if owner else nullcontext():
            group.think(batch_of(4))


@seldom_with_ray
def test_a_leak_does_not_hide_the_error_that_left_it(backend):
    if backend[1] > 2:
        pytest.skip("two workers are enough")
    mine = RuntimeError("mine")
    with pytest.raises(RuntimeError) as raised, open_cluster(*backend, timeout=60.0) as cluster:
        cluster.group("echo", f"{HERE}:echo", {}).put([1])
        raise mine
    assert raised.value is mine


def test_a_scope_frees_after_an_exception_too(cluster, echo):
    before = cluster.store.nbytes
    with pytest.raises(RuntimeError), cluster.store.scope():
        echo.put([1, 2])
        raise RuntimeError
    assert cluster.store.nbytes == before


def test_keys_of_all_ranks_differ(cluster, echo):
    with cluster.store.scope():
        batches = [echo.think(batch_of(8)) for _ in range(3)] + [echo.same(echo.think(batch_of(8)))]
        keys = [h.key for batch in batches for h in batch.payload["tokens"].handles]
        assert len(set(keys)) == len(keys)


def test_times_of_the_workers_come_with_the_answers(cluster, echo):
    cluster.totals()
    with cluster.store.scope():
        echo.think(batch_of(10, length=4))
    found = cluster.totals()["think"]
    assert found.tokens == 40  # copies along tp are not counted again
    assert found.count == 1 and found.seconds > 0
    assert "think" not in cluster.totals()


def test_answers_that_are_not_read_yet_are_arguments(cluster, echo):
    with cluster.store.scope():
        assert echo.sums(echo.same(echo.think(batch_of(5))))["sum"].tolist() == [3 * i + 3 for i in range(5)]


def test_a_worker_of_one_answers_at_once_and_plainly(cluster, echo, backend):
    if backend[0] != "inline":
        pytest.skip("the others are lazy")
    assert type(echo.same(batch_of(2))) is Batch and type(echo.total(batch_of(2))) is dict


def test_calls_of_one_worker_run_one_after_the_other_in_call_order(cluster, echo):
    one, two = (cluster.group(name, f"{HERE}:echo", {}, mesh_of(cluster.workers)) for name in ("one", "two"))
    found = [one.timed("a", 0.05), two.timed("b", 0.05), one.timed("c", 0.05)]
    spans = {key: times for part in found for key, times in part.items()}
    for rank in {rank for _, rank in spans}:
        order = [spans[name, rank] for name in "abc" if (name, rank) in spans]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(order))


def test_bytes_through_the_controller_do_not_grow_with_the_tokens(cluster, echo, backend):
    sizes = []
    for length in (4, 4000):
        with cluster.store.scope():
            cluster.traffic()
            batch = echo.think(batch_of(512, length))
            echo.sums(batch)["sum"]
            sizes.append(sum(cluster.traffic().values()) / 512)
            assert cluster.store.nbytes >= 512 * length * 8
    assert abs(sizes[0] - sizes[1]) < 2 and max(sizes) <= 200 * (2 if cluster.workers > 1 else 1)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=[pytest.mark.dist, pytest.mark.slow])])
def test_every_worker_writes_its_trace_and_collects_when_all_do(tmp_path, workers):
    from tilth.analysis.read import read_events

    with open_cluster("local" if workers > 1 else "inline", workers) as traced:
        traced.trace(tmp_path, 0, planned=True)
        assert traced.rank == (traced.workers if workers > 1 else 0)
        group = traced.group("echo", f"{HERE}:echo", {}, Mesh(("dp",), (traced.workers,)))
        with traced.store.scope():
            group.think(batch_of(4))
        traced.collect_garbage(7)
    assert not recorder.recording and gc.isenabled()
    events = read_events(tmp_path).to_pylist()
    assert {e["rank"] for e in events if e["op"] == "think"} == set(range(traced.workers))
    asked = [e["rank"] for e in events if e["op"] == "call" and e["detail"] == "collect"]
    assert sorted(asked) == list(range(traced.workers))
    pauses = [e for e in events if e["op"] == "gc" and e["step"] >= 0]
    assert [(e["step"], e["detail"], e["role"]) for e in pauses] == [(7, "2", "")] * traced.workers


@seldom_with_ray
def test_roles_are_closed_at_the_end(backend, tmp_path):
    with open_cluster(*backend) as cluster:
        cluster.group("faulty", f"{HERE}:faulty", {"closed": str(tmp_path)}, Mesh(("dp",), (cluster.workers,)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"closed-faulty-{r}" for r in range(cluster.workers)]
    cluster.close()  # twice is fine


RAISED = {"data": DataError, "odd": Odd, "value": WorkerError, "exit": WorkerError}
OFTEN = {"local-1": ("odd",), "ray-2": ()}
"""What becomes of the others is settled in code that the rows of local-2 run too."""


def raised():
    """Each kind on each backend; a fleet of processes for each."""
    for backend, kind in itertools.product(BACKENDS, RAISED):
        given, marks = getattr(backend, "values", (backend,))[0], list(getattr(backend, "marks", ()))
        given = ("local", 2) if given == ("local", 4) else given  # two are enough, and half as many processes
        name = f"{given[0]}-{given[1]}"
        seldom = kind not in OFTEN.get(name, RAISED)
        yield pytest.param(given, kind, RAISED[kind], marks=marks + [pytest.mark.slow] * seldom, id=f"{name}-{kind}")


@pytest.mark.parametrize("backend, kind, error", list(raised()), indirect=["backend"])
def test_what_a_worker_raises(backend, kind, error):
    if backend == ("inline", 1):
        error = {"value": ValueError, "exit": SystemExit}.get(kind, error)
    with pytest.raises(error) as raised, open_cluster(*backend) as cluster:
        group = cluster.group("faulty", f"{HERE}:faulty", {}, Mesh(("dp",), (cluster.workers,)))
        dict(group.fail(cluster.workers - 1, kind))
    assert "it is wrong" in str(raised.value)
    if backend[0] != "inline":
        told = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
        assert told.startswith(f"role faulty, rank {backend[1] - 1}, fail: ")
        assert "in fail\n" in told and "raise {" in told  # the line that raised


def test_a_role_made_again_is_the_next_generation_and_refuses_what_was_called_before(cluster, backend):
    group = cluster.group("again", f"{HERE}:echo", {"scale": lambda x: FACTOR * x}, mesh_of(cluster.workers))
    assert (group.generation, group.about()["generation"]) == (0, 0)
    late = group.scaled(batch_of(3))
    cluster.make(group)
    assert (group.generation, group.about()["generation"]) == (1, 1)
    assert group.scaled(batch_of(3))["y"].tolist() == [FACTOR * x for x in batch_of(3)["x"].tolist()]
    if backend[0] != "inline":  # where it was answered at once
        with raises(StaleGeneration, "again.scaled"):
            late.wait()


IN_PLUGIN = """
import tilth
from tilth.cluster.protocol import transfer

@tilth.role("of_mine")
class Mine:
    def __init__(self, context): pass

    @transfer("all", "all")
    def act(self):
        return {}["lost"]

@tilth.engine("of_mine")
class Engine(Mine):
    pass

class Beside(Mine):
    pass

class Unmade:
    def __init__(self, context):
        raise SystemExit(3)
"""
PLUGIN_FAULTS = [
    ("of_mine", "Mine", PluginError, "role.of_mine"),
    ("rollout", "Engine", PluginError, "role.of_mine"),  # the class that has the method
    ("beside", "Beside", PluginError, "role.of_mine"),
]


@seldom_with_ray
def test_workers_that_are_kept_outlive_calls_that_fail(backend, tmp_path):
    with open_cluster(*backend, timeout=60.0) as cluster:
        cluster.dispatch.keep = True
        group = cluster.group("faulty", f"{HERE}:faulty", {"closed": str(tmp_path)}, Mesh(("dp",), (cluster.workers,)))
        with pytest.raises(DataError):
            dict(group.fail(cluster.workers - 1, "data"))
        with raises(StaleGeneration, "faulty.sleep"):
            cluster.dispatch.wait([cluster.dispatch.submit(0, Call("faulty", "sleep", (0,), generation=7))])
        cluster.make(group)
        assert len(list(tmp_path.iterdir())) == cluster.workers  # the objects of before were closed
        group.sleep(0)
        path = str(write(tmp_path, IN_PLUGIN))
        for role, name, error, key in PLUGIN_FAULTS:
            theirs = cluster.group(role, f"{HERE}:of_plugin", {"path": path, "name": name})
            with raises(error, key) as raised:
                theirs.act()
            assert "KeyError: 'lost' at mine.py:11" in str(raised.value)
            assert ("rank 0" in str(raised.value)) == (backend[0] != "inline")
        with raises(PluginError, "role.of_mine"):
            cluster.group("of_mine", f"{HERE}:of_plugin", {"path": path, "name": "Unmade"})


@seldom_with_ray
def test_an_error_in_a_factory_comes_up(backend):
    with raises(DataError, "corpus.txt"), open_cluster(*backend) as cluster:
        cluster.group("broken", f"{HERE}:broken", {})


@seldom_with_ray
def test_payload_outlives_the_rank_that_made_it(backend):
    if backend[1] == 1:
        pytest.skip("the only rank")
    with open_cluster(*backend, timeout=60.0) as cluster:
        first = cluster.group("first", f"{HERE}:echo", {})
        second = cluster.group("second", f"{HERE}:echo", {}, Mesh(("dp",), (1,), (1,)))
        handle = first.put([5, 6, 7])
        os.kill(first.pid()[0], signal.SIGKILL)
        assert second.get(handle) == [5, 6, 7]
        with raises(WorkerLost, "first.pid"):
            first.pid()


def test_who_waits_for_the_first_answer_waits_for_no_other(cluster, tmp_path):
    echo = cluster.group("first", f"{HERE}:echo", {}, Mesh(("dp",), (cluster.workers,)))
    assert echo.first([echo.timed("a", 0.0)]) == [True]
    if cluster.workers == 1:
        return
    slow, quick = echo.part("dp", [0]), echo.part("dp", [1])
    answers = slow.until("slow", str(tmp_path / "go")), quick.timed("quick", 0.1)
    assert echo.first(answers) == [False, True] and ("quick", 1) in answers[1]
    (tmp_path / "go").touch()
    assert echo.first(answers[:1]) == [True] and answers[0] == {("slow", 0): True}


def test_roles_in_disjoint_pools_overlap_and_lazy_answers_wait(backend):
    if backend[1] < 4:
        pytest.skip("one pool")
    with open_cluster(*backend, timeout=60.0) as cluster:
        left = cluster.group("left", f"{HERE}:echo", {}, Mesh(("dp",), (2,), (0, 1)))
        right = cluster.group("right", f"{HERE}:echo", {}, Mesh(("dp",), (2,), (2, 3)))
        a, b = left.timed("a", 0.5), right.timed("b", 0.5)
        assert isinstance(a, LazyMap) and repr(a) == "LazyMap(not resolved)"
        spans = {**a, **b}
        assert all(spans["b", r][0] < spans["a", s][1] for r in (2, 3) for s in (0, 1))  # b began before a ended
        assert all(spans["a", s][0] < spans["b", r][1] for r in (2, 3) for s in (0, 1))
        with cluster.store.scope():
            lazy = left.think(batch_of(3))
            assert isinstance(lazy, LazyBatch) and len(right.sums(lazy)) == 3


# ---- the control channel ----


@seldom_with_ray
def test_a_generation_is_looked_at_and_aborted_between_rounds(cluster):
    group = cluster.group("generating", f"{HERE}:generating", {}, Mesh(("dp",), (cluster.workers,)))
    count = 2 * cluster.workers
    loader = cluster.group("loading", f"{HERE}:loading", {}, Mesh(("dp",), (1,), (0,)))
    assert [found["requests"] for found in group.status()] == [0] * cluster.workers
    with cluster.store.scope():
        group.begin()
        group.submit(loader.encode(Batch({name: np.arange(count) for name in ("id", "group", "prompt")})))
        assert dict(group.advance()) == {} and [found["requests"] for found in group.status()] == [2] * cluster.workers
        assert sum(group.abort(ids=[0])) == 1
        assert [*group.advance()] == [0] and {found["version"] for found in group.status()} == {7}
        assert sum(group.abort()) == count - 1
        assert sorted(group.advance()) == [*range(1, count)]
        found = group.collect(np.arange(count))
        ids, finish, lengths = (found[name] for name in ("id", "finish", "completion"))
        order = np.argsort(ids)
    assert ids[order].tolist() == list(range(count)) and set(finish) == {FINISHES.index("aborted")}
    assert 0 < lengths[order][0] < lengths[order][1] and lengths.min() > 0 and lengths.max() < LONG
    assert sum(group.abort()) == 0


def test_control_messages_are_answered_while_a_call_runs_and_only_by_methods_that_say_so(cluster):
    group = cluster.group("faulty", f"{HERE}:faulty", {}, Mesh(("dp",), (cluster.workers,)))  # imports no torch
    fleet = cluster.backend
    for role, method in (("faulty", "sleep"), ("faulty", "context"), ("nobody", "status")):
        with raises(WorkerError, f"{role}.{method}"):
            fleet.control(0, role, method, {})
    with pytest.raises((WorkerError, TypeError)):
        fleet.control(0, "faulty", "status", {"wrong": 1})
    assert group.status() == ["here"] * cluster.workers  # nothing of this ends a worker


@seldom_with_ray
def test_a_probe_shows_the_operation_that_a_worker_is_in(backend):
    with open_cluster(*backend, timeout=60.0) as cluster:
        if not isinstance(cluster.backend, RepairableBackend):
            pytest.skip("it shows no operations")
        group = cluster.group("faulty", f"{HERE}:faulty", {})
        paced = Thread(target=group.paced, args=(1.0,))
        paced.start()
        seen = set()
        while paced.is_alive() and not seen:
            seen = {name for name, _ in cluster.backend.probe(0).spans} & {"forward"}
        paced.join()
        assert seen


def test_a_stopped_worker_is_named_by_control_messages(backend, monkeypatch):
    if backend[0] == "inline":
        pytest.skip("a process does not ask itself when it is stopped")
    monkeypatch.setattr("tilth.cluster.backends.control.LIMIT", 0.5)
    with open_cluster(*backend, timeout=60.0) as cluster:
        group = cluster.group("faulty", f"{HERE}:faulty", {})
        assert group.status() == ["here"]
        pid = cluster.backend.probe(0).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # a thread of it may still run an instant
                time.sleep(0.001)
            shown = hasattr(cluster.backend, "life")  # a backend of a plugin need not show signs of life
            with raises(CallTimeout, "faulty.status") as caught:
                group.status()
            assert caught.value.ranks == ((0,) if shown else ())
            if not shown:
                return
            monkeypatch.setattr("tilth.cluster.controller.group.STILL", 0.0)
            beats = itertools.count()
            monkeypatch.setattr(cluster.backend, "life", lambda rank: (0, next(beats)))
            with raises(CallTimeout, "faulty.status") as caught:  # it only takes long
                group.status()
            assert caught.value.ranks == ()
        finally:
            os.kill(pid, signal.SIGCONT)


def test_wrong_requests_name_what_would_work():
    with raises(RecipeError, "cluster.workers"):
        open_cluster("inline", 4)
    with raises(RecipeError, "cluster.backend"):
        open_cluster("mpi", 1)
    with raises(RecipeError, "cluster.workers"):
        open_cluster("local", 0)
    with raises(ValueError, "mesh"), open_cluster("inline", 1) as cluster:
        cluster.group("x", f"{HERE}:echo", {}, Mesh(("dp",), (2,)))
