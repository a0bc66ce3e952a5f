from concurrent.futures import Future
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tilth.cluster.backends.base import Reply
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.controller.dispatch import Dispatch
from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.leases import LeasedStore
from tilth.cluster.protocol import transfer_of
from tilth.config.schema import Recipe, TrainConfig
from tilth.core.batch import Handle
from tilth.core.errors import LogprobMismatch, WeightMismatch, WorkerLost
from tilth.core.layout import Mesh
from tilth.engines.protocol import EngineError
from tilth.flows.weight_sync import Publisher, SyncBounds, check_mismatch
from tilth.rl.metrics import Metric
from tilth.roles.relay_sync import RelaySyncWorker


def worst(value, count=1):
    return {"mismatch/max": Metric(value, count, "max")}


def test_bounds_by_precision_and_parity():
    assert SyncBounds.of(Recipe()) == SyncBounds(torch.float32, 1e-3)
    assert SyncBounds.of(Recipe(train=TrainConfig(precision="bf16"))) == SyncBounds(torch.bfloat16, 0.5)
    assert SyncBounds.of(Recipe(train=TrainConfig(mismatch=0.01))).mismatch == 0.01
    assert SyncBounds.of(Recipe(train=TrainConfig(parity=True))).mismatch == 0.0


def test_agreement_within_the_bound_passes():
    check_mismatch(worst(5e-4), SyncBounds(torch.float32, 1e-3), 0)
    check_mismatch({}, SyncBounds(torch.float32, 0.0), 0)
    check_mismatch(worst(0.0), SyncBounds(torch.float32, 0.0), 0)
    check_mismatch(worst(0.0, count=0), SyncBounds(torch.float32, 0.0), 0)


@pytest.mark.parametrize("value", [2e-3, float("inf"), float("nan")])
def test_disagreement_names_step_value_and_bound(value):
    with raises(LogprobMismatch, "train.mismatch"):
        check_mismatch(worst(value), SyncBounds(torch.float32, 1e-3), 4)


def test_in_parity_mode_the_smallest_difference_is_an_error():
    with pytest.raises(LogprobMismatch):
        check_mismatch(worst(1e-9), SyncBounds(torch.float32, 0.0), 0)


class Nodes:
    """Ranks of weight sync on two nodes, and their store."""

    mesh = Mesh(("to",), (2,))

    def __init__(self):
        self.packed, self.sent, self.held, self.numbers = [], [], set(), count()

    def part(self, axis, places):
        return self

    def relay_id(self, target):
        return ["near", "far"]

    def publish(self, target, publication, sent, *, anew):
        return [1]

    def pack(self, target, publication, since, *, base):
        self.packed.append((publication.version, since and publication.number - since, base))
        return [{0: Handle("key", 1)}]

    def pull(self, target, publication, sent):
        self.sent.append([one.publication.version for one in sent])
        return {}

    def lease(self, name):
        self.held.add(number := next(self.numbers))
        return SimpleNamespace(number=number, release=lambda: self.held.discard(number))

    def release(self, *leases):
        self.held.difference_update(lease.number for lease in leases)

    def under(self, lease):
        return nullcontext()


class Answers:
    """A backend whose workers answer at once, and the role of weight sync on them: the policy, then replicas."""

    def __init__(self, replicas, monkeypatch):
        self.workers, self.store, self.calls, self.waits = replicas + 1, InlineStore(), [], []
        dispatch, wait = Dispatch(self, 60), Dispatch.wait_first
        monkeypatch.setattr(Dispatch, "wait_first", lambda *given: self.waits.append(1) or wait(*given))
        self.group = WorkerGroup("weight_sync", "", {}, Mesh(("to",), (self.workers,)), dispatch)
        self.group.methods = {
            name: transfer_of(vars(RelaySyncWorker)[name]) for name in ("relay_id", "publish", "pull")
        }
        ranks = Mesh.of({}), Mesh.of({"dp": replicas}, range(1, self.workers))
        self.publisher = Publisher(self.group, *ranks, LeasedStore(self.store, dispatch), 3)

    def submit(self, rank, call):
        self.calls.append((rank, call))
        future = Future()
        future.set_result(Reply({"relay_id": "near", "publish": 1}.get(call.method, {rank: None}), {}))
        return future

    def pulled(self):
        """Ranks that were asked to pull since the last call, and the number of messages that were made for it."""
        pulls = [(rank, id(call)) for rank, call in self.calls if call.method == "pull"]
        self.calls = []
        return [rank for rank, _ in pulls], len({made for _, made in pulls})


