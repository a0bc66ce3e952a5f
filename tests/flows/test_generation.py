"""Samples are generated in rounds and scored while others are, with the results of scoring at the end."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.flows import tiny
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.core.layout import Mesh
from tilth.engines.rounds import RoundLimits
from tilth.flows.generation import Generation, Scorers, apart
from tilth.rewards.process_pool import Outcome
from tilth.roles import rollout as roles_rollout
from tilth.roles.reward import RewardWorker
from tilth.roles.rollout import Ended


class Pool:
    """Scores by the text; ``called`` tells that it has scored."""

    def __init__(self):
        self.called, self.asked = threading.Event(), []

    def score(self, items, known=None):
        self.asked += [item[0] for item in items if item[0] not in (known or {})]
        self.called.set()
        return [(known or {}).get(item[0]) or Outcome(float(len(item[2]))) for item in items]


@pytest.fixture
def roles(monkeypatch):
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(1))
    store = InlineStore()
    speaker = small.rollout(store, temperature=1.0)
    speaker.receive(small.policy(store).weights(), 0)
    return store, speaker, RewardWorker(Pool(), small.PROMPTS, store)


def scorers(reward=None, judge=None, known=lambda batch: {}):
    return Scorers(reward, judge, known, 4)


def test_a_finished_sample_is_scored_while_others_are_generated(roles):
    """The engine goes on only when the reward of its first sample has been asked for."""
    store, speaker, reward = roles
    counts, asked = [], small.asked(store, (3, 8), 4, 0)

    def goes_on(done):
        counts.append(done)
        assert not done or reward.pool.called.wait(60)

    generation = Generation(speaker, scorers(reward), goes_on)
    generation.run(asked)
    batch, early = generation.collect(asked["id"]), list(reward.pool.asked)
    scored = reward.score(batch)
    assert counts == sorted(counts) and 0 < counts[-2] < counts[-1] == 8
    assert early and sorted(reward.pool.asked) == list(range(8))  # each once
    at_the_end = RewardWorker(Pool(), small.PROMPTS, store).score(batch)
    assert all(np.array_equal(scored[name], at_the_end[name], equal_nan=True) for name in at_the_end.rows)


ENDED = {7: Ended(0, 1, "a", False), 8: Ended(0, 2, "b", False)}


def test_a_judge_gets_all_that_has_ended_and_a_reward_what_the_journal_does_not_know():
    class Group:
        def __init__(self):
            self.given = []

        def advance(self, ended):
            self.given.append(dict(ended))

        def begin(self, **given):
            self.given.append(given)

        def forget(self, samples):
            self.given.append(samples)

    reward, judge = Group(), Group()
    both = scorers(reward, judge, lambda batch: {7: {}} if batch["identity"].tolist() == [1, 2] else None)
    both.take(ENDED)
    both.take({})  # a round for what the judge has begun
    assert judge.given == [ENDED, {}]
    assert reward.given == [{"items": [[8, 0, 2, "b"]], "most": 4}]
    both.forget(ENDED)
    both.forget()
    assert judge.given[2:] == [[(7, 1), (8, 2)], None] == reward.given[1:]


def test_groups_are_apart_that_share_no_worker():
    one, two, three = (SimpleNamespace(mesh=Mesh(("dp",), (len(ranks),), ranks)) for ranks in ((0, 1), (2,), (1, 2)))
    assert apart(one, two) and not apart(one, three) and not apart(three, two)


def test_what_has_paused_is_not_scored_and_goes_on():
    class Rollout:
        """Pauses sample 8 once."""

        def __init__(self):
            self.calls, self.told = [], iter([{7: ENDED[7]}, {}, {8: ENDED[8]._replace(paused=True)}, {}, ENDED, {}])

        def __getattr__(self, name):
            return lambda *given, **options: self.calls.append(name)

        def advance(self, texts):
            return {i: one for i, one in next(self.told).items() if i == 8 or "resume" not in self.calls}

    scored = []

    class Judge:
        def advance(self, ended):
            scored.extend(ended)

    generation = Generation(Rollout(), scorers(judge=Judge()))
    generation.run(roles_rollout.ask([0], 2, 7))
    assert scored == [7] and [i for i, one in generation.ended.items() if one.paused] == [8]
    generation.resume()
    assert scored == [7, 8] and not any(one.paused for one in generation.ended.values())


def test_outcomes_are_used_for_the_tokens_that_were_scored_alone(roles):
    """Whatever is scored between; once."""
    store, speaker, reward = roles
    batch = small.generated(speaker, small.asked(store, (3,), 2, 0))
    checksum = int(batch["identity"][0])
    reward.begin([[0, 3, checksum + 1, "x" * 99], [0, 3, checksum, "x" * 98]], most=4)
    while len(reward._ahead._outcomes) < 2:
        pass
    reward.score(small.generated(speaker, small.asked(store, (8,), 2, 50)))
    assert reward.score(batch)["reward"][0] == 98 != reward.score(batch)["reward"][0]
    reward.forget([[0, checksum + 1]])
    assert not reward._ahead._outcomes


def test_a_run_is_that_of_scoring_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(1))
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 3})
    soon = tiny.run(made, name="soon")
    monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(10**6, early=10**6))
    late = tiny.run(made, name="late")
    assert tiny.same(tiny.numbers(soon.directory), tiny.numbers(late.directory))
    assert tiny.weights(soon.directory) == tiny.weights(late.directory)
