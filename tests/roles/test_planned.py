"""The controller plans from row columns what each rank would find in its payload, and a rank follows no other plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.roles import small, test_critic, test_pairs
from tests.roles.test_policy import reference
from tilth.cluster.protocol import deal, offered
from tilth.core.batch import Jagged
from tilth.core.errors import ArgumentError, PlanError
from tilth.core.layout import Mesh
from tilth.core.trajectory import OPENS, Segment, Trajectory
from tilth.roles.experience import of_pass, put_like, put_mask, to_batch
from tilth.training.packed import plan_micros


def calls(worker, method, batch, ranks=2):
    """Part of the batch and of the plan that each rank of a call gets."""
    how = offered(worker)[method]
    dealt = deal(how, Mesh(("dp",), (ranks,)), None, [batch], {})
    return [(given.args[0], given.kwargs["plan"]) for given in dealt.arguments]


def plain(plan):
    return [[([g.tolist() for g in micro.groups], *micro[1:]) for micro in micros] for micros in plan]


def from_payload(worker, method, part, mask="mask"):
    columns = part.read(worker.store, "tokens", mask)
    opens = of_pass(part, worker.store, columns["tokens"]).get(OPENS)
    dropout = offered(worker)[method].dropout
    return plan_micros(columns["tokens"], columns[mask].values, worker.limits, opens, dropout=dropout)


def same(worker, method, batch, mask="mask"):
    """True if some of the micro-batches have trees."""
    for ranks in (1, 2, 3):
        for part, plan in calls(worker, method, batch, ranks):
            assert plain(plan) == plain(from_payload(worker, method, part, mask))
    return any(micro.shared for _, plan in calls(worker, method, batch, 1) for micro in plan.learn)


@pytest.fixture(scope="module")
def worker():
    return small.policy(micro_tokens=40)


@pytest.fixture(scope="module")
def batch(worker):
    return small.experience(worker)


def ragged(store, batch, name):
    return batch.read(store, name)[name]


@pytest.mark.parametrize("several, dropout", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("method", ["logprobs", "compare", "update", "sft_step", "likelihood"])
def test_samples_are_planned_as_their_payload_says(worker, batch, method, several, dropout, monkeypatch):
    limits = replace(worker.limits, several=several, dropout=dropout)
    monkeypatch.setattr(worker.engine, "limits", limits)
    assert same(worker, method, batch) == (not (dropout and method == "sft_step"))


def test_other_roles_plan_with_limits_of_their_own(worker, batch):
    judge, frozen = test_critic.critic(worker, micro_tokens=30), reference(worker)
    assert judge.limits.tokens == 30 != frozen.limits.tokens
    for role, method in ((judge, "values"), (judge, "update"), (frozen, "logprobs")):
        assert same(role, method, batch)


def test_what_a_loader_makes_is_planned(worker):
    assert same(worker, "sft_step", small.loader(worker.store).examples([3, 8, 41, 3])) in (True, False)
    pairs = test_pairs.policy(worker.store)
    for role in (pairs, test_pairs.reward_model(worker.store)):
        same(role, "pair_step", test_pairs.batch_of(worker.store))


def test_an_update_is_planned_from_the_tokens_that_a_correction_keeps(worker, batch):
    """A rejected first token moves the end of the prompt; the critic learns from all of them."""
    tokens, mask = (ragged(worker.store, batch, name) for name in ("tokens", "mask"))
    kept = mask.values.copy()
    kept[tokens.offsets[0] + 4] = kept[tokens.offsets[5] : tokens.offsets[6]] = 0
    corrected = put_mask(batch, worker.store, "kept", kept, tokens)
    same(worker, "update", corrected, "kept")
    (_, plan), (_, before) = (calls(worker, "update", each, 1)[0] for each in (corrected, batch))
    assert plain(plan) != plain(before)
    assert same(test_critic.critic(worker, micro_tokens=30), "update", corrected, "mask")


def test_a_row_of_several_conversations_is_known_from_its_columns(worker):
    mask = np.array([0, 0, 0, 0, 1, 0, 1], np.uint8)
    spans = [Segment("user", 0), Segment("assistant", 4), Segment("user", 5, opens=True), Segment("assistant", 6)]
    made = [
        Trajectory(
            i, 0, 0, np.arange(1, 8), mask, np.zeros(7, np.float32), segments=spans[: 4 if i else 2], versions=[(4, 0)]
        )
        for i in range(4)
    ]
    several = to_batch(made, worker.store)
    assert several["prefix"].tolist() == [4, 0, 0, 0]
    assert not same(worker, "update", several)


def test_a_mask_that_an_estimator_changes_has_columns_of_its_own(worker, batch):
    """A row without a reward is out of the loss, and of its group's tree."""
    missing = batch.with_rows(reward=np.where(np.arange(len(batch)) == 1, np.nan, batch["reward"]).astype(np.float32))
    ready = worker.advantages(missing, small.HOW)
    assert not ragged(worker.store, ready, "mask").row(1).any()
    assert ready["prefix"][1] == ready["length"][1] and ready["prefix"][0] == batch["prefix"][0]
    same(worker, "update", ready)


