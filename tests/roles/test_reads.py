"""Methods that are declared to read leave the state of their role as it is: a recovery does not load it again."""

import pytest
import torch

from tests.roles import small, test_critic, test_pairs
from tests.roles.test_policy import reference
from tilth.cluster.protocol import offered
from tilth.roles.critic import CriticWorker
from tilth.roles.pairs import PairPolicyWorker, RewardModelWorker
from tilth.roles.policy import PolicyWorker
from tilth.roles.reference import ReferenceWorker

HOW = test_pairs.LOSSES[0]


def learned(worker, batch):
    """A policy and a batch of its samples after an update, so that no state is that of the beginning."""
    worker.update(worker.advantages(batch, small.HOW), small.HOW)
    return worker, batch


def of_policy():
    worker = small.policy()
    return learned(worker, small.experience(worker))


def of_critic():
    policy = small.policy()
    batch = small.experience(policy)
    judge = test_critic.critic(policy)
    judge.update(test_critic.ready(policy, judge, batch), small.HOW)
    return judge, batch


def of_reference():
    policy, batch = of_policy()
    return reference(policy), batch


def of_pairs(make):
    store = small.policy().store
    worker, batch = make(store), test_pairs.batch_of(store)
    worker.pair_step(batch, HOW if make is test_pairs.policy else test_pairs.TERRY)
    return worker, batch


ROLES = {
    PolicyWorker: of_policy,
    CriticWorker: of_critic,
    ReferenceWorker: of_reference,
    PairPolicyWorker: lambda: of_pairs(test_pairs.policy),
    RewardModelWorker: lambda: of_pairs(test_pairs.reward_model),
}
ARGUMENTS = {
    "save": lambda batch, folder: (str(folder / "save"), False),
    "snapshot": lambda batch, folder: (str(folder), 0),
    "saving": lambda batch, folder: (True,),
    "tune": lambda batch, folder: (1e-2, 10),  # as the recipe has it
    "time_passes": lambda batch, folder: ([5, 3],),
    "time_ring": lambda batch, folder: (8,),
    "pair_eval": lambda batch, folder: (batch, HOW),
    **dict.fromkeys(("logprobs", "compare", "likelihood", "values"), lambda batch, folder: (batch,)),
}


def state(worker):
    """All that a checkpoint holds of a role."""
    groups = worker.groups().items()
    return {
        f"{group}/{name}": x.clone() for group, held in groups for name, x in held.tensors.items()
    }, worker.position()


def same(one, two):
    return one[1] == two[1] and all(torch.equal(one[0][name], x) for name, x in two[0].items())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_a_method_that_reads_leaves_the_state_of_its_role(role, tmp_path):
    worker, batch = ROLES[role]()
    reads = [name for name, how in offered(worker).items() if how.reads]
    assert {"save", "snapshot", "position"} <= set(reads)
    for name in reads:
        if name == "compare" and "rollout_logprobs" not in batch.payload:
            continue  # pairs have no samples
        before = state(worker)
        given = ARGUMENTS.get(name, lambda batch, folder: ())(batch, tmp_path)
        if role is RewardModelWorker and name == "pair_eval":
            given = batch, test_pairs.TERRY
        getattr(worker, name)(*given)
        assert same(before, state(worker)), name


@pytest.mark.parametrize("role", [PolicyWorker, CriticWorker], ids=lambda role: role.__name__)
def test_a_method_that_changes_the_state_is_not_declared_to_read(role):
    worker, _ = ROLES[role]()
    before = state(worker)
    worker.begin(1e-2, 10)
    assert not same(before, state(worker))
    assert not {"update", "begin", "adopt", "load", "sft_step", "pair_step"} & {
        name for name, how in offered(worker).items() if how.reads
    }
