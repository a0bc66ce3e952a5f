"""The loss of an update: the same whatever the split into micro-batches, with every part of it."""

import functools

import numpy as np
import pytest
import torch

from tests.roles import small
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import OUTCOME, put_like


def how(**keys):
    return small.algorithm(**{"advantage": "grpo_no_std", "epochs": 2, **keys})


PARTS = {
    "plain": how(),
    "likelihood of right answers": how(nll_coef=0.5),
    "entropy": how(entropy_coef=0.1),
    "sequence ratio": how(loss="gspo"),
    "geometric mean": how(loss="geo_mean"),
    "chosen at random": how(loss="clip_cov", options={"cov_share": 0.3, "cov_low": -5.0, "cov_high": 5.0}),
    "chosen by covariance": how(loss="kl_cov", options={"cov_share": 0.3}),
    "truncated weights": how(correction="decoupled_token_is", options={"max_weight": 1.01}),
    "rejected rows": how(correction="decoupled_geo_rs", options={"reject": {"seq_mean_k3": 2e-4}}),
    "two policies": how(correction="bypass_ppo_clip"),
}


def updated(chosen: Algorithm, micro_tokens: int, order=None):
    """Weights after one update, and its metrics; the engine that sampled differed a little from the trainer."""
    worker = small.policy(micro_tokens=micro_tokens)
    batch = small.experience(worker)
    batch = batch.with_rows(**{OUTCOME: (np.arange(len(batch)) % 2).astype(np.float32)})
    for handle in batch.payload["rollout_logprobs"].handles:
        noise = 0.03 * np.sin(np.arange(len(worker.store.get(handle).values)))
        worker.store.get(handle).values[:] += noise.astype(np.float32)
    batch = worker.advantages(worker.logprobs(batch), chosen)
    worker.update(batch, chosen)  # so that the ratio is not 1 any more
    found = worker.update(batch if order is None else batch.select(order), chosen)
    weights = {name: tensor.clone() for name, tensor in worker.weights()}
    return weights, found


@functools.cache
def whole(part):
    """The update in one micro-batch, once for all tests of a part; nobody changes it."""
    return updated(PARTS[part], 4096)


def assert_close(one, other):
    for name, tensor in one[0].items():
        torch.testing.assert_close(
            tensor, other[0][name], rtol=1e-3, atol=1e-4, msg=lambda said, name=name: f"{name} {said}"
        )
    assert float(one[1]["grad_norm"]) == pytest.approx(float(other[1]["grad_norm"]), rel=1e-4)
    assert float(one[1]["loss"]) == pytest.approx(float(other[1]["loss"]), abs=2e-6)


@pytest.mark.parametrize("part", PARTS)
def test_the_split_into_micro_batches_changes_nothing(part):
    assert_close(whole(part), updated(PARTS[part], 24))


@pytest.mark.parametrize("part", [name for name in PARTS if name != "plain"])
def test_every_part_has_an_effect(part):
    plain, other = whole("plain"), whole(part)
    assert any((tensor != other[0][name]).any() for name, tensor in plain[0].items())


def test_a_right_answer_stays_right_when_its_reward_is_shaped():
    """By the outcome alone: a punishment for length takes nobody out of the likelihood of right answers."""
    worker = small.policy()
    right = small.experience(worker).with_rows(**{OUTCOME: np.ones(12, np.float32)})
    shaped = right.with_rows(reward=(right["reward"] - 1).astype(np.float32))
    found = worker.update(worker.advantages(shaped, how()), how(nll_coef=0.5))
    assert float(found["nll/right"].count) == right.read(worker.store, "mask")["mask"].values.sum()


def test_without_right_answers_their_likelihood_is_nothing():
    worker = small.policy()
    batch = small.experience(worker).with_rows(**{OUTCOME: np.zeros(12, np.float32)})
    batch = worker.advantages(batch, how())
    found = worker.update(batch, how(nll_coef=0.5))
    assert "nll/right" not in found or not float(found["nll/right"].count)
    other = small.policy()
    other.update(other.advantages(small.experience(other), how()), how())
    for (name, tensor), (_, same) in zip(worker.weights(), other.weights()):
        assert torch.equal(tensor, same), name


def test_rejected_tokens_leave_the_denominator():
    """Half of the rows weigh nothing: the others weigh twice as much, as if they had come alone."""
    worker = small.policy()
    batch = small.experience(worker)
    for handle in batch.payload["rollout_logprobs"].handles:
        found = worker.store.get(handle)
        for i in range(6):
            found.row(i)[:] -= 1.0
    chosen = how(correction="decoupled_geo_rs")
    batch = worker.advantages(worker.logprobs(batch), chosen)
    found = worker.update(batch, chosen)
    assert float(found["correction/rejected_rows"]) == pytest.approx(0.5)
    alone = small.policy()
    rest = small.experience(alone)
    rest = alone.advantages(alone.logprobs(rest), how()).select(np.arange(6, 12))
    alone.update(rest, how())
    for (name, tensor), (_, same) in zip(worker.weights(), alone.weights()):
        torch.testing.assert_close(tensor, same, rtol=1e-4, atol=1e-6, msg=name)


def test_with_the_penalty_in_the_reward_the_loss_has_none():
    given = dict(kl_coef=0.5, kl="k1", advantage="reinforce_pp")
    results = {}
    for place in ("reward", "loss"):
        worker = small.policy()
        batch = worker.logprobs(small.experience(worker))
        own = batch.read(worker.store, "old_logprobs")["old_logprobs"]
        batch = put_like(batch, worker.store, "ref_logprobs", own.values - 0.2, own)
        chosen = how(kl_in=place, **given)
        results[place] = worker.advantages(batch, chosen).read(worker.store, "advantages")["advantages"].values
        found = worker.update(worker.advantages(batch, chosen), chosen)
        assert float(found["kl_ref"]) == pytest.approx(0.2, abs=1e-5)
    assert not np.allclose(results["reward"], results["loss"])