def test_a_replica_that_is_lost_takes_nothing_until_it_joins_again(monkeypatch):
    workers = Answers(2, monkeypatch)
    publisher, found = workers.publisher, []
    for version in range(3):
        publisher.publish(version)
        found.append(workers.pulled()[0])
        if version == 0:
            publisher.leave(1)
        if version == 1:
            assert publisher.join(1).version == 1 and workers.pulled()[0] == [2]
    assert found == [[1, 2], [1], [1, 2]]


def test_a_replica_that_is_lost_is_not_asked_to_pull_alone(monkeypatch):
    """It would draw with its first weights, and the log would say that it has the newest."""
    publisher = Answers(2, monkeypatch).publisher
    publisher.publish(0)
    publisher.leave(1)
    with raises(EngineError, "weight_sync.pull"):
        publisher.pull(1)
    publisher.join(1)
    assert publisher.pull(1).version == 0


@pytest.mark.parametrize("ask", [lambda publisher: publisher.publish(1), Publisher.wait])
def test_what_stopped_a_pull_is_raised_though_another_thread_has_heard_of_it(monkeypatch, ask):
    """Beside a loss in the same call, which is that of the worker's next call."""
    workers = Answers(2, monkeypatch)
    publisher, plain = workers.publisher, workers.submit
    gone = WorkerLost("gone", key="worker.1")
    gone.ranks = (1,)
    torn = {1: gone, 2: WeightMismatch("torn", key="relay.torn")}

    def submit(rank, call):
        if call.method != "pull":
            return plain(rank, call)
        future = Future()
        future.set_exception(torn[rank])
        return future

    workers.submit = submit
    workers.group._dispatch.keep, workers.group._dispatch.apart = True, {1, 2}
    publisher.publish(0)
    with raises(WeightMismatch, "relay.torn"):  # the thread of the replicas
        workers.group._dispatch.wait([])
    with raises(WeightMismatch, "relay.torn"):
        ask(publisher)


def test_what_the_controller_does_for_a_publication_grows_with_no_replica_but_by_its_message(monkeypatch):
    done = set()
    for replicas in (1, 15):
        workers = Answers(replicas, monkeypatch)
        for version in range(3):
            workers.publisher.publish(version)
            before = len(workers.waits)
        ranks, made = workers.pulled()
        assert ranks == [*range(1, replicas + 1)] * 3 and made <= 2 * 3  # one of them asks for an answer
        workers.publisher.publish(3)
        done.add(len(workers.waits) - before)
    assert len(done) == 1, done


@pytest.mark.parametrize("adapters", [False, True])
def test_whole_versions_come_again_and_the_base_of_adapters_once(adapters):
    """Other nodes get all since the last whole version, and the base; what they no longer need is freed."""
    nodes, one = Nodes(), Mesh(("dp",), (1,))
    publisher = Publisher(nodes, one, one, nodes, 3, adapters=adapters)
    for version in range(8):
        publisher.publish(version)
    whole = (0, 1, 4, 7) if adapters else (0, 3, 6)
    base = (0,) if adapters else whole
    assert nodes.packed == [(version, int(version not in whole), version in base) for version in range(8)]
    assert [nodes.sent[5], nodes.sent[7]] == ([[0, 4, 5], [0, 7]] if adapters else [[3, 4, 5], [6, 7]])
    assert len(nodes.held) == len(nodes.sent[-1]) + 1  # and that of the pulls under way
    publisher.wait()
    assert not nodes.held
    publisher.publish(8)
    assert nodes.packed[-1] == (8, 0, True)
