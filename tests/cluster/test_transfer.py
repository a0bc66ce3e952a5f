"""What roles declare of their calls is true: a call on two halves, gathered as declared, is the call on the whole."""

import inspect
from functools import partial

import numpy as np
import pytest

from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.protocol import transfer_of
from tilth.core.batch import concat
from tilth.rewards.process_pool import Outcome
from tilth.roles.critic import CriticWorker
from tilth.roles.loader import DocumentLoader, PromptLoader
from tilth.roles.policy import PolicyWorker
from tilth.roles.reference import ReferenceWorker
from tilth.roles.reward import RewardWorker
from tilth.roles.rollout import RolloutWorker
from tilth.roles.trajectory_writer import TrajectoryWriter
from tilth.roles.weight_sync import WeightSyncWorker

ROLES = (PolicyWorker, CriticWorker, ReferenceWorker, PromptLoader, DocumentLoader, TrajectoryWriter)
ROLES += (RewardWorker, RolloutWorker, WeightSyncWorker)
LOCAL = {"weights", "receive", "fingerprint", "groups", "saved", "table", "follow", "close", "check_at_rest",
         "averaged", "published"}  # fmt: skip
"""Methods that a role keeps to its own process."""


@pytest.mark.parametrize("role", ROLES)
def test_every_public_method_of_a_role_says_how_it_is_split_and_gathered(role):
    public = {n: m for n, m in inspect.getmembers(role, inspect.isfunction) if not n.startswith("_")}
    assert {n for n, m in public.items() if transfer_of(m) is None} <= LOCAL
    for method in (m for m in public.values() if transfer_of(m)):
        found = transfer_of(method)
        assert found.split in ("rows", "plan", "all") and found.gather in ("rows", "first", "merge", "all")
        if found.gather == "rows":
            assert found.split in ("rows", "plan") or method is RolloutWorker.collect
            assert inspect.signature(method).return_annotation.__name__ == "Batch"


@pytest.fixture(scope="module")
def worker():
    return small.policy()


@pytest.fixture(scope="module")
def batch(worker):
    return small.experience(worker)


def in_halves(call, batch):
    """As two ranks would: rows in two parts, at the border of a group; answers concatenated."""
    cut = np.arange(len(batch)) < 4
    return concat([call(batch.select(cut)), call(batch.select(~cut))])


def same(store, a, b, *columns):
    for left, right in zip(a.read(store, *columns).values(), b.read(store, *columns).values()):
        assert np.array_equal(left.offsets, right.offsets)
        assert np.allclose(left.values, right.values, atol=1e-6)


def test_generating_in_halves_is_generating(worker):
    speaker = small.rollout(worker.store)
    speaker.receive(worker.weights(), 0)
    asked = small.asked(worker.store, [3, 8, 41], 4, 0)
    whole, halves = small.generated(speaker, asked), in_halves(partial(small.generated, speaker), asked)
    same(worker.store, whole, halves, "tokens", "mask", "rollout_logprobs", "text")
    assert all(np.array_equal(whole[c], halves[c], equal_nan=c in ("reward", "outcome")) for c in whole.rows)


@pytest.mark.parametrize("method, column", [("logprobs", "old_logprobs"), ("advantages", "advantages")])
def test_the_policy_s_columns_in_halves(worker, batch, method, column):
    def call(part):
        return getattr(worker, method)(part, *([small.HOW] if method == "advantages" else []))

    same(worker.store, call(batch), in_halves(call, batch), column)


def test_scoring_in_halves_is_scoring(worker, batch):
    class Lengths:
        def score(self, items, known=None):
            return [Outcome(float(len(text)), {"id": i}) if i % 5 else Outcome(None) for i, _, text, _ in items]

    role = RewardWorker(Lengths(), small.PROMPTS, worker.store)
    whole, halves = role.score(batch), in_halves(role.score, batch)
    for name in ("reward", "part/id"):
        assert np.array_equal(whole[name], halves[name], equal_nan=True)


def test_payload_behind_a_batch_is_freed_with_the_lease_of_its_step():
    store = InlineStore()
    worker = small.policy(store)
    store.lease = "step"
    batch = small.experience(worker)
    ready = worker.advantages(batch, small.HOW)
    assert len(store.held()) > len(batch.payload)
    store.release("step")
    assert store.held() == {}
    with pytest.raises(KeyError):
        ready.read(store, "advantages")
