"""Results of a step: metrics of its updates, its samples, the line that commits it; warnings of jumps, of samples that
are too far behind, and of steps without a learning signal, which can otherwise last for days."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.data.trajectories import TRAJECTORIES
from tilth.flows.reward_shaping import adapted, has_spread
from tilth.flows.roles import Roles
from tilth.flows.weight_sync import SyncBounds, check_mismatch
from tilth.rl.algorithm import Algorithm
from tilth.rl.estimators import Advantage
from tilth.rl.metrics import Metric
from tilth.roles.experience import CALLS, CUT, is_right
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
        self.learned: Batch | None = None
        """Rows of the running step that the policy is updated with."""
        self._roles = roles
        self._rules: list[SpikeRule | BehindRule] = [SpikeRule(name) for name in WATCHED[recipe.flow_spec.samples]]
        if recipe.rollout.staleness:
            self._rules.append(BehindRule(recipe))
        self._pending: list[tuple[Mapping[str, Metric], bool]] = []
        self._updates: list[Mapping[str, Metric]] = []
        self.updated: Callable[[dict[str, float]], None] = lambda metrics: None
        """Called with the metrics of each optimizer step of the policy."""
        if self._writer is not None:
            self._writer.open(str(directory.path.resolve() / TRAJECTORIES), "" if spill is None else str(spill))
            directory.trajectories = self._writer

    def start(self) -> None:
        """Begin a step."""
        self._updates, self.learned = [], None

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
                for rule in self._rules:
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

    def add_unaligned(self, lost: int, tokens: int, teacher: str = "") -> None:
        """Count tokens of answers that cannot be aligned with a teacher's; warn if they are most of the first ones that
        it is asked about. teacher: its name, where there are several."""
        self.metrics.add_sum("reference/unaligned", lost, tokens)
        if tokens == 0 or teacher in self.state.aligned:
            return
        self.state.aligned.append(teacher)
        if 2 * lost > tokens:
            named = f"reference.teachers.{teacher}: " if teacher else ""
            text = f"{named}{lost} of {tokens} tokens of the answers cannot be written in the teacher's tokens, or not"
            self._warn(f"{text} aligned with them, so nothing is learned from them; the tokenizers are too different")

    def adapt_weights(self) -> None:
        """Adapt the weights of KL penalty and entropy bonus that follow a target, from the updates of this step."""
        state, samples = self.state, self.recipe.rollout.prompts * self.recipe.rollout.group
        learned = [metrics for metrics in self._updates if NOT_FINITE not in metrics]
        state.weights = adapted(self.recipe.algorithm, state.weights, learned, samples)
        for name in ("kl_coef", "entropy_coef"):
            if name in state.weights:
                self.metrics.add(name, state.weights[name])

    def record(self, sampled: Batch) -> None:
        """Hand the step's trajectories to their writer, with what was learned from them; warn if the last steps had
        nothing to learn from."""
        state = self.state
        if self._writer is not None:
            self.sample = self._writer.add(sampled, state.step + 1, self.learned)
        state.flat = counted(state.flat, sampled, self.algorithm.estimator, self.recipe.rollout.group)
        if text := warning(state.flat, sampled, self.recipe):
            self.directory.warn(state.step + 1, text)
            self.say(text)
        if state.phase_step == 0:
            self._warn(uncalled(sampled, self.recipe.rollout.environment))

    def commit(self, phase_steps: int) -> dict[str, Any]:
        """Write the line of the step that ``state`` stands at and return it; phase_steps: length of the phase."""
        state = self.state
        return self.directory.commit_step(
            self.metrics.close(step=state.step, phase=state.phase, phase_step=state.phase_step, phase_steps=phase_steps)
        )


# ---- jumps of a metric: several times its running median (ByteRobust, arXiv 2509.16293, section 4) ----

FACTOR = 5.0
PAST = 100
"""Values that the median is of."""
LEAST = 20
"""Values before which nothing is a jump: a metric moves much while training begins."""


class SpikeRule:
    """Jumps of one metric. A row of jumps is reported once, and jumps count in the median: a new level ends them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._past: deque[float] = deque(maxlen=PAST)
        self._high = False

    def add(self, value: float) -> str:
        """Add the next value; return a warning if a jump begins with it, else ""."""
        if not math.isfinite(value):  # ``guard.on_nan`` decides about it
            return ""
        usual = median(self._past) if len(self._past) >= LEAST else math.inf
        self._past.append(value)
        before, self._high = self._high, value > FACTOR * usual > 0
        if not self._high or before:
            return ""
        return (
            f"{self.name} is {value:.3g}, {value / usual:.1f} times the median of the last {len(self._past) - 1} steps"
        )


