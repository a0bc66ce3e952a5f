"""Roles and files of a run that answer from Python, for parts of a run by themselves."""

from contextlib import contextmanager

import numpy as np

from tests.flows import tiny
from tilth.core.batch import Batch
from tilth.data.order import Order
from tilth.flows.roles import Roles
from tilth.flows.sampler import Sampler
from tilth.rl.algorithm import Algorithm
from tilth.roles.rollout import Ended
from tilth.runs.metrics import Metrics
from tilth.runs.progress import StepProgress
from tilth.runs.state import RunState


class Loader:
    """Encodes to the same rows; batches of given data are their indices."""

    def encode(self, asked, then=()):
        return asked

    def examples(self, indices, then=()):
        return Batch({"id": indices})

    documents = pairs = examples


class Rollout:
    """Generates answers of two tokens and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def begin(self):
        self.left = {}

    def submit(self, asked, *, greedy=False, since=None):
        self.asked.append((asked, greedy))
        self.left = {i: Ended(p, 0, "", False) for i, p in zip(asked["id"].tolist(), asked["prompt"].tolist())}

    def advance(self, *, texts):
        found, self.left = self.left, {}
        return found

    def engine_counts(self):
        return []

    def collect(self, ids):
        asked, _ = self.asked[-1]
        finish = np.full(len(asked), "stop")
        return asked.with_rows(completion=np.full(len(asked), 2), finish=finish, version=np.zeros(len(asked)))


class Reward:
    """Scores by a function of the trajectory's id; None: missing."""

    def __init__(self, value):
        self.value, self.lost = value, {}

    def begin(self, **given):
        pass

    def forget(self, **given):
        pass

    def score(self, batch, *, known, call=None):
        values = [known.get(i, {"value": self.value(i)})["value"] for i in batch["id"].tolist()]
        lost = {"status": "error", "reason": "no answer"}
        self.lost = {i: lost for i, v in zip(batch["id"].tolist(), values) if v is None}
        rewards = np.array([np.nan if v is None else v for v in values], np.float32)
        return batch.with_rows(reward=rewards, outcome=rewards)

    def failures(self):
        return self.lost


class Journal:
    """Knows what it is given, and remembers what is written."""

    def __init__(self, known=()):
        self.entries, self.written = dict(known), []

    def known(self, step, batch):
        return {i: self.entries[i] for i in batch["id"].tolist() if i in self.entries}

    def write(self, step, scored, failures):
        self.written.append((step, scored["id"].tolist(), sorted(failures)))


class Store:
    """A store in which no payload lies."""

    @contextmanager
    def scope(self):
        yield


def sampler(folder, value=lambda i: float(i % 2), journal=None, rows=10, **sections):
    """A sampler over stand-ins, with ``said``: the lines that it logs."""
    recipe, said = tiny.recipe(folder, **sections), []
    roles = Roles({"policy": None, "loader": Loader(), "rollout": Rollout(), "reward": Reward(value)})
    made = Sampler(
        recipe, Algorithm.of(recipe), roles, Order(np.arange(rows)), RunState(), Metrics(), journal or Journal(),
        folder / "reward.log", said.append, StepProgress(folder),
    )  # fmt: skip
    made.said = said
    return made
