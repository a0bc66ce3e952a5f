from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tilth.cluster.controller.lazy import LazyMap
from tilth.config.schema import Recipe, TrainConfig
from tilth.core.batch import Handle
from tilth.core.errors import LogprobMismatch, WorkerLost
from tilth.core.layout import Mesh
from tilth.flows.weight_sync import Publisher, SyncBounds, check_mismatch
from tilth.rl.metrics import Metric


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


class Pulls(Nodes):
    """Two replicas, of which one has died when somebody waits for what it takes."""

    def __init__(self, error):
        super().__init__()
        self.error, self.pulled = error, []

    def part(self, axis, places):
        return SimpleNamespace(publish=self.publish, pull=lambda *given: self.taken(*places))

    def relay_id(self, target):
        return ["near"]

    def taken(self, *places):
        def wait():
            if 1 in places:
                raise self.error

        self.pulled += places
        return LazyMap(wait)


def test_a_replica_that_is_lost_takes_nothing_until_it_joins_again():
    error = WorkerLost("gone", key="weight_sync.pull")
    error.ranks = (1,)
    nodes = Pulls(error)
    publisher = Publisher(nodes, Mesh(("dp",), (1,)), Mesh(("dp",), (2,)), nodes, 3)
    publisher.publish(0)
    with raises(WorkerLost, "weight_sync.pull"):  # nobody mends it
        publisher.publish(1)
    publisher.apart = (1,)
    publisher.publish(2)
    publisher.leave(1)
    publisher.publish(3)
    assert publisher.join(1).version == 3
    publisher.publish(4)
    assert nodes.pulled == [0, 1, 0, 1, 0, 1, 0, 1] and len(nodes.held) == 1


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
