"""The rollout role, called directly: what is asked, the order of answers, what arrives of the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.core.errors import ModelError
from tilth.engines.rounds import RoundLimits
from tilth.roles import rollout as roles_rollout
from tilth.roles.experience import FINISHES, texts
from tilth.roles.rollout import ask

# ---- asking ----


def test_ask_makes_a_group_of_rows_for_each_prompt():
    asked = ask([7, 3], 3, 12)
    assert asked["id"].tolist() == [12, 13, 14, 15, 16, 17]
    assert asked["group"].tolist() == [12, 12, 12, 15, 15, 15]
    assert asked["prompt"].tolist() == [7, 7, 7, 3, 3, 3]
    assert not asked.payload


@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_ids_and_groups_of_all_steps_are_different(prompts, sizes):
    """As ``Run.experience`` asks, in a loop whose groups have these sizes: a step begins where the last one ended."""
    starts = np.cumsum([0, *(prompts * size for size in sizes)]).tolist()
    asked = [ask([0] * prompts, size, start) for size, start in zip(sizes, starts)]
    ids = np.concatenate([a["id"] for a in asked])
    _, counts = np.unique(np.concatenate([a["group"] for a in asked]), return_counts=True)
    assert ids.tolist() == list(range(starts[-1]))
    assert counts.tolist() == [size for size in sizes for _ in range(prompts)]


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
    batch = small.generated(worker, asked)
    for name in ("id", "group", "prompt"):
        assert np.array_equal(batch[name], asked[name])
    column = batch.read(store, "tokens")["tokens"]
    for row, prompt in enumerate(asked["prompt"]):
        head = small.TOKENIZER.encode(small.PROMPTS[int(prompt)].text)
        assert column.row(row)[: len(head)].tolist() == head
    assert set(batch["version"]) == {3}


@pytest.fixture
def short_rounds(monkeypatch):
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(1))


@pytest.mark.usefixtures("short_rounds")
def test_rounds_report_what_has_ended_and_the_status_counts_it(made):
    store, worker, _ = made
    batch = small.generated(worker, small.asked(store, [3, 77], 3, 30))
    worker.begin()
    worker.submit(small.asked(store, [3, 77], 3, 30))
    assert (worker.status()["requests"], worker.status()["done"]) == (6, 0)
    told, counts = {}, []
    while worker.rounds.busy:
        told |= worker.advance()
        counts.append((len(told), int(worker.status()["done"])))
    assert all(known == done for known, done in counts) and counts[0][0] < counts[-1][0] == 6 and not worker.advance()
    said = texts(batch.read(store, "text")["text"])
    for row, i in enumerate(batch["id"].tolist()):
        assert told[i][:4] == (batch["prompt"][row], batch["identity"][row], said[row], False)
    worker.begin()
    assert worker.status()["done"] == 0 and len(worker.collect(batch["id"])) == 0


@pytest.mark.usefixtures("short_rounds")
def test_a_generation_that_was_broken_off_begins_again_with_the_same_samples(made):
    """As a step that runs again does where another role failed and this one was not made again."""
    store, worker, _ = made
    asked = small.asked(store, [3, 77, 12], 4, 30)
    whole = tokens_by_id(store, small.generated(worker, asked))
    worker.submit(asked)
    for _ in range(2):
        worker.advance()
    assert worker.rounds.busy and worker.abort([30, 31]) > 0
    assert tokens_by_id(store, small.generated(worker, asked)) == whole


@pytest.mark.usefixtures("short_rounds")
def test_samples_join_and_are_aborted_between_rounds(made):
    store, worker, _ = made
    asked = small.asked(store, [3, 77], 3, 30)
    whole = tokens_by_id(store, small.generated(worker, asked))
    worker.begin()
    worker.submit(asked.select(np.arange(4)))
    worker.advance()
    worker.submit(asked.select(np.arange(4, 6)))
    assert worker.abort([31, 99]) == 1
    told = {}
    while worker.rounds.busy:
        told |= worker.advance(texts=False)
    assert sorted(told) == asked["id"].tolist() and {one.text for one in told.values()} == {""}
    batch = worker.collect(asked["id"])
    cut, found = batch["id"] == 31, tokens_by_id(store, batch)
    assert set(batch["finish"][cut]) == {FINISHES.index("aborted")} and found[31] == whole[31][: len(found[31])]
    assert {i: t for i, t in found.items() if i != 31} == {i: t for i, t in whole.items() if i != 31}
    assert worker.abort() == 0


def test_a_sample_depends_on_its_id_and_not_on_its_company(made):
    store, worker, _ = made
    asked = small.asked(worker.store, [3, 77, 12], 4, 0)
    whole = tokens_by_id(store, small.generated(worker, asked))
    alone = {}
    for row in range(len(asked)):
        alone |= tokens_by_id(store, small.generated(worker, asked.select(np.array([row]))))
    assert alone == whole and len({tuple(t) for t in whole.values()}) > 3


def test_greedy_answers_of_a_prompt_are_the_same_whatever_their_ids(made):
    store, worker, _ = made
    batch = small.generated(worker, small.asked(worker.store, [3], 4, 100), greedy=True)
    assert len({tuple(t) for t in tokens_by_id(store, batch).values()}) == 1


def test_text_is_the_completion_decoded(made):
    store, worker, _ = made
    batch = small.generated(worker, small.asked(worker.store, [3, 4], 2, 0))
    read = batch.read(store, "tokens", "mask", "text")
    for row, text in enumerate(texts(read["text"])):
        chosen = read["tokens"].row(row)[read["mask"].row(row) == 1]
        assert text == small.TOKENIZER.decode(chosen)
        assert len(chosen) == batch["completion"][row] <= 4


def test_stop_strings_and_limits_of_the_recipe_are_obeyed():
    store = InlineStore()
    worker = small.rollout(store, max_tokens=2, stop=("1",))
    worker.receive(small.policy(store).weights(), 0)
    batch = small.generated(worker, small.asked(worker.store, list(range(20)), 4, 0))
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
    assert set(small.generated(worker, small.asked(worker.store, [1], 2, 0))["version"]) == {2}
    assert worker.compile_seconds() == 0


def test_weights_of_another_shape_are_refused():
    store = InlineStore()
    worker, policy = small.rollout(store), small.policy(store)
    some = [(n, t[:1] if n.endswith("norm.weight") else t) for n, t in policy.weights()]
    with pytest.raises(ModelError) as caught:
        worker.receive(iter(some), 1)
    assert "norm.weight" in str(caught.value)
