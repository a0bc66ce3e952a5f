"""Episodes of many segments: what is trained is what the mask says, token by token, against plain forward passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilth
from tests.config.test_plugins import _nothing_left_behind  # noqa: F401  (a fixture)
from tests.core.test_trajectory import episodes
from tests.examples import examples
from tests.roles import small
from tilth.core.trajectory import Segment, Trajectory, token_versions
from tilth.engines.request import Request, SamplingParams
from tilth.models.attention import PackedContext
from tilth.rl import registry
from tilth.rl.rollout_correction import Correction, CorrectionRule, Sampled
from tilth.roles.experience import to_batch


def naive(model, tokens: np.ndarray) -> np.ndarray:
    """Log-prob of each token after those before it, one plain pass over the whole sequence; 0 at the first."""
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        hidden = model(ids, PackedContext(torch.tensor([len(ids)]), ids.device))
        logprobs = (hidden @ model.head_weight.T).log_softmax(-1)
    found = [float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))]
    return np.array([0.0, *found], np.float32)


def batch_of(store, made):
    batch = to_batch(made, store)
    return batch.with_rows(reward=(np.arange(len(batch)) % 3).astype(np.float32))


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(episodes(), min_size=1, max_size=5), st.sampled_from([8, 4096]))
def test_what_is_trained_is_what_the_mask_says(drawn, micro_tokens):
    """Log-probs (the shifted ones) at chosen tokens and nowhere else, in micro-batches and with shared prompts."""
    worker = small.policy(micro_tokens=micro_tokens)
    cut = [(replace(t, id=i), truth) for i, (t, truth) in enumerate(drawn) if len(t.tokens) <= small.CONTEXT]
    if not cut:
        return
    batch = batch_of(worker.store, [t for t, _ in cut])
    found = worker.logprobs(batch).read(worker.store, "old_logprobs", "versions", "mask")
    for i, (t, truth) in enumerate(cut):
        chosen = np.array([c for _, c, _ in truth])
        want = np.where(chosen, naive(worker.engine.model, t.tokens), 0)
        np.testing.assert_allclose(found["old_logprobs"].row(i), want, atol=2e-5)
        assert found["mask"].row(i).tolist() == chosen.tolist()
        assert found["versions"].row(i).tolist() == [version for _, _, version in truth]
    total = sum(c for _, truth in cut for _, c, _ in truth)
    likelihood = worker.likelihood(batch)["loss"]
    assert likelihood.count == total
    assert likelihood.total == pytest.approx(-found["old_logprobs"].values.sum(dtype=np.float64), abs=1e-3)


def test_an_update_trains_on_chosen_tokens_of_every_turn_and_on_no_other():
    """The gradient of the second turn is there: masking it changes the step; what a tool said changes nothing else."""
    turns = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint8)
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int64)
    spans = [Segment("user", 0), Segment("assistant", 2), Segment("tool", 4), Segment("assistant", 6)]

    def stepped(mask):
        worker = small.policy()
        made = [
            Trajectory(i, 0, 0, tokens, mask, np.zeros(8, np.float32), segments=spans, versions=[(2, i)])
            for i in (0, 1)
        ]
        batch = worker.advantages(batch_of(worker.store, made), small.HOW)
        metrics = worker.update(batch, small.HOW)
        assert float(metrics["entropy"].count) == 2 * mask.sum()
        return torch.cat([p.flatten() for _, p in worker.weights()])

    first_only = np.where(np.arange(8) < 6, turns, 0).astype(np.uint8)
    assert not torch.equal(stepped(turns), stepped(first_only))


def test_the_engine_goes_on_behind_a_tool_s_answer():
    """A second turn is generated after tokens that the policy did not choose, as one episode."""
    worker = small.policy()
    speaker = small.rollout(worker.store)
    speaker.receive(worker.weights(), 0)
    engine = speaker.engine
    prompt = np.array(small.TEMPLATE.prompts([small.PROMPTS[3]])[0])
    one = engine.generate([Request(0, prompt, SamplingParams(max_tokens=3))])[0]
    heard = np.array([1, 2], np.int64)
    asked = replace(
        one, tokens=np.concatenate([one.tokens, heard]), mask=np.concatenate([one.mask, [0, 0]]).astype(np.uint8),
        logprobs=np.concatenate([one.logprobs, [0, 0]]).astype(np.float32),
        segments=[*one.segments, Segment("tool", len(one.tokens))],
    )  # fmt: skip
    engine.update_weights(worker.weights(), version=5)
    engine.resume(asked, SamplingParams(max_tokens=2))
    (two,) = [t for _ in range(9) for t in engine.poll()]
    assert [s.role for s in two.segments] == ["user", "assistant", "tool", "assistant"]
    n = len(asked.tokens)
    assert two.tokens[:n].tolist() == asked.tokens.tolist() and two.mask.tolist() == [
        *asked.mask,
        *[1] * (len(two.tokens) - n),
    ]
    assert token_versions([two])[n - 3 :].tolist() == [0] * 3 + [5] * (len(two.tokens) - n)
    np.testing.assert_allclose(two.logprobs[n:], naive(worker.engine.model, two.tokens)[n:], atol=2e-5)


def versioned(worker):
    """One episode whose last chosen token is of version 4, those before of version 3."""
    mask = np.array([0, 1, 1, 1], np.uint8)
    made = Trajectory(0, 0, 0, np.arange(1, 5), mask, np.zeros(4, np.float32), versions=[(1, 3), (3, 4)])
    return to_batch([made], worker.store).with_rows(reward=np.ones(1, np.float32))


def test_versions_reach_a_loss_that_asks_for_them():
    seen = []

    @tilth.policy_loss("mine_newest")
    def newest(logprobs, versions):
        seen.append(versions.tolist())
        return -logprobs * (versions == 4)

    worker, how = small.policy(), small.HOW.updated(loss="mine_newest", advantage="reinforce_pp")
    worker.update(worker.advantages(versioned(worker), how), how)
    assert seen == [[3, 3, 4]]


def test_versions_reach_a_correction_that_asks_for_them(monkeypatch):
    seen = []

    class Newest(CorrectionRule):
        @property
        def needs(self):
            return ("versions",)

        def apply(self, sampled: Sampled):
            seen.append(sampled.versions.tolist())
            return Correction(None, sampled.packing.mask, False, {})

    monkeypatch.setitem(registry._ENTRIES["corrections"], "newest", Newest)
    worker, how = small.policy(), small.HOW.updated(correction="newest")
    worker.advantages(versioned(worker), how)
    assert seen == [[0, 3, 3, 4]]
