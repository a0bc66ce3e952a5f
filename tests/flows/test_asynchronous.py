"""Asynchronous experience as a client of the rollout's rounds: step k + 1 trains while samples of step k are drawn."""

import numpy as np
import pytest
import torch

from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.core.batch import concat
from tilth.engines.rounds import RoundLimits
from tilth.roles import rollout as roles_rollout

GROUP, STEPS, TAKEN = 2, 5, 3
PROMPTS = (3, 77, 12, 50, 9, 41, 8)


class AsynchronousSampler:
    """Keeps groups in flight over steps. A step takes the oldest ones, so that no length is preferred."""

    def __init__(self, rollout, flying):
        self.rollout, self.asked, self.taken, self.ended = rollout, 0, 0, {}
        rollout.begin()
        self.submit(flying)

    def submit(self, groups):
        prompts = [PROMPTS[(self.asked + i) % len(PROMPTS)] for i in range(groups)]
        self.rollout.submit(small.asked(self.rollout.store, prompts, GROUP, self.asked * GROUP))
        self.asked += groups

    def advance(self):
        self.ended |= self.rollout.advance(texts=False)

    def take(self, groups):
        """Generate until the oldest groups are whole, and return them."""
        ids = np.arange(self.taken, self.taken + groups * GROUP)
        while not self.ended.keys() >= set(ids.tolist()):
            self.advance()
        self.taken += len(ids)
        return self.rollout.collect(ids)


def trained(flying, monkeypatch):
    """Batches of all steps, and the weights of each version."""
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(1))
    store = InlineStore()
    rollout, policy, batches = small.rollout(store, max_tokens=6), small.policy(store), []
    kept = [{name: t.detach().clone() for name, t in policy.weights()}]
    rollout.receive(policy.weights(), 0)
    sampler = AsynchronousSampler(rollout, flying)
    for step in range(STEPS):
        batches.append(sampler.take(TAKEN))
        if ahead := flying > TAKEN:
            sampler.submit(TAKEN)
            sampler.advance()
        reward = (batches[-1]["completion"] % 3).astype(np.float32)
        policy.update(policy.advantages(batches[-1].with_rows(reward=reward), small.HOW), small.HOW)
        kept.append({name: t.detach().clone() for name, t in policy.weights()})
        rollout.receive(policy.weights(), step + 1)
        if not ahead:
            sampler.submit(TAKEN)
    return store, concat(batches), kept


def test_each_token_names_the_weights_that_drew_it(monkeypatch):
    store, batch, kept = trained(2 * TAKEN, monkeypatch)
    assert batch["id"].tolist() == list(range(STEPS * TAKEN * GROUP))
    columns = batch.read(store, "versions", "rollout_logprobs", "mask")
    versions, drawn, mask = (columns[name].values for name in ("versions", "rollout_logprobs", "mask"))
    mixed = [len({*columns["versions"].row(i)[columns["mask"].row(i) == 1].tolist()}) for i in range(len(batch))]
    assert max(mixed) > 1 and len({*versions[mask == 1].tolist()}) > 2
    for version in {*versions[mask == 1].tolist()}:
        policy, mine = small.policy(store), (mask == 1) & (versions == version)
        with torch.no_grad():
            for name, tensor in policy.weights():
                tensor.copy_(kept[version][name])
        expected = policy.logprobs(batch).read(store, "old_logprobs")["old_logprobs"].values
        np.testing.assert_allclose(drawn[mine], expected[mine], atol=1e-5)


@pytest.mark.parametrize("step", [0, STEPS - 1])
def test_without_samples_ahead_it_is_synchronous(monkeypatch, step):
    store, batch, kept = trained(TAKEN, monkeypatch)
    rollout = small.rollout(store, max_tokens=6)
    rollout.receive(iter(kept[step].items()), step)
    some = batch.select(np.arange(step * TAKEN * GROUP, (step + 1) * TAKEN * GROUP))
    prompts = [PROMPTS[(step * TAKEN + i) % len(PROMPTS)] for i in range(TAKEN)]
    whole = small.generated(rollout, small.asked(store, prompts, GROUP, step * TAKEN * GROUP))
    for name in ("tokens", "rollout_logprobs", "versions"):
        assert np.array_equal(some.read(store, name)[name].values, whole.read(store, name)[name].values)
