"""Experience of an asynchronous run, repeated by its log of events (``runs.events``): nothing is behind any more.

Each version of the policy draws, when the engines have it, the tokens that it drew in the run, up to where the next
version went on; the pool of prefixes keeps them until their step. A step learns from the samples that it had.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilth.cluster.controller.leases import LeasedStore
from tilth.core.batch import Batch
from tilth.flows.async_sampler import AsyncSampler
from tilth.flows.generation import Generation
from tilth.flows.group_filters import Keep
from tilth.flows.sampler import Sampler, StepSamples
from tilth.roles.rollout import SINCE, STOP
from tilth.runs.events import AsyncLog, DrawnPart, RunReplay


class ReplaySampler(AsyncSampler):
    """A sampler whose batches and versions come from the log of another run."""

    def __init__(self, *given: Any, store: LeasedStore, events: AsyncLog, replay: RunReplay) -> None:
        """given: as of ``Sampler``; events: the log of this run."""
        super().__init__(*given, store=store, events=events)
        self.replay = replay

    def sample(self, group: int, keep: Keep | None = None, rounds: int = 0) -> StepSamples:
        """Return the samples of the step, all at once."""
        return Sampler.sample(self, group, keep)

    def _next(self, count: int, group: int) -> Batch:
        """Return the samples that the step had, scored; log them as consumed."""
        step, reward = self.state.step + 1, self.roles.reward
        parts = self.replay.batch(step)
        self.progress.at("generating", 0, len(parts))
        generation = self._draw_parts(parts, [part.version for part in parts])
        batch = generation.collect(np.array([part.id for part in parts], np.int64))
        for part, checksum in zip(parts, batch["identity"].tolist()):
            one = generation.ended[part.id]
            self.events.append("admit", id=part.id, group=part.group, prompt=part.prompt)
            facts = {"versions": list(one.versions), "length": one.length, "checksum": checksum}
            self.events.append("finish", id=part.id, **facts)
            self.events.append("consume", id=part.id, batch=step, checksum=checksum)
        failures: dict[int, dict[str, Any]] = {}
        if reward is not None:
            batch, failures = self._score(reward, batch, self._rewards_of_call(len(batch)))
        return self._completed(batch, failures, "reward")

    def published(self, version: int) -> None:
        """Draw what this version drew for steps to come."""
        if version == self._published:
            return
        self.events.append("publish", version=version)
        self._published = version
        if parts := self.replay.parts(version, self.state.step):
            with self.store.scope():
                generation = self._draw_parts(parts, [part.since for part in parts])
                generation.rollout.keep(version, self.replay.oldest(self.journal.oldest))

    def _draw_parts(self, parts: Sequence[DrawnPart], since: Sequence[int | None]) -> Generation:
        """Draw parts, each from where its trajectory was kept under version ``since``; they are to be collected."""
        names = ("id", "group", "prompt")
        columns = {name: np.array([getattr(part, name) for part in parts], np.int64) for name in names}
        columns[SINCE] = np.array([-1 if one is None else one for one in since], np.int64)
        columns[STOP] = np.array([part.stop for part in parts], np.int64)
        generation = Generation(self._engines())
        generation.run(self.roles["loader"].encode(Batch(columns)))
        return generation

    @contextmanager
    def generating(self) -> Iterator[None]:
        yield

    def commit(self) -> None:
        """Commit the log with the position."""
        for part in self.replay.batch(self.state.step):
            self.state.admitted.add(part.id)
            self.state.ended.add(part.id)
            self.state.consumed.add(part.id)
        self.state.event = self.events.sync(self.state.step)
        super().commit()