# ---- samples that are too far behind ----


class BehindRule:
    """Updates in a row whose samples tell little of the policy that learns: weights of whole answers would leave less
    than half of them, 1 / (1 + chi2). How far it has gone meanwhile is the lag times the learning rate."""

    name = "mismatch/chi2_seq"

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._far = recipe, 0

    def add(self, value: float) -> str:
        """Add the next value; return a warning with the ``PATIENCE``-th update in a row, else ""."""
        self._far = self._far + 1 if value > 1 else 0
        if self._far != PATIENCE:
            return ""
        r, o = self._recipe.rollout, self._recipe.optimizer
        momentum = f"optimizer.muon_momentum={o.muon_momentum:g} or " if o.name == "muon" else ""
        lag = f"rollout.buffer={r.buffer}" if r.staleness == "free" else f"rollout.staleness={r.staleness}"
        return (
            f"samples of the last {PATIENCE} updates are so far behind the policy that fewer than half of them count "
            f"({self.name} is {value:.3g}); try a lower {momentum}optimizer.lr={o.lr:g}, or a smaller "
            f"{lag}"
        )


# ---- consecutive steps without a learning signal ----

PATIENCE = 20
"""Consecutive steps without a learning signal, or updates of samples too far behind, before the warning."""
MANY = 0.5
"""Share of cut answers from which on the warning proposes a larger rollout.max_tokens."""


def counted(before: Mapping[str, float], sampled: Batch, estimator: Advantage, group: int) -> dict[str, float]:
    """Return the episode after one more step: number of steps, lowest and highest reward; {} if it has ended.

    A step continues the episode if no two rewards of a group differ; for an estimator that learns from flat groups, if
    all rewards of the episode are equal. A step without any reward changes nothing.
    """
    scored = sampled.select(~np.isnan(sampled["reward"]))
    if not len(scored) or not estimator.reads_reward:
        return dict(before)
    low, high = float(scored["reward"].min()), float(scored["reward"].max())
    joined = {
        "steps": before.get("steps", 0.0) + 1,
        "low": min(low, before.get("low", low)),
        "high": max(high, before.get("high", high)),
    }
    if group > 1 and not estimator.flat_teaches:
        return {} if has_spread(scored).any() else joined
    if joined["low"] == joined["high"]:
        return joined
    return {"steps": 1.0, "low": low, "high": high} if low == high else {}


def warning(episode: Mapping[str, float], sampled: Batch, recipe: Recipe) -> str:
    """Return the warning after the ``PATIENCE``-th step of an episode, else ""."""
    if episode.get("steps") != PATIENCE:
        return ""
    one, r = episode["low"] == episode["high"], recipe.rollout
    same = f"every reward was {episode['low']:g}" if one else "all answers to a prompt earned the same reward"
    tries = ["tilth reward try (can the reward tell a right answer from a wrong one?)"]
    cut = float((sampled["finish"] == CUT).mean())
    if cut >= MANY:
        tries.append(f"a larger rollout.max_tokens={r.max_tokens} ({cut:.0%} of the answers are cut)")
    if r.temperature < 1:
        tries.append(f"a higher rollout.temperature={r.temperature:g}")
    if r.group > 1:
        tries.append(f"a larger rollout.group={r.group}")
    if is_right(sampled).all():
        tries.append("harder prompts (data.source)")
    else:
        warm = f"a longer warm-up (supervised.steps={recipe.supervised.steps})"
        tries.append(warm if recipe.supervised.steps else "a warm-up on answers (supervised.steps)")
        tries.append("easier prompts (data.source)")
    return f"nothing can be learned from the last {PATIENCE} steps: {same}; the run goes on; try {'; '.join(tries)}"


def uncalled(sampled: Batch, environment: str) -> str:
    """Return the warning of a step whose prompts list tools that no answer calls, else ""."""
    calls = sampled.rows.get(CALLS, np.empty(0))
    calls = calls[~np.isnan(calls)]
    if not len(calls) or calls.any():
        return ""
    return (
        f"none of {len(calls)} answers calls a tool, though each prompt lists those of {environment}; a model that was "
        f"fine-tuned without the list has never seen one: flow sft shows it with rollout.environment={environment}, or "
        "with the column tools of its records (docs/agents.md)"
    )
