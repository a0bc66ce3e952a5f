"""Experience of an asynchronous run, repeated by its log of events (``runs.events``): nothing is behind any more.

Each version of the policy draws, when the engines have it, the tokens that it drew in the run, up to where the next
version went on; the log of tokens keeps them until their step, and environments say what the run's journal has. A step
learns from the samples that it had.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.core.batch import Batch
from tilth.flows.async_sampler import AsyncSampler
from tilth.flows.generation import Generation
from tilth.flows.reward_shaping import Keep
from tilth.flows.sampler import Sampler, StepSamples
from tilth.rollout.episodes import conversation_id
from tilth.runs.events import DrawnPart, RunReplay


class ReplaySampler(AsyncSampler):
    """A sampler whose batches and versions come from the log of another run."""

    def __init__(self, *given: Any, replay: RunReplay, **how: Any) -> None:
        """given, how: as of ``AsyncSampler``."""
        super().__init__(*given, **how)
        self.replay = replay
        self._rollout: WorkerGroup | None = None

    def sample(self, group: int, keep: Keep | None = None, rounds: int = 0) -> StepSamples:
        """Return the samples of the step, all at once."""
        return Sampler.sample(self, group, keep)

    def _next(self, count: int, group: int) -> Batch:
        """Return the samples that the step had, scored; log them as consumed."""
        step, reward = self.state.step + 1, self.roles.reward
        parts = self.replay.batch(step)
        self.progress.at("generating", 0, len(parts))
        generation = self._go_on(parts, {})
        batch = generation.collect(np.array([part.id for part in parts], np.int64))
        for part, checksum in zip(parts, batch["identity"].tolist()):
            self.events.append("admit", id=part.id, group=part.group, prompt=part.prompt)
            self._log_finish(part.id, generation.ended[part.id])
            self.events.append("consume", id=part.id, batch=step, checksum=checksum)
        failures: dict[int, dict[str, Any]] = {}
        if self.recipe.rollout.environment:
            failures = self._failed_episodes(batch, generation.ended)
        elif reward is not None:
            batch, failures = self._score(reward, batch, self._rewards_of_call(len(batch)))
        return self._completed(batch, failures, "reward")

    def published(self, version: int) -> None:
        """Draw what this version drew for steps to come."""
        if version == self._published:
            return
        self.events.append("publish", version=version)
        self._published = version
        if parts := self.replay.parts(version, self.state.step):
            stops = {conversation_id(part.id, at): stop for part in parts for at, stop in part.stops.items()}
            with self.store.scope():
                self._go_on(parts, stops)
                self._engines().discard([part.id for part in parts])  # which the log has

    def _go_on(self, parts: Sequence[DrawnPart], stops: Mapping[int, int]) -> Generation:
        """Draw parts, each from where its trajectory is in the log; those without a stop are to be collected."""
        if self._rollout is None:
            self._rollout = self._engines()
            self._rollout.begin(anew=True)
            self._log_tokens(self._rollout, complete=True)
        names = ("id", "group", "prompt")
        columns = {name: np.array([getattr(part, name) for part in parts], np.int64) for name in names}
        generation = Generation(self._rollout)
        generation.go_on(self._load(Batch(columns)), stops)
        return generation

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Set the log aside, of which nothing is in flight."""
        rollout = self._engines()
        rollout.set_aside()
        yield
        rollout.take_up()

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
        if self._rollout is not None:
            self._rollout.forget(self.replay.lowest(self.journal.oldest))
