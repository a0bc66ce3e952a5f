from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tilth.config.schema import Recipe, TrainConfig
from tilth.core.batch import Handle
from tilth.core.errors import LogprobMismatch
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
