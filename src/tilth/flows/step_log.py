"""Results of a step: metrics of its updates, its samples and warnings, and the line that commits it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.data.trajectories import TRAJECTORIES
from tilth.flows import hopeless
from tilth.flows.reward_shaping import adapted
from tilth.flows.roles import Roles
from tilth.flows.weight_sync import SyncBounds, check_mismatch
from tilth.guard.spikes import SpikeRule
from tilth.rl.algorithm import Algorithm
from tilth.rl.metrics import Metric
from tilth.roles.objective import NOT_FINITE
from tilth.runs.directory import RunDir
from tilth.runs.metrics import Metrics
from tilth.runs.state import RunState

WATCHED = {True: ("grad_norm",), False: ("grad_norm", "loss")}
"""Metrics of an optimizer step that may not jump, by whether the flow samples: a policy loss is near 0."""


class StepLog:
    """Collect what a step computes, and write it as one line of ``metrics.jsonl``."""

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        roles: Roles,
        directory: RunDir,
        state: RunState,
        metrics: Metrics,
        bounds: SyncBounds,
        say: Callable[[str], None],
        spill: Path | None = None,
    ) -> None:
        """bounds: largest log-prob difference of trainer and engine; say: log a line and show it; spill: folder of
        ``TrajectoryFiles``."""
        self.recipe, self.algorithm, self.directory, self.state = recipe, algorithm, directory, state
        self.metrics, self.bounds, self.say, self._writer = metrics, bounds, say, roles.writer
        self.sample: dict[str, Any] | None = None
        """A sampled answer of the newest step."""
        self._spikes, self._roles = [SpikeRule(name) for name in WATCHED[recipe.flow_spec.samples]], roles
        self._pending: list[tuple[Mapping[str, Metric], bool]] = []
        self._updates: list[Mapping[str, Metric]] = []
        self.updated: Callable[[dict[str, float]], None] = lambda metrics: None
        """Called with the metrics of each optimizer step of the policy."""
        if self._writer is not None:
            self._writer.open(str(directory.path.resolve() / TRAJECTORIES), "" if spill is None else str(spill))
            directory.trajectories = self._writer

    def start(self) -> None:
        """Begin a step."""
        self._updates = []

    def add_update(self, metrics: Mapping[str, Metric], *, policy: bool = True) -> None:
        """Add an optimizer step; ``flush`` waits for its metrics. policy: False for a step of the critic."""
        self._pending.append((metrics, policy))

    def flush(self) -> None:
        """Wait for the pending updates, which roles in different pools run at the same time, and check their metrics.

        Count optimizer steps and versions of the policy. LogprobMismatch if trainer and engine differ too much.
        """
        pending, self._pending = self._pending, []
        self._updates += [metrics for metrics, policy in pending if policy]
        for number, (metrics, policy) in enumerate(pending):
            self.directory.progress.at("updating", number, len(pending))
            if policy:
                self.state.optimizer_steps += 1
                self.state.version += not float(metrics["steps/skipped"])
                r = self.recipe.rollout
                if not (r.partial or r.staleness):  # tokens of earlier versions differ; probes compare the weights
                    check_mismatch(metrics, self.bounds, self.state.step)
                for rule in self._spikes:
                    if rule.name in metrics:
                        self._warn(rule.add(float(metrics[rule.name])))
            if policy:
                self.updated({name: float(metric) for name, metric in metrics.items()})
            self.metrics.take(metrics)
            if NOT_FINITE in metrics:
                learner = self._roles.policy if policy else self._roles.critic
                for text in learner.troubles() if learner is not None else ():
                    self._warn(f"an optimizer step was left out: {text}")

    def _warn(self, text: str) -> None:
        if text:
            self.directory.warn(self.state.step + 1, text)
            self.say(f"step {self.state.step + 1}: {text}")

    def adapt_weights(self) -> None:
        """Adapt the weights of KL penalty and entropy bonus that follow a target, from the updates of this step."""
        state, samples = self.state, self.recipe.rollout.prompts * self.recipe.rollout.group
        learned = [metrics for metrics in self._updates if NOT_FINITE not in metrics]
        state.weights = adapted(self.recipe.algorithm, state.weights, learned, samples)
        for name in ("kl_coef", "entropy_coef"):
            if name in state.weights:
                self.metrics.add(name, state.weights[name])

    def record(self, sampled: Batch) -> None:
        """Hand the step's trajectories to their writer; warn if the last steps had nothing to learn from."""
        state = self.state
        if self._writer is not None:
            self.sample = self._writer.add(sampled, state.step + 1)
        state.flat = hopeless.counted(state.flat, sampled, self.algorithm.estimator, self.recipe.rollout.group)
        if text := hopeless.warning(state.flat, sampled, self.recipe):
            self.directory.warn(state.step + 1, text)
            self.say(text)
        if state.phase_step == 0:
            self._warn(hopeless.uncalled(sampled, self.recipe.rollout.environment))

    def commit(self, phase_steps: int) -> dict[str, Any]:
        """Write the line of the step that ``state`` stands at and return it; phase_steps: length of the phase."""
        state = self.state
        return self.directory.commit_step(
            self.metrics.close(step=state.step, phase=state.phase, phase_step=state.phase_step, phase_steps=phase_steps)
        )