def weights(worker):
    return torch.cat([p.detach().flatten() for _, p in worker.weights()])


def test_a_step_by_a_plan_has_the_bits_of_one_without(batch, worker):
    found = []
    for planned in (False, True):
        one = small.policy(worker.store, micro_tokens=40)
        ready = one.advantages(batch, small.HOW)
        plan = calls(one, "update", ready, 1)[0][1] if planned else None
        one.update(ready, small.HOW, plan=plan)
        found.append(weights(one))
    assert torch.equal(*found)


def test_a_plan_that_does_not_match_the_payload_is_refused_and_changes_nothing(worker, batch):
    """A mask was put without its columns, tokens without theirs, or the rows are of another part."""
    one = small.policy(worker.store, micro_tokens=40)
    ready, before = one.advantages(batch, small.HOW), weights(one)
    ((_, plan),) = calls(one, "update", ready, 1)
    tokens, mask = (ragged(worker.store, ready, name) for name in ("tokens", "mask"))
    later = mask.values.copy()
    later[tokens.offsets[0] + 4] = 0
    other = np.where(np.arange(len(tokens.values)) == tokens.offsets[0], 5, tokens.values)
    changed = {
        "mask": put_like(ready, worker.store, "mask", later, tokens),
        "tokens": put_like(ready, worker.store, "tokens", other, tokens),
        "order": ready.select(np.arange(len(ready))[::-1].copy()),
    }
    for name, each in changed.items():
        with raises(PlanError, "plan.0"):
            one.logprobs(each, plan=plan)
        if name == "mask":  # ids that are not those of the rollout are refused before
            with raises(PlanError, "plan.0"):
                one.update(each, small.HOW, plan=plan)
    with raises(PlanError, "plan.rows"):
        one.update(ready.select(np.arange(3)), small.HOW, plan=plan)
    assert torch.equal(weights(one), before)


def test_a_plan_with_trees_is_refused_in_passes_with_dropout(worker, batch, monkeypatch):
    ((part, plan),) = calls(worker, "update", batch, 1)
    monkeypatch.setattr(worker.engine, "limits", replace(worker.limits, dropout=True))
    with raises(PlanError, "plan.dropout"):
        worker.sft_step(part, plan=plan)


@pytest.mark.parametrize("column", ["length", "prefix", "prefix_digest"])
def test_a_batch_without_a_column_of_a_plan_is_refused(worker, batch, column):
    rows = {name: values for name, values in batch.rows.items() if name != column}
    with raises(ArgumentError, column):
        calls(worker, "update", replace(batch, rows=rows))


def test_without_sharing_lengths_are_enough(worker, batch, monkeypatch):
    monkeypatch.setattr(worker.engine, "limits", replace(worker.limits, share=False))
    rows = {name: values for name, values in batch.rows.items() if "prefix" not in name}
    assert not same(worker, "update", replace(batch, rows=rows))


def test_the_columns_are_those_of_the_payload(worker, batch):
    tokens, mask = (ragged(worker.store, batch, name) for name in ("tokens", "mask"))
    assert isinstance(tokens, Jagged) and batch["prefix_digest"].dtype == np.int64
    prompts = [tokens.row(i)[: int(np.argmax(mask.row(i)))].tolist() for i in range(len(batch))]
    assert batch["prefix"].tolist() == [len(prompt) for prompt in prompts]
    pairs = {(digest, tuple(prompt)) for digest, prompt in zip(batch["prefix_digest"].tolist(), prompts)}
    assert len(pairs) == len({digest for digest, _ in pairs}) == len({prompt for _, prompt in pairs}) == 3
