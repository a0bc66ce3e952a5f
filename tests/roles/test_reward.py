"""The reward role, called directly, over a pool that is a table or a real one."""

from dataclasses import asdict

import numpy as np
import pytest

from tests.roles import small
from tests.roles.test_experience import trajectory
from tilth.cluster.backends.inline import InlineStore
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.roles.experience import to_batch
from tilth.roles.reward import RewardWorker


class Table:
    """A pool whose outcomes are known in advance; remembers what it was asked."""

    def __init__(self, *outcomes):
        self.outcomes, self.items, self.known = outcomes, [], None

    def score(self, items, known=None):
        self.items, self.known = items, known
        return [known.get(item[0], outcome) for item, outcome in zip(items, self.outcomes)]


def worker(store, *outcomes):
    return RewardWorker(Table(*outcomes), small.PROMPTS, store)


@pytest.fixture
def asked():
    store = InlineStore()
    return store, to_batch([trajectory(i, [1, 2], [3], text) for i, text in enumerate(("07", "3", ""))], store)


def test_the_function_gets_prompt_completion_and_what_the_data_says(asked):
    store, batch = asked
    role = worker(store, Outcome(1.0), Outcome(0.0), Outcome(0.5))
    scored = role.score(batch)
    prompt = small.PROMPTS[7]
    assert role.pool.items == [(i, prompt.text, text, prompt.info) for i, text in enumerate(("07", "3", ""))]
    assert scored["reward"].tolist() == [1.0, 0.0, 0.5] and scored["reward"].dtype == np.float32
    assert np.isnan(batch["reward"]).all()  # the batch that was given is as it was


def test_parts_are_row_columns_with_nan_where_there_is_none(asked):
    store, batch = asked
    role = worker(store, Outcome(1.0, {"form": 0.5}), Outcome(2.0, {"form": 0.25, "length": 3}), Outcome(0.0))
    scored = role.score(batch)
    assert np.array_equal(scored["part/form"], np.float32([0.5, 0.25, np.nan]), equal_nan=True)
    assert np.array_equal(scored["part/length"], np.float32([np.nan, 3, np.nan]), equal_nan=True)
    assert [n for n in scored.rows if n.startswith("part/")] == ["part/form", "part/length"]


def test_without_parts_there_is_no_such_column(asked):
    store, batch = asked
    assert not any(n.startswith("part/") for n in worker(store, *[Outcome(1.0)] * 3).score(batch).rows)


def test_what_the_verifier_said_is_noted_once(asked):
    """By the part ``correct`` of the very row where it has one, else by its reward."""
    store, batch = asked
    scored = worker(store, Outcome(0.4, {"correct": 1.0}), Outcome(1.0), Outcome(None)).score(batch)
    assert np.array_equal(scored["outcome"], np.float32([1, 1, np.nan]), equal_nan=True)
    assert scored["outcome"].dtype == np.float32
    odd = worker(store, Outcome(0.4, {"correct": np.nan}), Outcome(0.0), Outcome(-1.0)).score(batch)
    assert np.array_equal(odd["outcome"], np.float32([np.nan, 0, -1]), equal_nan=True)


def test_a_missing_reward_is_nan_and_told_by_id(asked):
    store, batch = asked
    late = Outcome(None, reason="too late", status="timeout")
    role = worker(store, Outcome(1.0), late, Outcome(0.0))
    assert np.array_equal(role.score(batch)["reward"], np.float32([1, np.nan, 0]), equal_nan=True)
    assert role.failures() == {1: asdict(late)}


def test_failures_are_those_of_the_last_call(asked):
    store, batch = asked
    role = worker(store, *[Outcome(None, status="error")] * 3)
    role.score(batch)
    role.pool.outcomes = [Outcome(1.0)] * 3
    role.score(batch)
    assert role.failures() == {}


def test_known_outcomes_are_replayed_and_the_function_is_not_called(tmp_path):
    notes = tmp_path / "notes"

    def noting(prompt, completion, info):
        with open(notes, "a") as file:
            file.write(f"{completion}\n")
        return {"reward": 1.0, "length": len(completion)}

    store = InlineStore()
    batch = to_batch([trajectory(i, [1], [3], text) for i, text in enumerate(("a", "bb", "ccc"))], store)
    late = Outcome(None, reason="took longer than 0.3 s", status="timeout", seconds=0.3)
    with RewardPool(noting) as pool:
        role = RewardWorker(pool, small.PROMPTS, store)
        scored = role.score(batch, known={1: asdict(late)})
    assert notes.read_text().split() == ["a", "ccc"]
    assert np.array_equal(scored["reward"], np.float32([1, np.nan, 1]), equal_nan=True)
    assert np.array_equal(scored["part/length"], np.float32([1, np.nan, 3]), equal_nan=True)
    assert role.failures() == {1: asdict(late)}


def test_outcomes_of_other_ids_change_nothing(asked):
    store, batch = asked
    role = worker(store, *[Outcome(1.0)] * 3)
    scored = role.score(batch, known={99: asdict(Outcome(None, status="timeout"))})
    assert scored["reward"].tolist() == [1.0, 1.0, 1.0] and role.failures() == {}
