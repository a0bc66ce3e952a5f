"""Samples are scored while others are generated, with the results of scoring at the end."""

import threading

import numpy as np
import pytest

from tests.flows import tiny
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.flows import ahead
from tilth.flows.ahead import scored_ahead
from tilth.rewards.process_pool import Outcome
from tilth.roles.reward import RewardWorker


class Group:
    """A worker group of one rank in this process."""

    def __init__(self, worker):
        self.worker = worker

    def finished(self):
        return [self.worker.finished()]

    def begin(self, **arguments):
        return [self.worker.begin(**arguments)]


class Pool:
    """Scores by the text; ``called`` tells that it has scored."""

    def __init__(self):
        self.called, self.asked = threading.Event(), []

    def score(self, items, known=None):
        self.asked += [item[0] for item in items if item[0] not in (known or {})]
        self.called.set()
        return [(known or {}).get(item[0]) or Outcome(float(len(item[2]))) for item in items]


@pytest.fixture
def roles():
    store = InlineStore()
    speaker = small.rollout(store, temperature=1.0)
    speaker.receive(small.policy(store).weights(), 0)
    return store, speaker, RewardWorker(Pool(), small.PROMPTS, store)


def test_a_finished_sample_is_scored_while_others_are_generated(roles):
    """The engine goes on only when the reward of its first sample has been asked for."""
    store, speaker, reward = roles
    whole = speaker.engine.stream

    def stream(requests, aborting):
        for t in whole(requests, aborting):
            yield t
            assert reward.pool.called.wait(60)

    speaker.engine.stream = stream
    asked = small.asked(store, (3, 8), 4, 0)
    with scored_ahead(Group(speaker), Group(reward), lambda batch: {}, 5, 4):
        batch = speaker.generate(asked)
    early = list(reward.pool.asked)
    scored = reward.score(batch, call=5)
    assert early and sorted(reward.pool.asked) == list(range(8))  # each once
    at_the_end = RewardWorker(Pool(), small.PROMPTS, store).score(batch)
    assert all(np.array_equal(scored[name], at_the_end[name], equal_nan=True) for name in at_the_end.rows)


def test_a_judge_begins_with_what_has_finished_too():
    """Each engine takes its own share; what is passed without a reward function is all of it."""
    begun = []

    class Judge:
        def begin(self, **given):
            begun.append(given)

    class Rollout:
        def finished(self):
            return [[[7, 0, 1, "a"], [8, 0, 2, "b"]]] if not begun else [[]]

    with scored_ahead(Rollout(), None, lambda batch: {7: {}}, 3, 2, Judge()):
        while not begun:
            pass
    assert begun == [{"items": [[7, 0, 1, "a"], [8, 0, 2, "b"]], "call": 3, "most": 2}]


def test_outcomes_of_another_generation_or_other_tokens_are_not_used(roles):
    store, speaker, reward = roles
    batch = speaker.generate(small.asked(store, (3,), 2, 0))
    reward.begin([[0, 3, 12345, "x" * 99]], call=1, most=4)
    assert reward.pool.called.wait(60)
    assert (reward.score(batch, call=1)["reward"] < 99).all()
    reward.begin([[0, 3, int(batch["identity"][0]), "x" * 99]], call=2, most=4)
    assert (reward.score(batch, call=3)["reward"] < 99).all()
    reward.begin([[0, 3, int(batch["identity"][0]), "x" * 99]], call=4, most=4)
    while not reward._ahead[1]._outcomes:
        pass
    assert reward.score(batch, call=4)["reward"][0] == 99


def test_what_the_journal_knows_is_not_scored_and_an_error_is_raised(roles):
    _, _, reward = roles
    assert ahead._unknown([[4, 0, 1, "a"], [5, 0, 2, "b"]], lambda batch: {4: {}}) == [[5, 0, 2, "b"]]

    class Lost:
        def finished(self):
            raise OSError("gone")

    with pytest.raises(OSError), scored_ahead(Lost(), Group(reward), dict, 0, 1):
        for thread in [t for t in threading.enumerate() if t.name == "scored-ahead"]:
            thread.join(60)


def test_a_run_is_that_of_scoring_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "PAUSE", 0.0005)
    soon = tiny.run(tiny.recipe(tmp_path), name="soon")
    monkeypatch.setattr(ahead, "PAUSE", 1e6)
    late = tiny.run(tiny.recipe(tmp_path), name="late")
    assert tiny.same(tiny.numbers(soon.directory), tiny.numbers(late.directory))
    assert tiny.weights(soon.directory) == tiny.weights(late.directory)
