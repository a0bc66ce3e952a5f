"""Generation in rounds, driven by the controller: what a round has finished goes to the reward and the judge at once
(Seed1.5-Thinking, arXiv 2504.13914)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import resolved
from tilth.core.batch import Batch
from tilth.core.errors import DataError
from tilth.roles.rollout import Ended


class Scorers(NamedTuple):
    """Roles that score while others are generated. known: outcomes of the journal by id, which the reward is not asked
    for; most: samples that the reward scores at once."""

    reward: WorkerGroup | None
    judge: WorkerGroup | None
    known: Callable[[Batch], dict[int, Any]]
    most: int

    def take(self, ended: Mapping[int, Ended]) -> None:
        """Score these samples soon, and return at once."""
        if self.judge is not None:
            self.judge.advance(ended)
        if self.reward is None or not ended:
            return
        ids, sums = np.array([*ended], np.int64), np.array([one.checksum for one in ended.values()], np.uint32)
        known = self.known(Batch({"id": ids, "identity": sums}))
        if new := [[i, one.prompt, one.checksum, one.text] for i, one in ended.items() if i not in known]:
            self.reward.begin(items=new, most=self.most)

    def forget(self, ended: Mapping[int, Ended] | None = None) -> None:
        """Drop what was begun for these samples, whose scores nobody asks for; None: for all."""
        samples = None if ended is None else [(i, one.checksum) for i, one in ended.items()]
        if self.judge is not None:
            self.judge.forget(samples)
        if self.reward is not None:
            self.reward.forget(samples=samples)


class Generation:
    """Samples that a rollout group generates. progress: is given the number of those that have ended or paused."""

    def __init__(
        self, rollout: WorkerGroup, scorers: Scorers | None = None, progress: Callable[[int], None] = lambda done: None
    ) -> None:
        self.rollout, self.scorers, self._progress = rollout, scorers, progress
        self.ended: dict[int, Ended] = {}

    def run(self, asked: Batch, *, greedy: bool = False, since: int | None = None, ahead: Batch | None = None) -> None:
        """Generate these samples until each has ended or paused: see ``RolloutWorker.submit``. ahead: rows that are
        asked for next, see ``RolloutWorker.run_ahead``."""
        if len(np.unique(asked["id"])) < len(asked):
            raise DataError("a sample is asked for twice: ids of one generation must differ", key="asked.id")
        self.rollout.begin()
        self.rollout.submit(asked, greedy=greedy, since=since)
        if ahead is not None:
            self.rollout.run_ahead(ahead)
        self._until(len(asked))

    def go_on(self, asked: Batch, stops: Mapping[int, int]) -> None:
        """Go on with these samples from what the log has of them, until each has ended or paused: see
        ``RolloutWorker.submit``."""
        self.rollout.submit(asked, again=0, stops=stops)
        self._until(len(asked))

    def resume(self) -> None:
        """Go on with the samples that have paused."""
        count = len(self.ended)
        self.ended = {i: one for i, one in self.ended.items() if not one.paused}
        self.rollout.resume()
        self._until(count)

    def _until(self, count: int) -> None:
        """Run rounds until ``count`` samples have ended or paused.

        The next round is sent before the answer of the last one is read, so that no engine waits for the controller.
        """
        texts = self.scorers is not None
        ahead = self.rollout.advance(texts=texts) if len(self.ended) < count else {}
        while len(self.ended) < count:
            now, ahead = ahead, self.rollout.advance(texts=texts)
            self.ended |= now
            if self.scorers is not None:
                self.scorers.take({i: one for i, one in now.items() if not one.paused})
            self._progress(len(self.ended))

    def collect(self, ids: np.ndarray) -> Batch:
        """Return the rows of these samples, in this order."""
        found = resolved(self.rollout.collect(ids))
        place = {i: row for row, i in enumerate(found["id"].tolist())}
        return found.select(np.array([place[i] for i in ids.tolist()], np.int64))


def apart(one: WorkerGroup, other: WorkerGroup) -> bool:
    """Return True if no worker is in two groups, so that both compute at once."""
    return set(one.mesh.ranks).isdisjoint(other.mesh.ranks)
