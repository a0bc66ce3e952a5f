"""The rollout role, called directly: what is asked, the order of answers, what arrives of the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.core.errors import ModelError
from tilth.roles.experience import texts
from tilth.roles.rollout import ask

# ---- asking ----


def test_ask_makes_a_group_of_rows_for_each_prompt():
    asked = ask([7, 3], 3, 12)
    assert asked["id"].tolist() == [12, 13, 14, 15, 16, 17]
    assert asked["group"].tolist() == [4, 4, 4, 5, 5, 5]
    assert asked["prompt"].tolist() == [7, 7, 7, 3, 3, 3]
    assert not asked.payload


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
def test_ids_and_groups_of_all_steps_are_different(prompts, group, steps):
    """As ``Run.experience`` asks: step s begins at s * prompts * group."""
    asked = [ask([0] * prompts, group, s * prompts * group) for s in range(steps + 1)]
    ids = np.concatenate([a["id"] for a in asked])
    groups, sizes = np.unique(np.concatenate([a["group"] for a in asked]), return_counts=True)
    assert len(np.unique(ids)) == len(ids) == (steps + 1) * prompts * group
    assert len(groups) == (steps + 1) * prompts and (sizes == group).all()


def test_a_prompt_that_is_drawn_twice_makes_two_groups():
    assert len(np.unique(ask([5, 5], 2, 0)["group"])) == 2


# ---- generating ----


@pytest.fixture
def made():
    store = InlineStore()
    worker, policy = small.rollout(store), small.policy(store)
    worker.receive(policy.weights(), 3)
    return store, worker, policy


def tokens_by_id(store, batch):
    column = batch.read(store, "tokens")["tokens"]
    return {int(i): column.row(row).tolist() for row, i in enumerate(batch["id"])}


def test_answers_come_in_the_order_in_which_they_were_asked(made):
    store, worker, _ = made
    asked = small.asked(worker.store, [3, 77, 12, 50, 9], 3, 30).select(np.random.default_rng(0).permutation(15))
    batch = worker.generate(asked)
    for name in ("id", "group", "prompt"):
        assert np.array_equal(batch[name], asked[name])
    column = batch.read(store, "tokens")["tokens"]
    for row, prompt in enumerate(asked["prompt"]):
        head = small.TOKENIZER.encode(small.PROMPTS[int(prompt)].text)
        assert column.row(row)[: len(head)].tolist() == head
    assert set(batch["version"]) == {3}


def test_the_status_of_a_running_call_counts_what_has_ended(made):
    store, worker, _ = made
    seen, announce = [], worker._announce

    def look(trajectory):
        announce(trajectory)
        found = worker.status()
        seen.append((found["done"], found["requests"]))

    worker._announce = look
    for _ in range(2):
        worker.generate(small.asked(store, [3, 77], 3, 30))
    assert seen == [(i + 1, 6) for i in range(6)] * 2 and worker.status()["done"] == 0


def test_a_sample_depends_on_its_id_and_not_on_its_company(made):
    store, worker, _ = made
    asked = small.asked(worker.store, [3, 77, 12], 4, 0)
    whole = tokens_by_id(store, worker.generate(asked))
    alone = {}
    for row in range(len(asked)):
        alone |= tokens_by_id(store, worker.generate(asked.select(np.array([row]))))
    assert alone == whole and len({tuple(t) for t in whole.values()}) > 3


def test_greedy_answers_of_a_prompt_are_the_same_whatever_their_ids(made):
    store, worker, _ = made
    batch = worker.generate(small.asked(worker.store, [3], 4, 100), greedy=True)
    assert len({tuple(t) for t in tokens_by_id(store, batch).values()}) == 1


def test_text_is_the_completion_decoded(made):
    store, worker, _ = made
    batch = worker.generate(small.asked(worker.store, [3, 4], 2, 0))
    read = batch.read(store, "tokens", "mask", "text")
    for row, text in enumerate(texts(read["text"])):
        chosen = read["tokens"].row(row)[read["mask"].row(row) == 1]
        assert text == small.TOKENIZER.decode(chosen)
        assert len(chosen) == batch["completion"][row] <= 4


def test_stop_strings_and_limits_of_the_recipe_are_obeyed():
    store = InlineStore()
    worker = small.rollout(store, max_tokens=2, stop=("1",))
    worker.receive(small.policy(store).weights(), 0)
    batch = worker.generate(small.asked(worker.store, list(range(20)), 4, 0))
    assert batch["completion"].max() == 2
    assert not any("1" in text for text in texts(batch.read(store, "text")["text"]))


# ---- receiving weights ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_received_has_the_checksums_of_what_was_sent(dtype):
    store = InlineStore()
    worker, policy = small.rollout(store, dtype=dtype), small.policy(store, dtype=dtype)
    worker.receive(policy.weights(), 1)
    received = worker.fingerprint()
    assert received == small.checksums(policy.weights(), dtype) and len(received) == len(dict(policy.weights()))
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    assert received != small.checksums(policy.weights(), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_read_from_the_live_storage(dtype):
    store = InlineStore()
    worker, policy = small.rollout(store, dtype=dtype), small.policy(store, dtype=dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    live = dict(worker.engine.named_parameters())[name]
    load = worker.engine.update_weights

    def damages(weights, version):
        load(weights, version=version)
        live[0, :2] = live[0, :2].flip(0)

    worker.engine.update_weights = damages
    worker.receive(policy.weights(), 1)
    received, expected = worker.fingerprint(), small.checksums(policy.weights(), dtype)
    assert [n for n in expected if received[n] != expected[n]] == [name]


def test_later_weights_replace_earlier_ones_and_stamp_what_is_said():
    store = InlineStore()
    worker = small.rollout(store)
    first, second = small.policy(store, seed=1), small.policy(store, seed=2)
    worker.receive(first.weights(), 1)
    worker.receive(second.weights(), 2)
    assert worker.fingerprint() == small.checksums(second.weights()) != small.checksums(first.weights())
    assert set(worker.generate(small.asked(worker.store, [1], 2, 0))["version"]) == {2}
    assert worker.compile_seconds() == 0


def test_weights_of_another_shape_are_refused():
    store = InlineStore()
    worker, policy = small.rollout(store), small.policy(store)
    some = [(n, t[:1] if n.endswith("norm.weight") else t) for n, t in policy.weights()]
    with pytest.raises(ModelError) as caught:
        worker.receive(iter(some), 1)
    assert "norm.weight" in str(caught.value)
